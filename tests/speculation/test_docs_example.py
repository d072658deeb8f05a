"""docs/add-a-drafter.md: its example runs as it stands."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from qdeploy import LLM, SamplingParams
from tiny_models import tiny_checkpoint

DOCS = Path(__file__).parents[2] / "docs/add-a-drafter.md"


def test_the_example_drafts_and_changes_nothing(tmp_path: Path) -> None:
    example: dict[str, Any] = {}
    code = DOCS.read_text(encoding="utf-8").split("```python\n")[1].split("```")[0]
    exec(compile(code, str(DOCS), "exec"), example)
    llm = LLM(tiny_checkpoint("llama", tmp_path), max_model_len=128)
    prompt, params = [1, 2, 3], SamplingParams(temperature=0, max_tokens=60)
    plain = llm.generate([prompt], params)[0].outputs[0].token_ids
    phrases = [plain[i : i + 12] for i in range(0, 48, 12)]
    speculating = example["with_drafter"](llm, example["PhraseDrafter"](phrases))
    for _ in range(3):  # k grows once steps have been measured
        assert speculating.generate([prompt], params)[0].outputs[0].token_ids == plain
    assert speculating.engine.stats().speculation.num_accepted_tokens > 0
