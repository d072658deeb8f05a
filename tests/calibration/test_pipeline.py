"""Checkpoint to artifact on tiny models: files, manifest, options, early errors, resume."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import qdeploy.pipeline as pipeline
from qdeploy.calibration.layers import LayerRunner
from qdeploy.errors import CalibrationError, QdeployError, UsageError
from qdeploy.formats.checkpoint import open_checkpoint
from qdeploy.formats.hf import open_folder
from qdeploy.formats.manifest import read_manifest
from qdeploy.pipeline import QuantizeResult, quantize_checkpoint
from qdeploy.progress import Silent
from qdeploy.quantization.scheme import QuantizedLinear
from qdeploy.recipes import parse_recipe
from tiny_models import ARCHITECTURES, tiny_checkpoint

DATA = {"samples": 6, "seqlen": 48}


class Lines(Silent):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def info(self, message: str) -> None:
        self.lines.append(message)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint("llama", tmp_path_factory.mktemp("llama") / "model")


def quantize(
    source: Path,
    out: Path,
    *,
    progress: Silent | None = None,
    resume: bool = True,
    overwrite: bool = False,
    **recipe: Any,
) -> QuantizeResult:
    data = {"method": "rtn", "group_size": 32, "calibration": DATA} | recipe
    return quantize_checkpoint(
        str(source),
        out,
        parse_recipe(data, "test"),
        progress=progress or Silent(),
        resume=resume,
        overwrite=overwrite,
    )


def weights_digest(folder: Path) -> str:
    return open_folder(folder).weights_sha256()


@torch.no_grad()
def mean_kl(source: Path, artifact: Path) -> float:
    """Divergence of the dequantized artifact from its source, on random tokens."""
    ids = torch.randint(0, 256, (2, 48), generator=torch.Generator().manual_seed(3))
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).eval()
    before = model(ids).logits.log_softmax(-1)
    checkpoint = open_checkpoint(artifact)
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and name != "lm_head":
            module.weight.copy_(checkpoint.weight(name))
            if module.bias is not None:
                module.bias.copy_(checkpoint.linear(name).bias)  # type: ignore[union-attr,arg-type]
        elif "norm" in name:
            module.weight.copy_(checkpoint.tensor(f"{name}.weight"))  # type: ignore[operator]
    after = model(ids).logits.log_softmax(-1)
    return (before.exp() * (before - after)).sum(-1).mean().item()


def stored_bits(source: Path, out: Path) -> float:
    """Bits of everything stored under the decoder's projections, per weight of the source."""
    stored, dense = open_folder(out), open_folder(source)
    projections = [n for n in dense.names() if n.endswith("_proj.weight")]
    weights = sum(dense.tensor(name).numel() for name in projections)
    return sum(stored.tensor(n).nbytes for n in stored.names() if "_proj." in n) * 8 / weights


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("method", ["awq", "gptq", "awq+gptq", "rtn"])
def test_end_to_end(arch: str, method: str, tmp_path: Path) -> None:
    source = tiny_checkpoint(arch, tmp_path / "model")
    result = quantize(source, tmp_path / "out", method=method)
    assert result.size_bytes < result.source_bytes
    assert result.bits_per_weight == pytest.approx(stored_bits(source, tmp_path / "out"))
    # 4 bits of code, a 16-bit scale and a 4-bit zero point in 32; g_idx and biases come on top.
    assert 4 + 20 / 32 <= result.bits_per_weight < 5.3
    manifest = read_manifest(tmp_path / "out")
    assert manifest is not None
    checkpoint = open_checkpoint(tmp_path / "out")
    layers = AutoModelForCausalLM.from_pretrained(source).config.num_hidden_layers
    assert len(manifest.layers) == 7 * layers
    assert checkpoint.format == result.format == manifest.recipe["format"]
    assert manifest.recipe["group_size"] == 32
    assert (manifest.calibration is None) == (method == "rtn")
    assert mean_kl(source, tmp_path / "out") < 0.5
    assert not list(tmp_path.glob("*resume*"))
    assert json.dumps(result.layers)  # plain data, for --json


