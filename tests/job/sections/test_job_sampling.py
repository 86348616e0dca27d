"""A job, a workflow and a client of the endpoint may write the same sampling parameters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from pydantic import ValidationError

from tests.support.training import make_spec
from troupe.job import JobSpec
from troupe.job.sections.agents import SamplingSpec
from troupe.workflow import Sampling
from troupe.workflow.errors import InvalidMessagesError

REFUSED = "refused"


def in_a_job(name: str, value: Any) -> Any:
    """Return the value that a job reads, or `REFUSED`."""
    try:
        return getattr(SamplingSpec.model_validate({name: value}), name)
    except ValidationError:
        return REFUSED


def in_a_turn(name: str, value: Any) -> Any:
    """Return the value that a turn of a workflow and a request read, or `REFUSED`."""
    try:
        return getattr(Sampling().override({name: value}), name)
    except InvalidMessagesError:
        return REFUSED


@given(st.integers())
@example(0)
@example(2**24 + 1)
@example(2**31)
def test_top_k_means_the_same_in_a_job_and_in_a_turn(top_k: int) -> None:
    assert in_a_job("top_k", top_k) == in_a_turn("top_k", top_k)


@pytest.mark.parametrize("name", ["temperature", "top_p"])
@given(value=st.floats())
@example(value=0.0)
@example(value=1.0)
@example(value=1e-7)
@example(value=1001.0)
def test_a_number_means_the_same_in_a_job_and_in_a_turn(name: str, value: float) -> None:
    assert in_a_job(name, value) == in_a_turn(name, value)


def test_all_tokens_are_kept_by_top_k_0_and_minus_1() -> None:
    assert [in_a_job("top_k", k) for k in (0, -1, 1, -2)] == [-1, -1, 1, REFUSED]


@pytest.mark.parametrize("read", [in_a_job, in_a_turn])
def test_a_temperature_that_logits_cannot_be_divided_by_is_greedy(read: Any) -> None:
    drawn = [read("temperature", t) for t in (0, 1e-320, 1e-8, 1e-5, 0.7)]
    assert drawn == [0, 0, 0, 1e-5, 0.7]


def test_an_empty_stop_string_is_refused_by_a_job() -> None:
    assert in_a_job("stop", [""]) == REFUSED


@pytest.mark.parametrize(
    ("kind", "sampling", "message"),
    [
        ("embedded", {"top_p": 0.9}, ""),
        ("embedded", {"top_p": 0.9, "logprobs": "processed"}, ""),
        ("sglang", {"top_k": 9}, ""),
        ("sglang", {"top_k": 9, "logprobs": "processed"}, "choose `full`"),
        ("vllm", {}, ""),
        ("vllm", {"top_p": 0.9}, "choose `processed`"),
        ("vllm", {"top_p": 0.9, "logprobs": "processed"}, ""),
    ],
)
def test_engines_record_the_log_probs_that_they_can(
    kind: str, sampling: dict[str, Any], message: str
) -> None:
    values = make_spec(Path("t")).model_dump()
    values["policies"]["solver"]["engine"] = {"kind": kind}
    values["agents"]["solver"]["sampling"] |= sampling
    if not message:
        assert JobSpec.model_validate(values).policies["solver"].engine.kind == kind
        return
    with pytest.raises(ValidationError, match=f"agents.solver.sampling.logprobs.*{message}"):
        JobSpec.model_validate(values)
