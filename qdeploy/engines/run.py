"""An engine's run, start to end: checked before, checked after, packed as our own results are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import Tensor

from qdeploy.calibration.memory import require_memory
from qdeploy.calibration.plan import QuantPlan
from qdeploy.engines import ENGINES
from qdeploy.engines.base import Engine, EngineJob
from qdeploy.errors import CalibrationError, UsageError
from qdeploy.formats.artifact import ArtifactWriter
from qdeploy.formats.checkpoint import Checkpoint, open_checkpoint
from qdeploy.formats.hf import TensorFolder
from qdeploy.formats.manifest import LayerRecord
from qdeploy.formats.module_schemes import distinct
from qdeploy.progress import Progress
from qdeploy.quantization.scheme import QuantizedLinear

#: Mean KL in nats on the calibration text above which a result is noise: broken runs reach 9.
MAX_KL = 5.0
_CHECK_TOKENS = 256
#: Of a model that an engine has loaded, at least: float16 there, then float32 for the check.
BYTES_PER_WEIGHT = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRun:
    """An engine that can do what the plan asks."""

    engine: Engine
    progress: Progress
    trust_remote_code: bool = False

    def version(self) -> str:
        """Name and version of the engine's package."""
        return self.engine.version()

    def run(
        self,
        sequences: Sequence[Sequence[int]],
        plan: QuantPlan,
        folder: TensorFolder,
        writer: ArtifactWriter,
    ) -> tuple[list[LayerRecord], set[str]]:
        """Write the engine's codes, and what it changed of other tensors, in the plan's format.

        Returns a record for each layer, and the names of the dense tensors that were written.
        Raises CalibrationError for a target that the engine left dense, and for noise.
        """
        with TemporaryDirectory(
            prefix=f".{writer.out.name}.engine-", dir=writer.out.parent
        ) as work:
            job = EngineJob(
                folder=folder.path,
                out=Path(work) / "out",
                method=plan.recipe.method,
                scheme=plan.scheme,
                dense=plan.dense,
                sequences=sequences,
                seqlen=plan.recipe.calibration.seqlen,
                trust_remote_code=self.trust_remote_code,
            )
            made = self.quantized(job, tuple(plan.shapes))
            layers = [_pack(made, module, plan, writer) for module in plan.schemes]
            return layers, _copy_changed(made, plan, folder, writer)

    def quantized(self, job: EngineJob, targets: Sequence[str]) -> Checkpoint:
        """What the engine made of the model; it is checked."""
        self.progress.info(f"quantizing with {self.version()}")
        self.engine.quantize(job)
        made = open_checkpoint(job.out)
        for name in targets:
            if name not in made.packed:
                raise CalibrationError(f"{self.version()} left {name} dense; use --engine native")
        tokens = job.sequences[0][:_CHECK_TOKENS]
        kl = divergence(job.folder, made, tokens, job.trust_remote_code)
        self.progress.info(f"KL on {len(tokens)} tokens of its calibration text: {kl:.3f}")
        if not kl < MAX_KL:  # NaN, too
            raise CalibrationError(
                f"{self.version()} gave noise: KL {kl:.3g} on its own calibration text "
                f"(limit {MAX_KL:g}); use --engine native"
            )
        return made


def engine_run(
    plan: QuantPlan,
    folder: TensorFolder,
    progress: Progress,
    max_memory: int | None,
    trust_remote_code: bool,
) -> EngineRun | None:
    """The engine that the recipe asks for, None for native; UsageError for what it can't do, and
    CapacityError for a model that doesn't fit in max_memory bytes: engines load it whole.
    """
    name, method = plan.recipe.engine, plan.recipe.method
    if name == "native":
        return None
    if not plan.schemes:
        raise UsageError(
            f"engine {name} quantizes weights, which method {method} doesn't; leave it out",
            param="engine",
        )
    scheme, *others = distinct(plan.schemes.values())
    if others:
        raise UsageError(
            f"engine {name} gives all layers one scheme; leave overrides out or use "
            "--engine native",
            param="overrides",
        )
    if scheme.activations is not None:
        raise UsageError(
            f"engine {name} rounds weights alone, not inputs as {scheme.name} does; use "
            "--engine native",
            param="scheme",
        )
    if plan.recipe.kv_cache.needs_statistics:
        raise UsageError(
            f"engine {name} takes no statistics of K and V, which this KV policy needs; use "
            "--engine native or another --kv-cache-dtype",
            param="kv_cache",
        )
    engine = ENGINES.get(name)
    engine.check(method, scheme, plan.dense)
    needed = BYTES_PER_WEIGHT * folder.num_weights()
    require_memory(f"--engine {name}", needed, max_memory, "use --engine native")
    return EngineRun(engine=engine, progress=progress, trust_remote_code=trust_remote_code)


def _pack(made: Checkpoint, module: str, plan: QuantPlan, writer: ArtifactWriter) -> LayerRecord:
    q, scheme = made.linear(module), plan.schemes[module]
    assert isinstance(q, QuantizedLinear)
    if q.g_idx is not None:
        scheme = replace(scheme, act_order=True)
    writer.add_linear(module, replace(q, scheme=scheme), plan.format)
    return LayerRecord(name=module, scheme=scheme.name)


def _copy_changed(
    made: Checkpoint, plan: QuantPlan, folder: TensorFolder, writer: ArtifactWriter
) -> set[str]:
    """Norms that scales were folded into, and all else that isn't packed, in our dtypes."""
    names = {n for n in folder.names() & made.names() if n.rpartition(".")[0] not in plan.schemes}
    for name in sorted(names):
        writer.add(name, made.tensor(name).to(folder.dtype(name)))
    return names


@torch.no_grad()
def divergence(
    dense: Path, made: Checkpoint, tokens: Sequence[int], trust_remote_code: bool = False
) -> float:
    """Mean KL in nats of a checkpoint from the model that it was made from, by transformers."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        dense, dtype=torch.float32, trust_remote_code=trust_remote_code
    ).eval()
    ids = torch.tensor([list(tokens)])
    before = _log_probs(model(ids).logits)
    for name, parameter in model.named_parameters():
        module, _, last = name.rpartition(".")
        if module in made.packed and last == "weight":
            parameter.copy_(made.weight(module))
        elif made.has(name):
            parameter.copy_(made.tensor(name))
    after = _log_probs(model(ids).logits)
    return (before.exp() * (before - after)).sum(-1).mean().item()


def _log_probs(logits: Tensor) -> Tensor:
    return logits.float().log_softmax(-1)
