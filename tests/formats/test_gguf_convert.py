"""GGUF → Hugging Face folders: the converted model is the original, bit for bit."""

from __future__ import annotations

import json
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from gguf_builder import MODELS, finish, gguf_tensors, permute, tiny_model, write_gguf
from qdeploy.errors import FormatError
from qdeploy.formats import gguf as converter
from qdeploy.formats.gguf import convert_gguf
from qdeploy.formats.gguf_config import llama3_divisors
from qdeploy.formats.gguf_file import open_gguf
from qdeploy.formats.gguf_tensors import undo_rope_permutation
from qdeploy.formats.hf import open_folder


def convert(tmp_path: Path, file: Path) -> Path:
    out = tmp_path / "converted"
    out.mkdir()
    return convert_gguf(file, out)


@pytest.mark.parametrize("name", MODELS)
def test_converted_model_equals_the_original(name: str, tmp_path: Path) -> None:
    model = tiny_model(name)
    folder = convert(tmp_path, write_gguf(tmp_path / "m.gguf", name, model))
    loaded = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )
    assert type(loaded) is type(model)
    for key, value in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[key], value), key
    tokens = torch.arange(3, 40).unsqueeze(0)
    with torch.no_grad():
        assert torch.equal(loaded(tokens).logits, model(tokens).logits)


@pytest.mark.parametrize("tied", [True, False])
def test_tied_embeddings_follow_output_weight(tied: bool, tmp_path: Path) -> None:
    model = tiny_model("llama", tie_word_embeddings=tied)
    folder = open_folder(convert(tmp_path, write_gguf(tmp_path / "m.gguf", "llama", model)))
    assert folder.config["tie_word_embeddings"] is tied
    assert ("lm_head.weight" in folder.names()) is not tied


def test_llama_attention_bias_is_permuted_back(tmp_path: Path) -> None:
    model = tiny_model("llama", attention_bias=True)
    folder = open_folder(convert(tmp_path, write_gguf(tmp_path / "m.gguf", "llama", model)))
    name = "model.layers.1.self_attn.q_proj.bias"
    assert folder.config["attention_bias"] is True
    assert torch.equal(folder.tensor(name).float(), model.state_dict()[name])


def test_rope_permutation_round_trip() -> None:
    weight = torch.arange(8 * 12 * 3, dtype=torch.float32).reshape(8 * 12, 3)
    permuted = torch.from_numpy(permute(weight.numpy(), 8).copy())
    assert not torch.equal(permuted, weight)
    assert torch.equal(undo_rope_permutation(permuted, 8), weight)


def test_gemma3_layers_and_rope(tmp_path: Path) -> None:
    model = tiny_model("gemma3")
    config = open_folder(convert(tmp_path, write_gguf(tmp_path / "m.gguf", "gemma3", model))).config
    assert config["layer_types"] == ["sliding_attention"] * 5 + [
        "full_attention",
        "sliding_attention",
    ]
    assert (config["rope_theta"], config["rope_local_base_freq"]) == (1_000_000.0, 10000.0)
    assert config["query_pre_attn_scalar"] == 32


