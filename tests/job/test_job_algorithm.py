"""`algorithm`: what goes together, and what is refused with a remedy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from tests.support.training import make_spec


def _pipeline(mode: str) -> dict[str, Any]:
    return {"mode": mode, "steps": 10, "queries_per_step": 2}


@pytest.mark.parametrize(
    ("algorithm", "mode", "message"),
    [
        ({"advantage": "reinforce_plus_plus"}, "micro_batch", "use pipeline.mode `sync`"),
        ({"loss": "cispo", "correction": "truncated"}, "async", "choose `masked`"),
        ({"normalize_per_agent": False}, "sync", "a baseline is of one agent anyway"),
        ({"constant_tokens": 8}, "sync", "without effect with normalize `token`"),
        ({"correction": "none", "loss": "gspo"}, "async", "needs a correction"),
        ({"rae_decay": 1.0}, "sync", "less than 1"),
        ({"advantage": "gae"}, "sync", "'reinforce_plus_plus'"),
    ],
)
def test_what_does_not_go_together(algorithm: dict[str, Any], mode: str, message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        make_spec(Path("t"), algorithm=algorithm, pipeline=_pipeline(mode))


@pytest.mark.parametrize(
    ("algorithm", "mode", "correction"),
    [
        ({}, "sync", "none"),
        ({}, "async", "truncated"),
        ({"loss": "dppo_mask"}, "async", "masked"),
        ({"loss": "gspo", "correction": "sequence_masked"}, "async", "sequence_masked"),
        ({"advantage": "reinforce_plus_plus"}, "async", "truncated"),
    ],
)
def test_the_correction_in_force(algorithm: dict[str, Any], mode: str, correction: str) -> None:
    spec = make_spec(Path("t"), algorithm=algorithm, pipeline=_pipeline(mode))
    assert spec.correction == correction


def test_the_constant_is_the_longest_response_that_an_agent_may_give() -> None:
    agents = {
        "solver": {"policy": "solver", "sampling": {"max_new_tokens": 40}},
        "critic": {"policy": "solver", "sampling": {"max_new_tokens": 9}},
    }
    spec = make_spec(Path("t"), agents=agents, algorithm={"normalize": "constant"})
    assert spec.constant_tokens("solver") == 40
    own = {"normalize": "constant", "constant_tokens": 5}
    assert make_spec(Path("t"), agents=agents, algorithm=own).constant_tokens("solver") == 5
