"""How much each measure of benchmarks/runtime.py runs, and what its ratio should reach."""

from __future__ import annotations

from dataclasses import dataclass

from figures import Target


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Lengths are in tokens.

    requests: of one run of the workload, whose prompts have `prompt` = (least, most) tokens and
    whose outputs are lognormal with this median and sigma 1, cut at `limit`. batch: sequences at a
    time. reserved: sequences whose reservation of max_model_len fills the memory of the
    concurrency measure. held: lengths of the sequences that are held in the memory of
    `held_bf16` bf16 ones, and `held_run`: of how many in the run that checks it. long_prompt:
    arrives while others decode; max_tokens: the budget of a step. system: the shared prompt.
    preempted: prompts of preempted sequences, multiples of 64. answer: most new
    tokens of a speculated answer.
    """

    requests: int = 48
    batch: int = 16
    prompt: tuple[int, int] = (32, 512)
    median: int = 48
    limit: int = 512
    reserved: int = 4
    max_model_len: int = 2048
    held: tuple[int, ...] = (1024, 4096)
    held_bf16: int = 50
    held_run: int = 3
    long_prompt: int = 4000
    max_tokens: int = 512
    system: int = 1000
    preempted: tuple[int, ...] = (512, 2048)
    answer: int = 256


FULL = Sizes()
#: A tiny model runs these in a moment.
QUICK = Sizes(
    requests=6,
    batch=3,
    prompt=(8, 64),
    median=6,
    limit=16,
    reserved=1,
    max_model_len=256,
    held=(128, 192),
    held_bf16=12,
    held_run=2,
    long_prompt=256,
    max_tokens=64,
    system=130,
    preempted=(128, 192),
    answer=16,
)

TARGETS = (
    Target(pattern=r"\| continuous batching \|", limit=2.0),
    Target(pattern=r"\| KV slots wasted \|", limit=1.0, at_most=True),
    Target(pattern=r"\| sequences at a time, paged \|", limit=3.0),
    Target(pattern=r"\| sealed bits per element \| .*int8", limit=8.6 / 16, at_most=True),
    Target(pattern=r"\| sealed bits per element \| .*int4", limit=4.6 / 16, at_most=True),
    Target(pattern=r"\| sequences of 1,024 tokens held \| .*int8", limit=1.65),
    Target(pattern=r"\| sequences of 4,096 tokens held \| .*int8", limit=1.8),
    Target(pattern=r"\| sequences of 1,024 tokens held \| .*int4", limit=2.6),
    Target(pattern=r"\| sequences of 4,096 tokens held \| .*int4", limit=3.2),
    Target(pattern=r"\| first token after a shared prompt", limit=0.2, at_most=True),
    Target(pattern=r"\| longest gap of 4 streams \|", limit=2.0, at_most=True),
    Target(pattern=r"\| prompt lookup, copy-heavy", limit=1.8),
    Target(pattern=r"\| prompt lookup, open answers", limit=0.95),
    Target(pattern=r"\| prompt lookup beside OpenVINO", limit=2.5),
)
