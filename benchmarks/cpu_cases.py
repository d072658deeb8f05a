"""What benchmarks/cpu.py runs: workloads, who takes part, and what the results should reach."""

from __future__ import annotations

from dataclasses import dataclass, replace

from figures import Target
from peers.contestant import Load

SMOLLM2, LLAMA_1B = "SmolLM2-135M", "Llama-1.17B"


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """A load that every contestant runs, and the rates taken from it.

    rates: title → attribute of Timing. heads: bits of our embeddings and head. kvs: our KV formats.
    llama_kvs, openvino_kvs: theirs; each is a contestant. step_facts: also compare our decode steps
    with the raw C++ call and with the bandwidth bound. compare_kvs: pairs of our KV formats, the
    second being what the first is compared with.
    """

    model: str
    load: Load
    rates: dict[str, str]
    heads: tuple[int, ...] = (8,)
    kvs: tuple[str, ...] = ("int8",)
    llama_kvs: tuple[str, ...] = ("f16",)
    openvino_kvs: tuple[str, ...] = ("u8",)
    step_facts: bool = False
    compare_kvs: tuple[tuple[str, str], ...] = ()

    @property
    def title(self) -> str:
        """Model and load, for progress lines and --only."""
        sizes = f"batch {self.load.batch}, prompt {self.load.prompt}, output {self.load.output}"
        return f"{self.model} | {', '.join(self.rates)} | {sizes}"


_TO_BF16 = (("int8", "bf16"), ("int4", "bf16"))
_KVS = ("bf16", "int8", "int4")

WORKLOADS = (
    Workload(
        model=SMOLLM2,
        load=Load(batch=1, prompt=128, output=128),
        rates={"decode": "decode_rate"},
        heads=(8, 4),
        step_facts=True,
    ),
    Workload(
        model=SMOLLM2,
        load=Load(batch=32, prompt=128, output=128),
        rates={"batch 32": "end_to_end_rate", "batch 32, decode phase": "decode_rate"},
        heads=(8, 4),
        step_facts=True,
    ),
    Workload(
        model=SMOLLM2,
        load=Load(batch=1, prompt=512, output=1),
        rates={"prefill 512": "prefill_rate"},
        kvs=_KVS,
        llama_kvs=("f16", "q8_0", "q4_0"),
        openvino_kvs=("u8", "u4"),
        compare_kvs=_TO_BF16,
    ),
    Workload(
        model=SMOLLM2,
        load=Load(batch=1, prompt=4096, output=1),
        rates={"prefill 4096": "prefill_rate"},
        kvs=_KVS,
        compare_kvs=_TO_BF16,
    ),
    Workload(
        model=SMOLLM2,
        load=Load(batch=1, prompt=8000, output=128),
        rates={"decode at 8k": "decode_rate"},
        kvs=_KVS,
        compare_kvs=(("int8", "bf16"), ("int4", "int8")),
    ),
    Workload(
        model=LLAMA_1B,
        load=Load(batch=1, prompt=128, output=128),
        rates={"decode": "decode_rate"},
        heads=(8, 4),
        step_facts=True,
    ),
    Workload(
        model=LLAMA_1B,
        load=Load(batch=1, prompt=512, output=1),
        rates={"prefill 512": "prefill_rate"},
    ),
    Workload(
        model=LLAMA_1B,
        load=Load(batch=16, prompt=128, output=128),
        rates={"batch 16": "end_to_end_rate"},
        heads=(8, 4),
    ),
)


TARGETS = (
    Target(pattern=r"SmolLM2-135M \| decode \| .*head 8-bit", limit=2.2),
    Target(pattern=r"SmolLM2-135M \| decode \| .*head 4-bit", limit=2.7),
    Target(pattern=r"SmolLM2-135M \| decode, of the bandwidth bound", limit=0.75),
    Target(pattern=r"engine over raw step", limit=1.1, at_most=True),
    Target(pattern=r"SmolLM2-135M \| batch 32 \|", limit=2.0),
    Target(pattern=r"SmolLM2-135M \| batch 32, decode phase \|", limit=3.0),
    Target(pattern=r"SmolLM2-135M \| prefill 512 \| .*KV int8", limit=1.3),
    Target(pattern=r"SmolLM2-135M \| prefill 4096, of prefill 512", limit=0.5),
    Target(pattern=r"SmolLM2-135M \| prefill \d+, KV .* over", limit=0.95),
    Target(pattern=r"SmolLM2-135M \| decode at 8k, KV .* over", limit=1.0),
    Target(pattern=r"Llama-1.17B \| decode \|", limit=1.15),
    Target(pattern=r"Llama-1.17B \| decode, of the bandwidth bound", limit=0.85),
    Target(pattern=r"Llama-1.17B \| prefill 512 \|", limit=1.2),
    Target(pattern=r"Llama-1.17B \| batch 16 \|", limit=1.5),
)


def quick(workload: Workload) -> Workload:
    """The same workload with few variants and sizes that a tiny model runs in a moment."""
    load = workload.load
    small = Load(
        batch=min(load.batch, 3), prompt=min(load.prompt // 8, 64), output=min(load.output, 4)
    )
    kvs = workload.kvs[:2]
    pairs = tuple(pair for pair in workload.compare_kvs if set(pair) <= set(kvs))
    heads = workload.heads[:1]
    return replace(workload, load=small, heads=heads, kvs=kvs, compare_kvs=pairs)
