"""Text that the model writes itself: full sequences, the template's frame, deterministic."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from qdeploy.calibration.self_model import own_sequences
from qdeploy.calibration.self_text import Script, make_script, sample_sequences
from qdeploy.errors import UsageError
from qdeploy.evaluation.gate import parse_gate
from qdeploy.evaluation.session import session
from qdeploy.evaluation.text import default_text
from qdeploy.kv.config import KVCacheConfig
from qdeploy.pipeline import quantize_checkpoint
from qdeploy.progress import Silent
from qdeploy.recipes import CalibrationSection, parse_recipe
from qdeploy.runtime.engine import Engine
from qdeploy.runtime.tokenizer import Tokenizer
from tiny_models import edit_json, tiny_checkpoint

END = 258


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint("llama", tmp_path_factory.mktemp("llama") / "model")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Without a chat template, and without BOS."""
    folder = tiny_checkpoint("llama", tmp_path_factory.mktemp("base") / "model")
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    edit_json(folder / "tokenizer_config.json", chat_template=None)
    return folder


def script_of(folder: Path) -> tuple[Script, Tokenizer]:
    tokenizer = Tokenizer.load(folder)
    return make_script(tokenizer, tokenizer.eos_token_ids), tokenizer


def two_words(prompts: Sequence[list[int]], rooms: Sequence[int], seed: int) -> list[list[int]]:
    return [[7, 8, END][:room] for room in rooms]


def test_x20_turns_are_framed_as_the_template_frames_them(llama: Path) -> None:
    script, tokenizer = script_of(llama)
    assert script.starts == ()
    ids = sample_sequences(script, two_words, {END}, samples=1, seqlen=60, seed=0)[0]
    word = tokenizer.decode([7, 8])
    roles = ("user", "assistant", "user")
    text = tokenizer.render_chat(
        [{"role": role, "content": word} for role in roles], add_generation_prompt=True
    )
    expected = tokenizer.encode(text, False)
    assert len(ids) == 60 > len(expected) + 2
    assert ids[: len(expected) + 2] == [*expected, 7, 8]


def test_a_base_model_begins_with_a_random_ordinary_token(base: Path) -> None:
    script, _ = script_of(base)
    assert (script.opening, script.between) == ([], ([],))
    assert set(script.starts) <= set(range(256))
    sequences = sample_sequences(script, two_words, {END}, samples=8, seqlen=16, seed=3)
    assert len({ids[0] for ids in sequences}) > 4
    assert all(ids[1:4] == [7, 8, END] and ids[4] in script.starts for ids in sequences)
    assert sequences == sample_sequences(script, two_words, {END}, samples=8, seqlen=16, seed=3)


def test_a_model_that_says_nothing_ends() -> None:
    def silent(prompts: Sequence[list[int]], rooms: Sequence[int], seed: int) -> list[list[int]]:
        return [[END] for _ in prompts]

    ids = sample_sequences(Script([1], ([],)), silent, {END}, samples=1, seqlen=500, seed=0)[0]
    assert len(ids) == 65


def test_turns_have_seeds_of_their_own() -> None:
    seeds: list[int] = []

    def generate(prompts: Sequence[list[int]], rooms: Sequence[int], seed: int) -> list[list[int]]:
        seeds.append(seed)
        return [[7] for _ in prompts]

    for seed in (0, 1):
        sample_sequences(Script([1], ([],)), generate, {END}, samples=1, seqlen=20, seed=seed)
    assert len(seeds) == len(set(seeds)) == 38


def test_a_template_longer_than_a_sample_is_an_error(llama: Path) -> None:
    script, _ = script_of(llama)
    with pytest.raises(UsageError, match="raise --calib-seqlen"):
        sample_sequences(script, two_words, {END}, samples=1, seqlen=6, seed=0)


@pytest.mark.parametrize("kind", ["llama", "base"])
def test_the_model_writes_the_same_text_for_the_same_seed(
    kind: str, request: pytest.FixtureRequest
) -> None:
    folder: Path = request.getfixturevalue(kind)

    def of(seed: int, samples: int = 3) -> list[list[int]]:
        section = CalibrationSection(source="self", samples=samples, seqlen=48, seed=seed)
        sequences, note = own_sequences(folder, section, Tokenizer.load(folder), Silent())
        assert f"sampled {48 * samples} tokens" in note
        return sequences

    first = of(0)
    assert [len(ids) for ids in first] == [48] * 3
    assert first == of(0)
    assert first != of(1)
    assert max(id for ids in first for id in ids) < 288


def test_quantizing_on_the_models_own_text_needs_no_data(llama: Path, tmp_path: Path) -> None:
    recipe = {"method": "gptq", "group_size": 32, "calibration": {"source": "self", "samples": 2}}
    recipe["calibration"] |= {"seqlen": 64}  # type: ignore[operator]
    digests = []
    for name in ("one", "two"):
        quantize_checkpoint(str(llama), tmp_path / name, parse_recipe(recipe, "test"))
        record = json.loads((tmp_path / name / "qdeploy.json").read_text())["calibration"]
        assert (record["source"], record["tokens"], record["rows_kept"]) == ("self", 128, None)
        digests.append(record["sha256"])
    assert digests[0] == digests[1]


def test_x14_both_models_are_scored_on_the_same_held_out_text(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither on what the model wrote for its calibration."""
    recipe = {"method": "gptq", "group_size": 32, "calibration": {"source": "self", "samples": 1}}
    quantize_checkpoint(str(llama), tmp_path / "out", parse_recipe(recipe, "test"))
    scored: dict[Engine, list[list[int]]] = {}
    original = Engine.score

    def score(self: Engine, window: Sequence[int], *rest: Any) -> None:
        scored.setdefault(self, []).append(list(window))
        original(self, window, *rest)

    monkeypatch.setattr(Engine, "score", score)
    gate, kv = parse_gate("kl<100"), [KVCacheConfig()]
    options: dict[str, Any] = {"text": None, "ctx_len": 64, "max_windows": 2}
    session(tmp_path / "out", str(llama), kv, gate, progress=Silent(), **options)
    reference, artifact = scored.values()
    assert reference == artifact
    held_out = Tokenizer.load(llama).encode(default_text().read_text(encoding="utf-8")[:2000])
    assert reference[0][-50:] in [held_out[i : i + 50] for i in range(64)]


def test_a_model_that_the_runtime_cannot_run_is_told_so(llama: Path, tmp_path: Path) -> None:
    from shutil import copytree

    copytree(llama, tmp_path / "model")
    edit_json(tmp_path / "model" / "config.json", architectures=["X"], model_type="stablelm")
    section = CalibrationSection(source="self", samples=1, seqlen=32)
    tokenizer = Tokenizer.load(llama)
    with pytest.raises(UsageError, match=r"self runs the model: .*; give text with --calib"):
        own_sequences(tmp_path / "model", section, tokenizer, Silent())