def test_llama3_divisors_equal_transformers() -> None:
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    scaling = {
        "rope_type": "llama3",
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    config = LlamaConfig(
        hidden_size=256, num_attention_heads=2, rope_theta=500000.0, rope_scaling=scaling
    )
    frequencies, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    plain = 500000.0 ** -(torch.arange(0, 128, 2) / 128)
    divisors = torch.tensor(llama3_divisors(128, 500000.0, 32.0))
    torch.testing.assert_close(plain / divisors, frequencies, rtol=1e-4, atol=0)


def test_unknown_rope_freqs_are_refused(tmp_path: Path) -> None:
    file = write_llama_with(tmp_path, {"rope_freqs.weight": np.arange(1, 9, dtype=np.float32)})
    with pytest.raises(FormatError, match="isn't Llama 3 scaling"):
        convert(tmp_path, file)


def test_llama3_rope_freqs_become_config(tmp_path: Path) -> None:
    divisors = np.array(llama3_divisors(16, 50000.0, 8.0), dtype=np.float32)
    file = write_llama_with(tmp_path, {"rope_freqs.weight": divisors})
    config = open_folder(convert(tmp_path, file)).config
    assert config["rope_scaling"]["rope_type"] == "llama3"
    assert config["rope_scaling"]["factor"] == 8.0


def write_llama_with(
    tmp_path: Path, extra: dict[str, np.ndarray], drop: str = "", arch: str = "llama"
) -> Path:
    """A tiny llama with tensors added, dropped, or another architecture name."""
    file = write_gguf(tmp_path / "base.gguf", "llama", tiny_model("llama"))
    source = gguf.GGUFReader(file)
    writer = gguf.GGUFWriter(str(tmp_path / "changed.gguf"), arch)
    for key, field in source.fields.items():
        if key.startswith("GGUF.") or key == "general.architecture":
            continue
        kind = field.types[0]
        sub = field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(key, field.contents(), kind, sub_type=sub)
    tensors = {**gguf_tensors("llama", tiny_model("llama")), **extra}
    for name, values in tensors.items():
        if name != drop:
            writer.add_tensor(name, values)
    return finish(writer)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"arch": "mamba"}, "architecture 'mamba' can't be converted"),
        ({"drop": "blk.1.attn_v.weight"}, "no tensor for model.layers.1.self_attn.v_proj.weight"),
        ({"extra": {"blk.0.ffn_gate_exps.weight": np.ones((2, 4, 4), np.float32)}}, "unknown"),
        ({"extra": {"blk.0.attn_q.weight": np.ones((8, 64), np.float32)}}, "should be"),
    ],
)
def test_what_cannot_be_converted_is_named(
    change: dict[str, object], message: str, tmp_path: Path
) -> None:
    arguments = {"extra": {}, **change}
    with pytest.raises(FormatError, match=message) as caught:
        convert(tmp_path, write_llama_with(tmp_path, **arguments))  # type: ignore[arg-type]
    assert "\n" not in str(caught.value)


def test_a08_metadata_says_pt_and_shards_have_an_index(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(converter, "MAX_SHARD_BYTES", 40_000)
    model = tiny_model("qwen3")
    path = convert(tmp_path, write_gguf(tmp_path / "m.gguf", "qwen3", model))
    assert len(list(path.glob("model-*-of-*.safetensors"))) > 1
    folder = open_folder(path)
    assert folder.metadata["format"] == "pt"
    loaded = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    for key, value in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[key], value), key
    index = json.loads((path / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"]) == folder.names()


QUANTIZED = ["F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"]
K_QUANTS = ["Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"]


@pytest.mark.parametrize("kind", QUANTIZED + K_QUANTS)
def test_every_quantization_type_is_read(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from qdeploy.formats import gguf_file

    quantization = gguf.GGMLQuantizationType[kind]
    rng = np.random.default_rng(3)
    if kind in K_QUANTS:  # the package can't make these, so any bytes with finite scales do
        block, size = gguf.GGML_QUANT_SIZES[quantization]
        stored = rng.integers(0, 60, (6, 512 // block * size), dtype=np.uint8)
    else:
        values = rng.standard_normal((6, 512)).astype(np.float32)
        stored = gguf.quants.quantize(values, quantization)
    writer = gguf.GGUFWriter(str(tmp_path / "q.gguf"), "llama")
    writer.add_tensor("w", stored, raw_dtype=quantization)
    source = open_gguf(finish(writer))
    monkeypatch.setattr(gguf_file, "SLICE_WEIGHTS", 1024)  # two rows a slice
    slices = list(source.tensor("w"))
    expected = torch.from_numpy(gguf.quants.dequantize(stored, quantization).astype(np.float32))
    assert len(slices) == 3
    assert torch.equal(torch.cat(slices), expected)
    if kind in QUANTIZED:
        bits = {"F16": 11, "BF16": 8}.get(kind, int(kind[1]) if kind[0] == "Q" else 0)
        assert (torch.cat(slices) - torch.from_numpy(values)).abs().max() < 8 * 2.0**-bits


def test_q4_1_by_hand(tmp_path: Path) -> None:
    """ggml's block_q4_1: f16 scale d, f16 minimum m, 16 bytes of nibbles; w = d * q + m."""
    codes = np.arange(32) % 16
    nibbles = (codes[:16] | codes[16:] << 4).astype(np.uint8)
    block = np.concatenate([np.array([0.5, -3.0], np.float16).view(np.uint8), nibbles])
    writer = gguf.GGUFWriter(str(tmp_path / "q.gguf"), "llama")
    kind = gguf.GGMLQuantizationType.Q4_1
    writer.add_tensor("w", block.reshape(1, -1), raw_dtype=kind)
    values = next(open_gguf(finish(writer)).tensor("w"))
    assert torch.equal(values[0], torch.from_numpy(0.5 * codes - 3.0).float())
