"""Populations: pools grow, payoffs fill, opponents are drawn, and a resume changes nothing."""

from __future__ import annotations

import asyncio
import shutil

import pytest
from redis.asyncio import Redis

from services.orchestrator.state.redis import JobKeys
from tests.orchestrator.playing import (
    MATCHES,
    game,
    lasting,
    matches,
    newer_wins,
    population,
)
from tests.support.cluster import Cluster, job_yaml
from tests.support.waiting import PATIENCE, until
from troupe.rpc import FailedPrecondition, InvalidArgument, NotFound
from troupe.v1 import common_pb2 as common_pb
from troupe.v1 import orchestrator_pb2 as orchestrator_pb
from troupe.v1 import rollout_pb2 as rollout_pb


async def test_psro_from_first_versions_to_a_payoff_table(cluster: Cluster) -> None:
    newer_wins(cluster)
    job_id = await cluster.submit(game())
    job = await cluster.wait(job_id)
    assert job.state == common_pb.JOB_STATE_SUCCEEDED, job.problem
    await cluster.check_accounts(job_id, 4, ["player"])
    found = await population(cluster, job_id)
    (pool,) = found.pools
    assert [(m.member_id, m.parent, m.step, m.iteration) for m in pool.members] == [
        ("player@0", "", 0, 0),
        ("player@2", "player@0", 2, 1),
        ("player@4", "player@2", 4, 2),
    ]
    assert {m.state for m in pool.members} == {orchestrator_pb.MEMBER_STATE_SETTLED}
    # All pairs, those with themselves included, each four times.
    assert [tuple(cell.members) for cell in found.cells] == [
        (0, 0), (0, 1), (0, 2), (1, 1), (1, 2), (2, 2),
    ]  # fmt: skip
    assert {cell.matches for cell in found.cells} == {4}
    assert found.matches_played == 24
    assert found.cells[1].mean[1] == pytest.approx(1.0, abs=0.05)
    # The newest member is best against all.
    assert [dict(one.mixtures[0].probabilities) for one in found.history] == [
        {"player@0": 1.0},
        {"player@2": 1.0},
        {"player@4": 1.0},
    ]
    assert found.history[1].gains[0] == pytest.approx(1.0, abs=0.1)
    ratings = {one.member_id: one.mean for one in found.ratings}
    assert ratings["player@0"] < ratings["player@2"] < ratings["player@4"]
    # Users may generate with it, and with a slot's member, after it has ended.
    for policy in ("player", "all--0"):
        await cluster.api.GeneratePolicy(
            orchestrator_pb.GeneratePolicyRequest(job_id=job_id, policy=policy, input_ids=[1]),
            timeout=PATIENCE,
        )
    # Training: the learner on one side, a member on the other, in turn on either.
    train = [t for t in cluster.rollouts[0].tickets if t.purpose == rollout_pb.Ticket.PURPOSE_TRAIN]
    assert {tuple(ticket.learners) for ticket in train} == {("player",)}
    sides = [[a for a, p in sorted(t.cast.items()) if p == "player"] for t in train]
    assert sorted({tuple(side) for side in sides}) == [("alice",), ("bob",)]
    by_query: dict[str, set[str]] = {}
    for ticket in train:
        by_query.setdefault(ticket.query_id, set()).add(str(sorted(ticket.cast.items())))
    assert all(len(casts) == 1 for casts in by_query.values()), "a group shares its cast"


