"""Policies that are networks in a real trainer: steps, bits, suspension, crashes, bad input."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from services.rollout.networks.episodes import samples_of
from services.rollout.trajectories.records import LargeColumns
from services.trainer.networks.learner import parse_fragments
from tests.support.waiting import until
from tests.trainer.doomed import doomed
from tests.trainer.stage import Trainer, TrainingStage
from troupe import tensors
from troupe.job import JobSpec
from troupe.networks.actor import Actor, Seat
from troupe.networks.jobs import environment_of, make_learner
from troupe.rpc import FailedPrecondition, InvalidArgument, TroupeError
from troupe.transfer import Transfer
from troupe.v1 import common_pb2 as common_pb
from troupe.v1 import experience_store_pb2 as store_pb
from troupe.v1 import rollout_pb2 as rollout_pb

QUERIES = ("q0", "q1", "q2")
MAPPO: dict[str, Any] = {"paradigm": "mappo", "lr": 0.01, "epochs": 2, "minibatches": 2}
QMIX: dict[str, Any] = {"paradigm": "qmix", "lr": 0.01, "batch": 4, "updates": 2, "buffer": 64}


def spec_of(learning: dict[str, Any] = MAPPO, **pipeline: Any) -> JobSpec:
    """Return a job of a team on the two-step game: one fragment of 8 episodes per query."""
    return JobSpec.model_validate(
        {
            "name": "test",
            "environment": {"source": "two_step", "copies": 8},
            "agents": {"agent_0": {"policy": "solver"}, "agent_1": {"policy": "solver"}},
            "policies": {"solver": {"network": {"hidden": [8], "learning": learning}}},
            "pipeline": {"steps": 10, "queries_per_step": 3, "deterministic": True, **pipeline},
        }
    )


def rows(
    stage: TrainingStage, spec: JobSpec, ref: common_pb.WeightsRef, step: int
) -> dict[str, list[store_pb.Sample]]:
    """Return, by query, a rollout worker's rows of a step that is played with `ref`."""
    network = spec.policies["solver"].network
    assert network is not None
    actor = Actor(environment_of(spec), {"solver": Seat(network, tuple(spec.agents))})
    actor.load("solver", stage.weights(ref), ref.version)
    found = {}
    for number, query in enumerate(QUERIES):
        ticket = rollout_pb.Ticket(query_id=query, trajectory_id=f"{query}-s{step}-t0")
        shelf = LargeColumns(stage.transfer, stage.job_id)
        played = actor.sample(10 * step + number)
        rosters = {"solver": tuple(spec.agents)}
        found[query] = samples_of(played, rosters=rosters, ticket=ticket, shelf=shelf)
    return found


async def play(
    stage: TrainingStage,
    spec: JobSpec,
    ref: common_pb.WeightsRef,
    step: int = 0,
    queries: Sequence[str] = QUERIES,
) -> None:
    played = rows(stage, spec, ref, step)
    for query in queries:
        await stage.append(query, f"{query}-s{step}-t0", played[query], step)


async def open_step(stage: TrainingStage, step: int = 0) -> None:
    await stage.open(step, queries=QUERIES, group_size=1, version=step)


async def train(
    stage: TrainingStage, trainer: Trainer, spec: JobSpec, ref: common_pb.WeightsRef, step: int
) -> store_pb.StepCommit:
    """Train one step from `ref`."""
    await open_step(stage, step)
    await play(stage, spec, ref, step)
    return await trainer.run(step, ref.version)


async def steps(stage: TrainingStage, spec: JobSpec, count: int) -> list[str]:
    """Return the checksums of the versions of an undisturbed run in a separate job."""
    quiet, trainer = await stage.sibling()
    refs = [await trainer.bind(spec)]
    for step in range(count):
        refs.append((await train(quiet, trainer, spec, refs[-1], step)).weights)
    return [ref.checksum for ref in refs]


@pytest.mark.parametrize("learning", [MAPPO, QMIX])
async def test_a_step_updates_on_all_of_its_fragments(
    stage: TrainingStage, learning: dict[str, Any]
) -> None:
    spec, trainer = spec_of(learning), await stage.trainer()
    ref = await trainer.bind(spec)
    before = stage.weights(ref)
    commit = await train(stage, trainer, spec, ref, 0)
    assert (commit.num_samples, commit.weights.version) == (3, 1)
    assert commit.outcome == store_pb.STEP_OUTCOME_APPLIED
    assert (commit.metrics["episodes"], commit.metrics["environment_steps"]) == (24, 48)
    assert commit.metrics["staleness/max"] == 0
    after = stage.weights(commit.weights)
    assert any(not torch.equal(before[name], after[name]) for name in before)
    audit = await stage.store.AuditTables(store_pb.AuditTablesRequest(job_id=stage.job_id))
    assert not audit.violations
    # Engines play with it, and users load it.
    rows(stage, spec, commit.weights, 1)
    path = await trainer.checkpoint(1)
    described = json.loads((path / "config.json").read_text())
    assert described["agents"] == ["agent_0", "agent_1"]
    assert described["network"]["learning"]["paradigm"] == learning["paradigm"]
    assert all(torch.isfinite(t).all() for t in load_file(path / "model.safetensors").values())


