"""The next opponents of learners, by the job's algorithm: functions of the state alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import yaml

from services.orchestrator.populations import decisions
from services.orchestrator.populations.decisions import levels, mixtures, settle_due, solution
from services.orchestrator.populations.state import (
    CANDIDATE,
    SETTLED,
    FrozenMember,
    PopulationState,
    Solution,
)
from troupe.job import JobSpec, parse_job
from troupe.populations.payoffs import PayoffTable
from troupe.rpc import FailedPrecondition

MODEL: dict[str, Any] = {"model": {"path": "/models/player"}}


def job(*learners: str, **population: Any) -> JobSpec:
    spec = {
        "name": "game",
        "workflow": "a.b:play",
        "tasks": {"source": "a.b:Tasks"},
        "agents": {"alice": {"policy": learners[0]}, "bob": {"policy": learners[0]}},
        "policies": dict.fromkeys(learners, MODEL),
        "pipeline": {"steps": 9, "queries_per_step": 4},
        "population": {"symmetric": True, **population},
        "algorithm": {"entropy_coefficient": 0.1},
    }
    return parse_job(yaml.safe_dump(spec))


def grown(*members: tuple[str, int, str]) -> PopulationState:
    """A pool of (learner, version, state); the newer of two members beats the older by 1."""
    found = {}
    for place, (learner, version, state) in enumerate(members):
        name = f"{learner}@{version}"
        found[name] = FrozenMember(
            name, learner, "main", version, "", version, place, "", state, 0, 0.0
        )  # fmt: skip
    table = PayoffTable([len(members)] * 2, symmetric=True)
    for cell in table.all():
        ahead = float(cell[0] > cell[1]) - float(cell[0] < cell[1])
        table.record(cell, [ahead, -ahead])
    state = PopulationState({"all": list(found)}, table, found, iteration=len(members) - 1)
    names = list(found)
    for a, one in enumerate(names):
        for b, other in enumerate(names):
            if a != b:
                state.wins[one, other] = [4 * (a > b), 0, 4]
    return state


SELVES = grown(("player", 0, SETTLED), ("player", 2, SETTLED), ("player", 4, SETTLED))


@pytest.mark.parametrize(
    ("algorithm", "more", "expected"),
    [
        ("fictitious", {"delta": 1.0}, {"player@0": 1 / 3, "player@2": 1 / 3, "player@4": 1 / 3}),
        ("fictitious", {"delta": 0.0}, {"player@4": 1.0}),
        ("prioritized", {}, {"player@4": 1.0}),  # it beats all the others every time
        ("psro", {}, {"player@4": 1.0}),
        ("psro", {"meta_solver": "uniform"}, dict.fromkeys(SELVES.members, 1 / 3)),
    ],
)
def test_opponents_of_a_learner_follow_the_algorithm(
    algorithm: str, more: dict[str, Any], expected: dict[str, float]
) -> None:
    spec = job("player", algorithm=algorithm, **more)
    assert mixtures(spec, SELVES)["player"]["all"] == pytest.approx(expected)


def test_self_play_has_no_opponents_from_the_past() -> None:
    assert mixtures(job("player", algorithm="self_play"), SELVES) == {}
    # Members' ratings are reported nevertheless.
    assert solution(job("player", algorithm="regularized"), SELVES, 4).mixtures == {
        "all": {"player@4": 1.0}
    }


def test_gains_of_all_pools_are_reported_even_if_one_has_no_new_member() -> None:
    agents = {"alice": {"policy": "player"}, "bob": {"policy": "rival"}}
    policies = {"player": MODEL, "rival": MODEL}
    changes = {"agents": agents, "policies": policies, "population": {}}
    spec = JobSpec.model_validate(job("player").model_dump(mode="json") | changes)
    table = PayoffTable([1, 2])
    table.record((0, 0), [1.0, -1.0])
    table.record((0, 1), [0.25, -0.25])
    members = {
        name: FrozenMember(name, name[:-2], "main", 0, "", 0, new, "", SETTLED, 0, 0.0)
        for name, new in (("player@0", 0), ("rival@0", 0), ("rival@2", 1))
    }
    pools = {"alice": ["player@0"], "bob": ["rival@0", "rival@2"]}
    before = Solution(0, 0, {"alice": {"player@0": 1.0}, "bob": {"rival@0": 1.0}}, [1.0, -1.0], {})
    state = PopulationState(pools, table, members, iteration=1, history=[before])
    assert list(solution(spec, state, 2).gains.items()) == [("alice", 0.0), ("bob", 0.75)]
    # Without new members nothing is known about future ones.
    state.iteration = 2
    assert solution(spec, state, 4).gains == {}


def test_a_solver_that_cannot_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def unsolved(*_: Any) -> Any:
        raise np.linalg.LinAlgError("singular")

    monkeypatch.setattr(decisions, "solve", unsolved)
    with pytest.raises(FailedPrecondition, match="singular") as caught:
        solution(job("player", algorithm="psro", meta_solver="alpha_rank"), SELVES, 4)
    assert (caught.value.kind, caught.value.value) == ("no_meta_strategy", "alpha_rank")


def test_a_pipeline_settles_its_lowest_level_and_trains_against_those_below() -> None:
    spec = job("first", "second", algorithm="pipeline_psro")
    state = grown(
        ("first", 0, SETTLED), ("second", 0, SETTLED), ("first", 2, CANDIDATE),
        ("second", 2, CANDIDATE),
    )  # fmt: skip
    assert spec.pools is not None
    assert levels(spec.pools.pools[0], state) == ["first", "second"]
    assert settle_due(spec, state) == ["first"]
    found = mixtures(spec, state)
    # The lower one knows the settled members only; the upper one that candidate, too.
    assert found["first"]["all"] == pytest.approx({"second@0": 1.0})
    assert found["second"]["all"] == pytest.approx({"first@2": 1.0})
    # Once it is settled it restarts on top.
    state.members["first@2"].state, state.settled_at["first"] = SETTLED, 3
    assert levels(spec.pools.pools[0], state) == ["second", "first"]


def test_a_league_plays_main_agents_as_they_are_now() -> None:
    learners = {"spy": {"kind": "main_exploiter"}}
    spec = job("main", "spy", algorithm="league", learners=learners)
    state = grown(("main", 0, SETTLED), ("spy", 0, SETTLED))
    found = mixtures(spec, state)
    assert found["spy"]["all"] == {"=main": 1.0}
    assert found["main"]["all"]["=main"] > 0
    assert sum(found["main"]["all"].values()) == pytest.approx(1.0)


def test_a_league_settles_a_member_that_beats_all_or_has_waited() -> None:
    learners = {"spy": {"kind": "main_exploiter"}}
    spec = job("main", "spy", algorithm="league", learners=learners, league={"freeze_after": 9})
    state = grown(("main", 0, SETTLED), ("spy", 0, SETTLED), ("main", 2, CANDIDATE))
    assert settle_due(spec, state) == ["main"]
    for counts in state.wins.values():
        counts[:] = [2, 0, 4]
    assert settle_due(spec, state) == []
    patient = job("main", "spy", algorithm="league", learners=learners, league={"freeze_after": 2})
    assert settle_due(patient, state) == ["main"]


def test_a_population_s_state_survives_writing_and_reading() -> None:
    state = grown(("player", 0, SETTLED), ("player", 2, CANDIDATE))
    state.history.append(solution(job("player"), state, 2))
    state.slots = {"all--0": ("player@0", 3)}
    state.attempts[0, 1] = 5
    fields = state.to_fields()
    written = dict(zip(fields[::2], fields[1::2], strict=True))
    assert PopulationState.from_fields(written).to_fields() == fields
