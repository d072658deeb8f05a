"""A decoder-only transformer as data (DESIGN §4): what executors need, and nothing else."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from qdeploy.errors import FormatError
from qdeploy.models.rope import RopeSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderSpec:
    """Sizes and switches of one decoder. `sliding_windows` and `rope` have one entry a layer.

    attention_scale: factor of the scores before soft cap and softmax
    embedding_multiplier: factor of the embedded tokens
    norm_offset: RMSNorm multiplies by (offset + weight)
    sandwich_norms: attention and MLP outputs are normed too, before the residual add (Gemma)
    sliding_windows: a query at t sees keys t − window + 1 … t; None sees all
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    max_model_len: int
    norm_eps: float
    tied_embeddings: bool
    attention_scale: float
    activation: str
    sliding_windows: tuple[int | None, ...]
    rope: tuple[RopeSpec, ...]
    norm_offset: float = 0.0
    qk_norm: bool = False
    sandwich_norms: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    embedding_multiplier: float = 1.0
    attention_soft_cap: float | None = None
    logit_soft_cap: float | None = None

    def __post_init__(self) -> None:
        sizes = ("vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_q_heads")
        for name in (*sizes, "num_kv_heads", "head_dim", "max_model_len"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise FormatError(f"config.json gives {name}={value!r}; it must be an integer ≥ 1")
        if self.num_q_heads % self.num_kv_heads or self.head_dim % 2:
            raise FormatError(
                f"config.json gives {self.num_q_heads} query heads, {self.num_kv_heads} KV heads "
                f"and head_dim {self.head_dim}; KV heads must divide query heads, head_dim be even"
            )

    @property
    def kv_elements_per_token(self) -> int:
        """Elements of K and V that one token adds over all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim


def spec_from_config(config: Mapping[str, Any]) -> DecoderSpec:
    """Describe the decoder of a Hugging Face config.json.

    Raises FormatError when the architecture, or a switch of it, is outside the family.
    """
    from qdeploy.models.architectures import ARCHITECTURES

    names = config.get("architectures") or []
    known = [name for name in names if name in ARCHITECTURES]
    if not known:
        raise FormatError(
            f"architecture {', '.join(names) or '(none in config.json)'} is not one the runtime "
            f"serves ({', '.join(ARCHITECTURES)}); its artifact can still be served on vLLM"
        )
    try:
        return ARCHITECTURES.get(known[0])(config)
    except KeyError as error:
        raise FormatError(f"config.json lacks the key {error.args[0]!r} of {known[0]}") from None
    except (AttributeError, TypeError, ValueError) as error:
        raise FormatError(f"config.json can't be read as {known[0]}: {error}") from None