async def test_matches_are_listed_and_can_be_watched(cluster: Cluster) -> None:
    newer_wins(cluster)
    job_id = await cluster.submit(game())
    await cluster.wait(job_id)
    found = await matches(cluster, job_id)
    assert len(found) == 24 == len({one.trajectory_id for one in found})
    assert found[0].iteration == 2
    assert set(found[-1].members.values()) == {"player@0"}
    own = await matches(cluster, job_id, member_id="player@4")
    assert len(own) == 12
    watched = await cluster.api.GetTrajectory(
        orchestrator_pb.GetTrajectoryRequest(job_id=job_id, trajectory_id=own[0].trajectory_id)
    )
    assert {turn.policy for turn in watched.turns} <= {"all--0", "all--1"}
    # Both sat on both sides.
    mixed = [one for one in own if len(set(one.members.values())) == 2]
    assert {one.members["alice"] for one in mixed} >= {"player@4", "player@2"}
    files = [
        chunk.path
        async for chunk in cluster.api.ExportMember(
            orchestrator_pb.ExportMemberRequest(job_id=job_id, member_id="player@2")
        )
    ]
    assert files == ["model.safetensors"]
    with pytest.raises(NotFound) as caught:
        async for _ in cluster.api.ExportMember(
            orchestrator_pb.ExportMemberRequest(job_id=job_id, member_id="player@9")
        ):
            pass
    assert caught.value.kind == "member_not_found"
    with pytest.raises(NotFound, match=r"player@0, player@2, player@4") as caught:
        await matches(cluster, job_id, member_id="player@9")
    assert caught.value.kind == "member_not_found"


@pytest.mark.parametrize("apart", [False, pytest.param(True, marks=pytest.mark.slow)])
async def test_a_killed_orchestrator_changes_nothing(cluster: Cluster, apart: bool) -> None:
    """Payoffs, meta-strategies and casts equal an undisturbed run's, bit for bit."""
    newer_wins(cluster)
    section = {"algorithm": "psro", "iteration_steps": 1, "matches": {"least": 6}}
    section |= {"evaluation_slots": 2 if apart else 0, "redraw_steps": 1}
    quiet = await cluster.submit(game("quiet", population=section))
    assert (await cluster.wait(quiet)).state == common_pb.JOB_STATE_SUCCEEDED
    expected = await population(cluster, quiet)
    cluster.rollouts[0].script.seconds = 0.02
    troubled = await cluster.submit(game("troubled", population=section))
    seen = set()
    for number in range(3, 40, 7):

        async def played(count: int = number) -> bool:
            tickets = cluster.rollouts[0].tickets
            return sum(t.purpose == rollout_pb.Ticket.PURPOSE_MATCH for t in tickets) >= count

        cluster.rollouts[0].tickets.clear()
        for _ in range(500):
            if (
                await played()
                or (await cluster.job(troubled)).state == common_pb.JOB_STATE_SUCCEEDED
            ):
                break
            await asyncio.sleep(0.01)
        seen.add((await cluster.job(troubled)).step)
        await cluster.stop_orchestrator()
        await cluster.start_orchestrator()
    job = await cluster.wait(troubled)
    assert job.state == common_pb.JOB_STATE_SUCCEEDED, job.problem
    assert len(seen) > 1, "it was killed in more than one iteration"
    found = await population(cluster, troubled)
    assert lasting(found) == lasting(expected)
    ended = await matches(cluster, troubled)
    assert len(ended) == found.matches_played == len({one.trajectory_id for one in ended})


async def test_an_evaluator_that_dies_leaves_no_half_match(cluster: Cluster) -> None:
    newer_wins(cluster)
    first = cluster.rollouts[0]
    first.script.break_after, first.script.die = 3, True
    job_id = await cluster.submit(game())

    async def one_is_due() -> bool:
        """Three of the first four have ended for good, and the last one is not played."""
        return (await population(cluster, job_id)).matches_due == 1

    await until(one_is_due)
    second = await cluster.add_rollout()
    second.keys, second.script.reward = first.keys, first.script.reward
    cluster.rollouts[0] = second
    second.keys = {}
    newer_wins(cluster)
    job = await cluster.wait(job_id)
    assert job.state == common_pb.JOB_STATE_SUCCEEDED, job.problem
    found = await population(cluster, job_id)
    assert {cell.matches for cell in found.cells} == {4}
    cluster.rollouts.append(first)


