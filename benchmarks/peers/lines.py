"""A driver's side of the conversation: a load as one JSON line in, its timing as one out.

Drivers run in the Python of the engine that they drive, so this file needs the standard library
only. What an engine prints goes to stderr: stdout is kept for answers.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from collections.abc import Callable, Iterable
from typing import Any

#: A load: batch, prompt and output (tokens of each request), seed.
Load = dict[str, int]
Answer = dict[str, Any]
#: Tokens that a step gave, as (request, how many).
StepTokens = list[tuple[int, int]]
#: Token ids below this one may be special.
FIRST_PLAIN_TOKEN = 32


def serve(prepare: Callable[[dict[str, Any]], Callable[[Load], Answer]]) -> None:
    """Prepare an engine from argv's JSON, say so, then answer one load a line until stdin ends."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    measure = prepare(json.loads(sys.argv[1]))
    print(json.dumps({"ready": True}), file=answers, flush=True)
    for line in sys.stdin:
        print(json.dumps(measure(json.loads(line))), file=answers, flush=True)


def random_prompts(load: Load, vocab_size: int) -> list[list[int]]:
    """Token ids [batch][prompt]. Each seed gives others: no engine finds a prefix in its cache."""
    chooser = random.Random(load["seed"])
    ids = range(min(FIRST_PLAIN_TOKEN, vocab_size - 1), vocab_size)
    return [chooser.choices(ids, k=load["prompt"]) for _ in range(load["batch"])]


def timed(load: Load, begin: float, steps: Iterable[StepTokens]) -> Answer:
    """Run the steps of a load that began at time.perf_counter() = `begin`.

    first_s: seconds until every request had a token; late_tokens: tokens after that, up to total_s.
    """
    waiting, early, first = set(range(load["batch"])), 0, 0.0
    for arrived in steps:
        if not waiting:
            continue
        early += sum(count for _, count in arrived)
        waiting -= {request for request, _ in arrived}
        first = time.perf_counter() - begin
    total = time.perf_counter() - begin
    late = load["batch"] * load["output"] - early
    return {"first_s": first, "total_s": total, "late_tokens": late}
