"""Checkpoints and artifacts on disk. Importing the package registers the weight formats."""

from qdeploy.formats import awq as _awq
from qdeploy.formats import compressed_tensors as _compressed_tensors
from qdeploy.formats import fp8 as _fp8
from qdeploy.formats import gptq as _gptq

__all__ = ["_awq", "_compressed_tensors", "_fp8", "_gptq"]
