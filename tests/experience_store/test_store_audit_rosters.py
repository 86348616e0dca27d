"""Audit and bytes while rosters change, groups without signal are dropped and samples return."""

from __future__ import annotations

from services.experience_store.store import Store
from tests.experience_store.test_store_audit import audit, train
from tests.experience_store.test_store_high_water import counted, held
from tests.support.experience import Stage, make_sample, make_stage
from troupe.rpc import new_id
from troupe.v1 import common_pb2 as common_pb


async def check(stage: Stage) -> None:
    """Check that the log adds up and the bytes are right."""
    assert list((await audit(stage)).violations) == []
    assert await counted(stage) == await held(stage)


async def end(stage: Stage, query: str, *rewards: float) -> None:
    for number, reward in enumerate(rewards):
        name = f"{query}-t{number}"
        rows = [
            make_sample(query, turn, name, policy=policy, reward=reward)
            for turn, policy in enumerate(stage.policies)
        ]
        await stage.append(query, name, rows)


async def test_dropped_and_carried_queries_are_accounted_for(store: Store) -> None:
    stage = await make_stage(store, new_id("job"), queries=("q0", "q1", "q2"), held_open=True)
    await stage.open(1, queries=["q5"], held_open=True)
    stage.step = 0
    await end(stage, "q0", 1, 0)
    await end(stage, "q1", 1)
    await end(stage, "q2", 1)
    await check(stage)
    await stage.amend(drop=["q1"], reason="surplus", carry=["q2"], carry_to=1, close=True)
    await check(stage)
    await train(stage)
    await check(stage)
    # A trajectory of the carried query that still names the old step.
    stage.step = 0
    late = [make_sample("q2", 0, "q2-t1")]
    await stage.append("q2", "q2-t1", late)
    stage.step = 1
    await end(stage, "q5", 1, 0)
    await stage.amend(close=True)
    await check(stage)
    await train(stage)
    for step in range(2, 5):
        await stage.open(step, queries=[f"q{step + 10}"])
        await end(stage, f"q{step + 10}", 1, 0)
        await train(stage)
    assert await store.steps.all(stage.job) == [3, 4]
    await check(stage)
    report = await audit(stage)
    assert report.trajectories_by_state == {"COMPLETED": 13, "ABORTED": 1}
    assert report.trajectories_admitted == report.trajectories_ended == 14
    checker, solver = report.policies
    assert (solver.appended, solver.trained, solver.dropped) == (13, 12, 1)
    assert solver.drop_reasons == {"surplus": 1}
    assert (checker.appended, checker.trained, checker.lost) == (12, 11, 0)


async def test_replays_count_once_and_at_most_as_often_as_allowed(store: Store) -> None:
    stage = await make_stage(store, new_id("job"), policies=("solver",), max_uses=2)
    for step in range(5):
        if step:
            await stage.open(step)
        await check(stage)
        await stage.append_all()
        await train(stage)
        await check(stage)
    (solver,) = (await audit(stage)).policies
    assert (solver.appended, solver.trained, solver.lost, solver.duplicated) == (20, 20, 0, 0)
    steps = [step async for step in store.audit.read(stage.job, "solver", 0)]
    assert [step.commit.num_samples for step in steps] == [4, 8, 8, 8, 8]
    again = [sample for sample in steps[1].samples if sample.HasField("origin_step")]
    assert [(sample.origin_step, sample.uses) for sample in again] == [(0, 2)] * 4
    await store.tables.drop(stage.job)
    assert list((await audit(stage)).violations) == []


async def test_groups_without_signal_are_dropped_with_their_bytes(store: Store) -> None:
    stage = await make_stage(store, new_id("job"), policies=("solver",), drop_without_signal=True)
    await end(stage, "q0", 1, 1)
    await check(stage)
    await end(stage, "q1", 1, 0)
    await check(stage)
    await train(stage)
    await check(stage)
    (solver,) = (await audit(stage)).policies
    assert (solver.trained, solver.dropped) == (2, 2)
    assert solver.drop_reasons == {"no_signal": 2}
    (kept,) = [step async for step in store.audit.read(stage.job, "solver", 0)]
    states = {sample.sample_id: sample.state for sample in kept.samples}
    assert states["q0_0_q0-t0"] == common_pb.SAMPLE_STATE_DROPPED