async def test_a_member_whose_weights_are_gone_is_named(cluster: Cluster) -> None:
    newer_wins(cluster)
    text = game(population={"iteration_steps": 1, "matches": MATCHES}, pipeline__steps=6)
    cluster.rollouts[0].script.seconds = 0.1
    job_id = await cluster.submit(text)
    await cluster.until(job_id, lambda job: job.step >= 1)
    shutil.rmtree(cluster.directory / job_id / "members")
    job = await cluster.wait(job_id)
    assert job.state == common_pb.JOB_STATE_FAILED
    assert job.problem.kind == "member_gone"
    assert job.problem.value.startswith("player@")


async def test_a_game_that_is_not_zero_sum_is_told_to_the_solver_of_those(
    cluster: Cluster,
) -> None:
    newer_wins(cluster, zero_sum=False)
    section = {"iteration_steps": 1, "matches": MATCHES, "meta_solver": "zero_sum_nash"}
    job_id = await cluster.submit(game(population=section))
    job = await cluster.wait(job_id)
    assert job.state == common_pb.JOB_STATE_FAILED
    assert (job.problem.kind, job.problem.field) == ("not_zero_sum", "population.meta_solver")


async def test_equal_payoffs_are_an_equilibrium_that_ends_the_job(cluster: Cluster) -> None:
    for worker in cluster.rollouts:
        worker.script.reward = lambda ticket: {"alice": 0.0, "bob": 0.0}
    stop = {"improvement": 0.0, "patience": 1}
    section = {"iteration_steps": 1, "matches": MATCHES, "stop": stop}
    job_id = await cluster.submit(game(population=section))
    job = await cluster.wait(job_id)
    assert job.state == common_pb.JOB_STATE_SUCCEEDED
    # No member gains anything: it ends before all steps are done.
    assert job.step == 1
    assert "0 more" in (await population(cluster, job_id)).stopped


@pytest.mark.slow
async def test_retired_versions_are_kept_while_they_may_be_drawn(cluster: Cluster) -> None:
    """Payoffs come an iteration late: whom learners below have replaced is met until then."""
    for worker in cluster.rollouts:
        worker.script.reward = lambda ticket: {"alice": 0.0, "bob": 0.0}
    section = {
        "algorithm": "pipeline_psro",
        "symmetric": True,
        "learners": {"third": {"agents": ["alice", "bob"]}},
        "iteration_steps": 2,
        "redraw_steps": 1,
        "meta_solver": "uniform",
        "matches": {"least": 2},
        "slots": 12,
        "evaluation_slots": 2,
    }
    text = job_yaml(
        policies=["player", "other", "third"],
        agents={"alice": {"policy": "player"}, "bob": {"policy": "other"}},
        pipeline__steps=10,
        pipeline__queries_per_step=4,
        population=section,
    )
    job = await cluster.wait(job_id := await cluster.submit(text))
    assert job.state == common_pb.JOB_STATE_SUCCEEDED, job.problem
    members = (await population(cluster, job_id)).pools[0].members
    retired = {m.member_id for m in members if m.state == orchestrator_pb.MEMBER_STATE_RETIRED}
    folder = cluster.directory / job_id / "members"
    kept = {f"{path.parent.name}@{path.name[1:]}" for path in folder.glob("*/v*")}
    assert kept >= {m.member_id for m in members} - retired
    assert kept != {m.member_id for m in members}, "what nobody plays any more is gone"


