"""transformers' own decoder layers, one in memory at a time, fed with calibration tokens."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, cast, overload

import torch
from torch import Tensor, nn

from qdeploy.calibration.capture import Keep
from qdeploy.errors import FormatError, UsageError
from qdeploy.formats.hf import TensorFolder
from qdeploy.quantization.method import LayerBatch, one_sequence

#: Sequences of one length are run this many tokens at a time, unless memory is short.
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

    Of the checkpoint's files only that layer's part is in memory.

    Everything outside the layers that makes their inputs (embeddings, rotary tables, masks) is
    the model's own code. All computation is float32 on the CPU. trust_remote_code: code in the
    folder may run.
    """

    def __init__(self, folder: TensorFolder, *, trust_remote_code: bool = False) -> None:
        self.folder = folder
        self._model = _meta_model(folder, trust_remote_code)
        self._decoder: Any = self._model.model
        self.layers: nn.ModuleList = self._decoder.layers
        self.config: Any = self._decoder.config
        self._kwargs: list[list[dict[str, Any]]] = []  # by batch and layer

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
            self.folder.release()

    @torch.no_grad()
    def embed(
        self,
        sequences: Sequence[Sequence[int]],
        batch_tokens: int = BATCH_TOKENS,
        keep: Keep = list,
    ) -> Sequence[Tensor]:
        """First layer's inputs, [batch, tokens, hidden], batches of equal length.

        Also records what each layer is given beside them, for `batches`.
        """
        embedding = self._decoder.embed_tokens
        batches = _batch(self._load_rows(embedding, sequences), batch_tokens)
        for module in self._decoder.children():
            if module is not self.layers and module is not embedding:
                _materialize_buffers(self._model, module)
        recorders = [_Recorder() for _ in self.layers]
        layers, norm = self._decoder.layers, self._decoder.norm
        self._decoder.layers, self._decoder.norm = nn.ModuleList(recorders), nn.Identity()
        self._kwargs = []
        known: dict[tuple[int, int], list[dict[str, Any]]] = {}

        def inputs() -> Iterator[Tensor]:
            for batch in batches:
                self._decoder(input_ids=torch.tensor(batch), use_cache=False)
                kwargs = [recorder.kwargs for recorder in recorders]
                first = known.setdefault((len(batch), len(batch[0])), kwargs)
                self._kwargs.append(first if _equal(first, kwargs) else kwargs)
                yield cast(Tensor, recorders[0].hidden).detach()

        try:
            return keep(inputs())
        finally:
            self._decoder.layers, self._decoder.norm = layers, norm
            embedding.to("meta")
            self.folder.release()

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

    def batches(self, index: int, hidden: Sequence[Tensor]) -> LayerBatches:
        """Inputs of a layer with the masks and rotary embeddings of its kind."""
        return LayerBatches(hidden, [kwargs[index] for kwargs in self._kwargs])


class LayerBatches(Sequence[LayerBatch]):
    """Batches of one layer; a tensor is read when its batch is asked for, and not kept here."""

    def __init__(self, hidden: Sequence[Tensor], kwargs: Sequence[Mapping[str, Any]]) -> None:
        if len(hidden) != len(kwargs):
            raise ValueError(f"{len(hidden)} inputs for {len(kwargs)} batches")
        self._hidden, self._kwargs = hidden, kwargs

    def __len__(self) -> int:
        return len(self._hidden)

    @overload
    def __getitem__(self, index: int) -> LayerBatch: ...

    @overload
    def __getitem__(self, index: slice) -> list[LayerBatch]: ...

    def __getitem__(self, index: int | slice) -> LayerBatch | list[LayerBatch]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        return LayerBatch(hidden=self._hidden[index], kwargs=self._kwargs[index])


def pick_sequences(
    batches: Sequence[LayerBatch], tokens: int, *, shortest: int = 0
) -> list[LayerBatch]:
    """Single sequences, evenly spread over the batches, of up to `tokens` tokens (at least one).

    shortest: only sequences of so many tokens; there must be one. Copies, which don't keep their
    batches in memory.
    """
    sizes = {number: batch.hidden.shape[:2] for number, batch in enumerate(batches)}
    long = {number: size for number, size in sizes.items() if size[1] >= shortest}
    every = [(number, row) for number, (rows, _) in long.items() for row in range(rows)]
    total = sum(rows * length for rows, length in long.values())
    count = max(len(every) * min(tokens, total) // total, 1)
    picked = [every[i * len(every) // count] for i in range(count)]
    return [_copied(one_sequence(batches[number], row)) for number, row in picked]


def _copied(batch: LayerBatch) -> LayerBatch:
    return replace(batch, hidden=batch.hidden.clone())


def _equal(one: Any, other: Any) -> bool:
    """Whether two nests of lists, dictionaries and tensors hold the same."""
    if isinstance(one, Tensor):
        return isinstance(other, Tensor) and one.shape == other.shape and torch.equal(one, other)
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_equal(one[k], other[k]) for k in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(_equal, one, other))
    return bool(one is other or one == other)


def _meta_model(folder: TensorFolder, trust_remote_code: bool) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        config = AutoConfig.from_pretrained(
            str(folder.path), local_files_only=True, trust_remote_code=trust_remote_code
        )
        config = config.get_text_config() if not hasattr(config, "num_hidden_layers") else config
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(
                config,
                dtype=torch.float32,
                attn_implementation="sdpa",
                trust_remote_code=trust_remote_code,
            )
    except (ValueError, KeyError, OSError, TypeError, AttributeError) as error:
        if "auto_map" in folder.config and not trust_remote_code:
            raise UsageError(
                f"{folder.path} needs code of its own, which isn't run; read it, then give "
                "--trust-remote-code",
                param="trust_remote_code",
            ) from error
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


def _batch(sequences: Sequence[Sequence[int]], batch_tokens: int) -> list[list[list[int]]]:
    """Batches of sequences of one length, so that nothing is padded; order is deterministic."""
    by_length: dict[int, list[list[int]]] = {}
    for sequence in sequences:
        by_length.setdefault(len(sequence), []).append(list(sequence))
    batches = []
    for length, group in by_length.items():
        step = max(batch_tokens // length, 1)
        batches += [group[start : start + step] for start in range(0, len(group), step)]
    return batches
