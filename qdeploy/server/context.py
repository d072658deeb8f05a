"""What every route needs: the engine, the tokenizer, the settings and the model's name."""

from __future__ import annotations

import itertools
import time
import uuid
from dataclasses import dataclass, field

from qdeploy.runtime.async_engine import AsyncEngine
from qdeploy.runtime.tokenizer import Tokenizer
from qdeploy.server.errors import ApiError
from qdeploy.server.prompts import Limits, ParamsBuilder
from qdeploy.server.settings import ServerSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerContext:
    """One server's parts. model: the id in /v1/models; created: unix seconds."""

    engine: AsyncEngine
    tokenizer: Tokenizer
    settings: ServerSettings
    params: ParamsBuilder
    model: str
    created: int = field(default_factory=lambda: int(time.time()))
    _ids: itertools.count[int] = field(default_factory=itertools.count)

    @property
    def limits(self) -> Limits:
        """What bounds a request."""
        return Limits(
            max_model_len=self.engine.max_model_len, max_num_seqs=self.engine.max_num_seqs
        )

    def check_model(self, name: str | None) -> None:
        """404 for a model that isn't served; no name is the default (H03)."""
        if name is not None and name != self.model:
            raise ApiError(
                404,
                f"model {name[:80]!r} is not served here; use {self.model!r}",
                param="model",
                code="model_not_found",
            )

    def next_id(self) -> str:
        """An engine request id: counted, so that seeds derived from it repeat run by run."""
        return str(next(self._ids))


def public_id(prefix: str) -> str:
    """The id that a client sees, e.g. chatcmpl-…"""
    return f"{prefix}-{uuid.uuid4().hex}"
