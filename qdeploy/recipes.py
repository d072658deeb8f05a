"""Recipes: everything that `quantize` needs to know, as a validated value (YAML on disk)."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from qdeploy._resources import resource_dir
from qdeploy.errors import UsageError
from qdeploy.kv.config import KVCacheConfig
from qdeploy.quantization.scheme import QuantScheme


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class KVSection(_Section):
    """The KV-cache policy that the artifact carries."""

    dtype: Literal["bf16", "int8", "int4", "k8v4", "fp8"] = "bf16"
    block_size: int = 64
    sink_blocks: int = 1
    residual_blocks: int = 0

    def config(self) -> KVCacheConfig:
        """The runtime's value of this section."""
        return KVCacheConfig(**self.model_dump())


class CalibrationSection(_Section):
    """Where calibration text comes from: `default` (shipped), a .jsonl or a .txt file."""

    source: str = "default"
    samples: int = Field(default=64, ge=1)
    seqlen: int = Field(default=512, ge=8)
    seed: int = 0


class Recipe(_Section):
    """A complete quantization recipe; flags of `quantize` override its fields."""

    model: str | None = None
    method: Literal["awq", "gptq", "rtn", "none"] = "awq"
    bits: Literal[2, 3, 4, 8] = 4
    group_size: int | Literal["auto"] = "auto"
    symmetric: bool = False
    format: Literal["auto", "awq", "gptq", "gptq_v2"] = "auto"
    ignore: tuple[str, ...] = ()
    quantize_embeddings: Literal[8, 4] | None = None
    kv_cache: KVSection = KVSection()
    calibration: CalibrationSection = CalibrationSection()
    gate: str | None = None

    def scheme(self, group_size: int) -> QuantScheme:
        """The weight scheme, once `auto` has been resolved to a group size."""
        return QuantScheme(bits=self.bits, group_size=group_size, symmetric=self.symmetric)


def parse_recipe(data: Any, origin: str) -> Recipe:
    """Validate a mapping; an unknown key or bad value is a UsageError that names it."""
    if not isinstance(data, dict):
        raise UsageError(f"recipe {origin}: expected a mapping of keys, got {type(data).__name__}")
    try:
        return Recipe.model_validate(data)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"])
        raise UsageError(f"recipe {origin}: {key}: {first['msg']}") from None


def recipe_names() -> list[str]:
    """Names of the shipped recipes, sorted."""
    return sorted(path.stem for path in resource_dir("recipes").glob("*.yaml"))


def load_recipe(name_or_path: str) -> Recipe:
    """Read a shipped recipe by name, or a YAML file by path."""
    path = Path(name_or_path)
    if path.suffix not in (".yaml", ".yml"):
        if name_or_path not in recipe_names():
            raise UsageError(
                f"unknown recipe {name_or_path!r}; choose one of {', '.join(recipe_names())} "
                "or give a .yaml file"
            )
        path = resource_dir("recipes") / f"{name_or_path}.yaml"
    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"recipe {path}: {error.strerror}; give a readable .yaml") from None
    except UnicodeDecodeError:
        raise UsageError(f"recipe {path}: not UTF-8 text; convert it") from None
    except yaml.YAMLError as error:
        raise UsageError(f"recipe {path}: not valid YAML ({error})".splitlines()[0]) from None
    return parse_recipe(data, str(path))