def test_true_sequential_is_recorded_and_only_of_methods_with_moments(
    llama: Path, tmp_path: Path
) -> None:
    for on in (False, True):
        quantize(llama, tmp_path / str(on), method="gptq", true_sequential=on)
    manifest = read_manifest(tmp_path / "True")
    assert manifest is not None
    assert manifest.recipe["true_sequential"] is True
    assert weights_digest(tmp_path / "True") != weights_digest(tmp_path / "False")
    for recipe in ({"method": "rtn"}, {"method": "gptq", "engine": "gptqmodel"}):
        with pytest.raises(UsageError, match="true_sequential needs the native engine and method"):
            parse_recipe(recipe | {"true_sequential": True}, "test")


@pytest.mark.parametrize(("bits", "symmetric"), [(2, False), (3, True), (8, False)])
@pytest.mark.parametrize("method", ["awq", "gptq", "awq+gptq", "rtn"])
def test_other_bits_are_written_and_read_back(
    method: str, bits: int, symmetric: bool, llama: Path, tmp_path: Path
) -> None:
    quantize(llama, tmp_path / "out", method=method, bits=bits, symmetric=symmetric)
    checkpoint = open_checkpoint(tmp_path / "out")
    schemes = checkpoint.schemes.values()
    assert {(scheme.bits, scheme.symmetric) for scheme in schemes} == {(bits, symmetric)}
    q = checkpoint.linear("model.layers.0.mlp.down_proj")
    assert isinstance(q, QuantizedLinear)
    assert q.codes.max() == q.scheme.max_code
    assert mean_kl(llama, tmp_path / "out") < {2: 6.0, 3: 1.5, 8: 5e-3}[bits]


@pytest.mark.parametrize("method", ["awq", "gptq", "rtn"])
def test_q18_group_size_is_recorded_and_changes_the_file(
    method: str, llama: Path, tmp_path: Path
) -> None:
    digests = set()
    for size in (16, 32):
        quantize(llama, tmp_path / str(size), method=method, group_size=size)
        checkpoint = open_checkpoint(tmp_path / str(size))
        assert {scheme.group_size for scheme in checkpoint.schemes.values()} == {size}
        scales = checkpoint.linear("model.layers.0.mlp.down_proj").scales  # type: ignore[union-attr]
        assert tuple(scales.shape) == (64, 96 // size)
        digests.add(weights_digest(tmp_path / str(size)))
    assert len(digests) == 2


def test_none_copies_weights_and_keeps_the_kv_policy(llama: Path, tmp_path: Path) -> None:
    result = quantize(llama, tmp_path / "out", method="none", kv_cache={"dtype": "int4"})
    assert weights_digest(tmp_path / "out") == weights_digest(llama)
    manifest = read_manifest(tmp_path / "out")
    assert manifest is not None
    assert manifest.kv_cache.dtype == "int4"
    assert result.kv_cache == "int4/b64/s1/r0"
    assert result.bits_per_weight == 32
    assert "quantization_config" not in json.loads((tmp_path / "out/config.json").read_text())


def test_auto_group_size_says_why(llama: Path, tmp_path: Path) -> None:
    progress = Lines()
    quantize(llama, tmp_path / "out", group_size="auto", progress=progress)
    assert any(line.startswith("group size 32: the largest") for line in progress.lines)
    assert any("MB before" in line for line in progress.lines)


def test_everything_else_is_copied_as_stored(llama: Path, tmp_path: Path) -> None:
    quantize(llama, tmp_path / "out", method="gptq")
    base, made = open_folder(llama), open_folder(tmp_path / "out")
    dense = [name for name in base.names() if "norm" in name or "embed" in name]
    assert dense
    assert all(torch.equal(base.tensor(name), made.tensor(name)) for name in dense)


@pytest.mark.parametrize("pattern", ["*.down_proj", r"re:.*\.down_proj$"])
@pytest.mark.parametrize("method", ["awq", "gptq", "rtn"])
def test_ignored_layers_stay_dense(pattern: str, method: str, llama: Path, tmp_path: Path) -> None:
    quantize(llama, tmp_path / "out", method=method, ignore=[pattern])
    checkpoint = open_checkpoint(tmp_path / "out")
    for index in range(3):
        name = f"model.layers.{index}.mlp.down_proj"
        assert isinstance(checkpoint.linear(name), torch.Tensor)
        assert torch.equal(checkpoint.weight(name), open_folder(llama).tensor(f"{name}.weight"))
    assert mean_kl(llama, tmp_path / "out") < 0.5


@pytest.mark.parametrize(
    ("recipe", "expected"),
    [
        ({"group_size": 64}, r"64 does not divide .*96 input .*down_proj; .*every layer: 32, 16"),
        ({"ignore": ["*.qkv_proj"]}, r"'\*\.qkv_proj' matches no linear"),
        ({"ignore": ["re:("]}, r"'re:\('"),
        ({"ignore": ["*"]}, "no linear layer is left"),
        ({"quantize_embeddings": 8, "ignore": ["lm_head"]}, "leave one of the two out"),
        ({"bits": 3, "format": "awq"}, "format"),
        ({"calibration": {"source": "pile"}, "method": "awq"}, "'pile'"),
    ],
)
def test_q19_q24_refused_before_any_calibration(
    recipe: dict[str, Any], expected: str, llama: Path, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match=expected):
        quantize(llama, tmp_path / "out", **recipe)
    assert list(tmp_path.iterdir()) == []


def test_the_embeddings_policy_changes_no_weight_file(llama: Path, tmp_path: Path) -> None:
    """It is applied at load: other readers get the same checkpoint."""
    plain = quantize(llama, tmp_path / "plain").output
    rounded = quantize(llama, tmp_path / "rounded", quantize_embeddings=4).output
    assert weights_digest(plain) == weights_digest(rounded)
    assert (plain / "config.json").read_bytes() == (rounded / "config.json").read_bytes()
    manifest = read_manifest(rounded)
    assert manifest is not None
    assert manifest.recipe["quantize_embeddings"] == 4
    assert manifest.embeddings is not None
    assert manifest.embeddings.scheme().bits == 4


def test_a_quantized_source_is_refused(llama: Path, tmp_path: Path) -> None:
    quantize(llama, tmp_path / "out")
    with pytest.raises(UsageError, match="quantized already"):
        quantize(tmp_path / "out", tmp_path / "again")


def test_fused_experts_are_refused(tmp_path: Path) -> None:
    from transformers import AutoConfig

    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "vocab_size": 64}
    config = AutoConfig.for_model(
        "mixtral", num_local_experts=2, num_attention_heads=2, num_key_value_heads=2, **sizes
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "model")
    with pytest.raises(UsageError, match="fused experts"):
        quantize(tmp_path / "model", tmp_path / "out")


