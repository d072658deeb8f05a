"""From a SpeculativeConfig to a drafter."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING

from qdeploy.errors import UsageError
from qdeploy.progress import Progress
from qdeploy.runtime.admission import resolve_max_model_len
from qdeploy.runtime.block_manager import BlockManager
from qdeploy.runtime.collector import banned_tokens, known_tokens
from qdeploy.runtime.kv_budget import plan_kv_pools
from qdeploy.runtime.speculation.base import Drafter
from qdeploy.runtime.speculation.config import SpeculativeConfig
from qdeploy.runtime.speculation.ngram import NgramDrafter

if TYPE_CHECKING:
    from qdeploy.runtime.engine_config import EngineConfig
    from qdeploy.runtime.executors.base import Executor
    from qdeploy.runtime.speculation.draft_model import ModelDrafter
    from qdeploy.runtime.tokenizer import Tokenizer

log = logging.getLogger("qdeploy")


def load_drafter(
    config: EngineConfig,
    executor: Executor,
    *,
    folder: Path,
    tokenizer: Tokenizer,
    threads: int | None,
    progress: Progress,
) -> Drafter | None:
    """The drafter that config.speculative asks for, on the target's backend; None for no drafter.

    executor, folder, tokenizer: the target's. Raises UsageError, in one line, for a draft that
    can't serve this model.
    """
    speculative = config.speculative
    if speculative.enabled:
        log.info("speculation by %s, at most %d drafts", speculative.method, speculative.max_drafts)
    if speculative.method == "ngram":
        return NgramDrafter(speculative.ngram_min, speculative.ngram_max)
    if speculative.method == "draft_model":
        draft = _load_model(speculative, executor, tokenizer, threads, progress)
    elif speculative.method == "self":
        draft = _load_own_copy(executor, folder, progress)
    else:
        return None
    return make_model_drafter(draft, config, executor, tokenizer.eos_token_ids)


def make_model_drafter(
    draft: Executor, config: EngineConfig, target: Executor, eos_token_ids: frozenset[int]
) -> ModelDrafter:
    """A drafter on `draft`; allocates its KV pools, for requests as long as the target's.

    They come on top of the target's: of as many bytes or blocks, where those are given, but never
    too few for one request. With fewer than all need, some requests aren't drafted at times.
    """
    from qdeploy.runtime.speculation.draft_model import ModelDrafter

    max_model_len = min(
        resolve_max_model_len(config, target.spec.max_model_len), draft.spec.max_model_len
    )
    least = sum(sum(group.blocks_for_tokens(max_model_len)) for group in draft.kv_groups)
    blocks = None if config.num_kv_blocks is None else max(config.num_kv_blocks, least)
    pools = plan_kv_pools(
        draft.kv_groups,
        draft.open_block_bytes,
        draft.sealed_block_bytes,
        max_model_len=max_model_len,
        max_num_seqs=config.max_num_seqs,
        kv_cache_memory_bytes=config.kv_cache_memory_bytes,
        num_kv_blocks=blocks,
        lookahead_tokens=config.speculative.max_drafts,
    )
    draft.allocate_kv(pools)
    eos = known_tokens(eos_token_ids, target.spec.vocab_size)
    return ModelDrafter(
        draft,
        BlockManager(draft.kv_groups, pools, prefix_caching=config.enable_prefix_caching),
        name=config.speculative.method,
        vocab_size=target.spec.vocab_size,
        max_model_len=max_model_len,
        max_tokens=config.max_num_batched_tokens,
        banned=lambda request: banned_tokens(request, eos),
    )


def _load_model(
    config: SpeculativeConfig,
    target: Executor,
    tokenizer: Tokenizer,
    threads: int | None,
    progress: Progress,
) -> Executor:
    from qdeploy.formats.sources import resolve_model
    from qdeploy.runtime.executors import load_executor
    from qdeploy.runtime.llm import resolve_kv_config
    from qdeploy.runtime.speculation.vocabulary import check_same_vocabulary
    from qdeploy.runtime.tokenizer import Tokenizer

    assert config.model is not None, "SpeculativeConfig has checked it"
    model = str(config.model)
    folder = resolve_model(model, progress)
    check_same_vocabulary(tokenizer, Tokenizer.load(folder), model)
    return load_executor(
        folder,
        backend=target.name,
        kv_config=resolve_kv_config(folder, "auto"),
        threads=threads,
        progress=progress,
    )


def _load_own_copy(executor: Executor, folder: Path, progress: Progress) -> Executor:
    """The target in fewer bits: 4 for weights that have more, int4 for K and V."""
    from qdeploy.runtime.executors.cpu import CpuExecutor

    if not isinstance(executor, CpuExecutor):
        raise UsageError(
            f"speculative_method self needs backend cpu: on backend {executor.name} fewer bits "
            "aren't faster; use ngram or draft_model",
            param="speculative_method",
        )
    from qdeploy.formats.checkpoint import open_checkpoint
    from qdeploy.runtime.executors.cpu_copy import load_low_bit_copy
    from qdeploy.runtime.executors.weights import WeightSource

    source = WeightSource(open_checkpoint(folder), executor.spec)
    copy = load_low_bit_copy(executor, source, executor.kv_config.with_dtype("int4"), progress)
    if copy.model is executor.model and copy.kv_config == executor.kv_config:
        raise UsageError(
            "speculative_method self can't help: weights and KV cache have 4 bits already, a copy "
            "would be as slow as the model; use ngram or draft_model",
            param="speculative_method",
        )
    return copy
