"""Writing artifacts: complete or not at all."""

from __future__ import annotations

import json
import struct
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from formats.layer_samples import CHECKPOINTS, Q_PROJ, copy_checkpoint
from qdeploy.errors import FormatError, UsageError
from qdeploy.formats.artifact import ArtifactWriter
from qdeploy.formats.checkpoint import open_checkpoint
from qdeploy.formats.hf import TensorFolder, open_folder
from qdeploy.formats.manifest import (
    AccuracyRecord,
    BaseModelRecord,
    Manifest,
    read_manifest,
    write_manifest,
)
from qdeploy.formats.weight_format import WEIGHT_FORMATS
from qdeploy.quantization.rtn import rtn_quantize
from qdeploy.quantization.scheme import QuantizedLinear, QuantScheme

SCHEME = QuantScheme(group_size=64)
MANIFEST = Manifest(
    base_model=BaseModelRecord(name="org/base", sha256="ab" * 32),
    recipe={"method": "awq", "bits": 4},
)


@pytest.fixture
def base(tmp_path: Path) -> TensorFolder:
    path = copy_checkpoint("dense", tmp_path / "base")
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "merges.txt"):
        (path / name).write_text(f"content of {name}")
    (path / "modeling_evil.py").write_text("raise SystemExit")
    return open_folder(path)


def linears(base: TensorFolder) -> list[str]:
    return sorted(name[: -len(".weight")] for name in base.names() if "_proj." in name)


def quantized(base: TensorFolder, module: str, scheme: QuantScheme = SCHEME) -> QuantizedLinear:
    weight = base.tensor(f"{module}.weight").float()
    return rtn_quantize(weight, scheme)


def fill(
    writer: ArtifactWriter, base: TensorFolder, format: str = "awq", skip: Sequence[str] = ()
) -> None:
    modules = linears(base)
    for name in sorted(base.names()):
        if name.rpartition(".")[0] not in modules and name not in skip:
            writer.add(name, base.tensor(name))
    for module in modules:
        writer.add_linear(module, quantized(base, module), format)


def write(out: Path, base: TensorFolder, format: str = "awq", **options: Any) -> Path:
    config = WEIGHT_FORMATS.get(format).quantization_config({"m": SCHEME}, ["lm_head"])
    with ArtifactWriter(out, base, **({"overwrite": False} | options)) as writer:
        fill(writer, base, format)
        return writer.finish(MANIFEST, config)


def header(path: Path) -> dict[str, Any]:
    raw = path.read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    loaded: dict[str, Any] = json.loads(raw[8 : 8 + length])
    return loaded


def siblings(out: Path) -> list[str]:
    return sorted(path.name for path in out.parent.iterdir())


@pytest.mark.parametrize("format", ["awq", "gptq_v2"])
def test_reload_equals_what_was_written(format: str, base: TensorFolder, tmp_path: Path) -> None:
    out = write(tmp_path / "out", base, format)
    checkpoint = open_checkpoint(out, verify_checksums=True)
    assert checkpoint.format == format
    for module in linears(base):
        assert torch.equal(checkpoint.weight(module), quantized(base, module).dequantize())
    for name in ("model.norm.weight", "lm_head.weight", "model.embed_tokens.weight"):
        assert torch.equal(checkpoint.tensor(name), base.tensor(name))
    assert siblings(out) == ["base", "out"]


def test_a08_metadata_says_pt_and_what_it_is(base: TensorFolder, tmp_path: Path) -> None:
    out = write(tmp_path / "out", base)
    metadata = header(out / "model.safetensors")["__metadata__"]
    assert metadata["format"] == "pt"
    assert (metadata["quant_method"], metadata["bits"], metadata["group_size"]) == (
        "awq",
        "4",
        "64",
    )
    assert metadata["method"] == "awq"
    assert metadata["qdeploy_version"]


