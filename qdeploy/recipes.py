"""Recipes: everything that `quantize` needs to know, as a validated value (YAML on disk)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from qdeploy._resources import resource_dir
from qdeploy.errors import UsageError
from qdeploy.kv.config import KVCacheConfig, LayerPolicy
from qdeploy.quantization.scheme import QuantScheme, fp8_scheme, w8a8_scheme

#: Schemes that say everything: bits, groups and what happens to activations.
SchemeName = Literal["FP8_DYNAMIC", "FP8_BLOCK", "FP8", "W8A8"]
#: Those that single layers may have: they need no calibration.
OverrideName = Literal["FP8_DYNAMIC", "FP8_BLOCK"]
#: Methods that W8A8 goes with: AWQ's scales are searched for exact activations.
W8A8_METHODS = ("rtn", "gptq")
#: Keys of a recipe that only integers have.
INTEGER_KEYS = ("bits", "group_size", "symmetric")
#: Keys of a recipe that only a method which trains has.
TRAINING_KEYS = ("iters", "lr")
#: Methods that round by second moments of a linear's inputs.
HESSIAN_METHODS = ("awq", "gptq", "awq+gptq")
#: `--scheme` of integers: bits and symmetry.
INTEGER_SCHEMES: dict[str, tuple[int, bool]] = {
    "W4A16": (4, True),
    "W4A16_ASYM": (4, False),
    "W8A16": (8, True),
    "W8A16_ASYM": (8, False),
    "W3A16": (3, True),
    "W3A16_ASYM": (3, False),
    "W2A16": (2, True),
    "W2A16_ASYM": (2, False),
}


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


KVDtype = Literal["bf16", "int8", "int4", "k8v4", "fp8"]


class KVLayerSection(_Section):
    """What one layer keeps; None: as the section says."""

    dtype: KVDtype | None = None
    sink_blocks: int | None = None
    residual_blocks: int | None = None


class KVSection(_Section):
    """The KV-cache policy that the artifact carries.

    dtype: auto gives each layer the cheapest policy that its attention bears on the calibration
    text, on top of the block counts. layers: by index, a format or a section, e.g.
    {0: int8, 29: {dtype: bf16}}; they are as they say, with auto too.
    """

    dtype: KVDtype | Literal["auto"] = "bf16"
    block_size: int = 64
    sink_blocks: int = 1
    residual_blocks: int = 0
    layers: dict[int, KVLayerSection] = Field(default_factory=dict)

    @field_validator("layers", mode="before")
    @classmethod
    def _formats_are_sections(cls, layers: Any) -> Any:
        if not isinstance(layers, dict):
            return layers
        return {k: {"dtype": v} if isinstance(v, str) else v for k, v in layers.items()}

    @model_validator(mode="after")
    def _auto_layers_have_formats(self) -> KVSection:
        for layer, section in self.layers.items():
            if self.dtype == "auto" and section.dtype is None:
                raise ValueError(f"layers.{layer} needs a dtype of its own beside dtype auto")
        return self

    @property
    def needs_statistics(self) -> bool:
        """Whether calibration must see K and V: to choose formats, or for static float8 scales."""
        return self.dtype in ("auto", "fp8")

    def config(self, chosen: Sequence[LayerPolicy] = ()) -> KVCacheConfig:
        """The runtime's value of this section; UsageError for a policy that can't be.

        chosen: with dtype auto, one policy for each layer; the most frequent one becomes the
        model's. Without, auto stands for bf16.
        """
        own = self.model_dump(exclude={"block_size", "layers"})
        if self.dtype == "auto":
            own["dtype"] = "bf16"
        layers = {
            layer: LayerPolicy(layer=layer, **(own | section.model_dump(exclude_none=True)))
            for layer, section in self.layers.items()
        }
        free = [policy for policy in chosen if policy.layer not in layers]
        if free:
            values = [(p.dtype, p.sink_blocks, p.residual_blocks) for p in free]
            common: tuple[str, int, int] = max(values, key=values.count)
            own = dict(zip(own, common, strict=True))
        every = {policy.layer: policy for policy in free} | layers
        return KVCacheConfig(block_size=self.block_size, layers=tuple(every.values()), **own)


class CalibrationSection(_Section):
    """Where calibration text comes from.

    source: `default` (shipped), `self` (sampled from the model), a .jsonl or .txt file, or a hub
    data set as NAME[:SPLIT][:COLUMN].
    """

    source: str = "default"
    samples: int = Field(default=64, ge=1)
    seqlen: int = Field(default=512, ge=8)
    seed: int = 0


class OverrideSection(_Section):
    """The scheme of some layers: keys given here replace the recipe's, or `scheme` names FP8."""

    bits: Literal[2, 3, 4, 8] | None = None
    group_size: int | None = None
    symmetric: bool | None = None
    scheme: OverrideName | None = None

    @model_validator(mode="after")
    def _one_kind(self) -> OverrideSection:
        integers = self.model_dump(exclude={"scheme"}, exclude_none=True)
        if (self.scheme is None) == (not integers):
            raise ValueError("give either scheme, or some of bits, group_size and symmetric")
        return self

    def apply(self, scheme: QuantScheme) -> QuantScheme:
        """The layers' scheme where that of the others is `scheme`."""
        if self.scheme is not None:
            return fp8_scheme(self.scheme)
        integers = self.model_dump(exclude={"scheme"}, exclude_none=True)
        if scheme.number == "int" and scheme.activations is None:
            return replace(scheme, **integers)
        return QuantScheme(**({"bits": 8, "group_size": -1, "symmetric": True} | integers))


