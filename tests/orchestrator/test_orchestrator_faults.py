"""Workers that die, streams that break, unusable steps: the job continues."""

import pytest

from tests.support.cluster import Cluster, job_yaml
from tests.support.fake_rollout import RolloutScript
from tests.support.fake_trainer import TrainerScript
from tests.support.waiting import until
from troupe.rpc import FailedPrecondition, InvalidArgument, NotFound, Unavailable
from troupe.v1 import common_pb2 as common_pb
from troupe.v1 import orchestrator_pb2 as orchestrator_pb

POLICIES = ("checker", "solver")
RUNNING = (common_pb.JOB_STATE_RUNNING,)


async def finish(cluster: Cluster, job_id: str, steps: int = 2) -> common_pb.Problem:
    """The job succeeds with every sample accounted for."""
    job = await cluster.wait(job_id)
    assert job.state == common_pb.JOB_STATE_SUCCEEDED, job.problem
    await cluster.check_accounts(job_id, steps, POLICIES)
    return job.problem


@pytest.mark.parametrize("silent", [False, True])
async def test_a_broken_stream_is_dispatched_again(cluster: Cluster, silent: bool) -> None:
    script = cluster.rollouts[0].script
    # Silent: all four trajectories of the call have ended in the store at the break.
    script.break_after, script.silent = (4 if silent else 2), silent
    job_id = await cluster.submit(job_yaml())
    await finish(cluster, job_id)
    assert any("dispatched again" in text for text in await cluster.notices(job_id))
    ran = cluster.rollouts[0].ran
    if silent:  # nothing is run twice
        assert len(ran) == len(set(ran)) == 8


async def test_another_rollout_worker_takes_over(cluster: Cluster) -> None:
    other = await cluster.add_rollout()
    cluster.rollouts[0].script = RolloutScript(seconds=0.02, break_after=1, die=True)
    job_id = await cluster.submit(job_yaml())
    await finish(cluster, job_id)
    assert set(other.ran) >= {f"q{n}-s1-t{m}" for n in (2, 3) for m in (0, 1)}


async def test_a_restarted_rollout_worker_is_prepared_again(cluster: Cluster) -> None:
    worker = cluster.rollouts[0]
    worker.script = RolloutScript(seconds=0.02, break_after=1, die=True)
    job_id = await cluster.submit(job_yaml())
    await worker.death()
    again = await cluster.add_rollout(port=worker.settings.port)
    await finish(cluster, job_id)
    # A call that is lost between two lives of the worker is repeated: it changes nothing.
    assert again.calls["PrepareJob"] >= 1


async def test_a_worker_that_forgot_the_job_is_prepared_again(cluster: Cluster) -> None:
    worker = cluster.rollouts[0]
    job_id = await cluster.submit(job_yaml(pipeline__steps=4))
    worker.script.seconds = 0.05
    await cluster.wait(job_id, RUNNING)
    worker.versions.clear()
    await finish(cluster, job_id, 4)
    assert worker.calls["PrepareJob"] == 2


async def test_a_worker_that_joins_gets_work(cluster: Cluster) -> None:
    cluster.rollouts[0].script.seconds = 0.05
    job_id = await cluster.submit(job_yaml(pipeline__steps=4))
    await cluster.wait(job_id, RUNNING)
    other = await cluster.add_rollout()
    await finish(cluster, job_id, 4)
    assert other.ran


async def test_a_hung_worker_is_lost_by_its_silence(cluster: Cluster) -> None:
    """A partition: the connection stays open, but nothing comes."""
    cluster.rollouts[0].script.seconds = 1000
    job_id = await cluster.submit(job_yaml())
    await cluster.until(job_id, lambda job: len(cluster.rollouts[0].ran) == 4)
    other = await cluster.add_rollout()
    beating = cluster.rollouts[0]._beating
    assert beating is not None
    await beating.stop_beats()
    await finish(cluster, job_id)
    assert len(other.ran) == 8
    assert cluster.rollouts[0].aborted == 4


@pytest.mark.parametrize("when", ["claimed", "committed"])
async def test_a_trainer_that_dies_loses_nothing(cluster: Cluster, when: str) -> None:
    cluster.trainers[0].script.die_when = when
    job_id = await cluster.submit(job_yaml())
    await cluster.wait(job_id, RUNNING)
    await cluster.add_trainer()
    await finish(cluster, job_id)
    commits = [one.weights.version for one in (await cluster.step(job_id, 0)).commits]
    assert commits == [1, 1]


