"""Populations in a game whose tree is walked: exact payoffs, NashConv, and no matches."""

from __future__ import annotations

from typing import Any

import pytest

from examples.self_play.kuhn import workflow
from services.orchestrator.populations import exact
from tests.orchestrator.playing import game, lasting, population
from tests.support.cluster import Cluster, job_yaml
from tests.support.waiting import PATIENCE, until
from troupe.populations import enumerated
from troupe.populations.enumerated import Enumeration
from troupe.populations.tree import agent_values, mixed
from troupe.rpc import Unavailable
from troupe.v1 import common_pb2 as common_pb
from troupe.v1 import orchestrator_pb2 as orchestrator_pb
from troupe.v1 import rollout_pb2 as rollout_pb
from troupe.workflow.environments import GameWorkflow

# Chances to bet at an equilibrium of Kuhn poker (Kuhn 1950, alpha = 0); else it is passed.
BETS = {
    "queen pass bet": 1 / 3,
    "king pass bet": 1.0,
    "jack pass": 1 / 3,
    "queen bet": 1 / 3,
    "king pass": 1.0,
    "king bet": 1.0,
}
LAST = 4
SECTION = {"algorithm": "psro", "iteration_steps": 2, "game": "kuhn_poker"}


def bets(version: int, text: str) -> float:
    """A policy that plays at random at first, and an equilibrium as version 4."""
    learned = min(version / LAST, 1.0)
    return (1 - learned) / 2 + learned * BETS.get(text, 0.0)


def say(version: int, prompt: rollout_pb.ScorePrompt) -> list[float]:
    """One answer in ten is not a move."""
    chance = bets(version, prompt.messages[-1].content)
    names = [one.text for one in prompt.continuations]
    assert names == ["Pass", "Bet"]
    return [0.9 * (1 - chance), 0.9 * chance]


def plans(tree: Enumeration, version: int) -> list[Any]:
    """The same without a cluster; illegal answers become random moves."""
    chances = [
        0.9 * bets(version, str(question.messages[-1]["content"])) for question in tree.questions
    ]
    return tree.plans(tree.behaviours([{0: 0.9 - p, 1: p} for p in chances]))


@pytest.fixture
def kuhn(cluster: Cluster) -> Cluster:
    cluster.rollouts[0].script.workflow, cluster.rollouts[0].script.score = workflow, say
    cluster.rollouts[0].script.reward = lambda ticket: {"alice": 0.0, "bob": 0.0}
    return cluster


