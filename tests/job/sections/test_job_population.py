"""`population` in a job: the policies that it adds, and refusals."""

from __future__ import annotations

from typing import Any, get_args

import pytest
import yaml

from troupe.job import JobSpecError, parse_job
from troupe.job.sections.population import MetaSolverName, WeightingName
from troupe.populations import MetaSolver, Weighting

MODEL: dict[str, Any] = {"model": {"path": "/models/player"}}


def job(**population: Any) -> dict[str, Any]:
    return {
        "name": "game",
        "workflow": "a.b:play",
        "tasks": {"source": "a.b:Tasks"},
        "agents": {"alice": {"policy": "player"}, "bob": {"policy": "player"}},
        "policies": {"player": MODEL},
        "pipeline": {"steps": 3, "queries_per_step": 4},
        "population": population,
    }


def fault(spec: dict[str, Any]) -> str:
    with pytest.raises(JobSpecError) as caught:
        parse_job(yaml.safe_dump(spec))
    return str(caught.value)


def test_slots_are_untrained_policies() -> None:
    spec = parse_job(yaml.safe_dump(job(slots=3, evaluation_slots=2)))
    assert spec.slots == ("all--0", "all--1", "all--2", "all--e0", "all--e1")
    assert spec.trained_policies == ["player"]
    assert spec.policies["all--0"].model == spec.policies["player"].model
    # The form that services exchange means the same.
    assert parse_job(spec.model_dump_json()) == spec


def test_a_learner_may_begin_with_an_optimizers_state() -> None:
    spec = job(slots=2)
    spec["policies"]["player"] = MODEL | {"init_from": {"job": "before", "optimizer": True}}
    found = parse_job(yaml.safe_dump(spec))
    # Services read it again, with the slots.
    assert parse_job(found.model_dump_json()) == found
    began = {name: one.init_from for name, one in found.policies.items()}
    assert [name for name, one in began.items() if one is None or one.job != "before"] == []
    assert [name for name, one in began.items() if one is not None and one.optimizer] == ["player"]
    # A restart would take this state again.
    said = fault(spec | {"population": {"slots": 2, "restart": "base"}})
    assert "policies.player.init_from.optimizer: each restart" in said


def test_a_change_of_a_slot_is_refused() -> None:
    """It would be silently without effect, since slots follow from their learners."""
    text = parse_job(yaml.safe_dump(job(slots=2))).model_dump_json()  # as it is stored
    for path in ("policies.all--1.engine.replicas", "policies.all--1.engine"):
        value = "2" if path.endswith("replicas") else "{replicas: 2}"
        with pytest.raises(JobSpecError) as caught:
            parse_job(text, overrides={path: value})
        assert f"{path} = {value}: is of a slot" in str(caught.value)
        assert "population.engine" in str(caught.value)
    spec = parse_job(text, overrides={"policies.player.engine.replicas": "2"})
    assert spec.policies["player"].engine.replicas == 2


def test_players_of_other_policies_have_pools_of_their_own() -> None:
    spec = job(slots=1)
    spec["policies"]["rival"] = MODEL
    spec["agents"]["bob"]["policy"] = "rival"
    pools = parse_job(yaml.safe_dump(spec)).pools
    assert pools is not None
    assert not pools.symmetric
    assert [(pool.name, pool.learners, pool.slots) for pool in pools.pools] == [
        ("alice", ("player",), ("alice--0",)),
        ("bob", ("rival",), ("bob--0",)),
    ]
    assert pools.places == (("player", ("alice",)), ("rival", ("bob",)))


def test_a_league_has_learners_that_no_agent_names() -> None:
    spec = job(algorithm="league", symmetric=True, learners={"spy": {"kind": "main_exploiter"}})
    spec["policies"]["spy"] = MODEL
    spec["algorithm"] = {"normalize": "constant"}
    found = parse_job(yaml.safe_dump(spec))
    assert found.pools is not None
    assert found.pools.seats["spy"] == ("alice", "bob")
    assert found.constant_tokens("spy") == found.constant_tokens("player")


@pytest.mark.parametrize(
    ("population", "says"),
    [
        ({"slots": 1}, "population.slots: 1 cannot serve a match of 2 players"),
        ({"learners": {"nobody": {}}}, "population.learners.nobody: is not a trained policy"),
        ({"learners": {"player": {"kind": "main_exploiter"}}}, "exploiters need a league"),
        (
            {"restart": "base", "algorithm": "self_play"},
            "restart: `self_play` continues one policy",
        ),
        (
            {"stop": {"improvement": 0.1}, "algorithm": "self_play", "matches": {"least": 0}},
            "stop.improvement: needs payoffs",
        ),
        ({"matches": {"least": 0}}, "`psro` chooses opponents by payoffs"),
        ({"stop": {"nash_conv": 0.1}}, "stop.nash_conv: is known only for OpenSpiel games"),
        (
            {"game": "kuhn_poker", "algorithm": "league", "matches": {"least": 0}},
            "`league` chooses opponents by payoffs",
        ),
        ({"learners": {"player": {"agents": ["carol"]}}}, "'carol' is not a player"),
        (
            {"learners": {"player": {"agents": ["alice", "alice"]}}},
            "population.learners.player.agents: 'alice' is named twice",
        ),
        ({"algorithm": "regularized"}, "population.algorithm: 'player' has no regularizer"),
        ({"game": ""}, "population.game = ''"),
        (
            {"engine": {"kind": "sglang", "urls": ["http://a:1"]}, "slots": 2},
            "cannot be divided evenly",
        ),
    ],
)
def test_populations_that_cannot_play_are_refused(population: dict[str, Any], says: str) -> None:
    assert says in fault(job(**population))