async def test_a_trainer_is_replaced_by_its_successor(cluster: Cluster) -> None:
    trainer = cluster.trainers[0]
    trainer.script.die_when = "claimed"
    job_id = await cluster.submit(job_yaml())
    await trainer.death()
    again = await cluster.add_trainer(port=trainer.settings.port)
    await finish(cluster, job_id)
    assert again.calls["Bind"] == 2


async def test_a_running_step_is_attached_to_again(cluster: Cluster) -> None:
    trainer = cluster.trainers[0]
    trainer.script = TrainerScript(seconds=0.4, break_stream=True)
    job_id = await cluster.submit(job_yaml(policies=["solver"]))
    job = await cluster.wait(job_id)
    assert job.state == common_pb.JOB_STATE_SUCCEEDED
    assert trainer.calls["RunStep"] == 3
    await cluster.check_accounts(job_id, 2, ["solver"])


async def test_a_policy_that_is_not_bound_is_bound_again(cluster: Cluster) -> None:
    cluster.rollouts[0].script.seconds = 0.05
    trainer = cluster.trainers[0]
    job_id = await cluster.submit(job_yaml(pipeline__mode="sync"))
    await cluster.wait(job_id, RUNNING)
    trainer.bound.clear()
    await finish(cluster, job_id)


async def test_a_skipped_step_is_reported_and_the_job_goes_on(cluster: Cluster) -> None:
    cluster.trainers[0].script = TrainerScript(skip=frozenset({0}))
    job_id = await cluster.submit(job_yaml())
    await finish(cluster, job_id)
    assert dict((await cluster.job(job_id)).versions) == {"checker": 1, "solver": 1}
    notices = await cluster.notices(job_id)
    assert sum("skipped its update" in text and "NaN" in text for text in notices) == 2


async def test_a_failed_update_is_repeated(cluster: Cluster) -> None:
    cluster.rollouts[0].script.update_errors = [Unavailable("busy")]
    job_id = await cluster.submit(job_yaml())
    await finish(cluster, job_id)


async def test_workers_are_told_how_many_update_a_policy_at_the_same_time(
    cluster: Cluster,
) -> None:
    await cluster.add_rollout()
    for worker in cluster.rollouts:
        worker.script.seconds = 0.1  # both are prepared before the last step
    job_id = await cluster.submit(job_yaml(pipeline__steps=4))
    await finish(cluster, job_id, steps=4)
    # The one that is prepared last counts from then on.
    assert [max(worker.updating) for worker in cluster.rollouts] == [2, 2]


async def test_lost_weights_are_published_again(cluster: Cluster) -> None:
    gone = NotFound("solver@1 is gone", kind="weights_not_found", field="solver")
    cluster.rollouts[0].script.update_errors = [gone]
    job_id = await cluster.submit(job_yaml(policies=["solver"]))
    assert (await cluster.wait(job_id)).state == common_pb.JOB_STATE_SUCCEEDED
    assert cluster.trainers[0].calls["Bind"] == 2


async def test_too_many_failures_fail_the_job_with_their_reason(cluster: Cluster) -> None:
    cluster.rollouts[0].script.fail = lambda ticket: (
        "workflow_raised: KeyError: 'x'" if ticket.trajectory_id.endswith("t0") else "deadline: 9 s"
    )
    job_id = await cluster.submit(job_yaml(limits__max_failed_fraction=0.75))
    job = await cluster.wait(job_id)
    assert job.state == common_pb.JOB_STATE_FAILED
    assert job.problem.kind == "too_many_failed_trajectories"
    assert job.problem.field == "limits.max_failed_fraction"
    assert "4 of 4" in job.problem.message
    assert "step 1" in job.problem.message
    assert "KeyError" in job.problem.message or "deadline" in job.problem.message