class Recipe(_Section):
    """A complete quantization recipe; flags of `quantize` override its fields."""

    model: str | None = None
    method: Literal["awq", "gptq", "awq+gptq", "signround", "rtn", "fp8", "none"] = "awq"
    #: With method fp8: FP8_DYNAMIC unless given. Other integers have the three keys that follow.
    scheme: SchemeName | None = None
    bits: Literal[2, 3, 4, 8] = 4
    group_size: int | Literal["auto"] = "auto"
    symmetric: bool = False
    format: Literal["auto", "awq", "gptq", "gptq_v2", "compressed-tensors", "fp8"] = "auto"
    ignore: tuple[str, ...] = ()
    #: With scheme W8A8: SmoothQuant's alpha, how much of the activations' range moves into the
    #: weights; auto (unless given): searched for each group of linears; off.
    smoothquant: Annotated[float, Field(ge=0, le=1)] | Literal["auto", "off"] | None = None
    #: With awq and gptq: a pass over the layer for each linear, which sees all quantized before it.
    true_sequential: bool = False
    #: With method signround: training steps a layer (200 unless given), and their first size, in
    #: rounding steps (1 / iters unless given).
    iters: int | None = Field(default=None, ge=1)
    lr: float | None = Field(default=None, gt=0, le=1)
    #: By pattern, as in `ignore`: layers that have another scheme. The first that matches wins.
    overrides: dict[str, OverrideSection] = Field(default_factory=dict)
    quantize_embeddings: Literal[8, 4] | None = None
    kv_cache: KVSection = KVSection()
    calibration: CalibrationSection = CalibrationSection()
    #: Who quantizes: qdeploy itself, or another tool whose result is checked and packed alike.
    engine: Literal["native", "autoawq", "gptqmodel"] = "native"
    gate: str | None = None

    @model_validator(mode="after")
    def _one_kind(self) -> Recipe:
        methods = () if self.scheme is None else methods_of(self.scheme)
        if methods and self.method not in methods:
            raise ValueError(
                f"scheme {self.scheme} needs method {' or '.join(methods)}, not {self.method}"
            )
        if self.smoothquant is not None and self.scheme != "W8A8":
            raise ValueError("smoothquant is for scheme W8A8; leave it out")
        if self.named_scheme() is not None:
            what = f"scheme {self.scheme}" if self.scheme else "method fp8"
            for key in INTEGER_KEYS:
                if getattr(self, key) != type(self).model_fields[key].default:
                    raise ValueError(f"{key} has no effect on {what}; leave it out")
        if self.true_sequential and (self.method not in HESSIAN_METHODS or self.engine != "native"):
            raise ValueError(
                f"true_sequential needs the native engine and method {', '.join(HESSIAN_METHODS)}; "
                "leave it out"
            )
        for key in TRAINING_KEYS:
            if self.method != "signround" and getattr(self, key) is not None:
                raise ValueError(f"{key} needs method signround, not {self.method}; leave it out")
        if self.method == "none" and self.overrides:
            raise ValueError("overrides have no effect on method none; leave them out")
        return self

    def named_scheme(self) -> QuantScheme | None:
        """The weight scheme that method fp8 or `scheme` gives; None: that of the other keys."""
        if self.method == "fp8":
            return fp8_scheme(self.scheme or "FP8_DYNAMIC")
        return w8a8_scheme() if self.scheme == "W8A8" else None

    @property
    def alpha(self) -> float | Literal["auto"] | None:
        """SmoothQuant's alpha; None where layers aren't smoothed."""
        if self.scheme != "W8A8" or self.smoothquant == "off":
            return None
        return "auto" if self.smoothquant is None else self.smoothquant

    @property
    def calibrates(self) -> bool:
        """Whether anything of it depends on the calibration text."""
        plain = self.method in ("rtn", "fp8", "none") and self.scheme != "FP8"
        return not plain or self.alpha is not None or self.kv_cache.needs_statistics

    def integer_scheme(self, group_size: int) -> QuantScheme:
        """The weight scheme of other methods, once `auto` has been resolved to a group size."""
        return QuantScheme(bits=self.bits, group_size=group_size, symmetric=self.symmetric)


def methods_of(scheme: str) -> tuple[str, ...]:
    """The methods that a named scheme goes with."""
    return W8A8_METHODS if scheme == "W8A8" else ("fp8",)


def parse_recipe(data: Any, origin: str) -> Recipe:
    """Validate a mapping; an unknown key or bad value is a UsageError that names it."""
    if not isinstance(data, dict):
        raise UsageError(f"recipe {origin}: expected a mapping of keys, got {type(data).__name__}")
    try:
        return Recipe.model_validate(data)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"])
        message = first["msg"].removeprefix("Value error, ")
        where = f"{key}: " if key else ""
        raise UsageError(f"recipe {origin}: {where}{message}") from None


class _UniqueKeys(yaml.SafeLoader):
    """A SafeLoader that refuses a key given twice, which YAML does and PyYAML doesn't."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = [self.construct_object(key, deep=True) for key, _ in node.value]
        for key in seen:
            if seen.count(key) > 1:
                line = node.start_mark.line + 1
                raise yaml.YAMLError(f"{key!r} is given twice in the mapping at line {line}")
        return super().construct_mapping(node, deep)


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
        data = yaml.load(path.read_text(encoding="utf-8"), _UniqueKeys)
    except OSError as error:
        raise UsageError(f"recipe {path}: {error.strerror}; give a readable .yaml") from None
    except UnicodeDecodeError:
        raise UsageError(f"recipe {path}: not UTF-8 text; convert it") from None
    except yaml.YAMLError as error:
        raise UsageError(f"recipe {path}: not valid YAML ({error})".splitlines()[0]) from None
    return parse_recipe(data, str(path))
