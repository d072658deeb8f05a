"""The unquantized model as a writer of its own calibration text, run by the serving engine."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from qdeploy.calibration.self_text import make_script, sample_sequences
from qdeploy.errors import CalibrationError, FormatError, UsageError
from qdeploy.progress import Progress, Task
from qdeploy.recipes import CalibrationSection
from qdeploy.runtime.llm import LLM
from qdeploy.runtime.sampling_params import SamplingParams
from qdeploy.runtime.tokenizer import Tokenizer

#: Sequences that are written at the same time.
BATCH = 32


def own_sequences(
    folder: Path, section: CalibrationSection, tokenizer: Tokenizer, progress: Progress
) -> tuple[list[list[int]], str]:
    """section.samples sequences of section.seqlen ids, and a line that says what they cost.

    The same for the same seed on one backend, whatever the number of threads. Raises UsageError
    for a model that the runtime can't run.
    """
    start = time.monotonic()
    end_ids = tokenizer.eos_token_ids
    script = make_script(tokenizer, end_ids)
    total = section.samples * section.seqlen
    llm = _load(folder, section, progress)
    with progress.task("sampling calibration text", total) as task:

        def generate(
            prompts: Sequence[list[int]], rooms: Sequence[int], seed: int
        ) -> list[list[int]]:
            return _continue(llm, prompts, rooms, seed, task)

        sequences = sample_sequences(
            script,
            generate,
            end_ids,
            samples=section.samples,
            seqlen=section.seqlen,
            seed=section.seed,
        )
    seconds = time.monotonic() - start
    backend = llm.engine.executor.name
    return sequences, f"self: sampled {total} tokens in {seconds:.0f} s (backend {backend})"


def _load(folder: Path, section: CalibrationSection, progress: Progress) -> LLM:
    try:
        return LLM(
            folder,
            kv_cache_dtype="bf16",
            max_model_len=section.seqlen,
            max_num_seqs=min(section.samples, BATCH),
            progress=progress,
        )
    except FormatError as error:
        raise UsageError(
            f"calibration source self runs the model: {error}; give text with --calib",
            param="calib",
        ) from error


def _continue(
    llm: LLM, prompts: Sequence[list[int]], rooms: Sequence[int], seed: int, task: Task
) -> list[list[int]]:
    """Each prompt's continuation of at most rooms[i] ids, at temperature 1."""
    written: list[list[int]] = []
    for begin in range(0, len(prompts), BATCH):
        group = range(begin, min(begin + BATCH, len(prompts)))
        params = [
            SamplingParams(seed=((seed << 32) + i) % 2**64, max_tokens=rooms[i], min_tokens=1)
            for i in group
        ]
        for result in llm.generate([prompts[i] for i in group], params):
            sample = result.outputs[0]
            if sample.error is not None:
                raise CalibrationError(
                    f"calibration source self: {sample.error}; give text with --calib"
                )
            written.append(sample.token_ids)
            task.advance(len(sample.token_ids))
    return written
