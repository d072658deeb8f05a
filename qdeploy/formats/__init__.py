"""Checkpoints and artifacts on disk. Importing the package registers the weight formats."""

from qdeploy.formats import awq as _awq
from qdeploy.formats import gptq as _gptq

__all__ = ["_awq", "_gptq"]