def test_a_game_of_one_agent_is_refused() -> None:
    spec = job()
    del spec["agents"]["bob"]
    assert "only alice has a trained policy" in fault(spec)


def test_with_a_game_payoffs_are_computed_unless_wins_are_asked_for() -> None:
    for algorithm, plays in (("psro", False), ("league", True), ("prioritized", True)):
        spec = parse_job(yaml.safe_dump(job(game="kuhn_poker", algorithm=algorithm)))
        assert spec.population is not None
        assert spec.population.plays_matches is plays
    parse_job(yaml.safe_dump(job(game="kuhn_poker", matches={"least": 0})))


@pytest.mark.parametrize(
    ("bob", "says"),
    [
        ({"sampling": {"top_p": 0.9}}, "agents.bob.sampling: with `population.game`"),
        ({"sampling": {"temperature": 0}}, "agents.bob.sampling: with `population.game`"),
        ({"system_prompt": "bluff"}, "agents.bob: with `population.game` all agents of a pool"),
    ],
)
def test_agents_of_a_game_must_be_computable_by_their_policy(
    bob: dict[str, Any], says: str
) -> None:
    spec = job(game="kuhn_poker")
    spec["agents"]["bob"] |= bob
    assert says in fault(spec)


def test_an_agent_outside_the_game_is_refused() -> None:
    spec = job(game="kuhn_poker")
    spec["policies"]["umpire"] = MODEL | {"trainable": False}
    spec["agents"]["umpire"] = {"policy": "umpire"}
    assert "'umpire' is not a player" in fault(spec)


def test_a_slot_cannot_be_declared_by_the_user() -> None:
    spec = job()
    spec["policies"]["all--0"] = MODEL
    assert "policies.all--0: is a slot" in fault(spec)


@pytest.mark.parametrize("by", ["kl_coefficient", "entropy_coefficient"])
def test_regularized_play_is_accepted_with_a_kl_or_entropy_term(by: str) -> None:
    spec = job(algorithm="regularized")
    spec["algorithm"] = {by: 0.1}
    assert parse_job(yaml.safe_dump(spec)).pools is not None


def test_slots_serve_one_architecture() -> None:
    spec = job(symmetric=True)
    spec["policies"]["rival"] = {"model": {"path": "/models/other"}}
    spec["agents"]["bob"]["policy"] = "rival"
    assert "their models differ" in fault(spec)


def test_a_step_has_a_query_for_every_learner() -> None:
    spec = job(symmetric=False)
    spec["pipeline"]["queries_per_step"] = 1
    assert "pipeline.queries_per_step: 1 cannot give each of 2" in fault(spec)


def test_names_of_meta_solvers_equal_the_solvers_own() -> None:
    assert get_args(MetaSolverName) == get_args(MetaSolver)
    assert get_args(WeightingName) == get_args(Weighting)


def test_every_learner_of_an_agent_has_its_teacher() -> None:
    """Also a learner that no agent names: without rewards it would learn nothing."""
    spec = job(symmetric=True, learners={"spy": {"agents": ["alice"]}})
    spec["policies"] |= {"spy": MODEL, "wise": MODEL | {"trainable": False}}
    spec["algorithm"] = {"distillation": {"teachers": {"alice": "wise"}}}
    found = parse_job(yaml.safe_dump(spec))
    assert {name: found.teachers_of(name) for name in found.policies} == {
        **dict.fromkeys(found.policies, ()),
        "player": ("wise",),
        "spy": ("wise",),
    }
    spec["population"]["learners"]["spy"]["agents"] = ["bob"]
    assert parse_job(yaml.safe_dump(spec)).teachers_of("spy") == ()


def test_a_slot_is_no_frozen_policy_of_the_job() -> None:
    spec = job()
    spec["algorithm"] = {"distillation": {"teachers": {"alice": "all--0"}}}
    assert "distillation.teachers.alice: 'all--0' is a slot" in fault(spec)
    del spec["algorithm"]
    by = {"queries": 1, "by": "all--0", "agents": ["alice"]}
    spec["evaluation"] = {"queries": 2, "contributions": by}
    assert "evaluation.contributions.by: 'all--0' is a slot" in fault(spec)


@pytest.mark.parametrize("who", ["slot", "learner"])
def test_engines_of_all_who_play_an_agent_report_its_log_probs(who: str) -> None:
    spec = job(symmetric=True, learners={"spy": {}})
    spec["policies"]["spy"] = MODEL
    spec["agents"]["alice"]["sampling"] = {"top_p": 0.9}
    assert parse_job(yaml.safe_dump(spec))
    if who == "slot":
        spec["population"]["engine"] = {"kind": "vllm"}
    else:
        spec["policies"]["spy"] = MODEL | {"engine": {"kind": "vllm"}}
        spec["policies"]["spy"]["model"] = MODEL["model"] | {"dtype": "float32"}
    name = {"slot": "all--0", "learner": "spy"}[who]
    assert f"agents.alice.sampling.logprobs: engines of kind `vllm`, which `{name}`" in fault(spec)
