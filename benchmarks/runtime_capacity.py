"""What a KV format stores: bits of a sealed element, sequences in the memory of bf16 ones."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from figures import Row, row
from runtime_session import Session, Setup, insist

from qdeploy.kv.config import KVCacheConfig

FORMATS = ("int8", "int4")


def bits(setup: Setup) -> Iterator[Row]:
    """Bits per element of a sealed block of 64 tokens, from the bytes that the executor takes."""
    for kv in FORMATS:
        executor = setup.executor.with_kv(KVCacheConfig(dtype=kv))
        elements = 64 * executor.spec.kv_elements_per_token
        found = 8 * sum(executor.sealed_block_bytes) / elements
        name = setup.name("sealed bits per element", kv)
        yield row(name, found, "bits", 1, found / 16, "16 bits of bf16")


def held(setup: Setup) -> Iterator[Row]:
    """Sequences that run at once, sinks and tails included, in the memory of `held_bf16` in bf16.

    Engines fill their pools with a stand-in for the model, which needs neither time nor memory;
    the count of a smaller memory must hold with the model, too.
    """
    sizes = setup.sizes
    for length in sizes.held:
        memory = sizes.held_bf16 * _bf16_bytes(setup, length)
        base = most_held(setup, "bf16", length, memory)
        for kv in FORMATS:
            count = most_held(setup, kv, length, memory)
            name = setup.name(f"sequences of {length:,} tokens held", kv)
            yield row(name, count, "sequences", 1, count / base, f"{base} in bf16")
    length = sizes.held[0]
    memory = sizes.held_run * _bf16_bytes(setup, length)
    for kv in ("bf16", *FORMATS):
        count = most_held(setup, kv, length, memory)
        session = setup.session(kv, **_room(count, length, memory))
        insist(all_run(session, setup, count, length), f"{count} sequences in {kv} don't fit")


def most_held(setup: Setup, kv: str, length: int, memory: int) -> int:
    """The largest number of sequences that run at once in so many bytes of cache."""
    low, high = 1, 4 * setup.sizes.held_bf16
    while low < high:
        count = (low + high + 1) // 2
        session = setup.session(kv, stand_in=True, **_room(count, length, memory))
        low, high = (count, high) if all_run(session, setup, count, length) else (low, count - 1)
    return low


def all_run(session: Session, setup: Setup, count: int, length: int) -> bool:
    """Whether `count` prompts of `length` tokens run at once, each going on after its prompt."""
    for prompt in setup.prompts([length] * count, seed=0):
        session.ask(prompt, 3)
    while min(len(trace.token_ids) for trace in session.traces) < 2:
        session.step()
        if any(len(trace.token_ids) == 3 for trace in session.traces):
            return False  # it ended before another had begun
    return session.engine.stats().num_preemptions_total == 0


def _room(count: int, length: int, memory: int) -> dict[str, Any]:
    """An engine's options: the memory, and steps that take all prompts at once."""
    return {
        "max_num_seqs": count,
        "max_model_len": length + 8,
        "max_num_batched_tokens": count * (length + 1),
        "kv_cache_memory_bytes": memory,
    }


def _bf16_bytes(setup: Setup, length: int) -> int:
    """Bytes of a sequence of `length` tokens that goes on, in bf16."""
    executor = setup.executor.with_kv(KVCacheConfig())
    return sum(executor.open_block_bytes) * (length // executor.kv_config.block_size + 1)
