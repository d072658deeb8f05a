"""Other tools that quantize, behind one protocol: `quantize --engine autoawq|gptqmodel`."""

from __future__ import annotations

from qdeploy.engines.autoawq import AutoAwq
from qdeploy.engines.base import Engine, EngineJob
from qdeploy.engines.gptqmodel import GptqModel
from qdeploy.registry import Registry

ENGINES: Registry[Engine] = Registry("engine")
ENGINES.add("autoawq", AutoAwq())
ENGINES.add("gptqmodel", GptqModel())

__all__ = ["ENGINES", "Engine", "EngineJob"]
