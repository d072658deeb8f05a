"""POST /v1/completions and /v1/chat/completions.

Closing the connection cancels a request, streamed or not: it is aborted before the next step and
its KV blocks are free again (user report H14).
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import replace

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from qdeploy.runtime.outputs import CompletionOutput, GenerationOutput
from qdeploy.server.chat_reply import ChatReply
from qdeploy.server.completion_reply import CompletionReply
from qdeploy.server.context import ServerContext
from qdeploy.server.generation import EventStream, answer
from qdeploy.server.prompts import (
    Prompt,
    chat_prompt,
    check_params,
    check_prompt_logprobs,
    check_prompts,
    check_stream_options,
    completion_prompts,
)
from qdeploy.server.replies import event, usage, usage_of
from qdeploy.server.schema import ChatBody, CompletionBody, read_body


def completion_routes(context: ServerContext) -> list[Route]:
    """The two routes that generate."""

    async def completions(request: Request) -> Response:
        return await _completions(request, context)

    async def chat_completions(request: Request) -> Response:
        return await _chat(request, context)

    return [
        Route("/v1/completions", completions, methods=["POST"]),
        Route("/v1/chat/completions", chat_completions, methods=["POST"]),
    ]


async def _chat(request: Request, context: ServerContext) -> Response:
    body = await read_body(request, ChatBody)
    context.check_model(body.model)
    include_usage = check_stream_options(body)
    prompt = await chat_prompt(body.messages, context.tokenizer)
    check_prompts([prompt], context.limits, "messages")
    params = context.params.chat(body, context.engine.max_model_len - len(prompt.token_ids))
    check_params(params, [prompt], context.limits)
    reply = ChatReply(
        context.model,
        context.tokenizer,
        n=params.n,
        logprobs=params.logprobs is not None,
        include_usage=include_usage,
        prompt_logprobs=check_prompt_logprobs(body),
    )
    return await answer(
        request,
        context,
        reply,
        [prompt],
        params,
        stream=bool(body.stream),
        include_usage=include_usage,
    )


async def _completions(request: Request, context: ServerContext) -> Response:
    body = await read_body(request, CompletionBody)
    context.check_model(body.model)
    include_usage = check_stream_options(body)
    prompt_logprobs = check_prompt_logprobs(body)
    scored = prompt_logprobs or body.logprobs is not None
    only_echo = bool(body.echo) and body.max_tokens == 0 and not scored
    if only_echo:
        body = body.model_copy(update={"max_tokens": 1, "min_tokens": None})
    params = context.params.completion(body)
    prompts = await completion_prompts(body, context.tokenizer)
    check_prompts(prompts, context.limits, "prompt")
    check_params(params, prompts, context.limits, "n" if body.best_of is None else "best_of")
    n = body.n or 1
    reply = CompletionReply(
        context.model,
        context.tokenizer,
        n=n,
        echoes=[_with_text(prompt, context) for prompt in prompts] if body.echo else (),
        logprobs=body.logprobs,
        include_usage=include_usage,
        prompt_logprobs=prompt_logprobs,
    )
    stream = bool(body.stream)
    if only_echo:
        return _echo_only(reply, prompts, n, stream=stream, include_usage=include_usage)
    return await answer(
        request, context, reply, prompts, params, stream=stream, include_usage=include_usage
    )


def _with_text(prompt: Prompt, context: ServerContext) -> Prompt:
    if prompt.text is not None:
        return prompt
    return replace(
        prompt, text=context.tokenizer.decode(prompt.token_ids, skip_special_tokens=False)
    )


def _echo_only(
    reply: CompletionReply, prompts: Sequence[Prompt], n: int, *, stream: bool, include_usage: bool
) -> Response:
    """max_tokens 0 with echo: the prompt, and nothing generated (R02)."""
    results = [
        GenerationOutput(
            request_id=reply.id,
            prompt=prompt.text,
            prompt_token_ids=prompt.token_ids,
            outputs=[CompletionOutput(index=i, finish_reason="length") for i in range(n)],
        )
        for prompt in prompts
    ]
    if not stream:
        return JSONResponse(reply.whole(results))

    async def events() -> AsyncIterator[str]:
        for chunk in reply.opening():
            yield event(chunk)
        for index in range(len(prompts) * n):
            yield event(reply.end_chunk(index, "length"))
        if include_usage:
            yield event(reply.usage_chunk(usage(usage_of(results)["prompt_tokens"], 0)))
        yield "data: [DONE]\n\n"

    return EventStream(events(), None)
