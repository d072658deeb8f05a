"""Speculation against none: the same answers, one stream, on text that it helps and other text."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from figures import Row, row
from peers.contestant import DriverProcess, openvino_lookup
from runtime_prompts import COPY_HEAVY, OPEN
from runtime_session import Session, Setup, insist

from qdeploy.runtime.speculation.config import SpeculativeConfig

#: OpenVINO GenAI's guide has 5 and 3; 10 is the faster here.
OPENVINO_DRAFTS, OPENVINO_NGRAM = 10, 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Questions:
    """What is asked, and how."""

    title: str
    texts: tuple[str, ...]
    temperature: float = 0.0


COPYING = Questions(title="copy-heavy answers", texts=COPY_HEAVY)
FREE = Questions(title="open answers", texts=OPEN)
SAMPLED = Questions(title="open answers, temperature 0.8", texts=OPEN, temperature=0.8)
EVERYTHING = Questions(title="all answers", texts=(*COPY_HEAVY, *OPEN))


def lookup(setup: Setup) -> Iterator[Row]:
    """Prompt lookup on answers that repeat the question and on others, and beside OpenVINO's."""
    for asked in (COPYING, FREE, SAMPLED):
        rows = list(_compare(setup, asked, "prompt lookup", SpeculativeConfig(method="ngram")))
        yield from rows
        if asked is COPYING and setup.openvino is not None:
            yield from _openvino_rows(setup, asked, rows[0])


def drafters(setup: Setup) -> Iterator[Row]:
    """A draft model, here the target with a 4-bit head, and the model's own low-bit copy."""
    draft = SpeculativeConfig(method="draft_model", model=str(setup.draft))
    yield from _compare(setup, EVERYTHING, "draft model", draft)
    yield from _compare(setup, EVERYTHING, "self", SpeculativeConfig(method="self"))


def _compare(
    setup: Setup, asked: Questions, title: str, speculative: SpeculativeConfig
) -> Iterator[Row]:
    plain, drafted, accepted = [], [], 0.0
    for seed in range(setup.repeats):
        session = setup.session(max_num_seqs=1)
        answers, rate = answer(session, setup, asked, seed)
        plain.append(rate)
        session = setup.session(max_num_seqs=1, speculative=speculative)
        same, rate = answer(session, setup, asked, seed)
        drafted.append(rate)
        insist(answers == same, f"{title} changes an answer")
        stats = session.engine.stats().speculation
        accepted = stats.num_accepted_tokens / max(1, stats.num_draft_tokens)
    ratio = statistics.median(a / b for a, b in zip(drafted, plain, strict=True))
    against = f"{statistics.median(plain):.0f} tok/s without; {accepted:.0%} of drafts accepted"
    name = setup.name(f"{title}, {asked.title}")
    yield row(name, statistics.median(drafted), "tok/s", setup.repeats, ratio, against)


def answer(
    session: Session, setup: Setup, asked: Questions, seed: int
) -> tuple[list[list[int]], float]:
    """Answers, one after the other, and their tokens per second after the first ones."""
    options: dict[str, Any] = {"temperature": asked.temperature, "seed": seed}
    for text in asked.texts:
        prompt = setup.tokenizer.chat([{"role": "user", "content": text}])
        session.ask(prompt, setup.sizes.answer, ignore_eos=False, **options)
        session.finish()
    return [trace.token_ids for trace in session.traces], decode_rate(
        [trace.times_s for trace in session.traces]
    )


def decode_rate(times_s: Sequence[Sequence[float]]) -> float:
    """Tokens after the first ones, over the time that they took."""
    late = sum(len(times) - 1 for times in times_s)
    return late / sum(times[-1] - times[0] for times in times_s)


def _openvino_rows(setup: Setup, asked: Questions, ours: Row) -> Iterator[Row]:
    """OpenVINO's own answers to the same prompts; its weights are rounded otherwise."""
    assert setup.openvino is not None
    peer = openvino_lookup(*setup.openvino, threads=setup.threads)
    rates = []
    try:
        peer.start()
        for _ in range(setup.repeats + 1):
            rates.append(decode_rate([_ask_openvino(peer, setup, text) for text in asked.texts]))
    finally:
        peer.close()
    rate = statistics.median(rates[1:])  # the first one warms up
    name = setup.name("prompt lookup beside OpenVINO GenAI's")
    against = f"OpenVINO's {rate:.0f} tok/s, at most {OPENVINO_DRAFTS} drafts"
    yield row(name, ours["value"], "tok/s", setup.repeats, ours["value"] / rate, against)


def _ask_openvino(peer: DriverProcess, setup: Setup, text: str) -> list[float]:
    prompt = setup.tokenizer.chat([{"role": "user", "content": text}])
    load = {"prompt": prompt, "output": setup.sizes.answer}
    times: list[float] = peer.tell(load | {"drafts": OPENVINO_DRAFTS, "ngram": OPENVINO_NGRAM})[
        "times_s"
    ]
    return times
