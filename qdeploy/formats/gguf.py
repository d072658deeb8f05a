"""A GGUF file → a plain Hugging Face folder: bfloat16 safetensors, config, tokenizer, template."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from qdeploy.errors import FormatError, QdeployError
from qdeploy.formats.gguf_config import generation_config, model_config
from qdeploy.formats.gguf_file import GgufFile, open_gguf
from qdeploy.formats.gguf_tensors import hf_tensors
from qdeploy.formats.gguf_tokenizer import build_tokenizer, tokenizer_config
from qdeploy.formats.hf import INDEX_NAME, SINGLE_NAME
from qdeploy.progress import Progress, Silent

# Part of the cache key: raise it whenever the converted folder would come out differently.
CONVERTER_VERSION = 1
MAX_SHARD_BYTES = 2 << 30


def convert_gguf(path: Path, out: Path, progress: Progress = Silent()) -> Path:
    """Write the folder `out` (which exists and is empty) and return it.

    Peak memory is one shard (2 GiB) plus one tensor. Raises FormatError when anything in the file
    can't be converted exactly: unknown architecture, tensor, quantization type or tokenizer.
    """
    source = open_gguf(path)
    config = _write_descriptions(source, out)
    _write_tensors(source, config, out, progress)
    return out


def _write_descriptions(source: GgufFile, out: Path) -> dict[str, Any]:
    """Everything but the weights; returns the config."""
    try:
        config = model_config(source)
        write_json(out / "config.json", config)
        write_json(out / "generation_config.json", generation_config(source))
        build_tokenizer(source).save(str(out / "tokenizer.json"))
        write_json(out / "tokenizer_config.json", tokenizer_config(source))
        template = source.fields.get("tokenizer.chat_template")
        if template:
            (out / "chat_template.jinja").write_text(template, encoding="utf-8")
    except (QdeployError, OSError):
        raise
    except Exception as error:  # values of a wrong type, or merges that `tokenizers` rejects
        reason = " ".join(str(error).split())[:120]
        raise FormatError(
            f"{source.path}: inconsistent GGUF metadata ({reason}); fetch another GGUF file"
        ) from error
    return config


def write_json(file: Path, value: dict[str, Any]) -> None:
    """Indented JSON with a final newline."""
    file.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _write_tensors(source: GgufFile, config: dict[str, Any], out: Path, progress: Progress) -> None:
    shards = []
    with progress.task(f"converting {source.path.name}", len(source.tensors)) as task:
        for number, shard in enumerate(_shards(hf_tensors(source, config))):
            file = out / f"part-{number:05d}.safetensors"
            save_file(shard, str(file), metadata={"format": "pt"})
            file.chmod(0o644)  # safetensors creates it for the owner only
            shards.append((file, {name: tensor.nbytes for name, tensor in shard.items()}))
            task.advance(len(shard))
    if len(shards) == 1:
        shards[0][0].rename(out / SINGLE_NAME)
        return
    weight_map = {}
    for number, (file, sizes) in enumerate(shards, start=1):
        name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        file.rename(out / name)
        weight_map.update(dict.fromkeys(sizes, name))
    total = sum(size for _, sizes in shards for size in sizes.values())
    write_json(out / INDEX_NAME, {"metadata": {"total_size": total}, "weight_map": weight_map})


def _shards(tensors: Iterator[tuple[str, Tensor]]) -> Iterator[dict[str, Tensor]]:
    shard: dict[str, Tensor] = {}
    size = 0
    for name, tensor in tensors:
        if shard and size + tensor.nbytes > MAX_SHARD_BYTES:
            yield shard
            shard, size = {}, 0
        shard[name] = tensor
        size += tensor.nbytes
    yield shard
