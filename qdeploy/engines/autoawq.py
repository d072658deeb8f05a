"""AutoAWQ 0.2.9 as an engine: AWQ at 4 bits with zero points."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

from qdeploy.engines.base import EngineJob, guarded, imported, require_method, require_package
from qdeploy.errors import UsageError
from qdeploy.quantization.scheme import QuantScheme

NAME = "autoawq"
_HEAD = ("lm_head",)


@dataclass(frozen=True)
class AutoAwq:
    """Runs on the CPU in float16, its own choice; every decoder linear is quantized."""

    def check(self, method: str, scheme: QuantScheme, dense: Sequence[str]) -> None:
        """W4A16_ASYM, and no layer left dense: its rules of that match parts of names only."""
        require_method(NAME, "awq", method)
        if scheme.bits != 4 or scheme.symmetric:
            raise UsageError(
                f"engine {NAME} does W4A16_ASYM, not {scheme.name}; use --engine native",
                param="engine",
            )
        left = [name for name in dense if name not in _HEAD]
        if left:
            raise UsageError(
                f"engine {NAME} can't keep single layers dense ({left[0]}); use --engine native",
                param="ignore",
            )
        require_package(NAME, "awq", "autoawq==0.2.9")

    def quantize(self, job: EngineJob) -> None:
        """Its grid search on our token sequences, joined and cut to whole samples of seqlen."""
        awq: Any = imported(NAME, "awq")
        quantizer = _cloning(imported(NAME, "awq.quantize.quantizer").AwqQuantizer)
        tokens = sum(len(sequence) for sequence in job.sequences)
        config = {
            "zero_point": True,
            "q_group_size": job.scheme.group_size,
            "w_bit": 4,
            "version": "GEMM",
        }
        with guarded(NAME):
            model = awq.AutoAWQForCausalLM.from_pretrained(
                str(job.folder),
                device_map="cpu",
                safetensors=True,
                trust_remote_code=job.trust_remote_code,
            )
            model.quantize(
                tokenizer=None,
                quant_config=config,
                calib_data=[list(sequence) for sequence in job.sequences],
                max_calib_samples=len(job.sequences),
                max_calib_seq_len=min(job.seqlen, tokens),
                quantizer_cls=quantizer,
            )
            model.save_quantized(str(job.out))

    def version(self) -> str:
        """Of the installed package."""
        return f"{NAME} {version(NAME)}"


def _cloning(quantizer: Any) -> Any:
    """AutoAWQ's quantizer with saved weights that are copies.

    Its grid search keeps `v.cpu()` of a block's weights to restore them after each try; on the CPU
    those are the weights themselves, which the search scales in place: the result is noise
    (perplexity 152,719 on SmolLM2).
    """

    class Cloning(quantizer):  # type: ignore[misc]
        def _compute_best_scale(
            self, x: Any, w_mean: Any, x_mean: Any, module2inspect: Any, *args: Any, **kwargs: Any
        ) -> Any:
            plain = module2inspect.state_dict

            def copied() -> dict[str, Any]:
                return {name: tensor.clone() for name, tensor in plain().items()}

            module2inspect.state_dict = copied
            try:
                return super()._compute_best_scale(
                    x, w_mean, x_mean, module2inspect, *args, **kwargs
                )
            finally:
                del module2inspect.state_dict

    return Cloning