async def test_a_complete_population_is_not_resumed_for_nothing(cluster: Cluster) -> None:
    newer_wins(cluster)
    section = {"iteration_steps": 1, "matches": MATCHES, "stop": {"iterations": 1}}
    job_id = await cluster.submit(game(population=section))
    job = await cluster.wait(job_id)
    assert (job.state, job.step) == (common_pb.JOB_STATE_SUCCEEDED, 1), job.problem
    changes: list[dict[str, str]] = [
        {},
        {"pipeline.steps": "9"},
        {"population.engine": "{replicas: 2}"},
        {"population.stop.patience": "3"},
    ]
    for overrides in changes:
        with pytest.raises(FailedPrecondition, match="would be again: 1 iterations") as refused:
            await cluster.resume(job_id, overrides=overrides)
        assert (refused.value.kind, refused.value.field) == ("nothing_left", "population.stop")
    await cluster.resume(job_id, overrides={"population.stop.iterations": "5"})
    job = await cluster.wait(job_id)
    assert (job.state, job.step) == (common_pb.JOB_STATE_SUCCEEDED, 4), job.problem
    # All steps are done, whatever the population's rule.
    with pytest.raises(FailedPrecondition, match="all of its 4 steps"):
        await cluster.resume(job_id, overrides={"population.stop.iterations": "9"})


async def test_the_time_of_a_population_does_not_count_the_queue(cluster: Cluster) -> None:
    newer_wins(cluster)
    section = {"iteration_steps": 1, "matches": MATCHES, "stop": {"seconds": 0.001}}
    job_id = await cluster.submit(game(population=section))
    job = await cluster.wait(job_id)
    assert (job.state, job.step) == (common_pb.JOB_STATE_SUCCEEDED, 0), job.problem
    async with Redis.from_url(cluster.settings.redis_url) as redis:
        await redis.hset(JobKeys(job_id).record, "created_at", "1.0")  # it waited for long
    await cluster.resume(job_id, overrides={"population.stop.seconds": "1000000"})
    job = await cluster.wait(job_id)
    assert (job.state, job.step) == (common_pb.JOB_STATE_SUCCEEDED, 4), job.problem


@pytest.mark.parametrize("limit", [0.5, pytest.param(1.0, marks=pytest.mark.slow)])
async def test_matches_that_fail_too_often_fail_the_job(cluster: Cluster, limit: float) -> None:
    """Regardless of the limit: rounds in which all matches fail do not repeat forever."""

    def fail(ticket: rollout_pb.Ticket) -> str | None:
        return "the game broke" if ticket.purpose == rollout_pb.Ticket.PURPOSE_MATCH else None

    newer_wins(cluster)
    cluster.rollouts[0].script.fail = fail
    text = game(limits={"step_seconds": PATIENCE, "max_failed_fraction": limit})
    job = await cluster.wait(await cluster.submit(text))
    assert (job.state, job.problem.kind) == (common_pb.JOB_STATE_FAILED, "too_many_failed_matches")
    assert "the game broke" in job.problem.message


@pytest.mark.slow
async def test_a_complete_population_goes_on_where_a_resume_asks_for_more(
    cluster: Cluster,
) -> None:
    newer_wins(cluster)

    def fail(ticket: rollout_pb.Ticket) -> str | None:
        last = ticket.trajectory_id.endswith("-e1-t0")
        return "broken" if last and ticket.purpose == rollout_pb.Ticket.PURPOSE_EVALUATE else None

    def text(iterations: int) -> str:
        section = {"iteration_steps": 1, "matches": MATCHES, "stop": {"iterations": iterations}}
        return game(population=section, evaluation={"queries": 1})

    cluster.rollouts[0].script.fail = fail
    job_id = await cluster.submit(text(1))
    job = await cluster.wait(job_id)
    assert (job.state, job.step) == (common_pb.JOB_STATE_FAILED, 1), (
        "it was complete, and not evaluated"
    )
    assert (await population(cluster, job_id)).stopped == "1 iterations are over"
    await cluster.resume(job_id, text(3))
    job = await cluster.wait(job_id)
    assert (job.state, job.step) == (common_pb.JOB_STATE_SUCCEEDED, 3), job.problem
    assert (await population(cluster, job_id)).stopped == "3 iterations are over"


def published(cluster: Cluster) -> set[str]:
    """Members that the trainers' transfer layer holds."""
    return set().union(*(trainer.published for trainer in cluster.trainers))


