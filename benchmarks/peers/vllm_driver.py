"""Drives vLLM's CPU build in its own Python: argv[1] = {"model", "threads", "batch",
"max_model_len"}.

bfloat16 weights and KV cache: what it runs without another tool's quantization.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lines import Answer, Load, StepTokens, random_prompts, serve, timed

KV_GIB = 4


class Engine:
    """An LLMEngine in this process; each call runs one load."""

    def __init__(self, options: dict[str, Any]) -> None:
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # step by step, in this process
        os.environ["VLLM_CPU_KVCACHE_SPACE"] = str(KV_GIB)
        os.environ["OMP_NUM_THREADS"] = str(options["threads"])
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = f"0-{options['threads'] - 1}"
        from vllm import LLM

        llm = LLM(
            options["model"],
            dtype="bfloat16",
            enable_prefix_caching=False,
            max_num_seqs=options["batch"],
            max_model_len=options["max_model_len"],
        )
        self.engine = llm.llm_engine
        config = Path(options["model"], "config.json").read_text(encoding="utf-8")
        self.vocab_size = json.loads(config)["vocab_size"]
        self.next_id = 0

    def __call__(self, load: Load) -> Answer:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        params = SamplingParams(
            temperature=0,
            ignore_eos=True,
            max_tokens=load["output"],
            output_kind=RequestOutputKind.DELTA,
        )
        prompts = random_prompts(load, self.vocab_size)
        begin = time.perf_counter()
        for request, ids in enumerate(prompts):
            self.engine.add_request(str(request), {"prompt_token_ids": ids}, params)
        return timed(load, begin, self._steps())

    def _steps(self) -> Iterator[StepTokens]:
        while self.engine.has_unfinished_requests():
            yield [
                (int(output.request_id), len(output.outputs[0].token_ids))
                for output in self.engine.step()
            ]


if __name__ == "__main__":
    serve(Engine)
