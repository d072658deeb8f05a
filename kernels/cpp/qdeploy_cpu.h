// C ABI of the CPU engine. Built once per instruction set from the same sources; the layouts below
// are the same for all of them. Every pointer belongs to the caller and outlives the model; structs
// are plain data that Python fills through ctypes (qdeploy_kernels/cpu/abi.py mirrors this file).
//
// Tiles. A matrix [rows, cols] is cut in tiles of 32 rows (padded with zero rows), each tile_bytes
// long and 64-byte aligned; half h, lane n stand for row 32·t + 16·h + n.
//   W4    for each 8 columns k: [2 halves][16 lanes][4 bytes], byte b = code(k + b) | code(k + 4 + b) << 4
//   W8    for each 4 columns k: [2 halves][16 lanes][4 bytes], byte b = code(k + b)
//         Both: after the codes of each group its float16 scales [32] and, unless symmetric, uint8
//         zero points [32], so that a tile is read from end to end (three times the speed of scales
//         that lie apart). W4 holds codes of 2, 3 and 4 bits. weight = (code − zero) · scale; a
//         symmetric matrix has zero = 8 (W4) or 128 (W8).
//   FP8   for each 4 columns k (the last ones padded): [2 halves][16 lanes][4 bytes], float8 (E4M3) of
//         the columns k, k + 2, k + 1, k + 3: so they widen to pairs of bfloat16, exactly. After the
//         codes of each group its float32 scales [32]; weight = value · scale.
//   BF16  for each 2 columns k (the last one padded): [2 halves][16 lanes][2] bfloat16
//   F32   for each column: [2 halves][16 lanes] float32
// group divides cols and is a multiple of 8 (W4, W8); it is also the group of dynamic int8 activations.
// FP8: group is a multiple of 4, or cols; the last group may be smaller. Its activations are bfloat16,
// as those of BF16 matrices; float32 in the mode QD_ACT_FP32.
// gate_up holds row r of gate in half 0 and row r of up in half 1 of tile r / 16; its `rows` is
// twice the inner size.
#pragma once
#include <stdint.h>

#define QD_API extern "C" __attribute__((visibility("default")))
#define QD_ABI_VERSION 4

enum qd_kind { QD_W4 = 0, QD_W8 = 1, QD_BF16 = 2, QD_F32 = 3, QD_FP8 = 4 };
enum qd_activation { QD_SILU = 0, QD_GELU_TANH = 1, QD_GELU = 2 };
enum qd_act_mode { QD_ACT_INT8 = 0, QD_ACT_FP32 = 1 };
enum qd_kv_dtype { QD_KV_BF16 = 0, QD_KV_INT8 = 1, QD_KV_INT4 = 2, QD_KV_K8V4 = 3, QD_KV_FP8 = 4 };

struct qd_matrix {
    int32_t rows, cols, kind, group, symmetric, reserved;
    int64_t tile_bytes;
    const uint8_t* tiles;
    const float* bias;           // [rows rounded up to 32] or null; gate_up: in the order of its tiles
    const int32_t* permutation;  // [cols] or null: the input feature that column c multiplies
};

// Norm weights hold the offset of (1 + w) norms already; null where the model has none.
struct qd_layer {
    qd_matrix qkv, o, gate_up, down;   // qkv: rows of q, then k, then v
    const float *input_norm, *post_attention_norm, *pre_feedforward_norm, *post_feedforward_norm;
    const float *q_norm, *k_norm;      // [head_dim]
    int32_t window;                    // a query sees that many newest keys; 0: all
    int32_t rope;                      // row of inverse_frequencies
};

struct qd_model {
    int32_t num_layers, hidden, inner, q_heads, kv_heads, head_dim, vocab;
    int32_t activation, sandwich_norms, act_mode, num_ropes, reserved;
    float norm_eps, attention_scale, embedding_multiplier;
    float attention_cap, logit_cap;    // 0: none
    float reserved_float;
    const float* inverse_frequencies;  // [num_ropes, head_dim / 2], radians per position
    const float* rope_scales;          // [num_ropes], factor of cosines and sines
    const float* norm;                 // [hidden]
    const qd_layer* layers;
    qd_matrix embedding, head;
};

