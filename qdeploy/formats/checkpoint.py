"""Checkpoints to run: dense or packed folders, ours or foreign, checked when opened."""

from __future__ import annotations

import hashlib
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from qdeploy.errors import FormatError
from qdeploy.formats.config_shapes import check_config_shapes
from qdeploy.formats.gptq_config import checkpoint_format
from qdeploy.formats.gptq_labels import LABELS, label_of, smallest
from qdeploy.formats.hf import TensorFolder, inside, open_folder
from qdeploy.formats.manifest import Manifest, read_manifest
from qdeploy.formats.module_schemes import ModuleSchemes, schemes_name
from qdeploy.formats.safetensors_header import read_json
from qdeploy.formats.weight_format import WEIGHT_FORMATS, Shape, WeightFormat
from qdeploy.quantization.scheme import QuantizedLinear, QuantScheme

#: Files that AutoGPTQ and AutoAWQ wrote beside config.json before transformers had the key.
_LEGACY_CONFIGS = {"quantize_config.json": "gptq", "quant_config.json": "awq"}
_PACKED_SUFFIXES = (".qweight", ".qzeros", ".weight_packed", ".weight_scale", ".weight_scale_inv")
_ACCEPTED_METHODS = ("awq", "gptq", "fp8", "compressed-tensors")
_DENSE_LISTS = ("modules_to_not_convert", "ignored_layers", "ignore")
_FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)


