"""What the driver of qdeploy tells of the cpu backend's decode steps."""

from __future__ import annotations

from pathlib import Path

import pytest

from tiny_models import VOCAB_SIZE, tiny_checkpoint

PEERS = Path(__file__).parents[2] / "benchmarks" / "peers"
LOAD = {"batch": 2, "prompt": 16, "output": 6, "seed": 0}


def test_decode_steps_are_told_with_what_they_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(PEERS))
    from qdeploy_driver import Engine

    model = tiny_checkpoint("llama", tmp_path, num_hidden_layers=2, tie_word_embeddings=False)
    options = {"backend": "cpu", "threads": 1, "kv": "bf16", "max_num_seqs": 2}
    engine = Engine({"model": str(model), **options})
    for _ in range(2):  # the second load starts anew
        told = engine(LOAD)
    assert told["late_tokens"] == 10
    assert 0 < told["raw_step_s"] < told["step_s"] < told["total_s"]
    assert told["read_s"] > 0
    # float32: q and k, v, o, then gate, up and down of each layer, and the head.
    layer = 64 * 64 * 2 + 2 * 32 * 64 + 3 * 96 * 64
    weights = 4 * (2 * layer + VOCAB_SIZE * 64)
    # 19 tokens of 2 requests, K and V of 2 layers with 2 heads of 16, in bfloat16.
    assert told["step_bytes"] == weights + 2 * 19 * 2 * 2 * 2 * 16 * 2
