"""GPTQModel 7.6 as an engine: GPTQ at 2, 3, 4 and 8 bits."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from qdeploy.engines.base import EngineJob, guarded, imported, require_method, require_package
from qdeploy.quantization.scheme import QuantScheme

NAME = "gptqmodel"
#: Threads of its pools; unset, it hangs on few cores, and fewer than two it refuses.
_WORKERS = "GPTQMODEL_CPU_WORKERS"


@dataclass(frozen=True)
class GptqModel:
    """Runs on the CPU; activation order in static groups (GPTQModel's act_group_aware)."""

    def check(self, method: str, scheme: QuantScheme, dense: Sequence[str]) -> None:
        """Method gptq, any integers."""
        require_method(NAME, "gptq", method)
        require_package(NAME, NAME, "gptqmodel==7.6.0")

    def quantize(self, job: EngineJob) -> None:
        """Its GPTQ on our token sequences, one a batch; written as v2, which holds every zero."""
        os.environ.setdefault(_WORKERS, str(max(2, os.cpu_count() or 1)))
        package: Any = imported(NAME, NAME)
        scheme = job.scheme
        folder, out = str(job.folder.resolve()), str(job.out.resolve())
        with guarded(NAME), _inside(job.out.parent):
            config = package.QuantizeConfig(
                bits=scheme.bits,
                group_size=scheme.group_size,
                sym=scheme.symmetric,
                desc_act=False,
                format="gptq_v2",
                dynamic={f"-:^{re.escape(name)}$": {} for name in job.dense} or None,
                device="cpu",
                offload_to_disk=False,
            )
            model = package.GPTQModel.load(folder, config, trust_remote_code=job.trust_remote_code)
            model.quantize(_rows(job.sequences), batch_size=1)
            model.save(out)

    def version(self) -> str:
        """Of the installed package."""
        return f"{NAME} {version(NAME)}"


@contextlib.contextmanager
def _inside(folder: Path) -> Iterator[None]:
    """It writes logs/ wherever it is started."""
    before = Path.cwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


def _rows(sequences: Sequence[Sequence[int]]) -> list[dict[str, list[int]]]:
    return [{"input_ids": list(ids), "attention_mask": [1] * len(ids)} for ids in sequences]