@pytest.mark.slow
async def test_members_are_published_while_slots_are_served(cluster: Cluster) -> None:
    """After every kind of end of a job nothing of them is left in memory; their files stay."""
    newer_wins(cluster)
    done = await cluster.submit(game())
    assert (await cluster.wait(done)).state == common_pb.JOB_STATE_SUCCEEDED
    assert not published(cluster)
    await cluster.api.GeneratePolicy(
        orchestrator_pb.GeneratePolicyRequest(job_id=done, policy="all--0", input_ids=[1]),
        timeout=PATIENCE,
    )
    assert not published(cluster), "what was published to be talked to"
    cluster.rollouts[0].script.seconds = 0.05
    for end in (cluster.pause, cluster.cancel):
        job_id = await cluster.submit(game(pipeline__steps=50))
        await cluster.until(job_id, lambda job: job.step >= 1)
        assert published(cluster)
        await end(job_id)
        await cluster.wait(job_id, (common_pb.JOB_STATE_PAUSED, common_pb.JOB_STATE_CANCELLED))
        assert not published(cluster)
        if end == cluster.pause:
            await cluster.cancel(job_id)
    assert {path.name for path in (cluster.directory / done / "members" / "player").iterdir()}


async def test_a_match_that_was_aborted_is_played_again(cluster: Cluster) -> None:
    """Under the same id, while the stream that it ended in has other matches yet, or none."""
    newer_wins(cluster)
    cluster.rollouts[0].script.seconds = 0.2
    cluster.rollouts[0].script.linger_seconds = 0.15
    cluster.rollouts[0].script.abort = {"m0x0-t1": 1, "m0x1-t2": 2}
    job_id = await cluster.submit(game())
    job = await cluster.wait(job_id)
    assert job.state == common_pb.JOB_STATE_SUCCEEDED, job.problem
    assert not any(cluster.rollouts[0].script.abort.values())
    assert {cell.matches for cell in (await population(cluster, job_id)).cells} == {4}
    assert {one.state for one in await matches(cluster, job_id)} == {
        common_pb.TRAJECTORY_STATE_COMPLETED
    }


@pytest.mark.slow
async def test_a_pause_ends_the_last_round_of_matches(cluster: Cluster) -> None:
    newer_wins(cluster)
    section = {"iteration_steps": 2, "matches": {"least": 40}}
    job_id = await cluster.submit(game(pipeline__steps=2, population=section))
    await cluster.until(job_id, lambda job: job.step == 2)
    cluster.rollouts[0].script.seconds = 0.3
    assert (await cluster.pause(job_id)).state == common_pb.JOB_STATE_PAUSING
    await cluster.wait(job_id, [common_pb.JOB_STATE_PAUSED])
    cluster.rollouts[0].script.seconds = 0.0
    await cluster.resume(job_id)
    assert (await cluster.wait(job_id)).state == common_pb.JOB_STATE_SUCCEEDED
    assert {cell.matches for cell in (await population(cluster, job_id)).cells} == {40}


async def test_pages_of_matches(cluster: Cluster) -> None:
    newer_wins(cluster)
    job_id = await cluster.submit(game())
    await cluster.wait(job_id)
    assert len(await matches(cluster, job_id)) == 24
    for token in ("m0x0-t0", "5:nobody", "-1:m0x0-t0", "9" * 40 + ":x"):
        with pytest.raises(InvalidArgument) as caught:
            await cluster.api.ListMatches(
                orchestrator_pb.ListMatchesRequest(job_id=job_id, page_token=token)
            )
        assert caught.value.field == "page_token"


async def test_a_job_without_a_population_says_so(cluster: Cluster) -> None:
    job_id = await cluster.submit(job_yaml())
    with pytest.raises(NotFound) as caught:
        await population(cluster, job_id)
    assert caught.value.kind == "no_population"