async def test_payoffs_are_computed_and_the_job_stops_near_an_equilibrium(kuhn: Cluster) -> None:
    tree = Enumeration.of(workflow.make(), workflow.rules)  # type: ignore[arg-type]
    own = [plans(tree, version) for version in (0, 2, 4)]
    gaps = [tree.form.nash_conv(one) for one in own]
    assert gaps[0] > gaps[1] > gaps[2] > 0
    stop = {"nash_conv": (gaps[1] + gaps[2]) / 2}
    job_id = await kuhn.submit(game(population=SECTION | {"stop": stop}, pipeline__steps=8))
    job = await kuhn.wait(job_id, seconds=PATIENCE)
    assert job.state == common_pb.JOB_STATE_SUCCEEDED, job.problem
    assert job.step == LAST, "it is over before all steps are"
    found = await population(kuhn, job_id)
    assert "NashConv is" in found.stopped
    assert (found.matches_played, found.matches_due) == (0, 0)
    assert len(found.cells) == 6
    assert all(cell.exact and cell.half_width == 0 for cell in found.cells)
    for cell in found.cells:
        expected = agent_values(tree.form, [own[place] for place in cell.members])
        assert list(cell.mean) == pytest.approx(list(expected))
    for solved in found.history:
        shares = dict(solved.mixtures[0].probabilities)
        members = [own[int(name.rpartition("@")[2]) // 2] for name in shares]
        played = mixed(members, list(shares.values()))
        assert solved.nash_conv == pytest.approx(tree.form.nash_conv(played))
    assert found.history[0].nash_conv == pytest.approx(gaps[0])
    metrics = await kuhn.api.ListMetrics(orchestrator_pb.ListMetricsRequest(job_id=job_id))
    row = max(metrics.rows, key=lambda one: one.step)
    assert "population/nash_conv" in row.values
    # Everybody is asked once, under the version of the slot; prompts are the job's own.
    assert kuhn.rollouts[0].calls["Score"] == 3
    assert kuhn.rollouts[0].calls["DescribeGame"] == 1


async def test_a_killed_orchestrator_computes_with_the_same_answers(kuhn: Cluster) -> None:
    section = SECTION | {"iteration_steps": 1, "evaluation_slots": 2}
    quiet = await kuhn.submit(game("quiet", population=section))
    assert (await kuhn.wait(quiet, seconds=PATIENCE)).state == common_pb.JOB_STATE_SUCCEEDED
    expected = await population(kuhn, quiet)
    assert len(expected.history) == 5
    worker = kuhn.rollouts[0]
    worker.calls.clear()
    worker.script.score_seconds = 0.05
    troubled = await kuhn.submit(game("troubled", population=section))
    killed_in = []
    for asked in (1, 4):
        await until(lambda least=asked: worker.calls["Score"] >= least)  # type: ignore[misc]
        killed_in.append((await kuhn.job(troubled)).state)
        await kuhn.stop_orchestrator()
        await kuhn.start_orchestrator()
    job = await kuhn.wait(troubled, seconds=PATIENCE)
    assert job.state == common_pb.JOB_STATE_SUCCEEDED, job.problem
    assert common_pb.JOB_STATE_SUCCEEDED not in killed_in
    assert lasting(await population(kuhn, troubled)) == lasting(expected)
    assert worker.calls["Score"] <= 5 + len(killed_in), "what was kept is not asked again"


async def test_members_of_two_pools_that_stay_on_their_seats(
    kuhn: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine that is away once costs time only; a long game is asked about in several calls."""
    monkeypatch.setattr(exact, "_CALL_CHARACTERS", 700)
    faults = [Unavailable("the engine died")]

    def once(version: int, prompt: rollout_pb.ScorePrompt) -> list[float]:
        if faults:
            raise faults.pop()
        return say(version, prompt)

    kuhn.rollouts[0].script.score = once
    kuhn.rollouts[0].script.workflow = GameWorkflow(
        workflow.make, rules=workflow.rules, permute=False
    )
    tree = Enumeration.of(workflow.make(), workflow.rules)  # type: ignore[arg-type]
    own = [plans(tree, version) for version in (0, 2)]
    agents = {"alice": {"policy": "player"}, "bob": {"policy": "rival"}}
    text = job_yaml(
        "two",
        policies=["player", "rival"],
        agents=agents,
        population=SECTION | {"slots": 1},
        pipeline__steps=2,
        pipeline__queries_per_step=4,
    )
    job_id = await kuhn.submit(text)
    job = await kuhn.wait(job_id, seconds=PATIENCE)
    assert job.state == common_pb.JOB_STATE_SUCCEEDED, job.problem
    found = await population(kuhn, job_id)
    assert len(found.cells) == 4
    assert kuhn.rollouts[0].calls["Score"] > 1 + 4 * 2
    for cell in found.cells:
        first, second = cell.members
        expected = tree.form.values([own[first][0], own[second][1]])
        assert list(cell.mean) == pytest.approx(list(expected))
    both = [own[0][0], own[0][1]]
    assert found.history[0].nash_conv == pytest.approx(tree.form.nash_conv(both))


@pytest.mark.parametrize("reason", ["unknown", "another", "no game", "large", "no answers"])
async def test_a_game_that_cannot_be_enumerated_fails_the_job_by_name(
    kuhn: Cluster, monkeypatch: pytest.MonkeyPatch, reason: str
) -> None:
    name = {"unknown": "no_such_game", "another": "leduc_poker"}.get(reason, "kuhn_poker")
    if reason == "large":
        monkeypatch.setattr(enumerated, "MAX_HISTORIES", 20)
    if reason == "no game":
        kuhn.rollouts[0].script.workflow = say
    if reason == "no answers":
        kuhn.rollouts[0].script.score = lambda version, prompt: [0.9, 0.9]
    job = await kuhn.wait(
        await kuhn.submit(game(population=SECTION | {"game": name})), seconds=PATIENCE
    )
    assert job.state == common_pb.JOB_STATE_FAILED
    assert (job.problem.kind, job.problem.field) == ("game_not_enumerable", "population.game")
    said = {
        "unknown": "no such game",
        "another": "plays kuhn_poker",
        "no game": "is no GameWorkflow",
        "large": "more than 20 nodes",
        "no answers": "player@0",
    }
    assert said[reason] in job.problem.message
