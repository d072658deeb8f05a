"""transformers' own decoder layers, one in memory at a time, fed with calibration tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn

from qdeploy.errors import FormatError, UsageError
from qdeploy.formats.hf import TensorFolder
from qdeploy.quantization.method import LayerBatch

#: Sequences of one length are run this many tokens at a time.
BATCH_TOKENS = 4096


class _Recorder(nn.Module):
    """Stands for a decoder layer: records the keywords it is given, passes the input on."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden: Tensor | None = None
        self.kwargs: dict[str, Any] = {}

    def forward(self, hidden_states: Tensor, **kwargs: Any) -> Tensor:
        self.hidden, self.kwargs = hidden_states, kwargs
        return hidden_states


class DecoderWalk:
    """The decoder of a checkpoint, on the meta device; layers are loaded when their turn comes.

    Everything outside the layers that makes their inputs (embeddings, rotary tables, masks) is
    the model's own code. All computation is float32 on the CPU.
    """

    def __init__(self, folder: TensorFolder) -> None:
        self.folder = folder
        self._model = _meta_model(folder)
        self._decoder: Any = self._model.model
        self.layers: nn.ModuleList = self._decoder.layers
        self.config: Any = self._decoder.config
        self._kwargs: list[list[dict[str, Any]]] = []

    @property
    def model_type(self) -> str:
        """The architecture's name in config.json."""
        return str(self.config.model_type)

    @property
    def head_dim(self) -> int:
        """Features of one attention head."""
        config = self.config
        size = getattr(config, "head_dim", None)
        return int(size or config.hidden_size // config.num_attention_heads)

    def layer_name(self, index: int) -> str:
        """Full name of a layer, the prefix of its tensors."""
        return f"model.layers.{index}"

    def linear_names(self, index: int) -> list[str]:
        """Names, relative to the layer, of its linear modules."""
        modules = self.layers[index].named_modules()
        return [name for name, module in modules if isinstance(module, nn.Linear)]

    @contextmanager
    def layer(self, index: int) -> Iterator[nn.Module]:
        """The layer with its float32 weights; they are freed on leaving."""
        layer, prefix = self.layers[index], self.layer_name(index)
        _load(self._model, layer, prefix, self.folder)
        try:
            yield layer
        finally:
            layer.to("meta")

    @torch.no_grad()
    def embed(self, sequences: Sequence[Sequence[int]]) -> list[Tensor]:
        """First layer's inputs, [batch, tokens, hidden], batches of equal length.

        Also records what each layer is given beside them, for `batches`.
        """
        embedding = self._decoder.embed_tokens
        batches = _batch(self._load_rows(embedding, sequences))
        for module in self._decoder.children():
            if module is not self.layers and module is not embedding:
                _materialize_buffers(self._model, module)
        recorders = [_Recorder() for _ in self.layers]
        layers, norm = self._decoder.layers, self._decoder.norm
        self._decoder.layers, self._decoder.norm = nn.ModuleList(recorders), nn.Identity()
        hidden: list[Tensor] = []
        try:
            for batch in batches:
                self._decoder(input_ids=torch.tensor(batch), use_cache=False)
                hidden.append(cast(Tensor, recorders[0].hidden).detach())
                self._kwargs.append([recorder.kwargs for recorder in recorders])
        finally:
            self._decoder.layers, self._decoder.norm = layers, norm
            embedding.to("meta")
        return hidden

    def _load_rows(
        self, embedding: nn.Embedding, sequences: Sequence[Sequence[int]]
    ) -> list[list[int]]:
        """Load only the embedding rows in use, float32; returns the sequences renumbered."""
        used = sorted({id for sequence in sequences for id in sequence})
        table = self.folder.tensor("model.embed_tokens.weight")
        if used[-1] >= table.shape[0] or used[0] < 0:
            raise FormatError(
                f"{self.folder.path}: the tokenizer gives id {used[-1]}, the embedding has "
                f"{table.shape[0]} rows; do they belong together?"
            )
        embedding.weight = nn.Parameter(table[torch.tensor(used)].float(), requires_grad=False)
        embedding.padding_idx = None  # of the full table; nothing is trained here
        _materialize_buffers(self._model, embedding)
        number = {id: row for row, id in enumerate(used)}
        return [[number[id] for id in sequence] for sequence in sequences]

    def batches(self, index: int, hidden: Sequence[Tensor]) -> list[LayerBatch]:
        """Inputs of a layer with the masks and rotary embeddings of its kind."""
        return [
            LayerBatch(hidden=tensor, kwargs=kwargs[index])
            for tensor, kwargs in zip(hidden, self._kwargs, strict=True)
        ]


def pick_sequences(batches: Sequence[LayerBatch], tokens: int) -> list[LayerBatch]:
    """Single sequences, evenly spread over the batches, of up to `tokens` tokens (at least one)."""
    every = [(batch, row) for batch in batches for row in range(batch.hidden.shape[0])]
    total = sum(batch.hidden.shape[0] * batch.hidden.shape[1] for batch in batches)
    count = max(len(every) * min(tokens, total) // total, 1)
    picked = [every[i * len(every) // count] for i in range(count)]
    return [_one_sequence(batch, row) for batch, row in picked]


def _one_sequence(batch: LayerBatch, row: int) -> LayerBatch:
    size = batch.hidden.shape[0]

    def narrow(value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(narrow(item) for item in value)
        if isinstance(value, Tensor) and size > 1 and value.dim() and value.shape[0] == size:
            return value[row : row + 1]
        return value

    kwargs = {name: narrow(value) for name, value in batch.kwargs.items()}
    return LayerBatch(hidden=batch.hidden[row : row + 1], kwargs=kwargs)


def _meta_model(folder: TensorFolder) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        config = AutoConfig.from_pretrained(
            str(folder.path), local_files_only=True, trust_remote_code=False
        )
        config = config.get_text_config() if not hasattr(config, "num_hidden_layers") else config
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(
                config, dtype=torch.float32, attn_implementation="sdpa", trust_remote_code=False
            )
    except (ValueError, KeyError, OSError, TypeError, AttributeError) as error:
        reason = str(error).strip().split("\n")[0]
        raise UsageError(
            f"{folder.path}: transformers can't build this model: {reason}; "
            "give a text-only decoder that it knows"
        ) from error
    decoder = getattr(model, "model", None)
    if not isinstance(getattr(decoder, "layers", None), nn.ModuleList):
        raise UsageError(
            f"{folder.path}: {type(model).__name__} has no `model.layers`; "
            "give a decoder-only model of the Llama family"
        )
    return model.eval()


def _load(model: Any, module: nn.Module, prefix: str, folder: TensorFolder) -> None:
    """Put the stored tensors, as float32, into a module on the meta device."""
    names = module.state_dict().keys()
    tensors = {name: folder.tensor(f"{prefix}.{name}").float() for name in names}
    for name, parameter in module.state_dict().items():
        if parameter.shape != tensors[name].shape:
            raise FormatError(
                f"{folder.path}: {prefix}.{name} has shape {list(tensors[name].shape)}, the config "
                f"asks for {list(parameter.shape)}; does config.json belong to these weights?"
            )
    module.load_state_dict(tensors, assign=True)
    _materialize_buffers(model, module)


def _materialize_buffers(model: Any, root: nn.Module) -> None:
    """Compute buffers that no checkpoint stores (rotary frequencies, Gemma's embedding scale).

    transformers' own initializer computes them; stored parameters are set aside meanwhile, since
    it would draw new ones.
    """
    for module in root.modules():
        buffers = {n: b for n, b in module.named_buffers(recurse=False) if b.is_meta}
        if not buffers:
            continue
        for name, buffer in buffers.items():
            setattr(module, name, torch.full(buffer.shape, torch.nan, dtype=buffer.dtype))
        parameters = dict(module.named_parameters(recurse=False))
        for name in parameters:
            setattr(module, name, nn.Parameter(torch.empty_like(parameters[name], device="meta")))
        model._init_weights(module)
        for name, parameter in parameters.items():
            setattr(module, name, parameter)
        for name in buffers:
            if module.get_buffer(name).isnan().any():
                raise UsageError(
                    f"transformers left {type(module).__name__}.{name} uninitialized; "
                    "this architecture can't be calibrated, use --method rtn"
                )


def _batch(sequences: Sequence[Sequence[int]]) -> list[list[list[int]]]:
    """Batches of sequences of one length, so that nothing is padded; order is deterministic."""
    by_length: dict[int, list[list[int]]] = {}
    for sequence in sequences:
        by_length.setdefault(len(sequence), []).append(list(sequence))
    batches = []
    for length, group in by_length.items():
        step = max(BATCH_TOKENS // length, 1)
        batches += [group[start : start + step] for start in range(0, len(group), step)]
    return batches
