"""Drives OpenVINO GenAI's prompt lookup in its own Python: argv[1] = {"model", "threads", "kv"}.

A load is one greedy answer: {"prompt": token ids, "output": most tokens, "drafts", "ngram": most
tokens to draft and to compare}; OpenVINO's own generation_config.json says what ends it.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import openvino as ov
import openvino_genai as genai
from lines import Answer, serve


class Engine:
    """A pipeline with prompt lookup; each call gives one answer."""

    def __init__(self, options: dict[str, Any]) -> None:
        scheduler = genai.SchedulerConfig()
        scheduler.enable_prefix_caching = False
        properties = {
            "INFERENCE_NUM_THREADS": options["threads"],
            "KV_CACHE_PRECISION": options["kv"],
            "prompt_lookup": True,
        }
        self.pipeline = genai.ContinuousBatchingPipeline(
            options["model"], scheduler, "CPU", properties
        )
        self.defaults = Path(options["model"]) / "generation_config.json"
        self.next_id = 0

    def __call__(self, load: dict[str, Any]) -> Answer:
        wanted = genai.GenerationConfig(str(self.defaults))
        wanted.max_new_tokens, wanted.do_sample = load["output"], False
        wanted.num_assistant_tokens, wanted.max_ngram_size = load["drafts"], load["ngram"]
        self.next_id += 1
        begin = time.perf_counter()
        tensor = ov.Tensor([load["prompt"]])
        handle = self.pipeline.add_request(self.next_id, tensor, wanted)
        times: list[float] = []
        while self.pipeline.has_non_finished_requests():
            self.pipeline.step()
            if handle.can_read():
                came = sum(len(output.generated_ids) for output in handle.read().values())
                times += [time.perf_counter() - begin] * came
        return {"times_s": times}


if __name__ == "__main__":
    serve(Engine)
