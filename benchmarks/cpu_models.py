"""The models that benchmarks/cpu.py runs, made once and kept in a folder."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from cpu_gguf import write_gguf
from safetensors.torch import save_file

from qdeploy.formats.sources import resolve_model

LLAMA_1B_SHAPE = {
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 22,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 64,
}
TINY_SHAPE = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
}
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "generation_config.json")


@dataclass(frozen=True, slots=True, kw_only=True)
class Models:
    """Where models are, and where those made of them go: `work`, reused by later runs."""

    work: Path
    group_size: int = 64

    def checkpoint(self, reference: str) -> Path:
        """A real model as a Hugging Face folder."""
        return resolve_model(reference)

    def random_llama(self, name: str, shape: dict[str, int], like: Path) -> Path:
        """An untied Llama of random bfloat16 weights, with the tokenizer and context of `like`."""
        return self._made(name, lambda out: write_random_llama(out, shape, like))

    def artifact(self, folder: Path, head_bits: int) -> Path:
        """The checkpoint as W4 symmetric, embeddings and head in 8 or 4 bits."""
        name = f"{folder.name}-w4g{self.group_size}-head{head_bits}"
        words = ["--method", "rtn", "--bits", "4", "--symmetric"]
        words += ["--group-size", str(self.group_size)]
        return self._quantized(name, folder, words, head_bits, "none")

    def head_only(self, folder: Path, head_bits: int) -> Path:
        """The checkpoint with nothing but its embeddings and head rounded, and measured."""
        name = f"{folder.name}-dense-head{head_bits}"
        return self._quantized(name, folder, ["--method", "none"], head_bits, "quick")

    def gguf(self, folder: Path, llama_cpp: Path) -> Path:
        """The checkpoint as llama.cpp's Q4_0 mix."""

        def make(out: Path) -> None:
            dense = out.with_suffix(".bf16")
            write_gguf(folder, dense)
            _call([str(llama_cpp / "llama-quantize"), str(dense), str(out), "Q4_0"])
            dense.unlink()

        return self._made(f"{folder.name}-q4_0.gguf", make)

    def openvino_ir(self, folder: Path, python: str) -> Path | None:
        """The checkpoint exported as int4 symmetric; None where `python` has no exporter."""
        probe = "from importlib.util import find_spec as f; assert f('nncf') and f('optimum')"
        if subprocess.run([python, "-c", probe], capture_output=True, check=False).returncode:
            return None
        tool = [python, "-c", "from optimum.commands.optimum_cli import main; main()"]
        words = ["export", "openvino", "--model", str(folder)]
        words += ["--task", "text-generation-with-past", "--weight-format", "int4", "--sym"]
        words += ["--ratio", "1.0", "--group-size", str(self.group_size)]
        name = f"{folder.name}-openvino-int4"
        return self._made(name, lambda out: _call([*tool, *words, str(out)]))

    def _quantized(
        self, name: str, folder: Path, words: list[str], head_bits: int, evaluate: str
    ) -> Path:
        words = [*words, "--quantize-embeddings", str(head_bits)]
        command = [sys.executable, "-c", "from qdeploy.cli import main; main()", "quantize"]
        command += [str(folder), *words, "--eval", evaluate, "-q", "-o"]
        return self._made(name, lambda out: _call([*command, str(out)]))

    def _made(self, name: str, make: Callable[[Path], None]) -> Path:
        """`work`/name; made aside first, so that a run that was stopped leaves no half of it."""
        target, partial = self.work / name, self.work / f"partial-{name}"
        if target.exists():
            return target
        self.work.mkdir(parents=True, exist_ok=True)
        if partial.is_dir():
            shutil.rmtree(partial)
        print(f"making {name}", flush=True)
        make(partial)
        return partial.rename(target)


def write_random_llama(out: Path, shape: dict[str, int], like: Path) -> None:
    """Save config, weights (normal, deviation 0.02) and the tokenizer files of `like` to `out`."""
    base = json.loads((like / "config.json").read_text(encoding="utf-8"))
    config: dict[str, Any] = base | shape | {"tie_word_embeddings": False}
    out.mkdir()
    (out / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
    for name in _TOKENIZER_FILES:
        if (like / name).is_file():
            shutil.copy(like / name, out / name)
    save_file(_random_tensors(config), out / "model.safetensors", {"format": "pt"})


def _random_tensors(config: dict[str, Any]) -> dict[str, torch.Tensor]:
    hidden, inner, width = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    q, kv = config["num_attention_heads"] * width, config["num_key_value_heads"] * width
    generator = torch.Generator().manual_seed(0)

    def matrix(rows: int, cols: int) -> torch.Tensor:
        values = torch.empty(rows, cols, dtype=torch.bfloat16)
        return values.normal_(0, 0.02, generator=generator)

    def norm() -> torch.Tensor:
        return torch.ones(hidden, dtype=torch.bfloat16)

    tensors = {
        "model.embed_tokens.weight": matrix(config["vocab_size"], hidden),
        "lm_head.weight": matrix(config["vocab_size"], hidden),
        "model.norm.weight": norm(),
    }
    sizes = {"q": (q, hidden), "k": (kv, hidden), "v": (kv, hidden), "o": (hidden, q)}
    mlp = {"gate": (inner, hidden), "up": (inner, hidden), "down": (hidden, inner)}
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        for name, size in sizes.items():
            tensors[f"{prefix}.self_attn.{name}_proj.weight"] = matrix(*size)
        for name, size in mlp.items():
            tensors[f"{prefix}.mlp.{name}_proj.weight"] = matrix(*size)
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{prefix}.{name}.weight"] = norm()
    return tensors


def _call(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{command[0]} failed:\n{done.stdout[-1000:]}{done.stderr[-2000:]}")
