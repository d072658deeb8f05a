"""`qdeploy serve`: an OpenAI-compatible server."""

from __future__ import annotations

from typing import Annotated

import typer

from qdeploy.cli.console import RichProgress, run
from qdeploy.cli.options import Act, Artifact, Backend, Quiet, Threads, Verbose, parse_size


def serve(
    artifact: Artifact,
    host: Annotated[str, typer.Option()] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535)] = 8000,
    served_model_name: Annotated[
        str | None, typer.Option(help="Id in /v1/models; default: ARTIFACT as given.")
    ] = None,
    api_key: Annotated[
        str | None, typer.Option(envvar="QDEPLOY_API_KEY", help="Asked of every route but /health.")
    ] = None,
    max_model_len: Annotated[int | None, typer.Option(min=1)] = None,
    max_num_seqs: Annotated[int, typer.Option(min=1, help="Sequences in a step.")] = 16,
    max_num_batched_tokens: Annotated[int, typer.Option(min=1, help="Tokens in a step.")] = 512,
    block_size: Annotated[int | None, typer.Option(help="Default: the artifact's.")] = None,
    kv_cache_dtype: Annotated[
        str, typer.Option(help="auto, bf16, int8, int4, k8v4 or fp8.")
    ] = "auto",
    kv_cache_memory: Annotated[str | None, typer.Option(help="E.g. 2GiB.")] = None,
    num_kv_blocks: Annotated[int | None, typer.Option(min=1, help="Instead of a size.")] = None,
    enable_chunked_prefill: Annotated[
        bool, typer.Option("--enable-chunked-prefill/--no-enable-chunked-prefill")
    ] = True,
    enable_prefix_caching: Annotated[
        bool, typer.Option("--enable-prefix-caching/--no-enable-prefix-caching")
    ] = True,
    preemption: Annotated[
        str, typer.Option(help="When KV blocks run out: auto, recompute or swap.")
    ] = "auto",
    swap_space: Annotated[str, typer.Option(help="Host memory for swapping; 0 for none.")] = "1GiB",
    speculative_method: Annotated[
        str, typer.Option(help="none, ngram (prompt lookup), draft_model or self (4-bit copy).")
    ] = "none",
    speculative_model: Annotated[
        str | None, typer.Option(help="The draft: folder, .gguf, hub or pypi:.")
    ] = None,
    num_speculative_tokens: Annotated[
        int | None, typer.Option(help="Most drafts per step; adapted down to 0.")
    ] = None,
    ngram_min: Annotated[int, typer.Option(help="Tokens that must match for a lookup.")] = 2,
    ngram_max: Annotated[int, typer.Option(help="Longer matches count as this long.")] = 16,
    backend: Backend = "auto",
    act: Act = None,
    threads: Threads = None,
    allow_unverified: Annotated[
        bool, typer.Option("--allow-unverified", help="Serve without a passed accuracy record.")
    ] = False,
    verify_checksums: Annotated[
        bool, typer.Option("--verify-checksums", help="Compare the files' sha256 first.")
    ] = False,
    max_queued_requests: Annotated[int, typer.Option(min=1, help="More get 503.")] = 256,
    request_timeout: Annotated[float | None, typer.Option(min=0.001, help="Seconds.")] = None,
    shutdown_timeout: Annotated[float, typer.Option(min=0, help="Seconds to drain.")] = 30,
    max_body_size: Annotated[str, typer.Option(help="Larger bodies get 413.")] = "8MiB",
    cors_origin: Annotated[
        list[str] | None, typer.Option(help="Allowed origin; repeatable.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of requests that give none.")] = 0,
    verbose: Verbose = 0,
    quiet: Quiet = False,
) -> None:
    """Serve ARTIFACT over HTTP."""

    def body() -> None:
        from qdeploy.runtime.speculation.config import SpeculativeConfig
        from qdeploy.server.serve import serve as serve_http
        from qdeploy.server.settings import ServerSettings

        settings = ServerSettings(
            host=host,
            port=port,
            served_model_name=served_model_name or artifact,
            api_key=api_key,
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            block_size=block_size,
            kv_cache_dtype=kv_cache_dtype,
            kv_cache_memory_bytes=(
                parse_size(kv_cache_memory, "--kv-cache-memory") if kv_cache_memory else None
            ),
            num_kv_blocks=num_kv_blocks,
            enable_chunked_prefill=enable_chunked_prefill,
            enable_prefix_caching=enable_prefix_caching,
            preemption=preemption,
            swap_space_bytes=parse_size(swap_space, "--swap-space", allow_zero=True),
            speculative=SpeculativeConfig(
                method=speculative_method,
                model=speculative_model,
                num_speculative_tokens=num_speculative_tokens,
                ngram_min=ngram_min,
                ngram_max=ngram_max,
            ),
            backend=backend,
            act=act,
            threads=threads,
            allow_unverified=allow_unverified,
            verify_checksums=verify_checksums,
            max_queued_requests=max_queued_requests,
            request_timeout=request_timeout,
            shutdown_timeout=shutdown_timeout,
            max_body_size=parse_size(max_body_size, "--max-body-size"),
            cors_origin=tuple(cors_origin or ()),
            seed=seed,
        )
        serve_http(artifact, settings, RichProgress())

    run(body)