async def test_the_resulting_bits_do_not_depend_on_the_order_of_fragments(
    stage: TrainingStage,
) -> None:
    checksums = []
    for size, order in ((32, QUERIES), (1, QUERIES[::-1])):
        spec = spec_of(QMIX, micro_batch_samples=size)
        job, trainer = await stage.sibling()
        ref = await trainer.bind(spec)
        await open_step(job)
        await play(job, spec, ref, queries=order)
        commit = await trainer.run(0, 0)
        checksums.append((ref.checksum, commit.weights.checksum))
    assert checksums[0] == checksums[1]


@pytest.mark.parametrize("learning", [MAPPO, QMIX])
async def test_a_step_that_moves_to_another_worker_ends_with_the_same_bits(
    stage: TrainingStage, learning: dict[str, Any]
) -> None:
    spec = spec_of(learning, micro_batch_samples=1)
    wanted = await steps(stage, spec, 2)
    here, there = await stage.trainer(), await stage.trainer(worker_id="there")
    ref = await here.bind(spec)
    ref = (await train(stage, here, spec, ref, 0)).weights
    await open_step(stage, 1)
    await play(stage, spec, ref, 1, QUERIES[:2])
    running = asyncio.create_task(here.events(1, 1))

    async def has_begun() -> bool:  # until then, it has the previous step's samples
        return any((one.step, one.samples) == (1, 2) for one in await here.statuses())

    await until(has_begun)
    state = await here.suspend()
    with pytest.raises(TroupeError) as stopped:
        await running
    assert stopped.value.kind == "step_suspended"
    assert (state.claims, state.samples) == (2, 2)
    await there.resume(spec, state, ref.checksum)
    await play(stage, spec, ref, 1, QUERIES[2:])
    commit = await there.run(1, 1)
    assert commit.num_samples == 3
    assert commit.weights.checksum == wanted[2]


async def test_a_replay_buffer_remembers_committed_steps_only(stage: TrainingStage) -> None:
    spec = spec_of(QMIX)
    wanted = await steps(stage, spec, 2)
    trainer = await stage.trainer()
    ref = await trainer.bind(spec)
    ref = (await train(stage, trainer, spec, ref, 0)).weights
    # A step is computed and then given up: the update was made, but not committed.
    learner = trainer.worker.bindings.find((stage.job_id, "solver")).learner
    played = rows(stage, spec, ref, 1)
    claimed = [store_pb.ClaimedSample(sample=one) for some in played.values() for one in some]
    learner.accumulate(learner.read(claimed, lambda key: np.zeros(0)))
    assert learner.apply(1).applied
    trainer.worker.bindings.find((stage.job_id, "solver")).versions.dirty = True
    commit = await train(stage, trainer, spec, ref, 1)
    assert commit.weights.checksum == wanted[2]
    path = next((stage.root / "runs" / stage.job_id / "state" / "solver").glob("v2-*"))
    kept = load_file(path / "optimizer.safetensors")
    assert any(name.startswith("buffer.") for name in kept)


