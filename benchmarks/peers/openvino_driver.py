"""Drives OpenVINO GenAI in its own Python: argv[1] = {"model": GGUF or IR, "threads", "kv"}.

Its continuous batching pipeline, the one behind LLMPipeline on a CPU.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import openvino as ov
import openvino_genai as genai
from lines import Answer, Load, StepTokens, random_prompts, serve, timed

#: As LLMPipeline does: a prompt is never cut into chunks.
WHOLE_PROMPTS = 1 << 20


class Engine:
    """A pipeline; each call runs one load."""

    def __init__(self, options: dict[str, Any]) -> None:
        scheduler = genai.SchedulerConfig()
        scheduler.max_num_batched_tokens = WHOLE_PROMPTS
        scheduler.enable_prefix_caching = False
        properties = {
            "INFERENCE_NUM_THREADS": options["threads"],
            "KV_CACHE_PRECISION": options["kv"],
        }
        self.pipeline = genai.ContinuousBatchingPipeline(
            options["model"], scheduler, "CPU", properties
        )
        self.vocab_size = len(self.pipeline.get_tokenizer().get_vocab())
        self.next_id = 0

    def __call__(self, load: Load) -> Answer:
        wanted = genai.GenerationConfig()
        wanted.max_new_tokens, wanted.ignore_eos, wanted.do_sample = load["output"], True, False
        tensors = [ov.Tensor([ids]) for ids in random_prompts(load, self.vocab_size)]
        begin = time.perf_counter()
        handles = [self._add(tensor, wanted) for tensor in tensors]
        return timed(load, begin, self._steps(handles))

    def _add(self, tensor: Any, wanted: Any) -> Any:
        self.next_id += 1
        return self.pipeline.add_request(self.next_id, tensor, wanted)

    def _steps(self, handles: list[Any]) -> Iterator[StepTokens]:
        while self.pipeline.has_non_finished_requests():
            self.pipeline.step()
            yield [
                (request, sum(len(output.generated_ids) for output in handle.read().values()))
                for request, handle in enumerate(handles)
                if handle.can_read()
            ]


if __name__ == "__main__":
    serve(Engine)