async def test_some_failures_are_borne(cluster: Cluster) -> None:
    cluster.rollouts[0].script.fail = lambda ticket: (
        "deadline: 9 s" if ticket.trajectory_id.endswith("t0") else None
    )
    job_id = await cluster.submit(job_yaml())
    await finish(cluster, job_id)
    assert (await cluster.job(job_id)).metrics["trajectories/failed"] == 2
    # Borne, but not in silence; nor told at every step.
    told = [text for text in await cluster.notices(job_id) if "deadline: 9 s" in text]
    assert told == [
        "step 1: 2 of 4 trajectories failed, most of them with: deadline: 9 s",
        "step 2: 2 of 4 trajectories failed (again), most of them with: deadline: 9 s",
    ]


async def test_a_missing_model_fails_the_job(cluster: Cluster) -> None:
    cluster.trainers[0].script.bind_error = InvalidArgument(
        "there is no model at nowhere",
        kind="model_not_found",
        field="policies.solver.model.path",
        value="nowhere",
        remedy="Give a directory or hub id.",
    )
    job = await cluster.wait(await cluster.submit(job_yaml()))
    assert job.state == common_pb.JOB_STATE_FAILED
    assert job.problem.kind == "model_not_found"
    assert job.problem.field == "policies.solver.model.path"
    assert job.problem.remedy


async def test_a_tokenizer_that_does_not_match_fails_the_job(cluster: Cluster) -> None:
    cluster.rollouts[0].script.prepare_error = FailedPrecondition(
        "the tokenizer has 300 tokens, the model 256",
        kind="tokenizer_mismatch",
        field="policies.solver.model.tokenizer",
    )
    job = await cluster.wait(await cluster.submit(job_yaml()))
    assert job.state == common_pb.JOB_STATE_FAILED
    assert job.problem.kind == "tokenizer_mismatch"


async def test_a_job_whose_last_checkpoint_is_missing_fails_and_resumed_writes_it(
    cluster: Cluster,
) -> None:
    cluster.trainers[0].script.disk_full = True
    job_id = await cluster.submit(job_yaml(checkpoint__every=1, evaluation__queries=1))
    job = await cluster.wait(job_id)
    assert (job.state, job.step, job.problem.kind) == (common_pb.JOB_STATE_FAILED, 2, "disk_full")
    assert "no checkpoint of" in job.problem.message
    assert (job.problem.field, job.problem.remedy) == ("data_dir", "Free some space.")
    texts = await cluster.notices(job_id)
    assert any("no checkpoint of solver after step 1" in text for text in texts)
    assert job.after  # it was evaluated nevertheless
    cluster.trainers[0].script.disk_full = False
    await cluster.resume(job_id)
    assert not (await finish(cluster, job_id)).kind
    request = orchestrator_pb.ListCheckpointsRequest(job_id=job_id)
    saved = (await cluster.api.ListCheckpoints(request)).checkpoints
    assert {(one.policy, one.version) for one in saved} == {("solver", 2), ("checker", 2)}


async def test_a_checkpoint_that_works_again_clears_the_problem(cluster: Cluster) -> None:
    cluster.trainers[0].script.disk_full = True
    cluster.rollouts[0].script.seconds = 0.1
    job_id = await cluster.submit(job_yaml(checkpoint__every=1))
    await until(lambda: cluster.trainers[0].calls["SaveCheckpoint"] == 2)  # both policies
    cluster.trainers[0].script.disk_full = False
    assert not (await finish(cluster, job_id)).kind


async def test_a_step_that_does_not_end_says_what_it_waited_for(cluster: Cluster) -> None:
    cluster.rollouts[0].script.seconds = 1000
    job_id = await cluster.submit(job_yaml(limits__step_seconds=0.5))
    job = await cluster.wait(job_id)
    assert job.state == common_pb.JOB_STATE_FAILED
    assert job.problem.field == "limits.step_seconds"
    assert "waiting for 4 trajectories" in job.problem.message
    assert cluster.rollouts[0].worker_id in job.problem.message
    assert cluster.rollouts[0].aborted == 4


async def test_a_step_that_lacks_a_column_names_it(cluster: Cluster) -> None:
    text = job_yaml(limits__step_seconds=1.5, pipeline__required_columns=["judge"])
    job_id = await cluster.submit(text)
    job = await cluster.wait(job_id)
    assert job.state == common_pb.JOB_STATE_FAILED
    assert (job.problem.kind, job.problem.field) == ("deadline_exceeded", "limits.step_seconds")
    assert "rows of checker and solver wait for the column 'judge'" in job.problem.message
    assert "pipeline.required_columns" in job.problem.remedy
