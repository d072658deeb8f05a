"""Every format of ours in the other engines: they load it and give our logits.

`make readers` runs this file and writes what was measured into qdeploy/formats/readers.json and
the table of docs/formats.md; `make test-interop` only checks.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch

from cpu.quantized_models import WeightKind, quantized_checkpoint
from qdeploy.formats.checkpoint import open_checkpoint
from qdeploy.formats.readers import Reader, kind_of
from qdeploy.kv.config import KVCacheConfig
from qdeploy.pipeline import quantize_checkpoint
from qdeploy.recipes import parse_recipe
from qdeploy.runtime.executors import load_executor
from readers_page import write_readers
from tables import run_chunks
from tiny_models import tiny_checkpoint

pytestmark = pytest.mark.interop
CT = "compressed-tensors"
TOKENS = torch.randint(0, 256, (1, 40), generator=torch.Generator().manual_seed(3))
#: Every width is a multiple of 128, as FP8 in blocks wants it.
SIZES = {"hidden_size": 128, "intermediate_size": 256, "num_key_value_heads": 2, "head_dim": 64}


def ints(format: str, bits: int = 4, symmetric: bool = True, **more: Any) -> WeightKind:
    return WeightKind(format=format, bits=bits, symmetric=symmetric, **more)


def floats(format: str, rows: int, group: int) -> WeightKind:
    return WeightKind(format=format, bits=8, symmetric=True, block_rows=rows, group=group)


KINDS = {
    "awq": ints("awq", symmetric=False),
    "gptq 4": ints("gptq"),
    "gptq 2": ints("gptq", 2),
    "gptq 3": ints("gptq", 3),
    "gptq 8": ints("gptq", 8),
    "gptq_v2": ints("gptq_v2"),
    "gptq_v2 asymmetric": ints("gptq_v2", symmetric=False),
    "gptq_v2 act-order": ints("gptq_v2", symmetric=False, act_order=True),
    "packed 4": ints(CT),
    "packed 4 asymmetric": ints(CT, symmetric=False),
    "packed 3": ints(CT, 3),
    "packed 8": ints(CT, 8),
    "float rows": floats(CT, 1, -1),
    "float blocks": floats(CT, 128, 128),
    "int8 rows": ints(CT, 8),
    "float tensors": floats(CT, -1, -1),
    "mixed": ints(CT),
    "mixed with floats": ints(CT),
    "fp8": floats("fp8", 128, 128),
}
#: Those that `quantize` itself makes, by their recipes.
W4: dict[str, Any] = {"method": "rtn", "group_size": 32, "symmetric": True}
RECIPES: dict[str, dict[str, Any]] = {
    "int8 rows": {"method": "rtn", "scheme": "W8A8", "smoothquant": "off"},
    "float tensors": {
        "method": "fp8",
        "scheme": "FP8",
        "calibration": {"samples": 4, "seqlen": 64},
    },
    "mixed": W4 | {"overrides": {"*.down_proj": {"bits": 8}}},
    "mixed with floats": W4
    | {"overrides": {"*.down_proj": {"bits": 8}, "model.layers.0.*": {"scheme": "FP8_DYNAMIC"}}},
}


@dataclass(frozen=True)
class Way:
    """A way to have transformers read a checkpoint."""

    formats: tuple[str, ...]
    packages: tuple[str, ...]
    dequantize: bool = False

    @property
    def needs(self) -> str:
        names = ", ".join(f"{name} {version(name)}" for name in self.packages)
        return f"{names}; dequantize=True" if self.dequantize else names


WAYS = (
    Way(("awq",), ("gptqmodel", "accelerate")),
    Way(("gptq", "gptq_v2"), ("gptqmodel", "optimum")),
    Way((CT,), ("compressed-tensors",)),
    Way((CT,), ("compressed-tensors",), dequantize=True),
    Way(("fp8",), ("accelerate",)),
)
CASES = [(name, way) for name, kind in KINDS.items() for way in WAYS if kind.format in way.formats]
#: What doesn't load, or rounds activations to 8 bits, by whether it dequantizes: in the table, too.
FAILS = {
    ("packed 4 asymmetric", False),  # transformers has the zero points' shape wrong
    ("int8 rows", False),
    ("float rows", False),
    ("float blocks", False),
    ("float tensors", False),
    ("mixed with floats", False),
    ("mixed", True),  # transformers' dequantizer takes the first group of a config for all
    ("mixed with floats", True),
}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Folders by name of KINDS, made when first asked for."""
    made: dict[str, Path] = {}

    def get(name: str) -> Path:
        if name not in made:
            folder = tmp_path_factory.mktemp("readers")
            make = _quantized if name in RECIPES else _plain
            made[name] = make(folder, name)
        return made[name]

    return get


def _plain(folder: Path, name: str) -> Path:
    return quantized_checkpoint("llama", folder, KINDS[name], **SIZES)


def _quantized(folder: Path, name: str) -> Path:
    source = tiny_checkpoint("llama", folder / "base", **SIZES)
    recipe = parse_recipe(RECIPES[name], "test")
    return quantize_checkpoint(str(source), folder / "out", recipe).output


@pytest.fixture(scope="module")
def measured() -> Iterator[list[Reader]]:
    """Rows as they come; written at the end when `make readers` asks for it."""
    rows: list[Reader] = []
    yield rows
    if os.environ.get("QDEPLOY_WRITE_READERS"):
        root = Path(os.environ["QDEPLOY_WRITE_READERS"])
        page = root / "docs" / "formats.md"
        write_readers(rows, root / "qdeploy" / "formats" / "readers.json", page)


def their_logits(folder: Path, packages: tuple[str, ...], dequantize: bool = False) -> torch.Tensor:
    """Of TOKENS, [tokens, vocabulary], by transformers."""
    from transformers import AutoModelForCausalLM

    options: dict[str, Any] = {"dtype": torch.float32}
    if dequantize:
        from transformers import CompressedTensorsConfig

        options["quantization_config"] = CompressedTensorsConfig(dequantize=True)
    if "gptqmodel" in packages:
        options |= {"dtype": torch.float16, "device_map": "cpu"}
    model = AutoModelForCausalLM.from_pretrained(folder, **options).eval()
    with torch.no_grad():
        logits: torch.Tensor = model(TOKENS).logits[0].float()
    return logits


def our_logits(folder: Path) -> torch.Tensor:
    executor = load_executor(folder, backend="reference", kv_config=KVCacheConfig())
    return run_chunks(executor, TOKENS[0].tolist(), [40])


@pytest.mark.parametrize(("name", "way"), CASES, ids=str)
def test_transformers_gives_our_logits(
    name: str, way: Way, checkpoints: Any, measured: list[Reader]
) -> None:
    folder = checkpoints(name)
    checkpoint = open_checkpoint(folder)
    expected = our_logits(folder)
    error: float | None = None
    try:
        found = their_logits(folder, way.packages, way.dequantize)
        error = ((found - expected).abs().max() / expected.abs().max()).item()
    except Exception as fault:
        print(f"{name}: {type(fault).__name__}: {fault}")
    reader = Reader(
        format=str(checkpoint.format),
        kind=kind_of(checkpoint.schemes.values()),
        engine=f"transformers {version('transformers')}",
        needs=way.needs,
        error=error,
    )
    measured.append(reader)
    assert reader.agrees != ((name, way.dequantize) in FAILS), reader
