"""The oracle: transformers' float32 logits on tiny random configs of every architecture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from backends import BACKENDS
from executors.driving import executor_of, logits_in_chunks
from qdeploy.errors import FormatError, UsageError
from qdeploy.kv.config import KVCacheConfig
from qdeploy.models.spec import spec_from_config
from qdeploy.runtime.engine import Engine
from qdeploy.runtime.engine_config import EngineConfig
from qdeploy.runtime.executors import load_executor
from qdeploy.runtime.tokenizer import Tokenizer
from tables import pool_sizes
from tiny_models import ARCHITECTURES, VOCAB_SIZE, tiny_config, tiny_model

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
VARIATIONS: list[tuple[str, dict[str, Any]]] = [
    *((arch, {}) for arch in ARCHITECTURES),
    ("llama", {"attention_bias": True, "mlp_bias": True}),
    ("llama", {"rope_parameters": LLAMA3}),
    ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}}),
    ("llama", {"head_dim": 32, "tie_word_embeddings": True}),
    ("llama", {"num_key_value_heads": 4, "hidden_act": "gelu"}),
    ("mistral", {"sliding_window": 20}),
    ("qwen2", {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 1}),
    ("qwen3", {"head_dim": 32, "attention_bias": True}),
    ("gemma3_text", {"final_logit_softcapping": 30.0, "attn_logit_softcapping": 20.0}),
]


def named(value: object) -> str:
    return value if isinstance(value, str) else "-".join(value) or "default"  # type: ignore[arg-type]


@pytest.mark.parametrize(("arch", "overrides"), VARIATIONS, ids=named)
def test_logits_equal_transformers(arch: str, overrides: dict[str, Any]) -> None:
    model = tiny_model(arch, **overrides)
    ids = torch.randint(0, VOCAB_SIZE, (90,), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        expected = model(ids[None]).logits[0]
    executor = executor_of(model, KVCacheConfig(block_size=16))
    executor.allocate_kv(pool_sizes(executor, 6, 0))
    actual = logits_in_chunks(executor, ids.tolist(), [33, 90])
    assert (actual - expected).abs().max() <= 1e-4
    assert expected.abs().max() > 1  # random weights large enough that a mistake shows


def test_unknown_architecture_names_the_known_ones() -> None:
    with pytest.raises(FormatError, match=r"BertModel.*LlamaForCausalLM.*vLLM"):
        spec_from_config({"architectures": ["BertModel"]})


def test_unknown_rope_is_named() -> None:
    config = tiny_config("llama").to_dict() | {"architectures": ["LlamaForCausalLM"]}
    config["rope_parameters"] = {"rope_type": "longrope", "rope_theta": 1e4}
    with pytest.raises(FormatError, match="longrope"):
        spec_from_config(config)


def test_missing_key_is_named() -> None:
    config = tiny_config("llama").to_dict() | {"architectures": ["LlamaForCausalLM"]}
    del config["intermediate_size"]
    with pytest.raises(FormatError, match="intermediate_size"):
        spec_from_config(config)


def test_old_style_rope_keys_mean_the_same() -> None:
    new = tiny_config("llama", rope_parameters=LLAMA3).to_dict()
    new["architectures"] = ["LlamaForCausalLM"]
    old = {k: v for k, v in new.items() if k != "rope_parameters"}
    old |= {"rope_theta": 10000.0, "rope_scaling": {**LLAMA3, "rope_theta": 10000.0}}
    assert spec_from_config(old) == spec_from_config(new)


def test_unknown_backend_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"cuda.*reference"):
        load_executor(tmp_path, backend="cuda", kv_config=KVCacheConfig())


@pytest.mark.model
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("fixture", ["smollm2_folder", "gemma3_folder"])
def test_real_model_equals_transformers(
    fixture: str, backend: str, request: pytest.FixtureRequest
) -> None:
    from transformers import AutoModelForCausalLM

    folder: Path = request.getfixturevalue(fixture)
    text = "The Eiffel Tower, built in 1889, stands in Paris. def f(x): return x + 1\n" * 9
    ids = Tokenizer.load(folder).encode(text)[:150]
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        expected = model(torch.tensor([ids])).logits[0]
    del model
    config = EngineConfig(kv=KVCacheConfig(), max_num_seqs=1, max_model_len=256)
    executor = load_executor(folder, backend=backend, act="fp32", kv_config=KVCacheConfig())
    engine = Engine(executor, config)
    chunks: list[torch.Tensor] = []
    engine.score(ids, lambda _, logits: chunks.append(logits))
    difference = (torch.cat(chunks) - expected).abs().max()
    assert difference <= 1e-4 * expected.abs().max()
