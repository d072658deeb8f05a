"""Tables that several commands print."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.table import Table

if TYPE_CHECKING:
    from qdeploy.evaluation.evaluate import Evaluation


def accuracy_table(evaluations: Sequence[Evaluation]) -> Table:
    """One row per KV format, against the unquantized reference."""
    first = evaluations[0]
    table = Table(
        title=f"against {first.reference}: {first.text.num_tokens} tokens of "
        f"{first.text.source} in windows of {first.text.ctx_len}, backend {first.backend}, "
        f"{first.act} activations"
        + (f", embeddings {first.embeddings.key}" if first.embeddings is not None else "")
    )
    for heading in ("KV cache", "perplexity", "reference", "mean KL", "KL p99", "top-1", "gate"):
        table.add_column(heading, justify="left" if heading in ("KV cache", "gate") else "right")
    for item in evaluations:
        values = item.metrics
        table.add_row(
            item.kv_config.label,
            f"{values['perplexity']:.3f}",
            f"{values['reference_perplexity']:.3f}",
            f"{values['kl_mean']:.5f}",
            f"{values['kl_p99']:.4f}",
            f"{values['top1_agreement']:.3f}",
            "failed: " + "; ".join(item.failures) if item.failures else f"passed {item.gate}",
        )
    return table
