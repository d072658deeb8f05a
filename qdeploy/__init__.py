"""qdeploy takes a Hugging Face checkpoint to a quantized, measured and served model.

The public names load on first use, so that `import qdeploy` costs no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from qdeploy.pipeline import quantize_checkpoint as quantize
    from qdeploy.runtime.llm import LLM
    from qdeploy.runtime.sampling_params import SamplingParams

__all__ = ["LLM", "SamplingParams", "__version__", "quantize"]
__version__ = "0.1.0"

_LAZY = {
    "LLM": ("qdeploy.runtime.llm", "LLM"),
    "SamplingParams": ("qdeploy.runtime.sampling_params", "SamplingParams"),
    "quantize": ("qdeploy.pipeline", "quantize_checkpoint"),
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, attribute = _LAZY[name]
    return getattr(import_module(module), attribute)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
