"""`--engine` without the packages: what is refused, before any work, in one line."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from qdeploy.engines import ENGINES, EngineJob
from qdeploy.engines.autoawq import AutoAwq
from qdeploy.engines.run import EngineRun, divergence
from qdeploy.errors import CalibrationError, CapacityError, UsageError
from qdeploy.formats.checkpoint import open_checkpoint
from qdeploy.pipeline import quantize_checkpoint
from qdeploy.progress import Silent
from qdeploy.quantization.scheme import QuantScheme
from qdeploy.recipes import parse_recipe
from tiny_models import tiny_checkpoint

DATA = {"samples": 4, "seqlen": 32}


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint("llama", tmp_path_factory.mktemp("llama") / "model")


def quantize(source: Path, out: Path, **recipe: Any) -> Any:
    data = {"group_size": 32, "calibration": DATA} | recipe
    return quantize_checkpoint(str(source), out, parse_recipe(data, "test"))


@pytest.fixture
def _no_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec

    def hidden(name: str, package: str | None = None) -> Any:
        return None if name in ("awq", "gptqmodel") else find(name, package)

    monkeypatch.setattr(importlib.util, "find_spec", hidden)


@pytest.mark.usefixtures("_no_packages")
@pytest.mark.parametrize(
    ("recipe", "expected"),
    [
        ({"engine": "autoawq"}, r"pip install autoawq==0\.2\.9"),
        ({"engine": "gptqmodel", "method": "gptq"}, r"pip install gptqmodel==7\.6\.0"),
        ({"engine": "autoawq", "method": "gptq"}, "does method awq, not gptq"),
        ({"engine": "gptqmodel", "method": "awq"}, "does method gptq, not awq"),
        ({"engine": "autoawq", "bits": 8}, "does W4A16_ASYM, not W8A16_ASYM"),
        ({"engine": "autoawq", "symmetric": True}, "does W4A16_ASYM, not W4A16"),
        ({"engine": "autoawq", "ignore": ["*.k_proj"]}, "can't keep single layers dense"),
        ({"engine": "autoawq", "overrides": {"*.k_proj": {"bits": 8}}}, "leave overrides out"),
        ({"engine": "autoawq", "method": "none"}, "method none doesn't"),
        (
            {"engine": "gptqmodel", "method": "gptq", "scheme": "W8A8", "group_size": "auto"},
            "rounds weights alone",
        ),
        ({"engine": "gptq"}, "engine"),
    ],
)
def test_q19_what_an_engine_cannot_do_is_named(
    recipe: dict[str, Any], expected: str, llama: Path, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match=expected) as info:
        quantize(llama, tmp_path / "out", **recipe)
    assert "\n" not in str(info.value)
    assert list(tmp_path.iterdir()) == []


def test_what_a_tool_raises_while_loading_is_one_line(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class AutoAWQForCausalLM:
        @staticmethod
        def from_pretrained(*_: object, **__: object) -> None:
            raise TypeError("granite isn't supported yet.\nmore")

    quantizer = SimpleNamespace(AwqQuantizer=object)
    package = SimpleNamespace(AutoAWQForCausalLM=AutoAWQForCausalLM)
    modules = {"awq": package, "awq.quantize.quantizer": quantizer}
    monkeypatch.setattr("qdeploy.engines.autoawq.imported", lambda _, name: modules[name])
    job = EngineJob(
        folder=llama,
        out=tmp_path / "out",
        method="awq",
        scheme=QuantScheme(),
        dense=(),
        sequences=[[1, 2]],
        seqlen=2,
    )
    with pytest.raises(CalibrationError, match=r"granite isn't supported yet\.; use") as info:
        AutoAwq().quantize(job)
    assert "\n" not in str(info.value)


class Fake:
    """An engine that rounds with qdeploy; `harm` is added to every weight first."""

    def __init__(self, harm: float = 0.0) -> None:
        self.harm = harm

    def check(self, method: str, scheme: QuantScheme, dense: Any) -> None:
        pass

    def version(self) -> str:
        return "fake 1"

    def quantize(self, job: EngineJob) -> None:
        quantize(job.folder, job.out, method="rtn", format="gptq_v2", ignore=list(job.dense[:-1]))
        if self.harm:
            from safetensors.torch import load_file, save_file

            path = job.out / "model.safetensors"
            tensors = load_file(path)
            for name in tensors:
                if name.endswith("scales"):
                    tensors[name] = tensors[name] * self.harm
            save_file(tensors, path, metadata={"format": "pt"})


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Fake:
    engine = Fake()
    monkeypatch.setitem(ENGINES._entries, "gptqmodel", engine)
    return engine


def test_the_artifact_holds_what_the_engine_made(fake: Fake, llama: Path, tmp_path: Path) -> None:
    options: dict[str, Any] = {"method": "gptq", "engine": "gptqmodel"}
    result = quantize(llama, tmp_path / "out", format="compressed-tensors", **options)
    plain = quantize(llama, tmp_path / "plain", method="rtn")
    assert result.format == "compressed-tensors"
    made, expected = open_checkpoint(tmp_path / "out"), open_checkpoint(plain.output)
    assert made.packed == expected.packed
    for module in made.packed:
        assert torch.equal(made.weight(module), expected.weight(module))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "plain"]


def test_noise_is_refused_and_leaves_nothing_behind(
    fake: Fake, llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake.harm = 1000.0
    monkeypatch.setattr("qdeploy.engines.run.MAX_KL", 0.1)  # so tiny a model knows little
    with pytest.raises(CalibrationError, match=r"fake 1 gave noise: KL \d"):
        quantize(llama, tmp_path / "out", method="gptq", engine="gptqmodel")
    assert list(tmp_path.iterdir()) == []


def test_a_layer_that_the_engine_left_dense_is_named(
    fake: Fake, llama: Path, tmp_path: Path
) -> None:
    job = EngineJob(
        folder=llama,
        out=tmp_path / "out",
        method="gptq",
        scheme=QuantScheme(group_size=32),
        dense=("model.layers.1.mlp.up_proj", "lm_head"),
        sequences=[list(range(32))],
        seqlen=32,
    )
    run = EngineRun(engine=fake, progress=Silent())
    targets = ["model.layers.0.mlp.up_proj", "model.layers.1.mlp.up_proj"]
    with pytest.raises(CalibrationError, match=r"left model\.layers\.1\.mlp\.up_proj dense"):
        run.quantized(job, targets)


def test_a_model_that_does_not_fit_is_refused_up_front(
    fake: Fake, llama: Path, tmp_path: Path
) -> None:
    recipe = parse_recipe({"method": "gptq", "engine": "gptqmodel", "group_size": 32}, "test")
    with pytest.raises(CapacityError, match=r"--engine gptqmodel loads the whole model"):
        quantize_checkpoint(str(llama), tmp_path / "out", recipe, max_memory=1 << 20)
    assert list(tmp_path.iterdir()) == []


def test_divergence_of_a_model_from_itself_is_zero(llama: Path) -> None:
    assert divergence(llama, open_checkpoint(llama), range(32)) == pytest.approx(0, abs=1e-9)
