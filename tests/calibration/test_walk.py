"""The layer walk gives what the whole model gives; capture sees every target or says so."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from qdeploy.calibration.capture import find_input_groups, run_layer
from qdeploy.calibration.walk import DecoderWalk, pick_sequences
from qdeploy.errors import CalibrationError, FormatError, UsageError
from qdeploy.formats.hf import open_folder
from qdeploy.quantization.method import LayerBatch
from tiny_models import ARCHITECTURES, edit_json, tiny_checkpoint

SEQUENCES = [[3, 50, 7, 200, 9] * 8, [4, 5, 6], [9, 8, 7] * 13 + [1], [250] * 3]


def walked(folder: Path) -> list[Tensor]:
    walk = DecoderWalk(open_folder(folder))
    hidden = walk.embed(SEQUENCES)
    for index in range(len(walk.layers)):
        with walk.layer(index) as layer:
            hidden = run_layer(layer, walk.batches(index, hidden))
        assert all(p.is_meta for p in walk.layers.parameters())
    return hidden


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_q07_walk_equals_the_model_at_any_mix_of_lengths(arch: str, tmp_path: Path) -> None:
    """40 and 3 tokens, two each: Gemma's windows of 24 are exceeded, and nothing is padded."""
    folder = tiny_checkpoint(arch, tmp_path / "model")
    batches = walked(folder)
    assert [tuple(batch.shape) for batch in batches] == [(2, 40, 64), (2, 3, 64)]
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    model.model.norm = nn.Identity()
    for batch, group in zip(batches, [(0, 2), (1, 3)], strict=True):
        for row, number in zip(batch, group, strict=True):
            with torch.no_grad():
                expected = model.model(torch.tensor([SEQUENCES[number]]))[0][0]
            torch.testing.assert_close(row, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_bfloat16_products_leave_the_residual_stream_in_float32(arch: str, tmp_path: Path) -> None:
    walk = DecoderWalk(open_folder(tiny_checkpoint(arch, tmp_path / "model")))
    batches = walk.batches(0, walk.embed(SEQUENCES))
    rows: list[Tensor] = []
    with walk.layer(0) as layer:
        exact = run_layer(layer, batches)
        seen = {"self_attn.q_proj": rows.append}
        fast = run_layer(layer, batches, seen, dtype=torch.bfloat16)
    assert rows[0].dtype == torch.float32
    for tensor, expected, batch in zip(fast, exact, batches, strict=True):
        assert tensor.dtype == torch.float32
        change = (expected - batch.hidden).norm()
        assert 0 < (tensor - expected).norm() < 0.03 * change


def test_bfloat16_weights_are_computed_in_float32(tmp_path: Path) -> None:
    folder = tiny_checkpoint("gemma3_text", tmp_path / "model")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    model.save_pretrained(tmp_path / "half")
    walk = DecoderWalk(open_folder(tmp_path / "half"))
    hidden = walk.embed([[1, 2, 3]])
    assert hidden[0].dtype == torch.float32
    expected = model.model.embed_tokens.weight[1:4].float() * 64**0.5
    torch.testing.assert_close(hidden[0][0], expected)


def test_inputs_are_shared_as_the_layer_shares_them(tmp_path: Path) -> None:
    walk = DecoderWalk(open_folder(tiny_checkpoint("qwen3", tmp_path / "model")))
    batches = walk.batches(0, walk.embed(SEQUENCES))
    names = walk.linear_names(0)
    with walk.layer(0) as layer:
        groups = find_input_groups(layer, "model.layers.0", batches[0], names)
    assert [len(group) for group in groups] == [3, 1, 2, 1]
    assert groups[3] == ("mlp.down_proj",)


def test_q10_a_target_that_saw_no_rows_is_named() -> None:
    class Bypassed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.fused = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, hidden_states: Tensor) -> Tensor:
            return nn.functional.linear(self.used(hidden_states), self.fused.weight)

    batch = LayerBatch(hidden=torch.zeros(1, 2, 4), kwargs={})
    with pytest.raises(CalibrationError, match=r"0 rows of model\.layers\.5\.fused;"):
        find_input_groups(Bypassed(), "model.layers.5", batch, ["used", "fused"])


def test_stop_after_skips_the_rest() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, hidden_states: Tensor) -> tuple[Tensor]:
            return (self.second(self.first(hidden_states)),)

    rows: list[int] = []
    batches = [LayerBatch(hidden=torch.zeros(2, 3, 4), kwargs={})] * 2
    layer = Two()
    layer.second.forward = None  # type: ignore[assignment] # fails if it is ever called
    seen = {"second": lambda tensor: rows.append(tensor.shape[0])}
    assert run_layer(layer, batches, seen, stop_after="second") == []
    assert rows == [6, 6]
    assert not layer.second._forward_pre_hooks


def test_pick_sequences_narrows_masks_but_not_shared_tensors() -> None:
    mask, cosines = torch.zeros(3, 1, 5, 5), torch.zeros(1, 5, 2)
    batch = LayerBatch(hidden=torch.randn(3, 5, 4), kwargs={"mask": mask, "rope": (cosines,)})
    picked = pick_sequences([batch], 10)
    assert len(picked) == 2
    assert picked[0].hidden.shape == (1, 5, 4)
    assert picked[0].kwargs["mask"].shape == (1, 1, 5, 5)
    assert picked[0].kwargs["rope"][0] is cosines
    assert len(pick_sequences([batch], 1)) == 1


def test_config_of_other_weights_is_refused(tmp_path: Path) -> None:
    folder = tiny_checkpoint("llama", tmp_path / "model")
    edit_json(folder / "config.json", intermediate_size=128)
    walk = DecoderWalk(open_folder(folder))
    with pytest.raises(FormatError, match=r"gate_proj.*asks for \[128, 64\]"), walk.layer(0):
        pass


def test_q19_an_unknown_architecture_is_refused(tmp_path: Path) -> None:
    folder = tiny_checkpoint("llama", tmp_path / "model")
    edit_json(folder / "config.json", model_type="nonesuch")
    with pytest.raises(UsageError, match="can't build this model"):
        DecoderWalk(open_folder(folder))
