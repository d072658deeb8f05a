"""Drives qdeploy's engine: argv[1] = {"model", "backend", "threads", "kv", "max_num_seqs"}."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

from lines import Answer, Load, StepTokens, random_prompts, serve, timed
from step_facts import StepFacts


class Engine:
    """An LLM; each call runs one load. Tells StepFacts, too, of the cpu backend."""

    def __init__(self, options: dict[str, Any]) -> None:
        from qdeploy import LLM
        from qdeploy.cli.environment import bound_spinning

        bound_spinning()  # as the command does; here, so that peers keep their own ways
        llm = LLM(
            options["model"],
            backend=options["backend"],
            threads=options["threads"],
            kv_cache_dtype=options["kv"],
            max_num_seqs=options["max_num_seqs"],
        )
        self.engine = llm.engine
        executor = llm.engine.executor
        self.facts = StepFacts(executor) if executor.name == "cpu" else None

    def __call__(self, load: Load) -> Answer:
        from qdeploy import SamplingParams

        prompts = random_prompts(load, self.engine.executor.spec.vocab_size)
        params = SamplingParams(temperature=0, ignore_eos=True, max_tokens=load["output"])
        if self.facts is not None:
            self.facts.start()
        begin = time.perf_counter()
        for request, ids in enumerate(prompts):
            self.engine.add_request(str(request), ids, params)
        answer = timed(load, begin, self._steps(load["batch"]))
        if self.facts is None:
            return answer
        middle = load["prompt"] + load["output"] // 2
        return answer | self.facts.told(load["batch"] * middle)

    def _steps(self, batch: int) -> Iterator[StepTokens]:
        while self.engine.has_unfinished:
            begin = time.perf_counter()
            outputs = self.engine.step()
            seconds = time.perf_counter() - begin
            errors = [output.error for output in outputs if output.error]
            if errors:
                raise RuntimeError(errors[0])
            if self.facts is not None and len(outputs) == batch:
                self.facts.note(seconds)
            yield [(int(output.request_id), len(output.token_ids)) for output in outputs]


if __name__ == "__main__":
    serve(Engine)