// Layers that share block ids: one KV format, one policy, one window. Every layer is in one group,
// and block_size is the same in all of them. window: that of its layers, which may then lack blocks
// that left it; 0 where no block ever leaves.
struct qd_kv_group {
    int32_t dtype, block_size, sink_blocks, residual_blocks;
    int32_t window, num_layers;
    const int32_t* layers;             // [num_layers]
};

// Copies an open block of a group onto another.
struct qd_block_copy {
    int32_t group, source, target;
};

// One step, as StepBatch has it. Tables are concatenated; slice s has ceil(end / block_size) entries
// in each, from table_starts[s]; −1: no block. Those of blocks that lie wholly before the window of
// the slice's first query are not read. Copies are done before anything else, in their order.
struct qd_step {
    int32_t num_slices, num_tokens;
    const int32_t *token_ids, *starts, *counts, *num_logits;
    const int64_t* table_starts;
    const int32_t *const *open_blocks, *const *sealed_blocks;  // [groups] tables
    float* logits;                     // rows of vocab values, logits_stride apart
    int64_t logits_stride;             // ≥ vocab rounded up to 32; the padding is scratch
    int64_t num_copies;
    const qd_block_copy* copies;
};

QD_API int32_t qd_abi_version();
// The instruction set of this build, e.g. "avx512", "avx2", "portable".
QD_API const char* qd_isa();
// The message of this thread's last failed call.
QD_API const char* qd_error();

// A model (which must outlive its engines) with a pool of threads; null on failure.
QD_API void* qd_model_create(const qd_model* model, int32_t threads);
QD_API void qd_model_destroy(void* model);

// KV pools and step scratch over a model. Steps of one model run one at a time. Groups are numbered
// in the order given here; a group that isn't there has blocks of −1 bytes and no pool.
QD_API void* qd_engine_create(void* model, const qd_kv_group* groups, int32_t num_groups);
QD_API void qd_engine_destroy(void* engine);
QD_API int64_t qd_open_block_bytes(const void* engine, int32_t group);
QD_API int64_t qd_sealed_block_bytes(const void* engine, int32_t group);
// num_open, num_sealed: [groups]. 0, or −1 when there is no memory. Drops what the pools held before.
QD_API int32_t qd_kv_allocate(void* engine, const int32_t* num_open, const int32_t* num_sealed);
// A pool's memory and, in *bytes, its size: [layers][KV heads][blocks][bytes of a head's block].
QD_API void* qd_pool(void* engine, int32_t group, int32_t sealed, int64_t* bytes);
// Blocks of one pool from and to data: [num][layers][KV heads][bytes of a head's block], a block's
// bytes in one piece. 0, or −1 with a message; then nothing was copied.
QD_API int32_t qd_read_blocks(void* engine, int32_t group, int32_t sealed, int64_t num, const int32_t* ids,
                              uint8_t* data);
QD_API int32_t qd_write_blocks(void* engine, int32_t group, int32_t sealed, int64_t num, const int32_t* ids,
                               const uint8_t* data);
// 0, or −1 with a message when the step is malformed; then nothing was computed.
QD_API int32_t qd_execute(void* engine, const qd_step* step);

// For benchmarks: seconds of the fastest of `repeats` streaming reads of `bytes` by the model's threads.
QD_API double qd_read_seconds(void* model, int64_t bytes, int32_t repeats);

// For tests: out[rows, matrix.rows rounded up to 32] = x[rows, cols] · matrixᵀ + bias, float32.
QD_API int32_t qd_linear(void* model, const qd_matrix* matrix, const float* x, int32_t rows, float* out);

// Sampling, on rows of count scores, none of them NaN or +∞. ids has room for all of them.
// Every token that may have the highest score / temperature + noise (one, as a rule), where a token's
// noise follows from key and its id. scores[best] is the maximum. Writes ids, rising; returns how many.
QD_API int64_t qd_contenders(const float* scores, int64_t count, int64_t best, double temperature,
                             uint64_t key, int32_t* ids);
// Every score of at least `lowest`: writes ids, rising; returns how many.
QD_API int64_t qd_near(const float* scores, int64_t count, float lowest, int32_t* ids);
// Sum of exp((score − best) · factor), relative error below 1e-6; best is the maximum.
QD_API double qd_mass(const float* scores, int64_t count, float best, double factor);
