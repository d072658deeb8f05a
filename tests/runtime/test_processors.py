"""What changes a row before the temperature: against other formulas, and from step to step."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from qdeploy.runtime.bad_words import ban_sequences
from qdeploy.runtime.request import Request
from qdeploy.runtime.row_passes import Row
from qdeploy.runtime.sampler import process_logits, sample
from qdeploy.runtime.sampling_params import SamplingParams
from qdeploy.runtime.tokenizer import Tokenizer
from runtime.tiny_tokenizer import save_tokenizer

VOCAB = 40
TOKENS = st.integers(0, VOCAB - 1)


def request(
    prompt: Sequence[int] = (1, 2, 3),
    output: Sequence[int] = (),
    bad_words: Sequence[Sequence[int]] = (),
    mask: TokenSequence | None = None,
    **params: object,
) -> Request:
    made = Request(
        request_id="a",
        order=0,
        prompt_token_ids=prompt,
        params=SamplingParams(**params),
        max_tokens=16,
        bad_words=bad_words,
        token_mask=mask,
    )
    for token in output:
        made.append(token, 0.0)
    return made


def row(seed: int = 1) -> Row:
    return np.random.default_rng(seed).normal(scale=2, size=VOCAB).astype(np.float32)


class TokenSequence:
    """A grammar whose only text is `tokens`; after them everything may come."""

    def __init__(self, tokens: Sequence[int], *, packed: bool = False, size: int = VOCAB) -> None:
        self._tokens, self._packed, self._size = tokens, packed, size
        self.taken: list[int] = []

    def allowed(self) -> NDArray[np.bool_] | NDArray[np.int32]:
        mask = np.zeros(self._size, np.bool_)
        done = len(self.taken) >= len(self._tokens)
        mask[... if done else self._tokens[len(self.taken)]] = True
        if not self._packed:
            return mask
        words = np.zeros(-(-self._size // 32), np.uint32)
        for token in np.flatnonzero(mask):
            words[token // 32] |= np.uint32(1 << (token % 32))
        return words.view(np.int32)

    def advance(self, token_id: int) -> None:
        self.taken.append(token_id)

    def rollback(self, num_tokens: int) -> None:
        del self.taken[len(self.taken) - num_tokens :]


def test_r20_penalties_equal_the_openai_and_hf_formulas() -> None:
    from transformers import RepetitionPenaltyLogitsProcessor

    logits, output = row(), [5, 5, 5, 9, 2]
    ids = torch.tensor([[1, 2, 3, *output]])
    theirs = RepetitionPenaltyLogitsProcessor(1.3)(ids, torch.tensor(logits)[None])[0].numpy()
    found = process_logits(logits, request(output=output, repetition_penalty=1.3), ())
    np.testing.assert_allclose(found, theirs, rtol=1e-6)
    r = request(output=output, frequency_penalty=0.5, presence_penalty=0.25)
    counts = np.bincount(output, minlength=VOCAB)
    expected = logits - counts * 0.5 - (counts > 0) * 0.25
    np.testing.assert_allclose(process_logits(logits, r, ()), expected, rtol=1e-6)


@settings(deadline=None)
@given(
    words=st.lists(st.lists(TOKENS, min_size=1, max_size=3), min_size=1, max_size=4),
    output=st.lists(TOKENS, max_size=4),
)
def test_bad_words_equal_transformers(words: list[list[int]], output: list[int]) -> None:
    from transformers import NoBadWordsLogitsProcessor

    logits = row()
    # theirs looks for the words in the prompt, too: a prompt that no word can match
    ids = torch.tensor([[VOCAB + 5, *output]])
    theirs = NoBadWordsLogitsProcessor(words)(ids, torch.tensor(logits)[None])[0].numpy()
    found = process_logits(logits, request([VOCAB + 5], output, bad_words=words), ())
    np.testing.assert_array_equal(found, theirs)


def test_bad_words_do_not_look_into_the_prompt() -> None:
    words = [[7, 8, 9], [8, 9], [8, 5, 9]]
    for output in ([], [5]):
        found = process_logits(row(), request([7, 8], output, bad_words=words), ())
        assert np.isfinite(found).all()


def test_bad_words_that_the_model_cannot_write_are_no_error() -> None:
    words = [[VOCAB], [VOCAB + 9], [5, VOCAB], [5, 6]]
    found = process_logits(row(), request([1], [5], bad_words=words), ())
    assert np.flatnonzero(np.isinf(found)).tolist() == [6]


def test_words_are_banned_with_and_without_a_space(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(save_tokenizer(tmp_path, add_bos=True))

    def encode(text: str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=False)

    for words in (["the"], [" the"], ["the", " the"]):
        found = ban_sequences(words, encode)
        assert sorted(tokenizer.decode(ids) for ids in found) == [" the", "the"]


@settings(max_examples=200, deadline=None)
@given(
    prompt=st.lists(TOKENS, min_size=1, max_size=8),
    moves=st.lists(st.tuples(st.integers(0, 3), st.lists(TOKENS, max_size=3)), max_size=8),
    repetition=st.sampled_from([1.0, 1.4]),
    frequency=st.sampled_from([0.0, 0.5]),
)
def test_state_that_follows_tokens_equals_one_made_afresh(
    prompt: list[int],
    moves: list[tuple[int, list[int]]],
    repetition: float,
    frequency: float,
) -> None:
    """Also when a drafter withdraws tokens and appends others."""
    options = {
        "repetition_penalty": repetition,
        "frequency_penalty": frequency,
        "presence_penalty": 0.25,
        "bad_words": [[1, 2], [3]],
    }
    mask = TokenSequence([5])
    followed = request(prompt, mask=mask, **options)
    for withdrawn, appended in moves:
        output = followed.output_token_ids
        keep = len(followed.token_ids) - min(withdrawn, len(output))
        del followed.token_ids[keep:]
        for token in appended:
            followed.append(token, 0.0)
        now = followed.output_token_ids
        found = process_logits(row(), followed, ()).copy()
        fresh = request(prompt, now, mask=TokenSequence([5]), **options)
        np.testing.assert_array_equal(found, process_logits(row(), fresh, ()))
        assert mask.taken == now


def test_many_distinct_tokens() -> None:
    logits = np.zeros(5000, np.float32)
    logits[:] = 1.0
    r = request(range(3000), range(1000, 4000), repetition_penalty=2.0, presence_penalty=1.0)
    found = process_logits(logits, r, ())
    expected = np.ones(5000, np.float32)
    expected[:4000] /= 2
    expected[1000:4000] -= 1
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("size", [VOCAB, VOCAB - 5, VOCAB + 7])
def test_a_grammar_decides_at_each_position(packed: bool, size: int) -> None:
    text = [3, 3, 34, 0]
    r = request(mask=TokenSequence(text, packed=packed, size=size), seed=1)
    for position in range(8):
        token = sample(row(position), r).token_id
        r.append(token, 0.0)
        assert position >= len(text) or token == text[position]
    free = request(seed=1)
    for token in text:
        free.append(token, 0.0)
    if size >= VOCAB and not packed:  # from where it allows everything it changes nothing
        for position in range(4, 8):
            assert sample(row(position), free).token_id == r.output_token_ids[position]
            free.append(r.output_token_ids[position], 0.0)


def test_a_grammar_that_allows_nothing_is_an_error() -> None:
    sampled = sample(row(), request(mask=TokenSequence([39], size=VOCAB), allowed_token_ids=[1]))
    assert "no token to sample" in str(sampled.error)


def test_r13_rows_of_one_step_are_processed_one_by_one() -> None:
    """A step that verifies drafts samples several rows, appending as it goes."""
    options = {"repetition_penalty": 1.5, "frequency_penalty": 0.5, "bad_words": [[4, 5], [6]]}
    rows = [row(seed) for seed in range(12)]
    together, alone = request(temperature=0.7, **options), request(temperature=0.7, **options)
    expected = []
    for i, logits in enumerate(rows):
        expected.append(sample(logits, alone, banned=[7] if i < 4 else []).token_id)
        fresh = request(output=expected[:-1], temperature=0.7, **options)
        assert sample(logits, fresh, banned=[7] if i < 4 else []).token_id == expected[-1]
        alone.append(expected[-1], 0.0)
    for start in range(0, 12, 4):
        for i in range(start, start + 4):
            token = sample(rows[i], together, banned=[7] if i < 4 else []).token_id
            together.append(token, 0.0)
    assert together.output_token_ids == expected
