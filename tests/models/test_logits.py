"""More of test_against_transformers.py: from files on disk, with rarer switches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from backends import BACKENDS
from qdeploy.kv.config import KVCacheConfig
from qdeploy.runtime.executors import load_executor
from tables import run_chunks
from tiny_models import ARCHITECTURES, edit_json, tiny_checkpoint

TEXT = Path(__file__).parents[2] / "calib_data" / "eval.txt"
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 128,
}
CASES: list[tuple[str, dict[str, Any]]] = [
    ("llama", {"head_dim": 32, "num_key_value_heads": 1}),
    ("llama", {"rope_parameters": YARN}),
    ("llama", {"rope_parameters": {**YARN, "attention_factor": 1.3, "beta_fast": 8.0}}),
    ("llama", {"rope_parameters": {**YARN, "mscale": 0.7, "mscale_all_dim": 1.1}}),
    ("llama", {"rms_norm_eps": 0.05, "hidden_act": "gelu_pytorch_tanh"}),
    ("mistral", {"num_attention_heads": 6, "num_key_value_heads": 3, "hidden_size": 96}),
    ("qwen2", {"tie_word_embeddings": True}),
    ("qwen3", {"head_dim": 32, "rope_parameters": YARN, "tie_word_embeddings": True}),
    ("qwen3", {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 2}),
    ("gemma3_text", {"query_pre_attn_scalar": 40, "tie_word_embeddings": False}),
    ("gemma3_text", {"sliding_window": 1, "num_key_value_heads": 1, "attention_bias": True}),
]


def transformers_logits(folder: Path, tokens: list[int]) -> Tensor:
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )
    with torch.no_grad():
        return model(torch.tensor([tokens])).logits[0]


def random_tokens(count: int, vocab: int = 256) -> list[int]:
    return torch.randint(0, vocab, (count,), generator=torch.Generator().manual_seed(1)).tolist()


def name(case: object) -> str:
    return case if isinstance(case, str) else "-".join(case) if isinstance(case, dict) else ""


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("arch", "overrides"), CASES, ids=name)
def test_equal_transformers(
    tmp_path: Path, arch: str, overrides: dict[str, Any], backend: str
) -> None:
    folder = tiny_checkpoint(arch, tmp_path / "m", **overrides)
    tokens = random_tokens(75)
    expected = transformers_logits(folder, tokens)
    kv = KVCacheConfig(block_size=16)
    executor = load_executor(folder, backend=backend, act="fp32", kv_config=kv)
    got = run_chunks(executor, tokens, [40, 41, 75])
    assert expected.std() > 0.5, "too small to tell a mistake"
    torch.testing.assert_close(got, expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_old_config_files_mean_the_same(tmp_path: Path, arch: str) -> None:
    """transformers 4 wrote rope_theta, rope_scaling, sliding_window_pattern; no layer_types."""
    folder = tiny_checkpoint(arch, tmp_path / "m")
    tokens = random_tokens(75)
    expected = transformers_logits(folder, tokens)
    old: dict[str, Any] = {"rope_theta": 10000.0}
    if arch == "gemma3_text":
        old = {"rope_theta": 1e6, "rope_local_base_freq": 1e4, "sliding_window_pattern": 6}
    edit_json(folder / "config.json", rope_parameters=None, layer_types=None, **old)
    kv = KVCacheConfig(block_size=16)
    executor = load_executor(folder, backend="reference", kv_config=kv)
    torch.testing.assert_close(run_chunks(executor, tokens, [75]), expected, atol=1e-4, rtol=0)


@pytest.mark.model
@pytest.mark.parametrize("backend", BACKENDS)
def test_gemma3_equals_transformers_beyond_its_window(gemma3_folder: Path, backend: str) -> None:
    from transformers import AutoTokenizer

    tokens = AutoTokenizer.from_pretrained(gemma3_folder)(TEXT.read_text()[:6000])["input_ids"]
    tokens = tokens[:620]
    assert len(tokens) == 620, "the window is 512"
    expected = transformers_logits(gemma3_folder, tokens)
    kv = KVCacheConfig()
    executor = load_executor(gemma3_folder, backend=backend, act="fp32", kv_config=kv)
    got = run_chunks(executor, tokens, [600, 619, 620])
    assert (got - expected).abs().max() <= 1e-4 * expected.abs().max()