async def test_an_update_that_breaks_is_skipped_and_leaves_no_trace(
    stage: TrainingStage, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec, trainer = spec_of(), await stage.trainer()
    ref = await trainer.bind(spec)
    learner = trainer.worker.bindings.find((stage.job_id, "solver")).learner
    update = learner._learner.update

    def broken(fragments: Any) -> dict[str, float]:
        metrics: dict[str, float] = update(fragments) | {"loss": float("nan")}
        return metrics

    monkeypatch.setattr(learner._learner, "update", broken)
    commit = await train(stage, trainer, spec, ref, 0)
    assert commit.outcome == store_pb.STEP_OUTCOME_SKIPPED
    assert commit.reason == "loss is nan"
    assert (commit.weights.version, commit.weights.checksum) == (0, ref.checksum)
    monkeypatch.undo()
    await open_step(stage, 1)
    await play(stage, spec, ref, 1)
    after = await trainer.run(1, 0)
    # It leaves no trace: fragments of the second step are the first of this job.
    quiet, other = await stage.sibling()
    first = await other.bind(spec)
    await open_step(quiet)
    for query, samples in rows(quiet, spec, first, 1).items():
        await quiet.append(query, f"{query}-s1-t0", samples)
    assert (await other.run(0, 0)).weights.checksum == after.weights.checksum


async def test_an_invalid_fragment_is_refused_by_column(stage: TrainingStage) -> None:
    spec, trainer = spec_of(), await stage.trainer()
    ref = await trainer.bind(spec)
    await open_step(stage)
    played = rows(stage, spec, ref, 0)
    bad = played["q1"][0]
    bad.columns["rewards"].tensor.CopyFrom(tensors.to_proto(np.zeros((1, 8, 2), np.float32)))
    for query in QUERIES:
        await stage.append(query, f"{query}-s0-t0", played[query])
    with pytest.raises(FailedPrecondition) as caught:
        await trainer.run(0, 0)
    assert caught.value.kind == "malformed_sample"
    assert bad.sample_id in str(caught.value)


def test_a_fragment_of_a_subset_of_agents_names_them(tmp_path: Path) -> None:
    spec = spec_of()
    network = spec.policies["solver"].network
    assert network is not None
    environment, agents = environment_of(spec), ("agent_0", "agent_1")
    actor = Actor(
        environment,
        {"solver": Seat(network, agents[1:], agents), "all--0": Seat(network, agents[:1])},
    )
    learner = make_learner(network, environment.spaces, agents, seed=0)
    actor.load("solver", learner.published(), 3)
    other = make_learner(network, environment.spaces, agents[:1], seed=0)
    actor.load("all--0", other.published(), 0)
    ticket = rollout_pb.Ticket(query_id="q", trajectory_id="t")
    shelf = LargeColumns(Transfer(tmp_path), "job")
    played = actor.sample(0)
    [sample] = samples_of(played, rosters={"solver": agents}, ticket=ticket, shelf=shelf)
    assert (sample.policy, sample.agent) == ("solver", "agent_1")
    assert sample.reward == pytest.approx(played.fragments["solver"].returns().mean())
    claimed = store_pb.ClaimedSample(sample=sample)
    [row] = parse_fragments([claimed], "solver", agents, lambda _: np.empty(0))
    assert row.fragment.agents == ("agent_1",)
    assert np.array_equal(row.fragment["actions"], played.fragments["solver"]["actions"])
    learner.update([row.fragment])
    for seats in ([2], [1, 1], [-1]):
        claimed.sample.columns["seats"].tensor.CopyFrom(tensors.to_proto(np.array(seats, np.int32)))
        with pytest.raises(FailedPrecondition, match="seats are") as caught:
            parse_fragments([claimed], "solver", agents, lambda _: np.empty(0))
        assert caught.value.kind == "malformed_sample"


@pytest.mark.parametrize(
    ("environment", "field"),
    [
        ({"source": "no_such"}, "environment.source"),
        ({"source": "two_step", "args": {"wings": 2}}, "environment.args"),
        ({"source": "simple_spread", "args": {"variant": "new"}}, "environment.args.variant"),
        (
            {"source": "openspiel", "args": {"game": "kuhn_poker", "seats": [7]}},
            "environment.args.seats",
        ),
    ],
)
def test_refusals_of_an_environment_name_the_field_of_the_job(
    environment: dict[str, Any], field: str
) -> None:
    job = spec_of().model_dump() | {"environment": environment}
    with pytest.raises(InvalidArgument) as caught:
        environment_of(JobSpec.model_validate(job))
    assert caught.value.field == field


async def test_an_environment_that_cannot_be_made_on_this_machine_is_refused(
    stage: TrainingStage,
) -> None:
    spec, trainer = spec_of(), await stage.trainer()
    environment = {"source": "tests.support.arenas:Unmade", "copies": 8}
    with pytest.raises(InvalidArgument) as caught:
        await trainer.bind(JobSpec.model_validate(spec.model_dump() | {"environment": environment}))
    assert (caught.value.field, caught.value.kind) == ("environment.source", "environment_raised")


@pytest.mark.slow
@pytest.mark.parametrize(
    "point", ["before a network's update", "after a network's update", "after saving"]
)
async def test_a_death_leaves_weights_bitwise_the_same(
    stage: TrainingStage, store_address: str, point: str
) -> None:
    spec = spec_of(QMIX)
    wanted = await steps(stage, spec, 2)
    async with doomed(stage, store_address, point) as trainer:
        first = await trainer.bind(spec)
        with pytest.raises(TroupeError):
            await train(stage, trainer, spec, first, 0)
    trainer = await stage.trainer()
    ref = await trainer.bind(spec, checksum=first.checksum)
    again = await trainer.run(0, 0)
    after = await train(stage, trainer, spec, again.weights, 1)
    assert [ref.checksum, again.weights.checksum, after.weights.checksum] == wanted
