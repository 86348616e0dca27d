"""Populations of every kind, as whole jobs: real engines, real steps, one cluster for all."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress

import pytest

from tests.e2e.populated import (
    TABLES,
    check_population,
    match_seats,
    population_job,
    training_casts,
)
from tests.e2e.standing import Standing, ended, stand_up, until_job
from tests.support.waiting import PATIENCE
from troupe.client import AsyncClient, AsyncJobHandle
from troupe.client.records.jobs import JobState
from troupe.rpc import TroupeError

pytestmark = pytest.mark.slow
CORRECTED = {"algorithm": {"advantage": "rae", "correction": "truncated"}}
TWO = {"alice": "player", "bob": "player"}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Standing]:
    with stand_up(tmp_path_factory.mktemp("populations")) as standing:
        yield standing


@pytest.fixture
async def client(cluster: Standing) -> AsyncIterator[AsyncClient]:
    async with cluster.client() as client:
        yield client


async def test_a_league_of_main_agent_and_exploiters(
    cluster: Standing, client: AsyncClient
) -> None:
    text = population_job(
        cluster.models,
        TWO,
        others=["spy", "hunter"],
        pipeline={"queries_per_step": 6},
        algorithm="league",
        learners={"spy": {"kind": "main_exploiter"}, "hunter": {"kind": "league_exploiter"}},
        league={"freeze_after": 2},
    )
    end = await ended(await client.submit(text))
    found = await check_population(end, cluster.data_dir)
    members = found.pools[0].members
    assert {one.kind for one in members} == {"main", "main_exploiter", "league_exploiter"}
    # After two iterations at the latest everybody was due, and who had only been new retired.
    for learner in ("player", "spy", "hunter"):
        own = [one for one in members if one.learner == learner]
        assert own[0].state == "settled"
        assert sum(one.state == "settled" for one in own[1:]) >= 1
        assert all(one.state in ("settled", "retired") for one in own[:-1])
    casts = await training_casts(end)
    # A main exploiter meets the main agent as it is now, which lends it no samples.
    assert {"spy", "player"} in [set(cast.values()) for cast in casts]
    for learner in ("player", "spy", "hunter"):
        assert {a for cast in casts for a, p in cast.items() if p == learner} == {"alice", "bob"}


async def test_two_best_responses_of_a_pipeline(cluster: Standing, client: AsyncClient) -> None:
    text = population_job(
        cluster.models,
        TWO,
        others=["second"],
        pipeline={"steps": 3},
        algorithm="pipeline_psro",
        meta_solver="uniform",
    )
    end = await ended(await client.submit(text))
    found = await check_population(end, cluster.data_dir)
    settled = [one for one in found.pools[0].members if one.state == "settled"]
    # The lowest is settled after every iteration, and restarts on top.
    assert [(one.learner, one.iteration) for one in settled if one.iteration] == [
        ("player", 1),
        ("second", 2),
        ("player", 3),
    ]
    assert len(found.history) == 4


async def test_three_players(cluster: Standing, client: AsyncClient) -> None:
    text = population_job(
        cluster.models,
        {"ann": "player", "ben": "player", "cid": "player"},
        workflow=TABLES + "three",
        pipeline={"queries_per_step": 6},
        slots=3,
        matches={"least": 9},
    )
    end = await ended(await client.submit(text))
    found = await check_population(end, cluster.data_dir)
    assert [one.id for one in found.pools[0].members] == ["player@0", "player@1", "player@2"]
    assert len(found.cells) == 10
    sat = match_seats(await end.handle.matches(limit=1000))
    for member in ("player@0", "player@1", "player@2"):
        assert len({sat[member, agent] for agent in found.agents}) == 1, "each seat equally often"
    casts = await training_casts(end)
    assert all(list(cast.values()).count("player") <= 1 for cast in casts)
    assert {a for cast in casts for a, p in cast.items() if p == "player"} == set(found.agents)


async def test_two_roles_that_are_not_the_same_in_mode_async(
    cluster: Standing, client: AsyncClient
) -> None:
    text = population_job(
        cluster.models,
        {"first": "opener", "second": "answerer"},
        workflow=TABLES + "sides",
        pipeline={"mode": "async", "alpha": 1, "steps": 4},
        changes=CORRECTED,
        iteration_steps=2,
        redraw_steps=1,
        slots=1,
    )
    end = await ended(await client.submit(text))
    found = await check_population(end, cluster.data_dir)
    assert [pool.name for pool in found.pools] == ["first", "second"]
    assert [[one.id for one in pool.members] for pool in found.pools] == [
        ["opener@0", "opener@2", "opener@4"],
        ["answerer@0", "answerer@2", "answerer@4"],
    ]
    assert len(found.cells) == 9
    casts = await training_casts(end)
    sides = {tuple(sorted(cast.items())) for cast in casts if len(cast) == 2}
    # Each learns on its own side against members of the other.
    assert sides == {
        (("first", "opener"), ("second", "second--0")),
        (("first", "first--0"), ("second", "answerer")),
    }


async def test_matches_beside_asynchronous_training(cluster: Standing, client: AsyncClient) -> None:
    text = population_job(
        cluster.models,
        TWO,
        pipeline={"mode": "async", "alpha": 1, "steps": 4},
        changes=CORRECTED,
        algorithm="prioritized",
        iteration_steps=2,
        evaluation_slots=2,
    )
    end = await ended(await client.submit(text))
    found = await check_population(end, cluster.data_dir)
    assert [one.id for one in found.pools[0].members] == ["player@0", "player@2", "player@4"]
    sat = match_seats(await end.handle.matches(limit=1000))
    assert sat["player@0", "alice"] == sat["player@0", "bob"]


async def test_workers_that_die_and_a_pause_cost_no_match(
    cluster: Standing, client: AsyncClient
) -> None:
    """A league whose evaluator, trainer and orchestrator are killed, and which is paused."""
    text = population_job(
        cluster.models,
        TWO,
        others=["spy"],
        pipeline={"steps": 3},
        algorithm="league",
        learners={"spy": {"kind": "main_exploiter"}},
        league={"freeze_after": 1},
        matches={"least": 12},
    )
    handle = await client.submit(text)
    for number, service in enumerate(("rollout-0", "trainer-0", "orchestrator", "rollout-0")):
        await played(handle, 20 * number + 1)
        cluster.kill(service)
    await played(handle, 90)
    await handle.pause()
    await until_job(handle, lambda job: job.state in (JobState.PAUSED, JobState.SUCCEEDED))
    if (await handle.info()).state == JobState.PAUSED:
        await handle.resume()
    end = await ended(handle)
    found = await check_population(end, cluster.data_dir)
    assert {cell.matches for cell in found.cells} == {12}


async def played(handle: AsyncJobHandle, least: int) -> None:
    """Wait until this number of matches is counted or known to have ended."""
    async with asyncio.timeout(PATIENCE):
        while True:
            with suppress(TroupeError):  # the orchestrator comes back
                if len(await handle.matches(limit=least)) >= least:
                    return
                if (await handle.info()).state.ended:
                    return
            await asyncio.sleep(0.02)


@pytest.mark.parametrize("algorithm", ["psro", "pipeline_psro"])
async def test_best_responses_that_begin_with_the_first_weights(
    cluster: Standing, client: AsyncClient, algorithm: str
) -> None:
    """Equal to the bit, also if orchestrator and trainer are killed meanwhile."""
    text = population_job(
        cluster.models,
        TWO,
        others=["second"] if algorithm == "pipeline_psro" else [],
        pipeline={"steps": 3, "deterministic": True},
        algorithm=algorithm,
        meta_solver="uniform",
        restart="base",
    )
    quiet = await ended(await client.submit(text))
    expected = await check_population(quiet, cluster.data_dir)
    for learner in expected.pools[0].learners:
        versions = await quiet.handle.versions(learner)
        again = [one for one in versions if one.outcome == "restarted"]
        assert {one.checksum for one in again} == {versions[0].checksum}
        assert len(again) == (2 if algorithm == "psro" else 1)
    handle = await client.submit(text)
    for number, service in enumerate(("orchestrator", "trainer-0")):
        await done(handle, number + 1)
        cluster.kill(service)
    troubled = await ended(handle)
    found = await check_population(troubled, cluster.data_dir)
    assert [(one.id, one.parent, one.checksum) for one in found.pools[0].members] == [
        (one.id, one.parent, one.checksum) for one in expected.pools[0].members
    ]
    assert (found.cells, found.history) == (expected.cells, expected.history)


async def done(handle: AsyncJobHandle, least: int) -> None:
    """Wait until this many steps are done, before the actions that are due after them."""
    async with asyncio.timeout(PATIENCE):
        while True:
            with suppress(TroupeError):  # the orchestrator comes back
                job = await handle.info()
                if job.state.ended or job.step >= least:
                    return
            await asyncio.sleep(0.005)
