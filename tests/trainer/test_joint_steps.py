"""Steps that learn joint pairs of two policies: on two trainers, on one in turn, after deaths."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.support.training import make_rollout
from tests.support.waiting import until
from tests.trainer import dying
from tests.trainer.doomed import doomed
from tests.trainer.stage import Trainer, TrainingStage
from troupe.job import JobSpec
from troupe.rpc import DeadlineExceeded, TroupeError
from troupe.v1 import experience_store_pb2 as store_pb

POLICIES = ("checker", "solver")
ROWS = 4


def spec_of(stage: TrainingStage, **changes: Any) -> JobSpec:
    return stage.spec(
        policies=POLICIES,
        preferences={"tasks": {"source": "nowhere:rows"}, "steps": 10, "joint": True, "beta": 0.5},
        pipeline={
            "steps": 10,
            "queries_per_step": ROWS,
            "micro_batch_samples": 3,
            "deterministic": True,
        },
        **changes,
    )


async def play(stage: TrainingStage, step: int = 0, rows: int = ROWS) -> None:
    """Open a step of joint pairs, one row each; the last row has no reply of the checker."""
    queries = [f"q{number}" for number in range(rows)]
    await stage.open(step, policies=POLICIES, queries=queries, group_size=1, version=step)
    for number, query in enumerate(queries):
        team = POLICIES if number < rows - 1 else ("solver",)
        samples = []
        for policy in team:
            for chosen in (True, False):
                turn = len(samples)
                sample = make_rollout(
                    query,
                    f"{query}-s{step}-t0",
                    policy=policy,
                    turn=turn,
                    prompt=(5 + number, 6, 7),
                    response=[
                        (11 * step + 7 * number + 3 * turn + k) % 64 for k in range(2 + turn)
                    ],
                    reward=float(chosen),
                    version=step,
                )
                sample.group_id = f"{query}/*/pair"
                sample.demonstration = sample.preference = True
                sample.joint_policies = len(team)
                samples.append(sample)
        await stage.append(query, f"{query}-s{step}-t0", samples, step)


async def step(
    stage: TrainingStage, trainers: dict[str, Trainer], number: int
) -> dict[str, store_pb.StepCommit]:
    """Run a step of both policies side by side."""
    await play(stage, number)
    running = [trainers[policy].run(number, number, policy) for policy in POLICIES]
    return dict(zip(POLICIES, await asyncio.gather(*running), strict=True))


async def undisturbed(stage: TrainingStage, steps: int = 1) -> list[dict[str, str]]:
    """Return the checksums of both policies' versions in a job of its own."""
    quiet, trainer = await stage.sibling()
    spec = spec_of(quiet)
    for policy in POLICIES:
        await trainer.bind(spec, policy)
    found = []
    for number in range(steps):
        commits = await step(quiet, dict.fromkeys(POLICIES, trainer), number)
        found.append({policy: commit.weights.checksum for policy, commit in commits.items()})
    return found


def checksums(commits: dict[str, store_pb.StepCommit]) -> dict[str, str]:
    return {policy: commit.weights.checksum for policy, commit in commits.items()}


async def given(stage: TrainingStage, policy: str) -> None:
    """Wait until the store has the sums of a policy."""

    async def there() -> bool:
        request = store_pb.GetStepRequest(job_id=stage.job_id, step=0)
        counts = (await stage.store.GetStep(request)).counts
        return any(one.policy == policy and one.pair_sums for one in counts)

    await until(there)


async def audited(stage: TrainingStage) -> None:
    audit = await stage.store.AuditTables(store_pb.AuditTablesRequest(job_id=stage.job_id))
    assert list(audit.violations) == []
    found = {one.policy: (one.trained, one.lost, one.duplicated) for one in audit.policies}
    assert found == {"checker": (2 * ROWS - 2, 0, 0), "solver": (2 * ROWS, 0, 0)}


