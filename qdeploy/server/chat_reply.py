"""OpenAI's chat.completion objects."""

from __future__ import annotations

from collections.abc import Sequence

from qdeploy.runtime.outputs import CompletionOutput, GenerationOutput, RequestOutput, TokenLogprob
from qdeploy.runtime.tokenizer import Tokenizer
from qdeploy.server.replies import Json, ReplyBase, finite, prompt_entries, usage_of
from qdeploy.server.token_text import token_bytes, token_text


class ChatReply(ReplyBase):
    """chat.completion and chat.completion.chunk."""

    def __init__(
        self,
        model: str,
        tokenizer: Tokenizer,
        *,
        n: int,
        logprobs: bool,
        include_usage: bool,
        prompt_logprobs: bool = False,
    ) -> None:
        super().__init__("chat.completion.chunk", "chatcmpl", model, include_usage)
        self._tokenizer = tokenizer
        self._n = n
        self._logprobs = logprobs
        self._prompt_logprobs = prompt_logprobs

    def whole(self, results: Sequence[GenerationOutput]) -> Json:
        """The answer without streaming."""
        choices = [self._whole_choice(sample) for sample in results[0].outputs]
        answer = {**self._object("chat.completion", choices), "usage": usage_of(results)}
        if self._prompt_logprobs:
            found = results[0].prompt_logprobs or ()
            answer["prompt_logprobs"] = prompt_entries(found, self._tokenizer)
        return answer

    def _whole_choice(self, sample: CompletionOutput) -> Json:
        return {
            "index": sample.index,
            "message": {"role": "assistant", "content": sample.text, "refusal": None},
            "logprobs": self._chat_logprobs(sample.logprobs),
            "finish_reason": sample.finish_reason,
            "stop_reason": sample.stop_reason,
        }

    def opening(self) -> list[Json]:
        """The role, once per choice."""
        delta = {"role": "assistant", "content": ""}
        return [self._chunk(self._choice(index, delta)) for index in range(self._n)]

    def chunks(self, prompt: int, output: RequestOutput) -> list[Json]:
        """Text of one step, then the end of the choice if it ended."""
        chunks = []
        logprobs = self._chat_logprobs(output.logprobs) if output.logprobs else None
        if output.text or logprobs:
            choice = self._text_choice(output.index, output.text)
            chunks.append(self._chunk({**choice, "logprobs": logprobs}))
        if output.finished:
            last = self._choice(output.index, {})
            end = {"finish_reason": output.finish_reason, "stop_reason": output.stop_reason}
            chunks.append(self._chunk({**last, **end}))
        return chunks

    def text_event(self, prompt: int, output: RequestOutput) -> str | None:
        """The event of an output that is text only, "" for none; None: take `chunks`."""
        return self._text_event(output.index, output)

    def _text_choice(self, index: int, text: str) -> Json:
        return self._choice(index, {"content": text})

    @staticmethod
    def _choice(index: int, delta: Json) -> Json:
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}

    def _chat_logprobs(self, tokens: Sequence[TokenLogprob] | None) -> Json | None:
        if not self._logprobs:
            return None
        content = [
            {
                **self._entry(token.token_id, token.logprob),
                "top_logprobs": [self._entry(i, logprob) for i, logprob in token.top],
            }
            for token in tokens or ()
        ]
        return {"content": content, "refusal": None}

    def _entry(self, token_id: int, logprob: float) -> Json:
        text = token_text(self._tokenizer, token_id)
        data = token_bytes(self._tokenizer, token_id, text)
        return {"token": text, "logprob": finite(logprob), "bytes": data}