@pytest.mark.parametrize("max_shard_size", [1, 50_000, 200_000])
def test_a09_shards_reload_alike_and_are_indexed_once(
    max_shard_size: int, base: TensorFolder, tmp_path: Path
) -> None:
    whole = open_checkpoint(write(tmp_path / "whole", base))
    out = write(tmp_path / "out", base, max_shard_size=max_shard_size)
    sharded = open_checkpoint(out, verify_checksums=True)
    assert sharded.names() == whole.names()
    assert all(torch.equal(sharded.tensor(n), whole.tensor(n)) for n in whole.names())
    index = json.loads((out / "model.safetensors.index.json").read_text())
    files = sorted(out.glob("model-*.safetensors"))
    assert len(files) > 1
    found = [name for file in files for name in header(file) if name != "__metadata__"]
    assert sorted(found) == sorted(index["weight_map"])
    assert index["metadata"]["total_size"] == sum(whole.nbytes(name) for name in whole.names())
    assert all(header(file)["__metadata__"]["bits"] == "4" for file in files)
    assert files[-1].name.endswith(f"-of-{len(files):05}.safetensors")
    assert open_folder(out).weights_sha256() == open_folder(tmp_path / "whole").weights_sha256()


def test_q03_no_tensor_is_held_once_it_is_written(base: TensorFolder, tmp_path: Path) -> None:
    with ArtifactWriter(tmp_path / "out", base, overwrite=False, max_shard_size=70_000) as writer:
        for name in sorted(base.names()):
            tensor = base.tensor(name).clone()
            held = weakref.ref(tensor)
            writer.add(name, tensor)
            del tensor
            assert held() is None
        writer.finish(MANIFEST, None)
    assert open_checkpoint(tmp_path / "out").format is None


def test_companions_are_copied_and_code_is_not(base: TensorFolder, tmp_path: Path) -> None:
    out = write(tmp_path / "out", base)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "merges.txt"):
        assert (out / name).read_text() == f"content of {name}"
    assert (out / "generation_config.json").is_file()
    assert not (out / "modeling_evil.py").exists()


def test_files_are_readable_by_others_as_the_umask_says(base: TensorFolder, tmp_path: Path) -> None:
    out = write(tmp_path / "out", base, max_shard_size=200_000)
    (tmp_path / "probe").write_text("")
    usual = (tmp_path / "probe").stat().st_mode
    assert {path.stat().st_mode for path in out.iterdir()} == {usual}


def test_link_out_of_the_base_folder_fails_before_the_work(
    base: TensorFolder, tmp_path: Path
) -> None:
    (tmp_path / "secret").write_text("secret")
    (base.path / "tokenizer.model").symlink_to(tmp_path / "secret")
    with pytest.raises(FormatError, match=r"tokenizer\.model"):
        ArtifactWriter(tmp_path / "out", base, overwrite=False)


def test_config_keeps_the_base_and_names_the_format(base: TensorFolder, tmp_path: Path) -> None:
    out = write(tmp_path / "out", base)
    config = json.loads((out / "config.json").read_text())
    quantization = config.pop("quantization_config")
    assert config == base.config
    assert config["dtype"] == "float16"
    assert quantization["quant_method"] == "awq"


def test_manifest_is_completed(base: TensorFolder, tmp_path: Path) -> None:
    out = write(tmp_path / "out", base)
    manifest = read_manifest(out)
    assert manifest is not None
    assert set(manifest.files) == {p.name for p in out.iterdir()} - {"qdeploy.json", "README.md"}
    checkpoint = open_checkpoint(out)
    stored = sum(checkpoint.nbytes(name) for name in checkpoint.names())
    assert manifest.capacity.weight_bytes == stored


