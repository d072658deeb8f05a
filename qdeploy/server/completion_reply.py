"""OpenAI's text_completion objects."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace

from qdeploy.runtime.outputs import CompletionOutput, GenerationOutput, RequestOutput, TokenLogprob
from qdeploy.runtime.tokenizer import Tokenizer
from qdeploy.server.prompts import Prompt
from qdeploy.server.replies import Json, ReplyBase, ending, finite, prompt_entries, usage_of
from qdeploy.server.token_text import token_text


class CompletionReply(ReplyBase):
    """text_completion, whole and streamed. n: choices of each prompt; where a result has more
    samples (best_of), the likeliest are chosen. echoes: the prompts, text included, or none without
    echo; with echo the log-probabilities begin with the prompt's. logprobs: how many alternatives.
    prompt_logprobs: whether vLLM's field of that name is asked for.
    """

    def __init__(
        self,
        model: str,
        tokenizer: Tokenizer,
        *,
        n: int,
        echoes: Sequence[Prompt] = (),
        logprobs: int | None,
        include_usage: bool,
        prompt_logprobs: bool = False,
    ) -> None:
        super().__init__("text_completion", "cmpl", model, include_usage)
        self._tokenizer = tokenizer
        self._n = n
        self._echoes = echoes
        self._logprobs = logprobs
        self._prompt_logprobs = prompt_logprobs
        self._offsets: dict[int, int] = {}

    def whole(self, results: Sequence[GenerationOutput]) -> Json:
        """The answer without streaming; choices go prompt by prompt."""
        choices = [
            self._whole_choice(prompt, result, sample)
            for prompt, result in enumerate(results)
            for sample in likeliest(result.outputs, self._n)
        ]
        return {**self._object("text_completion", choices), "usage": usage_of(results)}

    def _whole_choice(
        self, prompt: int, result: GenerationOutput, sample: CompletionOutput
    ) -> Json:
        index = prompt * self._n + sample.index
        tokens: list[TokenLogprob | None] = list(sample.logprobs or ())
        choice, ids = self._choice(index, sample.text), sample.token_ids
        if self._echoes:
            choice["text"] = f"{self._echoes[prompt].text}{sample.text}"
            tokens = [*(result.prompt_logprobs or ()), *tokens]
            ids = [*result.prompt_token_ids, *ids]
        if self._logprobs is not None:
            choice["logprobs"] = self._arrays(index, ids, tokens)
        if self._prompt_logprobs:
            entries = prompt_entries(result.prompt_logprobs or (), self._tokenizer)
            choice["prompt_logprobs"] = entries
        return {**choice, **ending(sample)}

    def opening(self) -> list[Json]:
        """The echoed prompts; with log-probabilities they come when these are known."""
        if self._logprobs is not None:
            return []
        return [
            self._chunk(self._choice(prompt * self._n + sample, echo.text or ""))
            for prompt, echo in enumerate(self._echoes)
            for sample in range(self._n)
        ]

    def chunks(self, prompt: int, output: RequestOutput) -> list[Json]:
        """Text of one step, then the end of the choice if it ended."""
        index = prompt * self._n + output.index
        chunks = []
        if output.prompt_logprobs is not None and self._echoes:
            chunks += self._echo_chunks(prompt, output.prompt_logprobs)
        if output.text or output.logprobs:
            choice = self._choice(index, output.text)
            if output.logprobs and self._logprobs is not None:
                choice["logprobs"] = self._arrays(index, output.token_ids, output.logprobs)
            chunks.append(self._chunk(choice))
        if output.finished:
            chunks.append(self._chunk({**self._choice(index, ""), **ending(output)}))
        return chunks

    def _echo_chunks(self, prompt: int, tokens: Sequence[TokenLogprob | None]) -> list[Json]:
        """One for each choice of a prompt, before anything else of it."""
        chunks, echo = [], self._echoes[prompt]
        for index in range(prompt * self._n, (prompt + 1) * self._n):
            choice = self._choice(index, echo.text or "")
            choice["logprobs"] = self._arrays(index, echo.token_ids, tokens)
            chunks.append(self._chunk(choice))
        return chunks

    def text_event(self, prompt: int, output: RequestOutput) -> str | None:
        """The event of an output that is text only, "" for none; None: take `chunks`."""
        return self._text_event(prompt * self._n + output.index, output)

    def _text_choice(self, index: int, text: str) -> Json:
        return self._choice(index, text)

    def end_chunk(self, index: int, reason: str) -> Json:
        """The chunk that ends a choice for which nothing was generated."""
        return self._chunk({**self._choice(index, ""), "finish_reason": reason})

    @staticmethod
    def _choice(index: int, text: str) -> Json:
        return {"index": index, "text": text, "logprobs": None, "finish_reason": None}

    def _arrays(
        self, index: int, ids: Sequence[int], tokens: Sequence[TokenLogprob | None]
    ) -> Json:
        """OpenAI's arrays of the tokens ids [n], which go on where the choice's last ones ended.
        A prompt's first token has no log-probability.
        """
        texts = [token_text(self._tokenizer, token_id) for token_id in ids]
        first = self._offsets.get(index, 0)
        offsets = list(itertools.accumulate((len(text) for text in texts), initial=first))
        self._offsets[index] = offsets.pop()
        return {
            "tokens": texts,
            "token_logprobs": [None if t is None else finite(t.logprob) for t in tokens],
            "top_logprobs": [None if t is None else self._top(t) for t in tokens],
            "text_offset": offsets,
        }

    def _top(self, token: TokenLogprob) -> dict[str, float]:
        return {
            token_text(self._tokenizer, token_id): finite(logprob)
            for token_id, logprob in token.top[: self._logprobs]
        }


def likeliest(samples: Sequence[CompletionOutput], n: int) -> list[CompletionOutput]:
    """The n samples with the highest log-probability per token, best first, numbered from 0."""
    if len(samples) == n:
        return list(samples)
    ranked = sorted(samples, key=_mean_logprob, reverse=True)
    return [replace(sample, index=index) for index, sample in enumerate(ranked[:n])]


def _mean_logprob(sample: CompletionOutput) -> float:
    if not sample.token_ids:  # max_tokens is 0, or time ran out before the first token
        return -math.inf
    total = sample.cumulative_logprob
    assert total is not None, "best_of needs log-probabilities"
    return total / len(sample.token_ids)
