"""An engine over a loaded model, with the drafter that its options ask for."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from qdeploy.progress import Progress
from qdeploy.runtime.engine import Engine
from qdeploy.runtime.engine_config import EngineConfig
from qdeploy.runtime.speculation.loading import load_drafter
from qdeploy.runtime.tokenizer import Tokenizer

if TYPE_CHECKING:
    from qdeploy.runtime.executors.base import Executor


def load_engine(
    executor: Executor,
    config: EngineConfig,
    *,
    folder: Path,
    tokenizer: Tokenizer,
    threads: int | None,
    progress: Progress,
) -> Engine:
    """What LLM and the server run. executor, folder, tokenizer: of the model; its KV pools are
    allocated here. threads: of a draft model, None for as many as the target's backend chooses.

    Raises UsageError or CapacityError, in one line, for what can't be honoured.
    """
    drafter = load_drafter(
        config, executor, folder=folder, tokenizer=tokenizer, threads=threads, progress=progress
    )
    return Engine(executor, config, tokenizer.eos_token_ids, tokenizer=tokenizer, drafter=drafter)
