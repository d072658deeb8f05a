from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from qdeploy.errors import FormatError, UsageError
from qdeploy.runtime.sampling_params import SamplingParams, sampling_defaults


def test_defaults_are_vllms() -> None:
    params = SamplingParams()
    assert (params.n, params.temperature, params.top_p, params.top_k) == (1, 1.0, 1.0, 0)
    assert (params.min_p, params.max_tokens, params.min_tokens, params.seed) == (0.0, 16, 0, None)
    assert not params.ignore_eos
    assert params.skip_special_tokens


@pytest.mark.parametrize("stop", ["", [""], ["a", ""], [None], [3]])
def test_r21_an_empty_stop_string_is_refused(stop: Any) -> None:
    with pytest.raises(UsageError, match="non-empty strings") as caught:
        SamplingParams(stop=stop)
    assert caught.value.param == "stop"


def test_r21_no_stop_strings() -> None:
    assert SamplingParams(stop=[]).stop_strings == SamplingParams(stop=None).stop_strings == ()
    assert SamplingParams(stop="x").stop_strings == ("x",)
    with pytest.raises(UsageError, match="at most 16"):
        SamplingParams(stop=["x"] * 17)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -0.1),
        ("stop", 5),
        ("stop_token_ids", 5),
        ("allowed_token_ids", 5),
        ("logit_bias", [1]),
        ("bad_words", 5),
        ("cache_salt", 5),
        ("cache_salt", b"x"),
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("temperature", "hot"),
        ("temperature", True),
        ("top_p", 0),
        ("top_p", 1.1),
        ("top_k", -2),
        ("top_k", 1.5),
        ("min_p", 1.5),
        ("n", 0),
        ("n", True),
        ("max_tokens", 0),
        ("min_tokens", 17),
        ("presence_penalty", 2.1),
        ("frequency_penalty", -3),
        ("repetition_penalty", 0),
        ("seed", 2**64),
        ("logprobs", 21),
        ("logprobs", -1),
        ("logit_bias", {1: 101}),
        ("logit_bias", {-1: 1}),
        ("stop_token_ids", [-1]),
        ("allowed_token_ids", []),
        ("allowed_token_ids", ["x"]),
    ],
)
def test_out_of_range_names_the_parameter(name: str, value: Any) -> None:
    with pytest.raises(UsageError, match=f"^{name}=") as caught:
        SamplingParams(**{name: value})
    assert caught.value.param == name
    assert "\n" not in str(caught.value)


def test_generation_config_gives_defaults(tmp_path: Path) -> None:
    assert sampling_defaults(tmp_path) == {}
    file = tmp_path / "generation_config.json"
    file.write_text(json.dumps({"temperature": 0.6, "top_k": None, "max_new_tokens": 9, "x": 1}))
    assert sampling_defaults(tmp_path) == {"temperature": 0.6, "max_tokens": 9}
    file.write_text("{")
    with pytest.raises(FormatError, match="not valid JSON"):
        sampling_defaults(tmp_path)