def test_q06_eight_tokens_warn(llama: Path, tmp_path: Path) -> None:
    (tmp_path / "short.txt").write_text("8 bytes!")
    calibration = {"source": str(tmp_path / "short.txt"), "samples": 1, "seqlen": 512}
    progress = Silent()
    result = quantize(
        llama, tmp_path / "out", method="awq", calibration=calibration, progress=progress
    )
    assert any(text.startswith("8 calibration tokens") for text in progress.warnings)
    assert result.warnings == progress.warnings


def test_q01_a_tiny_group_leaves_no_nan(tmp_path: Path) -> None:
    source = tiny_checkpoint("llama", tmp_path / "model")
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16)
    model.model.layers[1].mlp.gate_proj.weight.data[:, :32] *= 1e-9
    model.save_pretrained(source)
    for method in ("awq", "gptq"):
        quantize(source, tmp_path / method, method=method)
        folder = open_folder(tmp_path / method)
        tensors = [folder.tensor(name) for name in folder.names()]
        assert all(t.isfinite().all() for t in tensors if t.is_floating_point())


def test_q02_huge_inputs_of_the_last_layer_finish(tmp_path: Path) -> None:
    source = tiny_checkpoint("llama", tmp_path / "model")
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    model.model.layers[2].mlp.up_proj.weight.data *= 1e30
    model.save_pretrained(source)
    progress = Silent()
    quantize(source, tmp_path / "out", method="awq", progress=progress)
    assert any("model.layers.2" in text for text in progress.warnings)
    checkpoint = open_checkpoint(tmp_path / "out")
    assert checkpoint.weight("model.layers.2.mlp.down_proj").isfinite().all()


class Killed(BaseException):
    """Stands for kill -9: nothing catches it."""