class Checkpoint:
    """A model folder whose linears are dense or packed; tensors are read on demand."""

    def __init__(self, folder: TensorFolder) -> None:
        self.path = folder.path
        self.config = folder.config
        self.manifest: Manifest | None = read_manifest(folder.path)
        self._folder = folder
        self._by_module: dict[str, list[str]] = {}
        for name in sorted(folder.names()):
            self._by_module.setdefault(name.rpartition(".")[0], []).append(name)
        self._format, self._rules = _quantization(folder)
        #: Packed modules → (out_features, in_features); checked against the config here.
        self.packed: dict[str, tuple[int, int]] = self._packed_modules()
        #: Lines on what was read in another way than the files say.
        self.notes: list[str] = []
        self._check_dense()
        check_config_shapes(folder, self.packed)
        self._check_manifest()
        self._check_gptq_label()

    @property
    def format(self) -> str | None:
        """Name of the weight format; None for a dense checkpoint."""
        return self._format.name if self._format else None

    @property
    def schemes(self) -> dict[str, QuantScheme]:
        """The scheme of every packed module, by the config."""
        return {module: self._scheme(module) for module in self.packed}

    @property
    def scheme_name(self) -> str | None:
        """`W4A16`, or `W4A16 + W8A16` in mixed precision; None for a dense checkpoint."""
        return schemes_name(self.schemes.values()) if self.packed else None

    def names(self) -> frozenset[str]:
        """Names of all stored tensors."""
        return self._folder.names()

    def has(self, name: str) -> bool:
        """Whether a tensor is stored. A tied `lm_head.weight` usually isn't."""
        return name in self._folder.names()

    def weight_files(self) -> list[Path]:
        """The safetensors files that hold the tensors, sorted."""
        return self._folder.files()

    def tensor(self, name: str) -> Tensor:
        """A tensor as stored; FormatError when it is missing."""
        return self._folder.tensor(name)

    def shape(self, name: str) -> Shape:
        """A tensor's shape, from the header."""
        return self._folder.shape(name)

    def nbytes(self, name: str) -> int:
        """A tensor's stored bytes, from the header."""
        return prod(self._folder.shape(name)) * self._folder.dtype(name).itemsize

    def linear(self, module: str) -> Tensor | QuantizedLinear:
        """A linear layer by module name: the stored weight [out, in] if dense (its bias is the
        tensor `module.bias`), else its codes, scales, zero points and bias.

        Raises FormatError, naming the layer, when it is missing or broken.
        """
        if module not in self.packed:
            if not self.has(f"{module}.weight"):
                raise FormatError(f"{self.path}: no weight of {module}; fetch the model again")
            return self.tensor(f"{module}.weight")
        assert self._format is not None
        scheme = self._scheme(module)
        try:
            return self._format.unpack(self._stored(module, self._format, scheme), scheme)
        except FormatError as error:
            raise FormatError(f"{self.path}: {module}: {error}") from None

    def weight(self, module: str) -> Tensor:
        """The layer's weight [out, in], dequantized, float32."""
        linear = self.linear(module)
        return linear.float() if isinstance(linear, Tensor) else linear.dequantize()

    def stored_bytes(self, module: str) -> int:
        """Bytes on disk of a linear layer: packed words, scales, zeros, group index, bias."""
        return sum(self.nbytes(name) for name in self._children(module))

    def _children(self, module: str) -> list[str]:
        return self._by_module.get(module, [])

    def _stored(self, module: str, fmt: WeightFormat, scheme: QuantScheme) -> dict[str, Tensor]:
        names = (name for name in fmt.local_names(scheme).all if self.has(f"{module}.{name}"))
        return {name: self.tensor(f"{module}.{name}") for name in names}

    def _scheme(self, module: str) -> QuantScheme:
        scheme = self._rules.of(module)
        if scheme is None:
            raise FormatError(
                f"{self.path}: {module} is packed, but no group of the quantization config has it "
                "among its targets; save the model again"
            )
        return scheme

    def _packed_modules(self) -> dict[str, tuple[int, int]]:
        if self._format is None:
            return {}
        ways = [self._format.local_names(scheme) for scheme in self._rules.all]
        modules = {
            module
            for module, names in self._by_module.items()
            if any(way.mark(name.rpartition(".")[2]) for way in ways for name in names)
        }
        if not modules:
            raise FormatError(
                f"{self.path}: config.json says {self.format}, but no tensor is packed; remove "
                "quantization_config or fetch the weights again"
            )
        for module in modules & _listed_as_dense(self.config):
            raise FormatError(
                f"{self.path}: {module} is packed, but the quantization config lists it as dense; "
                "save the model again"
            )
        return {module: self._layout(module, self._format) for module in sorted(modules)}

    def _layout(self, module: str, fmt: WeightFormat) -> tuple[int, int]:
        scheme = self._scheme(module)
        local = fmt.local_names(scheme)
        for name in local.required:
            if not self.has(f"{module}.{name}"):
                raise FormatError(f"{self.path}: {module}.{name} is missing; fetch the model again")
        known = {f"{module}.{name}" for name in local.all}
        for name in self._children(module):
            if name not in known:  # a second copy (.weight), or scales that would be ignored
                raise FormatError(
                    f"{self.path}: {name} is unexpected beside a layer packed as {fmt.name}; "
                    "save the model again"
                )
        present = (name for name in local.all if self.has(f"{module}.{name}"))
        shapes = {name: self.shape(f"{module}.{name}") for name in present}
        try:
            return fmt.layout(shapes, scheme)
        except FormatError as error:
            raise FormatError(f"{self.path}: {module}: {error}") from None

    def _check_dense(self) -> None:
        """Float8 without its scale would be read as a weight of another size."""
        for name in sorted(self.names()):
            module, _, last = name.rpartition(".")
            float8 = self._folder.dtype(name) in _FLOAT8
            if float8 and last == "weight" and module not in self.packed:
                raise FormatError(
                    f"{self.path}: {name} is float8, but has no scale, or the quantization config "
                    "doesn't say so; fetch the model again"
                )

    def _check_gptq_label(self) -> None:
        """Read zero points as the words have them, whatever the label says, and say so."""
        if self._format is None or self.format not in LABELS:
            return
        fmt = self._format
        layers = (
            (self._stored(module, fmt, self._scheme(module)), self._scheme(module))
            for module in smallest(self.packed)
        )
        found = label_of(layers)
        if found is not None and found != self.format:
            self.notes.append(
                f"{self.path}: the label says {self.format}, but the zero points are those of "
                f"{found}; read as {found}"
            )
            self._format = WEIGHT_FORMATS.get(found)

    def _check_manifest(self) -> None:
        if self.manifest is None:
            return
        for name in self.manifest.files:
            if not (self.path / name).is_file():
                raise FormatError(f"{self.path}: {name} of qdeploy.json is missing; copy it again")
        for layer in self.manifest.layers:
            if not self.has(f"{layer.name}.weight") and layer.name not in self.packed:
                raise FormatError(
                    f"{self.path}: layer {layer.name} of qdeploy.json has no weights; copy it again"
                )


