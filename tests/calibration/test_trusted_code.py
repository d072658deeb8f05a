"""Q14, P6: a model's own code runs only when trusted, and then in every loader."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from qdeploy.calibration.walk import DecoderWalk
from qdeploy.cli import app
from qdeploy.formats.hf import open_folder
from qdeploy.runtime.tokenizer import Tokenizer
from tiny_models import edit_json, tiny_checkpoint

CODE = """
from pathlib import Path
from transformers import LlamaConfig, LlamaForCausalLM

(Path({marker!r})).touch()

class OwnConfig(LlamaConfig):
    model_type = "own"

class OwnForCausalLM(LlamaForCausalLM):
    config_class = OwnConfig
"""
AUTO_MAP = {"AutoConfig": "own_model.OwnConfig", "AutoModelForCausalLM": "own_model.OwnForCausalLM"}


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A Llama under another name, which its own code explains; running that leaves a file."""
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "hf"))
    folder = tiny_checkpoint("llama", tmp_path / "own")
    (folder / "own_model.py").write_text(CODE.format(marker=str(tmp_path / "ran")))
    edit_json(folder / "config.json", model_type="own", auto_map=AUTO_MAP)
    return folder


def quantize(model: Path, *extra: str) -> Result:
    args = ["quantize", str(model), "-o", str(model.parent / "out"), "--method", "rtn"]
    return CliRunner().invoke(app, [*args, "--group-size", "32", "--eval", "none", *extra])


def test_q14_code_of_a_model_runs_only_when_trusted(own: Path) -> None:
    result = quantize(own)
    assert result.exit_code == 2
    assert "read it, then give --trust-remote-code" in " ".join(result.output.split())
    assert not (own.parent / "ran").exists()
    result = quantize(own, "--trust-remote-code")
    assert result.exit_code == 0, result.output
    assert (own.parent / "ran").exists()
    out = own.parent / "out"
    assert (out / "own_model.py").read_bytes() == (own / "own_model.py").read_bytes()
    assert json.loads((out / "config.json").read_text())["auto_map"] == AUTO_MAP


def test_code_of_an_untrusted_model_is_not_copied(tmp_path: Path) -> None:
    folder = tiny_checkpoint("llama", tmp_path / "model")
    (folder / "setup.py").write_text("print()")
    assert quantize(folder).exit_code == 0
    assert not (tmp_path / "out" / "setup.py").exists()


@pytest.mark.parametrize("trusted", [False, True])
def test_q14_one_value_reaches_every_loader(
    trusted: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    folder = tiny_checkpoint("llama", tmp_path / "model")
    seen: list[tuple[str, Any]] = []

    def spied(of: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def spy(*args: Any, **kwargs: Any) -> Any:
            seen.append((of, kwargs.get("trust_remote_code")))
            return call(*args, **kwargs)

        return spy

    for owner, name in (
        (AutoConfig, "from_pretrained"),
        (AutoModelForCausalLM, "from_config"),
        (AutoTokenizer, "from_pretrained"),
    ):
        monkeypatch.setattr(owner, name, spied(owner.__name__, getattr(owner, name)))
    DecoderWalk(open_folder(folder), trust_remote_code=trusted)
    (folder / "tokenizer.json").rename(folder / "elsewhere.json")
    (folder / "vocab.json").write_text("{}")
    with pytest.raises(Exception, match="no usable tokenizer"):
        Tokenizer.load(folder, trust_remote_code=trusted)
    assert {name for name, _ in seen} == {"AutoConfig", "AutoModelForCausalLM", "AutoTokenizer"}
    assert {value for _, value in seen} == {trusted}