def kill_after(layers: int, source: Path, out: Path, method: str) -> None:
    """A run that dies before layer `layers` is done."""
    original: Callable[..., Any] = LayerRunner.run

    def run(self: Any, index: int, *inputs: Any) -> Any:
        if index == layers:
            raise Killed
        return original(self, index, *inputs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LayerRunner, "run", run)
        with pytest.raises(Killed):
            quantize(source, out, method=method)


@pytest.mark.parametrize("method", ["awq", "gptq", "awq+gptq", "rtn"])
@pytest.mark.parametrize("layers", [1, 2])
def test_q11_a_killed_run_resumes_to_the_same_bits(
    method: str, layers: int, llama: Path, tmp_path: Path
) -> None:
    quantize(llama, tmp_path / "whole", method=method)
    kill_after(layers, llama, tmp_path / "out", method)
    assert not (tmp_path / "out").exists()
    progress = Lines()
    result = quantize(llama, tmp_path / "out", method=method, progress=progress)
    assert any(f"resuming: {layers} finished" in line for line in progress.lines)
    assert weights_digest(tmp_path / "out") == weights_digest(tmp_path / "whole")
    assert len(result.layers) == 21
    assert not list(tmp_path.glob("*resume*"))


def test_q11_killed_after_the_last_layer(llama: Path, tmp_path: Path) -> None:
    def killed(self: object, writer: object) -> None:
        raise Killed

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pipeline._Run, "_copy_rest", killed)
        with pytest.raises(Killed):
            quantize(llama, tmp_path / "out", method="gptq")
    quantize(llama, tmp_path / "out", method="gptq")
    quantize(llama, tmp_path / "whole", method="gptq")
    assert weights_digest(tmp_path / "out") == weights_digest(tmp_path / "whole")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"bits": 8}, "changed recipe"),
        ({"calibration": {"samples": 5, "seqlen": 48}}, "calibration"),
        ({"resume": False}, "--no-resume"),
    ],
)
def test_q11_anything_changed_starts_over(
    change: dict[str, Any], reason: str, llama: Path, tmp_path: Path
) -> None:
    kill_after(2, llama, tmp_path / "out", "gptq")
    progress = Lines()
    changed: dict[str, Any] = {"method": "gptq"} | change
    quantize(llama, tmp_path / "out", progress=progress, **changed)
    assert any("starting over" in line and reason in line for line in progress.lines)
    quantize(llama, tmp_path / "whole", **changed)
    assert weights_digest(tmp_path / "out") == weights_digest(tmp_path / "whole")


def test_another_model_starts_over(llama: Path, tmp_path: Path) -> None:
    kill_after(2, llama, tmp_path / "out", "awq")
    other = tiny_checkpoint("llama", tmp_path / "other", seed=1)
    progress = Lines()
    quantize(other, tmp_path / "out", method="awq", progress=progress)
    assert any("changed weights" in line for line in progress.lines)


def test_an_empty_calibration_file_writes_nothing(llama: Path, tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").write_text("\n\n")
    calibration = {"source": str(tmp_path / "empty.jsonl")}
    with pytest.raises(CalibrationError, match="0 of"):
        quantize(llama, tmp_path / "out", method="awq", calibration=calibration)
    assert [path.name for path in tmp_path.iterdir()] == ["empty.jsonl"]


def test_errors_are_one_line(llama: Path, tmp_path: Path) -> None:
    with pytest.raises(QdeployError) as caught:
        quantize(llama, tmp_path / "out", group_size=128)
    assert "\n" not in str(caught.value)


def test_two_runs_give_the_same_bits(llama: Path, tmp_path: Path) -> None:
    for name in ("one", "two"):
        quantize(llama, tmp_path / name, method="awq")
    assert weights_digest(tmp_path / "one") == weights_digest(tmp_path / "two")


def test_untied_head_is_kept(tmp_path: Path) -> None:
    source = tiny_checkpoint("llama", tmp_path / "model", tie_word_embeddings=False)
    quantize(source, tmp_path / "out")
    head = open_folder(tmp_path / "out").tensor("lm_head.weight")
    assert torch.equal(head, open_folder(source).tensor("lm_head.weight"))
