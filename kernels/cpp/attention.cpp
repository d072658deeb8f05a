#include "attention.h"

#include <cmath>

namespace qd {

namespace {

constexpr float LOG2_E = 1.44269504f;

// Offers memory in aligned pieces; a first pass with null memory measures.
struct Carver {
    uint8_t* memory;
    int64_t used = 0;
    template <class T> void take(T*& out, int64_t count) {
        out = memory ? (T*)(memory + used) : nullptr;
        used = round_up(used + count * (int64_t)sizeof(T), 64);
    }
};

QD_INLINE float exp2_of(float x) {
    float out[LANES];
    store(out, exp2(set(x)));
    return out[0];
}

QD_INLINE void scale_row(float* row, int n, float factor) {
    if (factor == 1.0f) return;  // the same bits, sooner
    for (int i = 0; i < n; i += LANES) store(row + i, mul(load(row + i), set(factor)));
}

QD_INLINE int rows_of(const HeadRule& rule, const Tile& tile) { return tile.count * rule.queries_per_head; }

QD_INLINE int position_of(const HeadRule& rule, const Tile& tile, int row) {
    return tile.position + row / rule.queries_per_head;
}

void put_operand(const KVLayout& kv, const float* x, int64_t width, uint32_t* out) {
    if (kv.exact) {
        std::memcpy(out, x, width * sizeof(float));
        return;
    }
    for (int64_t i = 0; i < width; i += 2 * LANES) store_pairs(out + i / 2, load(x + i), load(x + i + LANES));
}

// Entries of 4 bytes from one row of an operand to the next.
QD_INLINE int64_t operand_stride(const KVLayout& kv, int64_t width) { return kv.exact ? width : width / 2; }

// The panel that a product should read: codes widen once when many rows share them.
const uint8_t* readable(const KVLayout& kv, Panel& kind, const uint8_t* panel, int lanes, int reduce, int rows,
                        uint8_t* wide) {
    if (rows <= DIRECT_ROWS && !kv.exact) return panel;
    widen_panel(kind, panel, lanes, reduce, kv.exact, wide);
    kind = kv.open_kind();
    return wide;
}

// Scores of the tile's rows with a block's keys, before masking.
void score_block(const KVLayout& kv, const Block& block, int rows, AttentionScratch& s) {
    const int64_t stride = operand_stride(kv, s.width);
    const uint32_t* operand = s.open_q;
    Panel kind = kv.open_kind();
    const uint8_t* panel = block.data;
    for (int r = 0; r < rows; r++)
        for (int i = 0; i < kv.block_size; i += LANES) store(s.scores + r * s.keys + i, zero());
    if (block.sealed) {  // q · (code · scale + offset): scales go into q, offsets into one number
        kind = kv.key_kind();
        read_scales(kv, kind, block.data + kv.key_scales(), kv.head_dim, s.scale, s.offset);
        float* scaled = s.scale + s.width;
        for (int r = 0; r < rows; r++) {
            const float* q = s.q + r * s.width;
            F offset = zero();
            for (int i = 0; i < kv.head_dim; i += LANES) {
                offset = fma(load(q + i), load(s.offset + i), offset);
                store(scaled + i, mul(load(q + i), load(s.scale + i)));
            }
            put_operand(kv, scaled, s.width, s.block_q + r * stride);
            const F start = set(sum(offset));
            for (int i = 0; i < kv.block_size; i += LANES) store(s.scores + r * s.keys + i, start);
        }
        operand = s.block_q;
        panel = readable(kv, kind, panel, kv.block_size, kv.head_dim, rows, s.key_panel);
    }
    panel_product(kind, operand, stride, panel, kv.block_size, 0, kv.block_size / LANES, kv.head_dim, rows, s.scores,
                  s.keys);
}

// Caps and masks a row's scores; keys at first … first + block_size − 1, a query at `position`.
void mask_row(const KVLayout& kv, const HeadRule& rule, int first, int position, float* scores) {
    if (rule.cap > 0)
        for (int i = 0; i < kv.block_size; i += LANES) {
            const F capped = mul(tanh(div(load(scores + i), set(rule.cap))), set(rule.cap * LOG2_E));
            store(scores + i, capped);
        }
    const int after = position + 1 - first;                                 // first key it must not see
    const int before = rule.window ? position - rule.window + 1 - first : 0;  // and how many are too old
    for (int i = after > 0 ? after : 0; i < kv.block_size; i++) scores[i] = -INFINITY;
    for (int i = 0; i < before && i < kv.block_size; i++) scores[i] = -INFINITY;
}

// Weights of a row's keys; returns the factor for what the row has gathered so far.
float weigh_row(const KVLayout& kv, int row, AttentionScratch& s) {
    float* scores = s.scores + row * s.keys;
    F most = set(s.most[row]);
    for (int i = 0; i < kv.block_size; i += LANES) most = max(load(scores + i), most);
    const float top = largest(most), correction = exp2_of(s.most[row] - top);
    F total = zero();
    for (int i = 0; i < kv.block_size; i += LANES) {
        const F weight = exp2(sub(load(scores + i), set(top)));
        total = add(total, weight);
        store(scores + i, weight);
    }
    s.most[row] = top;
    s.total[row] = s.total[row] * correction + sum(total);
    return correction;
}

// values += weights · V. Sealed: scales go into the weights, offsets into one number per group.
void gather_block(const KVLayout& kv, const Block& block, int rows, AttentionScratch& s) {
    const int groups = kv.value_groups(), vectors = kv.value_group() / LANES;
    const int64_t stride = operand_stride(kv, s.keys);
    Panel kind = kv.open_kind();
    const uint8_t* panel = block.data + kv.open_panel_bytes();
    if (!block.sealed) {
        for (int r = 0; r < rows; r++) put_operand(kv, s.scores + r * s.keys, s.keys, s.weights + r * stride);
        panel_product(kind, s.weights, stride, panel, kv.head_dim, 0, kv.head_dim / LANES, kv.block_size, rows,
                      s.values, kv.head_dim);
        return;
    }
    kind = kv.value_kind();
    panel = readable(kv, kind, block.data + kv.value_codes(), kv.head_dim, kv.block_size, rows, s.value_panel);
    float* scaled = s.scale + s.keys;
    for (int g = 0; g < groups; g++) {
        const int64_t step = (int64_t)kv.block_size * 2 * kv.halves();
        read_scales(kv, kv.value_kind(), block.data + kv.value_scales() + g * step, kv.block_size, s.scale, s.offset);
        for (int r = 0; r < rows; r++) {
            F offset = zero();
            for (int i = 0; i < kv.block_size; i += LANES) {
                const F weight = load(s.scores + r * s.keys + i);
                offset = fma(weight, load(s.offset + i), offset);
                store(scaled + i, mul(weight, load(s.scale + i)));
            }
            put_operand(kv, scaled, s.keys, s.weights + r * stride);
            s.offsets[r * groups + g] += sum(offset);
        }
        panel_product(kind, s.weights, stride, panel, kv.head_dim, g * vectors, (g + 1) * vectors, kv.block_size, rows,
                      s.values, kv.head_dim);
    }
}

}  // namespace

void AttentionScratch::reserve(const KVLayout& kv, int rows) {
    width = round_up(kv.head_dim, TILE);
    keys = round_up(kv.block_size, TILE);
    for (uint8_t* memory = nullptr;;) {
        Carver carve{memory};
        carve.take(q, rows * width);
        carve.take(open_q, rows * width);
        carve.take(block_q, rows * width);
        carve.take(scores, rows * keys);
        carve.take(weights, rows * keys);
        carve.take(values, (int64_t)rows * kv.head_dim);
        carve.take(merged, (int64_t)rows * kv.head_dim);
        for (float** one : {&most, &total, &all_most, &all_total}) carve.take(*one, rows);
        carve.take(offsets, (int64_t)rows * kv.value_groups());
        carve.take(scale, 2 * (width > keys ? width : keys));
        carve.take(offset, width > keys ? width : keys);
        carve.take(key_panel, kv.elements() * 4);
        carve.take(value_panel, kv.elements() * 4);
        if (memory) return;
        if ((int64_t)memory_.size() >= carve.used + 64) std::memset(memory_.data(), 0, memory_.size());
        else memory_.assign(carve.used + 64, 0);  // zero: paddings are read, and must be numbers
        memory = memory_.data() + (64 - (uintptr_t)memory_.data() % 64) % 64;
    }
}

void merge(Partial& into, const Partial& part, int dim) {
    const float most = into.most > part.most ? into.most : part.most;
    const float kept = exp2_of(into.most - most), added = exp2_of(part.most - most);
    into.total = into.total * kept + part.total * added;
    into.most = most;
    for (int i = 0; i < dim; i += LANES)
        store(into.values + i, fma(load(part.values + i), set(added), mul(load(into.values + i), set(kept))));
}

void load_queries(const KVLayout& kv, const HeadRule& rule, const Tile& tile, const float* q, int64_t stride,
                  const float* cos, const float* sin, int64_t angle_stride, AttentionScratch& s) {
    const int dim = kv.head_dim, heads = rule.queries_per_head;
    const F scale = set(rule.cap > 0 ? rule.scale : rule.scale * LOG2_E);
    for (int r = 0; r < rows_of(rule, tile); r++) {
        const int64_t token = tile.row + r / heads;
        float* out = s.q + r * s.width;
        std::memcpy(out, q + token * stride + (r % heads) * dim, dim * sizeof(float));
        if (rule.q_norm) head_norm(out, rule.q_norm, dim, rule.eps);
        rotate(out, cos + token * angle_stride, sin + token * angle_stride, dim);
        for (int i = 0; i < dim; i += LANES) store(out + i, mul(load(out + i), scale));
        put_operand(kv, out, s.width, s.open_q + r * operand_stride(kv, s.width));
    }
}

void attend_split(const KVLayout& kv, const HeadRule& rule, const Tile& tile, int split, const BlockSource& blocks,
                  AttentionScratch& s) {
    const int rows = rows_of(rule, tile), dim = kv.head_dim, size = kv.block_size, groups = kv.value_groups();
    const int per_split = SPLIT_TOKENS > size ? SPLIT_TOKENS / size : 1;
    const int last = (split + 1) * per_split - 1 < tile.block ? (split + 1) * per_split - 1 : tile.block;
    for (int r = 0; r < rows; r++) s.most[r] = NOTHING, s.total[r] = 0;
    std::memset(s.offsets, 0, rows * groups * sizeof(float));
    std::memset(s.values, 0, (int64_t)rows * dim * sizeof(float));
    for (int b = split * per_split; b <= last; b++) {
        if (rule.window && (b + 1) * size <= tile.position - rule.window + 1) continue;  // too old for all rows
        const Block block = blocks.find(b, tile.block);
        score_block(kv, block, rows, s);
        for (int r = 0; r < rows; r++) {
            const int position = position_of(rule, tile, r);
            mask_row(kv, rule, b * size, position, s.scores + r * s.keys);
            const float correction = weigh_row(kv, r, s);
            scale_row(s.values + (int64_t)r * dim, dim, correction);
            for (int g = 0; g < groups; g++) s.offsets[r * groups + g] *= correction;
        }
        gather_block(kv, block, rows, s);
    }
    for (int r = 0; r < rows; r++)
        for (int i = 0; i < dim; i += LANES) {
            float* at = s.values + (int64_t)r * dim + i;
            store(at, add(load(at), set(s.offsets[r * groups + i / kv.value_group()])));
        }
}

}  // namespace qd
