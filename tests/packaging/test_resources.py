"""Recipes parse, their gates parse, and the shipped texts are what LICENSES.md says they are."""

from __future__ import annotations

import hashlib
import json

import pytest

from qdeploy._resources import resource_dir
from qdeploy.evaluation.gate import parse_gate
from qdeploy.recipes import load_recipe, recipe_names

DATA = resource_dir("calib_data")
CALIBRATION = ("prose.txt", "chat.jsonl", "code.txt")


def shingles(text: str, words: int = 12) -> set[tuple[str, ...]]:
    """All runs of `words` words."""
    tokens = text.split()
    return {tuple(tokens[i : i + words]) for i in range(len(tokens) - words + 1)}


@pytest.mark.parametrize("name", recipe_names())
def test_recipe_is_valid(name: str) -> None:
    recipe = load_recipe(name)
    assert recipe.model
    assert recipe.gate
    assert parse_gate(recipe.gate).clauses
    recipe.kv_cache.config()
    named = recipe.named_scheme()
    if named is not None:
        assert named.name == recipe.scheme
        return
    assert isinstance(recipe.group_size, int)
    recipe.integer_scheme(recipe.group_size)


def test_the_promised_recipes_exist() -> None:
    assert {
        "smollm2-135m-awq",
        "smollm2-135m-awq-gptq",
        "smollm2-135m-gptq",
        "smollm2-135m-rtn",
        "smollm2-135m-fp8",
        "smollm2-135m-w8a8",
        "gemma3-270m-awq",
        "gemma3-270m-fp8-block",
    } <= set(recipe_names())


def test_q20_smollm2_groups_divide_its_layers() -> None:
    """128 doesn't divide 576: SmolLM2 recipes must say 64, a divisor, or whole rows."""
    for name in recipe_names():
        recipe = load_recipe(name)
        if recipe.named_scheme() is not None:  # whole rows, or blocks of 128 where they divide
            assert name.startswith("gemma3") or recipe.scheme in ("FP8_DYNAMIC", "W8A8")
        elif name.startswith("smollm2-135m"):
            scheme = recipe.integer_scheme(64)
            assert [scheme.groups(n) for n in (576, 1536)] == [9, 24]
            assert recipe.group_size == 64


def test_evaluation_text_is_held_out() -> None:
    """No run of 12 words of the evaluation text occurs in any calibration text."""
    held_out = shingles((DATA / "eval.txt").read_text(encoding="utf-8"))
    assert len(held_out) > 10_000
    for name in CALIBRATION:
        shared = held_out & shingles((DATA / name).read_text(encoding="utf-8"))
        assert not shared, (name, sorted(shared)[:3])


def test_checksums_cover_every_text() -> None:
    lines = (DATA / "SHA256SUMS").read_text(encoding="ascii").splitlines()
    sums = {name: digest for digest, name in (line.split() for line in lines)}
    texts = {p.name for p in DATA.iterdir()} - {"SHA256SUMS", "LICENSES.md"}
    assert set(sums) == texts == {*CALIBRATION, "eval.txt"}
    for name, digest in sums.items():
        assert hashlib.sha256((DATA / name).read_bytes()).hexdigest() == digest, name


def test_every_text_has_a_licence_and_the_set_is_small() -> None:
    licences = (DATA / "LICENSES.md").read_text(encoding="utf-8")
    for name in (*CALIBRATION, "eval.txt"):
        assert f"`{name}`" in licences
    assert sum(path.stat().st_size for path in DATA.iterdir()) < 700_000


def test_chat_rows_are_conversations_that_end_with_an_answer() -> None:
    lines = (DATA / "chat.jsonl").read_text(encoding="utf-8").splitlines()
    assert len(lines) >= 40
    for line in lines:
        roles = [message["role"] for message in json.loads(line)["messages"]]
        turns = roles[1:] if roles[0] == "system" else roles
        assert turns == ["user", "assistant"] * (len(turns) // 2)
        assert turns