async def test_two_trainers_learn_the_pairs_of_their_policies_together(
    stage: TrainingStage,
) -> None:
    spec = spec_of(stage)
    trainers = {policy: await stage.trainer(worker_id=policy) for policy in POLICIES}
    for policy, trainer in trainers.items():
        await trainer.bind(spec, policy)
    found = [await step(stage, trainers, number) for number in range(3)]
    for commits in found:
        assert [one.outcome for one in commits.values()] == [store_pb.STEP_OUTCOME_APPLIED] * 2
        assert commits["checker"].metrics["samples"] == 2 * ROWS - 2
        assert commits["solver"].metrics["samples"] == 2 * ROWS
    # At first every preference is a coin toss; then the margins are of both policies.
    first, *later = found
    for commit in first.values():
        assert commit.metrics["preference/loss"] == pytest.approx(0.6931, abs=1e-3)
    for commits in later:
        assert commits["solver"].metrics["preference/loss"] != pytest.approx(0.6931, abs=1e-4)
    # It does not depend on where the policies are.
    assert [checksums(commits) for commits in found] == await undisturbed(stage, 3)


async def test_two_policies_on_one_device_in_turn_do_not_wait_for_each_other_there(
    stage: TrainingStage,
) -> None:
    spec = spec_of(stage)
    here, there = await stage.trainer(), await stage.trainer(worker_id="there")
    await here.bind(spec, "solver")
    await play(stage)
    running = asyncio.create_task(here.run(0, 0, "solver"))
    await given(stage, "solver")
    # Another policy needs the device.
    state = await here.suspend("solver")
    with pytest.raises(TroupeError) as stopped:
        await running
    assert stopped.value.kind == "step_suspended"
    await here.bind(spec, "checker")
    checker = await here.run(0, 0, "checker")
    # The state goes on elsewhere, with the rows that it holds.
    await there.resume(spec, state, policy="solver")
    commits = {"checker": checker, "solver": await there.run(0, 0, "solver")}
    assert [checksums(commits)] == await undisturbed(stage)
    await audited(stage)


@pytest.mark.parametrize("point", list(dying.JOINT))
async def test_a_trainer_that_dies_in_the_exchange_begins_again_with_the_same_bits(
    stage: TrainingStage, store_address: str, point: str
) -> None:
    spec = spec_of(stage)
    trainer = await stage.trainer()
    await trainer.bind(spec, "checker")
    async with doomed(stage, store_address, point) as mortal:
        await mortal.bind(spec, "solver")
        await play(stage)
        checker = asyncio.create_task(trainer.run(0, 0, "checker"))
        with pytest.raises(TroupeError):
            await mortal.run(0, 0, "solver")
    other = await stage.trainer(worker_id="other")
    await other.bind(spec, "solver")
    solver = await other.run(0, 0, "solver")
    commits = {"checker": await checker, "solver": solver}
    assert [checksums(commits)] == await undisturbed(stage)
    await audited(stage)


async def test_a_version_that_was_on_no_disk_is_computed_again_with_the_sums_of_its_step(
    stage: TrainingStage, store_address: str
) -> None:
    spec = spec_of(stage, state={"every": 3})
    trainer = await stage.trainer()
    await trainer.bind(spec, "checker")
    async with doomed(stage, store_address, "after the commit") as mortal:
        await mortal.bind(spec, "solver")
        await play(stage)
        checker = asyncio.create_task(trainer.run(0, 0, "checker"))
        with pytest.raises(TroupeError):
            await mortal.run(0, 0, "solver")
    await checker
    request = store_pb.GetStepRequest(job_id=stage.job_id, step=0)
    found = (await stage.store.GetStep(request)).commits
    commits = {commit.policy: commit for commit in found}
    assert not list((stage.root / "runs" / stage.job_id / "state/solver").glob("v1-*"))
    other = await stage.trainer(worker_id="other")
    known = commits["solver"].weights
    bound = await other.bind(spec, "solver", version=1, checksum=known.checksum)
    assert bound.checksum == known.checksum
    after = await step(stage, {"checker": trainer, "solver": other}, 1)
    expected = await undisturbed(stage, 2)
    assert [checksums(commits), checksums(after)] == expected


@pytest.mark.slow
async def test_a_step_whose_pairs_wait_for_another_policy_says_so_at_its_deadline(
    stage: TrainingStage,
) -> None:
    # Long enough for the solver's own part on a busy machine; then it runs out.
    spec = spec_of(stage, limits={"step_seconds": 15})
    trainer = await stage.trainer()
    await trainer.bind(spec, "solver")
    await play(stage)
    with pytest.raises(DeadlineExceeded) as late:
        await trainer.run(0, 0, "solver")
    assert late.value.field == "limits.step_seconds"
    assert "its joint pairs wait for the margins of checker" in late.value.message
