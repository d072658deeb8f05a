"""config.json to DecoderSpec: what is understood, and that the rest is an error that names it."""

from __future__ import annotations

from typing import Any

import pytest

from qdeploy.errors import FormatError
from qdeploy.models.spec import DecoderSpec, spec_from_config
from tiny_models import tiny_config

NAMES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
}


def config(arch: str, **changes: Any) -> dict[str, Any]:
    return tiny_config(arch).to_dict() | {"architectures": [NAMES[arch]]} | changes


def spec(arch: str, **changes: Any) -> DecoderSpec:
    return spec_from_config(config(arch, **changes))


@pytest.mark.parametrize("arch", NAMES)
def test_sizes(arch: str) -> None:
    got = spec(arch)
    assert (got.hidden_size, got.num_q_heads, got.num_kv_heads, got.head_dim) == (64, 4, 2, 16)
    assert len(got.rope) == len(got.sliding_windows) == got.num_layers
    assert got.kv_elements_per_token == 2 * got.num_layers * 2 * 16


def test_unknown_architecture_lists_the_known_and_says_what_still_works() -> None:
    with pytest.raises(FormatError, match=r"MambaForCausalLM.*LlamaForCausalLM.*vLLM"):
        spec_from_config({"architectures": ["MambaForCausalLM"]})
    with pytest.raises(FormatError, match=r"none in config.json"):
        spec_from_config({})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_act": "relu2"}, "relu2"),
        ({"num_hidden_layers": 0}, "num_layers=0"),
        ({"vocab_size": "many"}, "vocab_size='many'"),
        ({"num_key_value_heads": 3}, "3 KV heads"),
        ({"rms_norm_eps": None, "rope_parameters": 5}, "can't be read as LlamaForCausalLM"),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "'dynamic'.*vLLM"),
        ({"rope_parameters": {"rope_type": "llama3", "factor": 2.0}}, "low_freq_factor"),
        ({"rope_parameters": {"rope_type": "linear"}}, "factor"),
        ({"rope_parameters": None, "rope_scaling": {"type": "mrope"}}, "mrope"),
        ({"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}, "partial_rotary"),
    ],
)
def test_what_is_not_understood_is_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(FormatError, match=message):
        spec("llama", **changes)


def test_a_missing_key_is_named() -> None:
    broken = config("qwen3")
    del broken["intermediate_size"]
    with pytest.raises(FormatError, match=r"intermediate_size.*Qwen3ForCausalLM"):
        spec_from_config(broken)


@pytest.mark.parametrize(
    ("types", "message"),
    [
        (["full_attention"], "1 layer_types for 3"),
        (["chunked_attention"] * 3, "chunked_attention"),
        (["sliding_attention"] * 3, "no sliding_window"),
    ],
)
def test_layer_types_are_checked(types: list[str], message: str) -> None:
    with pytest.raises(FormatError, match=message):
        spec("qwen3", layer_types=types, sliding_window=None)


def test_bidirectional_attention_is_refused() -> None:
    with pytest.raises(FormatError, match="use_bidirectional_attention"):
        spec("gemma3_text", use_bidirectional_attention=True)


def test_windows() -> None:
    assert spec("llama", sliding_window=9).sliding_windows == (None,) * 3
    assert spec("mistral", sliding_window=9).sliding_windows == (9,) * 3
    assert spec("mistral", sliding_window=9, use_sliding_window=False).sliding_windows == (9,) * 3
    qwen = {"layer_types": None, "sliding_window": 9, "max_window_layers": 1}
    assert spec("qwen2", **qwen).sliding_windows == (None,) * 3
    assert spec("qwen2", use_sliding_window=True, **qwen).sliding_windows == (None, 9, 9)
    gemma = spec("gemma3_text", layer_types=None, sliding_window_pattern=3)
    assert gemma.sliding_windows == (24, 24, None, 24, 24, None, 24)


def test_defaults_of_files_that_leave_keys_out() -> None:
    gemma = config("gemma3_text", rope_parameters=None)
    for key in ("head_dim", "tie_word_embeddings", "query_pre_attn_scalar", "sliding_window"):
        del gemma[key]
    got = spec_from_config(gemma)
    assert (got.head_dim, got.tied_embeddings, got.attention_scale) == (256, True, 1 / 16)
    assert got.sliding_windows[0] == 4096
    assert (got.rope[0].theta, got.rope[5].theta) == (1e4, 1e6)
    mistral = config("mistral")
    del mistral["sliding_window"], mistral["head_dim"]
    assert spec_from_config(mistral).sliding_windows == (4096,) * 3
    qwen3 = config("qwen3")
    del qwen3["head_dim"]
    assert spec_from_config(qwen3).head_dim == 128


def test_gemma_scales_full_layers_only() -> None:
    old = {"rope_theta": 1e6, "rope_local_base_freq": 1e4}
    scaling = {"rope_type": "linear", "factor": 8.0}
    got = spec("gemma3_text", rope_parameters=None, rope_scaling=scaling, **old)
    assert (got.rope[0].kind, got.rope[0].theta) == ("default", 1e4)
    assert (got.rope[5].kind, got.rope[5].factor, got.rope[5].theta) == ("linear", 8.0, 1e6)
