"""autoawq and gptqmodel themselves: as engines of `quantize`, and their own files read here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from qdeploy.engines import ENGINES, EngineJob
from qdeploy.engines.run import divergence
from qdeploy.formats.checkpoint import open_checkpoint
from qdeploy.formats.manifest import read_manifest
from qdeploy.formats.readers import SAME_LOGITS
from qdeploy.pipeline import QuantizeResult, quantize_checkpoint
from qdeploy.quantization.scheme import QuantScheme
from qdeploy.recipes import parse_recipe
from tiny_models import tiny_checkpoint

pytestmark = pytest.mark.interop
SIZES = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32}
DATA = {"samples": 8, "seqlen": 64}
SCHEMES = {
    "autoawq": ("awq", QuantScheme(group_size=32)),
    "gptqmodel": ("gptq", QuantScheme(group_size=32, symmetric=True)),
}


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint("llama", tmp_path_factory.mktemp("llama") / "model", **SIZES)


@pytest.fixture(scope="module")
def theirs(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Folders that the engines themselves wrote, by name."""
    made: dict[str, Path] = {}

    def get(name: str) -> Path:
        if name not in made:
            method, scheme = SCHEMES[name]
            generator = torch.Generator().manual_seed(0)
            out = tmp_path_factory.mktemp(name) / "out"
            ENGINES.get(name).quantize(
                EngineJob(
                    folder=llama,
                    out=out,
                    method=method,
                    scheme=scheme,
                    dense=("lm_head",),
                    sequences=torch.randint(0, 256, (8, 64), generator=generator).tolist(),
                    seqlen=64,
                )
            )
            made[name] = out
        return made[name]

    return get


def quantize(llama: Path, out: Path, name: str) -> QuantizeResult:
    method, scheme = SCHEMES[name]
    recipe = {
        "method": method,
        "group_size": scheme.group_size,
        "symmetric": scheme.symmetric,
        "calibration": DATA,
        "engine": name,
    }
    return quantize_checkpoint(str(llama), out, parse_recipe(recipe, "test"))


@pytest.mark.parametrize("name", SCHEMES)
def test_an_engine_makes_the_same_kind_of_artifact(name: str, llama: Path, tmp_path: Path) -> None:
    result = quantize(llama, tmp_path / "out", name)
    native = quantize_checkpoint(
        str(llama),
        tmp_path / "native",
        parse_recipe(
            {"method": SCHEMES[name][0], "group_size": 32, "calibration": DATA}
            | {"symmetric": SCHEMES[name][1].symmetric},
            "test",
        ),
    )
    assert (result.format, result.scheme) == (native.format, native.scheme)
    ours, made = open_checkpoint(native.output), open_checkpoint(result.output)
    assert made.names() == ours.names()
    assert {n: made.shape(n) for n in made.names()} == {n: ours.shape(n) for n in ours.names()}
    manifest = read_manifest(result.output)
    assert manifest is not None
    assert manifest.recipe["engine"] == name
    assert manifest.created_by["engine"].startswith(f"{name} ")
    assert manifest.calibration is not None
    assert {layer.name for layer in manifest.layers} == made.packed.keys()
    tokens = list(range(40, 104))
    # Each rounds in its own way; neither may be noise.
    assert divergence(llama, made, tokens) < 2 * divergence(llama, ours, tokens) + 0.05


@pytest.mark.parametrize("patched", [True, False])
def test_autoawqs_search_leaves_weights_alone_only_when_they_are_copied(patched: bool) -> None:
    """The fault that the adapter works around is still there in the package."""
    from awq.quantize.quantizer import AwqQuantizer

    from qdeploy.engines.autoawq import _cloning

    kind = _cloning(AwqQuantizer) if patched else AwqQuantizer
    quantizer = kind.__new__(kind)
    quantizer.__dict__ |= {
        "duo_scaling": True,
        "group_size": 32,
        "w_bit": 4,
        "zero_point": True,
        "max_chunk_memory": 1 << 30,
        "n_parallel_calib_samples": None,
    }
    generator = torch.Generator().manual_seed(0)
    linear = torch.nn.Linear(64, 32, bias=False)
    linear.weight.data = torch.randn(32, 64, generator=generator)
    before = linear.weight.detach().clone()
    x = torch.randn(1, 16, 64, generator=generator)
    means = (before.abs().mean(0), x.abs().mean((0, 1)))
    with torch.no_grad():
        quantizer._compute_best_scale(x, *means, linear, [linear], linear(x), {})
    assert torch.equal(linear.weight, before) is patched


@pytest.mark.parametrize("name", SCHEMES)
def test_their_own_files_are_read_as_they_read_them(name: str, theirs: Any) -> None:
    """Ours in float32 against transformers + gptqmodel in float16."""
    from interop.test_readers import TOKENS, our_logits, their_logits

    folder = theirs(name)
    expected = their_logits(folder, ("gptqmodel",))
    found = our_logits(folder)
    assert (found - expected).abs().max() < SAME_LOGITS * expected.abs().max()
    assert TOKENS.shape == (1, len(found))


def test_auto_gptqs_files_are_read(theirs: Any, tmp_path: Path) -> None:
    """As AutoGPTQ 0.7.1 writes them: v1 words, its own names of files, biases of zeros."""
    from interop.test_readers import our_logits
    from qdeploy.formats.convert import export_checkpoint

    export_checkpoint(theirs("gptqmodel"), tmp_path / "v1", "gptq")
    config = json.loads((tmp_path / "v1" / "config.json").read_text())
    quantization = config.pop("quantization_config")
    folder = tmp_path / "auto-gptq"
    folder.mkdir()
    for key in ("quant_method", "checkpoint_format", "meta", "lm_head"):
        quantization.pop(key, None)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "quantize_config.json").write_text(json.dumps(quantization))
    tensors: dict[str, Tensor] = load_file(tmp_path / "v1" / "model.safetensors")
    for name in [name for name in tensors if name.endswith(".scales")]:
        tensors[f"{name.removesuffix('.scales')}.bias"] = torch.zeros(tensors[name].shape[1])
    save_file(tensors, folder / "gptq_model-4bit-32g.safetensors", metadata={"format": "pt"})
    assert torch.equal(our_logits(folder), our_logits(tmp_path / "v1"))
