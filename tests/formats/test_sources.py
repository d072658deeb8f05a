"""resolve_model: what each kind of reference gives, the cache, and offline messages."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from gguf_builder import tiny_model, write_gguf
from qdeploy.errors import FormatError, SourceError
from qdeploy.formats import gguf as converter
from qdeploy.formats.sources import HUB_PATTERNS, resolve_model


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "cache"
    monkeypatch.setenv("QDEPLOY_CACHE", str(folder))
    return folder


def model_folder(path: Path) -> Path:
    path.mkdir(parents=True)
    (path / "config.json").write_text("{}")
    save_file({"a": torch.ones(1)}, path / "model.safetensors")
    return path


def test_a_folder_is_itself(tmp_path: Path, cache: Path) -> None:
    folder = model_folder(tmp_path / "org" / "name")
    assert resolve_model(str(folder)) == folder
    assert not cache.exists()


def test_a_local_folder_wins_over_a_hub_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model_folder(tmp_path / "org" / "name")
    monkeypatch.chdir(tmp_path)
    assert resolve_model("org/name") == Path("org/name")


def test_gguf_is_converted_once(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write_gguf(tmp_path / "m.gguf", "llama", tiny_model("llama"))
    folder = resolve_model(str(file))
    assert folder.parent == cache / "converted"
    assert {path.name for path in folder.iterdir()} == {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    monkeypatch.setattr(converter, "convert_gguf", None)  # a second conversion would fail
    assert resolve_model(str(file)) == folder


def test_changed_content_is_another_model(tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "m.gguf", "llama", tiny_model("llama"))
    first = resolve_model(str(file))
    raw = bytearray(file.read_bytes())
    raw[-1] ^= 1
    file.write_bytes(raw)
    assert resolve_model(str(file)) != first


@pytest.mark.parametrize("failure", [KeyboardInterrupt, FormatError])
def test_interrupted_conversion_leaves_nothing(
    failure: type[BaseException],
    tmp_path: Path,
    cache: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(path: Path, out: Path, progress: object) -> None:
        (out / "config.json").write_text("{}")
        raise failure("stop")

    monkeypatch.setattr(converter, "convert_gguf", fail)
    file = write_gguf(tmp_path / "m.gguf", "llama", tiny_model("llama"))
    with pytest.raises(failure):
        resolve_model(str(file))
    assert list((cache / "converted").iterdir()) == []


@pytest.mark.parametrize(
    ("reference", "message"),
    [
        ("no-such-thing", "no such folder or file; give"),
        ("", "no such folder or file|no config.json"),
        ("gone.gguf", "no such file"),
        ("a/b/c", "no such folder or file"),
        ("https://host/model", "no such folder or file"),
        ("pypi:package", "exact version"),
        ("pypi:package>=1/x.gguf", "exact version"),
        ("pypi:package==1.0/../x.gguf", "stay inside the package"),
        ("pypi:package==1.0//etc/x.gguf", "stay inside the package"),
        ("pypi:--index-url==1.0/x.gguf", "exact version"),
    ],
)
def test_unusable_reference(
    reference: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SourceError, match=message) as caught:
        resolve_model(reference)
    assert "\n" not in str(caught.value)


def test_unusable_paths(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(SourceError, match=r"no config\.json"):
        resolve_model(str(tmp_path / "empty"))
    (tmp_path / "model.bin").write_bytes(b"x")
    with pytest.raises(SourceError, match=r"not a \.gguf file"):
        resolve_model(str(tmp_path / "model.bin"))


def test_hub_download_asks_for_no_code_and_no_pickle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fnmatch import fnmatch

    import huggingface_hub

    folder = model_folder(tmp_path / "snapshot")
    asked = {}

    def download(name: str, revision: str | None, allow_patterns: list[str]) -> str:
        asked.update(name=name, revision=revision, patterns=allow_patterns)
        return str(folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert resolve_model("org/name@v1.0") == folder
    assert (asked["name"], asked["revision"]) == ("org/name", "v1.0")
    for refused in ("modeling_x.py", "tokenizer.py", "pytorch_model.bin", "model.pt", "x.gguf"):
        assert not any(fnmatch(refused, pattern) for pattern in HUB_PATTERNS)
    (folder / "model.safetensors").unlink()
    with pytest.raises(SourceError, match="ships no safetensors"):
        resolve_model("org/name")


def test_offline_hub_is_one_line(tmp_path: Path) -> None:
    """A real call with an endpoint that nobody listens on, in a process of its own."""
    environment = {
        **os.environ,
        "HF_ENDPOINT": "http://127.0.0.1:9",
        "HF_HOME": str(tmp_path / "hf"),
    }
    code = (
        "from qdeploy.errors import SourceError\n"
        "from qdeploy.formats.sources import resolve_model\n"
        "try:\n    resolve_model('org/name')\n"
        "except SourceError as error:\n    print(error)\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    assert result.stdout.startswith("org/name: no such folder here, and the hub can't be reached")
    assert result.stdout.count("\n") == 1


def test_unwritable_cache_names_the_variable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("QDEPLOY_CACHE", str(tmp_path / "file" / "cache"))
    file = write_gguf(tmp_path / "m.gguf", "llama", tiny_model("llama"))
    with pytest.raises(SourceError, match="set QDEPLOY_CACHE"):
        resolve_model(str(file))


@pytest.mark.model
@pytest.mark.parametrize(
    ("fixture", "prompt", "answer"),
    [
        ("smollm2_folder", "What is the capital of France?", "Paris"),
        ("gemma3_folder", None, "France"),
    ],
)
def test_real_models_answer(
    fixture: str, prompt: str | None, answer: str, request: pytest.FixtureRequest
) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = request.getfixturevalue(fixture)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    text = "The capital of France is"
    if prompt is not None:
        messages = [{"role": "user", "content": prompt}]
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    ids = tokenizer(text, return_tensors="pt").input_ids
    with torch.no_grad():
        out = model.generate(ids, max_new_tokens=16, do_sample=False)
    assert answer in tokenizer.decode(out[0, ids.shape[1] :])
