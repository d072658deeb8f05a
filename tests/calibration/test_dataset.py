"""Calibration data: what is kept, split, dropped, counted; deterministic by seed."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qdeploy.calibration.dataset import CalibrationData, load_calibration
from qdeploy.errors import CalibrationError, UsageError
from qdeploy.recipes import CalibrationSection

BOS = 1


class Words:
    """One token a word, by its length; BOS when special tokens are wanted."""

    def __init__(self, bos: bool = True, template: bool = True) -> None:
        self.bos, self.template = bos, template

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        ids = [10 + len(word) for word in text.split()]
        return [BOS, *ids] if add_special_tokens and self.bos else ids

    def chat(
        self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool
    ) -> list[int]:
        if not self.template:
            raise UsageError("this model has no chat template")
        turns = [id for m in messages for id in [5, *self.encode(m["content"], False), 6]]
        return [BOS, *turns, *([5] if add_generation_prompt else [])]

    def render_chat(
        self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool
    ) -> str:
        raise NotImplementedError


def load(source: object, samples: int = 8, seqlen: int = 16, **options: Any) -> CalibrationData:
    section = CalibrationSection(source=str(source), samples=samples, seqlen=seqlen)
    return load_calibration(section, Words(**options))


def write_rows(path: Path, rows: Sequence[object]) -> Path:
    path.write_text("\n".join(json.dumps(row) for row in rows) + "\n", encoding="utf-8")
    return path


def test_q05_a_long_document_is_split_not_dropped(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "long.jsonl", [{"text": "word " * 5000}])
    data = load(path, samples=1000, seqlen=512)
    # 511 words a window, each after BOS
    assert sorted(map(len, data.sequences)) == [5000 - 9 * 511 + 1] + [512] * 9
    assert all(sequence[0] == BOS and BOS not in sequence[1:] for sequence in data.sequences)
    assert any("1 rows kept (1 longer than 512 tokens were split into 10" in n for n in data.notes)


def test_q12_blank_rows_are_counted(tmp_path: Path) -> None:
    rows: list[object] = [{"text": f"row {i}"} for i in range(6)]
    rows += [{"text": ""}, {"text": " \n"}, {"messages": []}, {"messages": [{"content": ""}]}]
    data = load(write_rows(tmp_path / "rows.jsonl", rows), samples=128)
    assert (data.samples_used, data.samples_requested) == (6, 128)
    assert any("6 of 128 requested" in note for note in data.notes)
    assert any("4 blank rows dropped" in note for note in data.notes)
    assert (data.rows_kept, data.rows_blank) == (6, 4)
    assert "6 of 128 requested calibration samples: rows.jsonl has no more" in data.warnings(1)[0]


@pytest.mark.parametrize("text", ["", "\n\n", '{"text": " "}\n'])
def test_q12_nothing_usable_is_an_error(tmp_path: Path, text: str) -> None:
    path = tmp_path / "empty.jsonl"
    path.write_text(text)
    with pytest.raises(CalibrationError, match="0 of 128"):
        load(path, samples=128)
    (tmp_path / "empty.txt").write_text("\n")
    with pytest.raises(CalibrationError, match="no usable text"):
        load(tmp_path / "empty.txt")


def test_q07_mixed_lengths_stay_as_they_are(tmp_path: Path) -> None:
    rows = [{"text": "a " * 133}, {"text": "b " * 511}]
    data = load(write_rows(tmp_path / "mixed.jsonl", rows), seqlen=512)
    assert sorted(map(len, data.sequences)) == [134, 512]


def test_x20_messages_go_through_the_template_with_one_bos(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "hi there"}, {"role": "assistant", "content": "yes"}]
    data = load(write_rows(tmp_path / "chat.jsonl", [{"messages": messages}]))
    assert data.sequences == [[BOS, 5, 12, 15, 6, 5, 13, 6]]


def test_x20_a_question_without_an_answer_ends_where_the_answer_begins(tmp_path: Path) -> None:
    question = [{"role": "user", "content": "hi there"}]
    data = load(write_rows(tmp_path / "chat.jsonl", [{"messages": question}]))
    assert data.sequences == [[BOS, 5, 12, 15, 6, 5]]


def test_x20_text_for_a_chat_model_is_pointed_out(tmp_path: Path) -> None:
    plain = write_rows(tmp_path / "plain.jsonl", [{"text": "one two"}])
    chat = write_rows(tmp_path / "chat.jsonl", [{"messages": [{"role": "user", "content": "a"}]}])
    for path, template, expected in ((plain, True, 1), (plain, False, 0), (chat, True, 0)):
        notes = load(path, template=template).notes
        assert sum("--calib self" in note for note in notes) == expected


def test_prompt_and_completion_are_one_text_or_one_conversation(tmp_path: Path) -> None:
    turns = [{"role": role, "content": "hi"} for role in ("user", "assistant")]
    rows = [
        {"prompt": "one ", "completion": "three"},
        {"prompt": turns[:1], "completion": turns[1:]},
    ]
    for row, expected in zip(rows, ([BOS, 13, 15], [BOS, 5, 12, 6, 5, 12, 6]), strict=True):
        assert load(write_rows(tmp_path / "rows.jsonl", [row])).sequences == [expected]


def test_bos_that_a_text_spells_out_is_not_doubled(tmp_path: Path) -> None:
    class Spelled(Words):
        def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
            ids = [BOS if word == "<s>" else 10 + len(word) for word in text.split()]
            return [BOS, *ids] if add_special_tokens else ids

    path = write_rows(tmp_path / "rows.jsonl", [{"text": "<s> one two"}])
    section = CalibrationSection(source=str(path), samples=2, seqlen=16)
    assert load_calibration(section, Spelled()).sequences == [[BOS, 13, 13]]


def test_more_rows_than_samples_share_sequences_uncut(tmp_path: Path) -> None:
    rows = [{"text": "word " * (1 + i % 7)} for i in range(40)]
    data = load(write_rows(tmp_path / "rows.jsonl", rows), samples=8, seqlen=16)
    assert data.samples_used == 8
    assert data.tokens > 8 * 11  # eight rows alone are at most 8 * 8
    assert max(map(len, data.sequences)) <= 16
    for sequence in data.sequences:
        assert sequence[0] == BOS
        starts = [i for i, id in enumerate(sequence) if id == BOS]
        assert all(b - a <= 8 for a, b in zip(starts, [*starts[1:], len(sequence)], strict=True))


def test_few_tokens_for_each_feature_are_a_warning(tmp_path: Path) -> None:
    data = load(write_rows(tmp_path / "rows.jsonl", [{"text": "word " * 79}]), samples=1, seqlen=80)
    assert data.tokens == 80
    assert data.warnings(10) == []
    assert "fewer than 8 for each of 11 input features" in data.warnings(11)[0]


def test_messages_without_a_template_become_text_with_a_note(tmp_path: Path) -> None:
    rows = [{"messages": [{"role": "user", "content": "hi"}]}] * 3
    data = load(write_rows(tmp_path / "chat.jsonl", rows), template=False)
    assert data.sequences == [[BOS, 12]] * 3
    assert sum("no chat template" in note for note in data.notes) == 1


def test_prose_is_packed_into_full_windows_that_begin_with_bos(tmp_path: Path) -> None:
    path = tmp_path / "prose.txt"
    path.write_text("\n\n".join(["several words in a paragraph"] * 20))
    data = load(path, samples=5, seqlen=16)
    assert [len(sequence) for sequence in data.sequences] == [16] * 5
    assert all(sequence[0] == BOS and BOS not in sequence[1:] for sequence in data.sequences)
    assert all(BOS not in sequence for sequence in load(path, bos=False).sequences)


def test_q06_a_text_shorter_than_a_window_is_one_sequence(tmp_path: Path) -> None:
    path = tmp_path / "short.txt"
    path.write_text("only seven words are in this text")
    assert load(path, seqlen=512).tokens == 8


@given(words=st.integers(1, 400), seqlen=st.integers(8, 64))
def test_no_word_is_lost_or_repeated(
    tmp_path_factory: pytest.TempPathFactory, words: int, seqlen: int
) -> None:
    path = tmp_path_factory.mktemp("words") / "words.txt"
    text = " ".join("x" * (1 + i % 90) for i in range(words))
    path.write_text(text)
    data = load(path, samples=10_000, seqlen=seqlen)
    found = [id for sequence in data.sequences for id in sequence[1:]]
    assert sorted(found) == sorted(Words().encode(text, False))
    assert data.tokens == sum(map(len, data.sequences))


def test_q13_default_needs_no_network_and_mixes_genres() -> None:
    data = load("default", samples=32, seqlen=64)
    assert (data.samples_used, data.source) == (32, "default")
    chat = [sequence for sequence in data.sequences if 5 in sequence and 6 in sequence]
    assert 4 <= len(chat) <= 8
    assert len(data.sequences) - len(chat) >= 16


def test_same_seed_same_data_other_seed_other_data() -> None:
    def of(seed: int) -> CalibrationData:
        section = CalibrationSection(samples=8, seqlen=64, seed=seed)
        return load_calibration(section, Words())

    assert of(0) == of(0)
    assert of(0).sha256 != of(1).sha256
    assert of(0).sequences != of(1).sequences


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("bad.jsonl", "{oops\n", "line 1: not JSON"),
        ("bad.jsonl", '{"text": "a"}\n[1]\n', "line 2: needs the key"),
        ("bad.jsonl", '{"question": "a"}\n', "line 1: needs the key"),
        ("bad.jsonl", '{"prompt": ["a"], "completion": "b"}\n', "line 1: .prompt. must be a list"),
        ("bad.jsonl", '{"messages": "hi"}\n', "line 1: .messages. must be a list"),
        ("bad.jsonl", '{"messages": ["hi"]}\n', "line 1: .messages. must be a list"),
    ],
)
def test_broken_rows_are_named(tmp_path: Path, name: str, content: str, expected: str) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(CalibrationError, match=expected):
        load(tmp_path / name)


def test_a_source_that_is_no_file_is_named(tmp_path: Path) -> None:
    for source in ("text.csv.gz/", "../pile", "a/b/c/d", ":train", "pile:a:b:c"):
        with pytest.raises(UsageError, match=r"is unknown; give default, self, a \.jsonl or \.txt"):
            load(source)
    with pytest.raises(UsageError, match="No such file"):
        load(tmp_path / "missing.txt")
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    with pytest.raises(CalibrationError, match="not UTF-8"):
        load(tmp_path / "latin.txt")
