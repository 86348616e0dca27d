"""Monitors of a team through all services, against a workflow whose agents are known exactly."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.e2e.conftest import House
from tests.support.tiny_team import job
from troupe.algorithms.scores import interval

QUERIES = 4


def monitored(models: Path, contributions: dict[str, Any]) -> str:
    """A solver and a checker of their own policies, and an idler that the solver's policy plays. Of
    four held-out queries, two are about `g`."""
    changes: dict[str, Any] = {
        "workflow": "tests.support.judged_team:play",
        "agents.idler": {"policy": "solver", "sampling": {"max_new_tokens": 3}},
        "policies.base": {
            "model": {"path": str(models / "solver")},
            "engine": {"max_context": 128},
            "trainable": False,
        },
        "policies.checker.trainable": False,
        "pipeline.steps": 1,
        "evaluation": {
            "queries": QUERIES,
            "answer_pattern": "#(.*)",
            "judges": {"checker": "answer"},
            "contributions": {"queries": 3, "by": "base"},
        },
        "evaluations": {"quiet": {"queries": QUERIES, "contributions": contributions}},
    }
    return job(models, **changes)


@pytest.mark.timeout(600)
async def test_contributions_copying_agreement_and_verdicts_are_those_of_the_workflow(
    house: House, models: Path
) -> None:
    handle = await house.client.submit(monitored(models, {"queries": 99}))
    record = await handle.wait(timeout=400)
    assert record.state == "succeeded", record.problem
    found = record.metrics

    # `base` has the solver's tokenizer and plays the solver: nothing is solved. Of the first three
    # queries two are about `g`. Of all four, half are.
    contributions = {n: v for n, v in found.items() if "contribution/" in n and n.count("/") < 4}
    exact = {n: v for n, v in contributions.items() if not n.endswith(("/low", "/high"))}
    assert exact == {
        "evaluation/contribution/solver": pytest.approx(2 / 3),
        "evaluation/contribution/idler": 0,
        "evaluation/contribution/checker": 0,
        "evaluations/quiet/contribution/solver": 0.5,
        "evaluations/quiet/contribution/idler": 0,
        "evaluations/quiet/contribution/checker": 0,
    }
    assert found["evaluations/quiet/contribution/idler/high"] == 0
    assert found["evaluation/team/mean"] == found["evaluations/quiet/team/mean"] == 0.5
    assert found["evaluation/trajectories/completed"] == QUERIES

    # Of the others' answers, one in two is that of the solver and of the checker.
    for agent, share in (("solver", 0.5), ("checker", 0.5), ("idler", 0.0)):
        assert found[f"evaluation/trajectory/agreement/{agent}"] == share
    for prefix in ("evaluation/trajectory/", "evaluations/quiet/trajectory/", "trajectory/"):
        copied = {a: found[f"{prefix}copying/{a}"] for a in ("solver", "checker", "idler")}
        assert copied == {"solver": 0, "checker": 1, "idler": 0}, prefix

    low, high = interval(1.0, 2)
    assert found["evaluation/accepts_wrong/checker"] == 1
    assert found["evaluation/accepts_wrong/checker/low"] == pytest.approx(low)
    assert found["evaluation/accepts_wrong/checker/high"] == pytest.approx(high)
    assert found["evaluation/rejects_right/checker"] == 0

    for prefix in ("", "evaluation/"):
        turns = {a: found[f"{prefix}turn_share/{a}"] for a in ("solver", "checker", "idler")}
        assert turns == pytest.approx(dict.fromkeys(turns, 1 / 3))
        tokens = [found[f"{prefix}token_share/{a}"] for a in turns]
        assert sum(tokens) == pytest.approx(1)
        assert min(tokens) > 0
    # The conversations of repetitions are not among those of the evaluation.
    listed = [one.id for one in await handle.trajectories()]
    assert not [name for name in listed if "without" in name]
