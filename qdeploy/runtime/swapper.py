"""Moves the bytes of preempted sequences between the executor's pools and the host."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

from qdeploy.runtime.block_manager import Restored
from qdeploy.runtime.request import Request
from qdeploy.runtime.scheduler import ScheduledStep, Scheduler

if TYPE_CHECKING:
    from qdeploy.runtime.executors.base import Executor

logger = logging.getLogger(__name__)


class Swapper:
    """Carries out what the scheduler has decided, before the step. A request whose bytes can't be
    moved, say for lack of memory, is computed anew: never an error (R09).
    """

    def __init__(self, executor: Executor, scheduler: Scheduler) -> None:
        self._executor, self._scheduler = executor, scheduler

    def move(self, step: ScheduledStep) -> None:
        """First out, then in: blocks that are read may be among those that are written."""
        for request, ids in step.swap_outs.items():
            began = time.perf_counter()
            try:
                data = self._executor.read_blocks(ids)
            except Exception as error:
                self._recompute(step, request, error)
                continue
            self._scheduler.policy.note_copy(data.nbytes, time.perf_counter() - began)
            self._scheduler.swap.fill(request.sequence_id, data)
        for request, restored in step.swap_ins.items():
            try:
                self._write(request, restored)
            except Exception as error:
                self._recompute(step, request, error)

    def _write(self, request: Request, restored: Restored) -> None:
        began = time.perf_counter()
        data = self._scheduler.swap.take(request.sequence_id, restored.rows)
        self._executor.write_blocks(restored.ids, data)
        self._scheduler.policy.note_copy(data.nbytes, time.perf_counter() - began)

    def _recompute(self, step: ScheduledStep, request: Request, error: Exception) -> None:
        logger.warning(
            "%s can't be swapped and is computed anew: %s",
            request.sequence_id,
            " ".join(str(error).split()) or type(error).__name__,
        )
        self._scheduler.restart(step, request)