def test_card_shows_the_recipe_and_later_the_accuracy(base: TensorFolder, tmp_path: Path) -> None:
    out = write(tmp_path / "out", base)
    card = (out / "README.md").read_text()
    assert 'base_model: "org/base"' in card
    assert "groups of 64" in card
    assert "Not measured" in card
    manifest = read_manifest(out)
    assert manifest is not None
    record = AccuracyRecord(
        dtype="int4",
        backend="cpu",
        act="int8",
        reference="org/base",
        text_sha256="0",
        num_tokens=99,
        ctx_len=64,
        metrics={"perplexity": 12.345, "kl_mean": float("nan")},
        gate="kl<0.1",
        passed=False,
    )
    write_manifest(out, manifest.with_record(record))
    refreshed = (out / "README.md").read_text()
    assert "| int4/b64/s1/r0 | cpu | int8 | 12.35 | nan | 99 | kl<0.1: failed |" in refreshed
    assert "Not measured" not in refreshed
    assert refreshed.partition("## Serve")[2] == card.partition("## Serve")[2]
    open_checkpoint(out, verify_checksums=True)  # the card isn't part of the checksums


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt, SystemExit])
@pytest.mark.parametrize("overwrite", [False, True])
def test_interrupt_leaves_nothing(
    error: type[BaseException], overwrite: bool, base: TensorFolder, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    if overwrite:
        write(out, base)
    before = {p.name: p.read_bytes() for p in out.iterdir()} if overwrite else None

    def interrupted() -> None:
        with ArtifactWriter(out, base, overwrite=overwrite, max_shard_size=50_000) as writer:
            fill(writer, base)
            raise error

    with pytest.raises(error):
        interrupted()
    assert siblings(out) == (["base", "out"] if overwrite else ["base"])
    if before is not None:
        assert {p.name: p.read_bytes() for p in out.iterdir()} == before


def test_failed_rename_puts_the_old_artifact_back(
    base: TensorFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = write(tmp_path / "out", base)
    before = (out / "qdeploy.json").read_bytes()
    rename = Path.rename

    def fail_on_publish(self: Path, target: Path) -> Path:
        if ".tmp-" in self.name and not self.name.endswith("-old") and Path(target) == out:
            raise KeyboardInterrupt
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", fail_on_publish)
    with pytest.raises(KeyboardInterrupt):
        write(out, base, overwrite=True)
    assert (out / "qdeploy.json").read_bytes() == before
    assert siblings(out) == ["base", "out"]


def test_leaving_without_finish_writes_nothing(base: TensorFolder, tmp_path: Path) -> None:
    with ArtifactWriter(tmp_path / "out", base, overwrite=False) as writer:
        fill(writer, base)
    assert siblings(tmp_path / "out") == ["base"]


def test_existing_output_needs_overwrite(base: TensorFolder, tmp_path: Path) -> None:
    out = write(tmp_path / "out", base)
    (out / "old.txt").write_text("old")
    with pytest.raises(UsageError, match="--overwrite"):
        ArtifactWriter(out, base, overwrite=False)
    write(out, base, overwrite=True)
    assert not (out / "old.txt").exists()
    assert siblings(out) == ["base", "out"]


def test_overwrite_never_deletes_what_is_no_artifact(base: TensorFolder, tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir()
    (home / "thesis.tex").write_text("years of work")
    with pytest.raises(UsageError, match="no artifact"):
        ArtifactWriter(home, base, overwrite=True)
    with pytest.raises(UsageError, match="name a new folder"):
        ArtifactWriter(base.path, base, overwrite=True)
    assert (home / "thesis.tex").exists()


def test_output_below_a_file_is_a_usage_error(base: TensorFolder, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with (
        pytest.raises(UsageError, match="can't write"),
        ArtifactWriter(tmp_path / "file" / "out", base, overwrite=False),
    ):
        pass


def test_stale_folder_of_a_killed_process_is_removed(base: TensorFolder, tmp_path: Path) -> None:
    stale = tmp_path / f".out.tmp-{2**22 + 1}"  # above the largest pid of Linux
    stale.mkdir()
    other = tmp_path / ".elsewhere.tmp-1"
    other.mkdir()
    write(tmp_path / "out", base)
    assert not stale.exists()
    assert other.exists()


def test_a10_missing_tensor_fails_the_save(base: TensorFolder, tmp_path: Path) -> None:
    with ArtifactWriter(tmp_path / "out", base, overwrite=False) as writer:
        fill(writer, base, skip=["model.norm.weight"])
        with pytest.raises(FormatError, match=r"1 tensors .*model\.norm\.weight"):
            writer.finish(MANIFEST, None)
    assert siblings(tmp_path / "out") == ["base"]


def test_a10_duplicated_and_unknown_tensors_fail(base: TensorFolder, tmp_path: Path) -> None:
    with ArtifactWriter(tmp_path / "out", base, overwrite=False) as writer:
        fill(writer, base)
        with pytest.raises(ValueError, match="twice"):
            writer.add("model.norm.weight", torch.ones(128))
        with pytest.raises(ValueError, match="twice"):
            writer.add_linear(Q_PROJ, quantized(base, Q_PROJ), "awq")
        writer.add("layers.0.self_attn.q_proj.weight", torch.ones(128, 128))
        with pytest.raises(FormatError, match="not a tensor of the base"):
            writer.finish(MANIFEST, None)


def test_tied_head_is_never_written(base: TensorFolder, tmp_path: Path) -> None:
    tied = copy_checkpoint(
        "dense", tmp_path / "tied", config=lambda c: c.update(tie_word_embeddings=True)
    )
    out = write(tmp_path / "out", open_folder(tied))
    assert not open_checkpoint(out).has("lm_head.weight")


def test_layer_that_the_format_cannot_hold_is_named(base: TensorFolder, tmp_path: Path) -> None:
    layer = quantized(base, Q_PROJ, QuantScheme(bits=8, group_size=64))
    with ArtifactWriter(tmp_path / "out", base, overwrite=False) as writer:
        with pytest.raises(UsageError, match=f"{Q_PROJ}.*gptq_v2"):
            writer.add_linear(Q_PROJ, layer, "awq")
        with pytest.raises(UsageError, match="unknown weight format 'gguf'"):
            writer.add_linear(Q_PROJ, layer, "gguf")


def test_views_and_shared_storage_are_stored_as_values(tmp_path: Path) -> None:
    folder = tmp_path / "base"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    names = {"a": torch.zeros(4, 4), "b": torch.zeros(4), "c": torch.zeros(4, 4)}
    save_file(names, folder / "model.safetensors")
    storage = torch.arange(16.0).reshape(4, 4)
    with ArtifactWriter(tmp_path / "out", open_folder(folder), overwrite=False) as writer:
        writer.add("a", storage.t())
        writer.add("b", storage[1])
        writer.add("c", storage)
        storage.fill_(-1)  # a caller may reuse its buffer
        out = writer.finish(MANIFEST, None)
    expected = torch.arange(16.0).reshape(4, 4)
    assert torch.equal(open_folder(out).tensor("a"), expected.t())
    assert torch.equal(open_folder(out).tensor("b"), expected[1])


def test_fixture_can_be_written_again_as_another_format(tmp_path: Path) -> None:
    """awq → gptq_v2 → awq keeps every dequantized weight."""
    source = open_checkpoint(CHECKPOINTS / "awq")
    base = open_folder(CHECKPOINTS / "dense")
    out = tmp_path / "v2"
    with ArtifactWriter(out, base, overwrite=False) as writer:
        for name in source.names():
            if name.rpartition(".")[0] not in source.packed:
                writer.add(name, source.tensor(name))
        for module in source.packed:
            layer = source.linear(module)
            assert isinstance(layer, QuantizedLinear)
            writer.add_linear(module, layer, WEIGHT_FORMATS.get("gptq_v2"))
        config = WEIGHT_FORMATS.get("gptq_v2").quantization_config(source.schemes, [])
        writer.finish(MANIFEST, config)
    converted = open_checkpoint(out)
    for module in source.packed:
        assert torch.equal(converted.weight(module), source.weight(module))
