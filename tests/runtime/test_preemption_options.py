from __future__ import annotations

import pytest

from qdeploy.errors import UsageError
from qdeploy.kv.config import KVCacheConfig
from qdeploy.runtime.engine_config import EngineConfig
from qdeploy.server.settings import ServerSettings


@pytest.mark.parametrize(
    ("mode", "swap_space", "message"),
    [
        ("evict", 1, "preemption='evict' is unknown; choose one of auto, recompute, swap"),
        ("auto", -1, "swap_space=-1 is negative; give 0 or more bytes"),
        ("swap", 0, "preemption=swap needs swap_space above 0; give some, or preemption=recompute"),
    ],
)
def test_what_cannot_be_honoured_is_refused_before_anything_is_loaded(
    mode: str, swap_space: int, message: str
) -> None:
    with pytest.raises(UsageError) as engine:
        EngineConfig(kv=KVCacheConfig(), preemption=mode, swap_space_bytes=swap_space)
    with pytest.raises(UsageError) as server:
        ServerSettings(served_model_name="m", preemption=mode, swap_space_bytes=swap_space)
    assert str(engine.value) == str(server.value) == message


@pytest.mark.parametrize("mode", ["auto", "recompute"])
def test_no_swap_space_is_a_choice(mode: str) -> None:
    assert EngineConfig(kv=KVCacheConfig(), preemption=mode, swap_space_bytes=0)