def open_checkpoint(path: Path, *, verify_checksums: bool = False) -> Checkpoint:
    """Open a model folder and check it: headers, names, shapes, quantization config, manifest.

    `verify_checksums` also compares the sha256 of every file that the manifest lists. Raises
    FormatError with one line that names the file, the fault and the next step.
    """
    checkpoint = Checkpoint(open_folder(path))
    if verify_checksums:
        if checkpoint.manifest is None:
            raise FormatError(f"{path}: no qdeploy.json, so no checksums to verify")
        for finding in checksum_findings(Path(path), checkpoint.manifest):
            raise FormatError(f"{path}: {finding}; copy the artifact again")
    return checkpoint


def checksum_findings(folder: Path, manifest: Manifest) -> list[str]:
    """One line for each file whose sha256 differs from the manifest's, or that is missing."""
    findings = []
    for name, expected in sorted(manifest.files.items()):
        path = folder / name
        if not path.is_file():
            findings.append(f"{name} is missing")
        elif (found := file_sha256(path)) != expected:
            findings.append(f"{name} has sha256 {found[:12]}…, the manifest says {expected[:12]}…")
    return findings


def file_sha256(path: Path) -> str:
    """Hex sha256 of a file, read in chunks."""
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while chunk := stream.read(1 << 22):
            digest.update(chunk)
    return digest.hexdigest()


def _listed_as_dense(config: dict[str, Any]) -> set[str]:
    """Full names that a quantization config leaves dense; patterns among them match nothing."""
    quantization = config.get("quantization_config") or {}
    lists = (quantization.get(key) for key in _DENSE_LISTS)
    return {name for names in lists if isinstance(names, list) for name in names}


def _quantization(folder: TensorFolder) -> tuple[WeightFormat | None, ModuleSchemes]:
    """Format and schemes by config.json, else by a legacy file; no format when dense (A11)."""
    config, source = folder.config.get("quantization_config"), folder.path / "config.json"
    if config is None:
        for name, method in _LEGACY_CONFIGS.items():
            if (folder.path / name).is_file():
                source = inside(folder.path, name)
                config = {"quant_method": method} | read_json(source)
                break
    if config is None:
        packed = sorted(name for name in folder.names() if name.endswith(_PACKED_SUFFIXES))
        if packed:
            raise FormatError(
                f"{folder.path}: packed tensors found ({packed[0]}) but no quantization config; "
                "restore quantization_config in config.json"
            )
        return None, ModuleSchemes()
    return parse_quantization(config, source)


def parse_quantization(config: Any, source: Path) -> tuple[WeightFormat, ModuleSchemes]:
    """Format and schemes of a `quantization_config`; FormatError, naming `source`, otherwise."""
    accepted = ", ".join(_ACCEPTED_METHODS)
    if not isinstance(config, dict):
        raise FormatError(f"{source}: the quantization config is not a JSON object")
    method = config.get("quant_method")
    if method is None:
        raise FormatError(
            f"{source}: 'quant_method' is missing from the quantization config; "
            f"add it, accepted values: {accepted}"
        )
    if method not in _ACCEPTED_METHODS:
        raise FormatError(
            f"{source}: quant_method {method!r} is not read; accepted values: {accepted}; "
            "quantize the base model instead"
        )
    try:
        name = checkpoint_format(config) if method == "gptq" else method
        weight_format = WEIGHT_FORMATS.get(name)
        return weight_format, weight_format.parse_config(config)
    except FormatError as error:
        raise FormatError(f"{source}: {error}") from None
