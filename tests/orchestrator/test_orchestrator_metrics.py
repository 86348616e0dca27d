"""Sums over trajectories, and their destinations."""

import asyncio
import json
import math
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from services.orchestrator.jobs.sinks import JsonLines, Sinks
from services.orchestrator.metrics import ClusterCollector
from services.orchestrator.pipeline.metrics import JobTotals, Tally, commit_metrics, percentile
from services.orchestrator.pipeline.steps import warn_of
from services.orchestrator.placement.workers import WorkerHandle
from services.orchestrator.state.event_log import EventLog
from services.orchestrator.state.job_store import JobStore
from services.orchestrator.state.records import JobRecord
from services.orchestrator.state.redis import RedisAccess
from tests.support.cluster import Cluster, job_yaml
from troupe.job import parse_job
from troupe.job.sections.algorithm import AlgorithmSpec
from troupe.rpc import ClientSettings
from troupe.v1 import common_pb2 as common_pb
from troupe.v1 import experience_store_pb2 as store_pb
from troupe.v1 import orchestrator_pb2 as orchestrator_pb
from troupe.v1 import rollout_pb2 as rollout_pb


def ended(
    rewards: dict[str, float] | None = None, reason: str = "", **turn: float
) -> rollout_pb.TrajectoryEvent:
    event = rollout_pb.TrajectoryEvent(trajectory_id="t", reason=reason, rewards=rewards or {})
    event.state = (
        common_pb.TRAJECTORY_STATE_FAILED if reason else common_pb.TRAJECTORY_STATE_COMPLETED
    )
    event.turns.add(
        agent="solver",
        policy="big",
        response_tokens=int(turn.get("tokens", 10)),
        generate_seconds=turn.get("seconds", 1.0),
        queue_seconds=turn.get("queue", 0.5),
        versions=[common_pb.VersionSpan(version=int(turn.get("version", 3)), start=0, end=10)],
    )
    return event


def test_a_tally_names_metrics_as_the_field_does() -> None:
    tally = Tally(["solver", "checker"], {"big": 4})
    tally.add(ended({"solver": 1.0, "checker": 0.0, "team": 1.0}, tokens=30))
    tally.add(ended({"solver": 0.0, "checker": 1.0, "team": 0.0}, version=4))
    tally.add(ended(reason="deadline: 9 s", seconds=3.0))
    assert (tally.completed, tally.failed, tally.ended) == (2, 1, 3)
    assert tally.values(2.0) == {
        "trajectories/completed": 2,
        "trajectories/failed": 1,
        "reward/solver/mean": 0.5,
        "reward/checker/mean": 0.5,
        "reward/mean": 0.5,
        "team/mean": 0.5,
        "response_length/solver": pytest.approx(50 / 3),
        "turn_share/solver": 1,
        "turn_share/checker": 0,
        "token_share/solver": 1,
        "token_share/checker": 0,
        "rollout/seconds": 2.0,
        "rollout/tokens_per_second": 25.0,
        "rollout/turn_seconds/mean": pytest.approx(6.5 / 3),
        "rollout/turn_seconds/p95": 3.5,
        "rollout/queue_seconds/mean": 0.5,
        "staleness/mean": pytest.approx(2 / 3),
    }
    assert tally.scores() == {
        "reward/checker": 0.5,
        "reward/solver": 0.5,
        "team_success": 0.5,
        "trajectories/failed": 1.0,
    }
    assert tally.most_common_reason == "deadline: 9 s"


def test_the_shares_of_agents_are_of_all_turns_and_all_tokens() -> None:
    tally = Tally(["solver", "checker", "judge"], {})
    for agent, tokens in (("solver", 30), ("solver", 40), ("checker", 30)):
        event = ended({"solver": 1.0}, tokens=tokens)
        event.turns[0].agent = agent
        tally.add(event)
    found = tally.values(1.0)
    shares = {name: value for name, value in found.items() if "_share/" in name}
    assert shares == {
        "turn_share/solver": pytest.approx(2 / 3),
        "turn_share/checker": pytest.approx(1 / 3),
        "turn_share/judge": 0,
        "token_share/solver": pytest.approx(0.7),
        "token_share/checker": pytest.approx(0.3),
        "token_share/judge": 0,
    }
    alone = Tally(["solver"], {})
    alone.add(ended({"solver": 1.0}))
    assert not [name for name in alone.values(1.0) if "_share/" in name]


def test_faults_of_the_environment_are_counted() -> None:
    tally = Tally(["solver"], {})
    assert "environment/retries" not in tally.values(1.0)
    for reason in ("environment_died: gone", "tool_timeout: 3 s", "deadline: 9 s", ""):
        event = ended({"solver": 1.0}, reason=reason)
        event.metrics["environment_retries"] = 2
        tally.add(event)
    found = tally.values(1.0)
    assert (found["environment/retries"], found["environment/failed"]) == (8, 2)


def test_an_agent_called_team_is_an_agent() -> None:
    tally = Tally(["team"], {})
    tally.add(ended({"team": 1.0}))
    assert tally.scores() == {"reward/team": 1.0}


def test_an_empty_tally_has_no_means() -> None:
    values = Tally(["solver"], {}).values(0.0)
    assert values == {"trajectories/completed": 0, "trajectories/failed": 0}


def test_trainers_metrics_come_under_their_policy() -> None:
    commit = store_pb.StepCommit(
        policy="big",
        outcome=store_pb.STEP_OUTCOME_SKIPPED,
        num_samples=8,
        metrics={"loss/policy": math.nan, "grad_norm": 2.0},
    )
    assert commit_metrics([commit], AlgorithmSpec()) == {
        "big/grad_norm": 2.0,
        "big/samples": 8,
        "big/skipped": 1,
        "big/no_signal": 0,
    }


TEACHER = AlgorithmSpec.model_validate({"distillation": {"teachers": {"solver": "large"}}})


@pytest.mark.parametrize(
    ("metrics", "algorithm", "flat"),
    [
        ({"advantage/zero_fraction": 1.0, "grad_norm": 0.0}, AlgorithmSpec(), True),
        ({"advantage/zero_fraction": 0.9, "grad_norm": 0.1}, AlgorithmSpec(), False),
        # A regularizer has a gradient nevertheless, and teaches nothing about the task.
        (
            {"advantage/zero_fraction": 1.0, "grad_norm": 0.1},
            AlgorithmSpec(kl_coefficient=0.1, entropy_coefficient=0.1),
            True,
        ),
        # A teacher does, and a loss of the user's own may.
        ({"advantage/zero_fraction": 1.0, "grad_norm": 0.1}, TEACHER, False),
        ({"advantage/zero_fraction": 1.0, "grad_norm": 0.0}, TEACHER, True),
        (
            {"advantage/zero_fraction": 1.0, "grad_norm": 0.1},
            AlgorithmSpec(loss="mine:loss"),
            False,
        ),
        # Demonstrations have no advantages.
        ({"grad_norm": 0.1}, AlgorithmSpec(), False),
    ],
)
def test_a_step_whose_advantages_are_all_zero_has_no_signal(
    metrics: dict[str, float], algorithm: AlgorithmSpec, flat: bool
) -> None:
    commit = store_pb.StepCommit(
        policy="big", outcome=store_pb.STEP_OUTCOME_APPLIED, num_samples=8, metrics=metrics
    )
    assert commit_metrics([commit], algorithm)["big/no_signal"] == flat
    commit.outcome = store_pb.STEP_OUTCOME_SKIPPED
    assert commit_metrics([commit], algorithm)["big/no_signal"] == 0


@given(
    st.lists(
        st.fixed_dictionaries(
            {
                "big/samples": st.sampled_from([0.0, 8.0]),
                "big/skipped": st.sampled_from([0.0, 1.0]),
                "big/no_signal": st.sampled_from([0.0, 1.0]),
                "trajectories/completed": st.just(8.0),
            }
        )
    )
)
def test_the_steps_with_a_signal_are_those_that_trained_on_more_than_zero_advantages(
    rows: list[dict[str, float]],
) -> None:
    spec = parse_job(job_yaml(policies=["big"]))
    past = [orchestrator_pb.MetricsLogged(values=row) for row in rows[::2]]
    totals = JobTotals(spec, past)
    for row in rows[1::2]:
        totals.add(row)
        totals.add({"evaluation/trajectories/completed": 8.0})
    trained = [row for row in rows if row["big/samples"] and not row["big/skipped"]]
    count = sum(not row["big/no_signal"] for row in trained)
    assert totals.metrics() == {"big/signal_steps": count}
    found = totals.shortfall()
    assert (found is None) is (not rows or count > 0)


async def test_the_fifth_step_in_a_row_without_a_signal_says_what_to_do() -> None:
    warned: list[str] = []

    class Job:
        complaints: ClassVar[Counter[str]] = Counter()
        spec = parse_job(job_yaml(policies=["big"]))

        async def warn(self, text: str) -> None:
            warned.append(text)

    def commit(norm: float) -> store_pb.StepCommit:
        return store_pb.StepCommit(
            policy="big",
            outcome=store_pb.STEP_OUTCOME_APPLIED,
            num_samples=8,
            metrics={"advantage/zero_fraction": float(not norm), "grad_norm": norm},
        )

    job: Any = Job()
    for number, norm in enumerate([0, 0, 0, 0, 0.5, 0, 0, 0, 0, 0, 0, 0], 1):
        before = len(warned)
        await warn_of(job, f"step {number}", commit(norm))
        assert len(warned) - before == (number == 10)
    assert "big had no signal in 5 steps in a row" in warned[0]
    for remedy in ("easier tasks", "group_size", "temperature", "dynamic_sampling"):
        assert remedy in warned[0]


async def test_a_policy_without_rows_is_named_once_while_others_learn_from_rows() -> None:
    warned: list[str] = []

    class Job:
        complaints: ClassVar[Counter[str]] = Counter()
        spec = parse_job(
            job_yaml(supervised={"tasks": {"source": "a.b:Rows"}, "steps": 2, "agent": "solver"})
        )

        async def warn(self, text: str) -> None:
            warned.append(text)

    job: Any = Job()
    for step in range(4):
        empty = store_pb.STEP_OUTCOME_EMPTY
        commit = store_pb.StepCommit(policy="checker", step=step, outcome=empty)
        await warn_of(job, f"step {step + 1}", commit)
    assert warned == [
        "step 1: there was no row to learn from for checker",
        "step 3: there was no sample for checker",
        "step 4: there was no sample for checker",
    ]


@given(st.lists(st.floats(0, 100), min_size=1), st.floats(0, 1))
def test_a_percentile_is_one_of_the_values(values: list[float], fraction: float) -> None:
    found = percentile(values, fraction)
    assert found in values
    assert sum(value <= found for value in values) >= fraction * len(values) - 1e-9


def rows(*steps: int) -> list[orchestrator_pb.MetricsLogged]:
    return [
        orchestrator_pb.MetricsLogged(step=step, values={"reward/mean": step / 10})
        for step in steps
    ]


async def test_json_lines_catch_up_after_a_crash(tmp_path: Path) -> None:
    spec = parse_job(job_yaml())
    path = tmp_path / "metrics.jsonl"
    JsonLines(path).write(rows(0, 1))
    with path.open("a") as file:
        file.write('{"step": 2, "rewa')  # cut off by a crash
    sinks = Sinks(spec, "job", tmp_path)
    assert await sinks.open(rows(0, 1, 2, 3)) == []
    assert await sinks.write(rows(4)[0]) == []
    await sinks.close()
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["step"] for line in lines] == [0, 1, 2, 3, 4]
    assert lines[2] == {"step": 2, "reward/mean": 0.2}


async def test_tensorboard_events_without_torch_or_tensorflow(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    spec = parse_job(job_yaml(logging__tensorboard=True))
    sinks = Sinks(spec, "job", tmp_path)
    assert await sinks.open(rows(0, 1)) == []
    assert await sinks.write(rows(2)[0]) == []
    await sinks.close()
    assert "tensorflow" not in sys.modules
    found = EventAccumulator(str(tmp_path / "tensorboard"))
    found.Reload()
    assert [event.step for event in found.Tensors("reward/mean")] == [0, 1, 2]


async def test_a_sink_that_is_missing_is_reported(tmp_path: Path) -> None:
    spec = parse_job(job_yaml(logging__wandb_project="troupe"))
    sinks = Sinks(spec, "job", tmp_path)
    (trouble,) = await sinks.open([])
    assert "pip install wandb" in trouble
    await sinks.close()


async def test_a_full_disk_is_reported(tmp_path: Path) -> None:
    spec = parse_job(job_yaml())
    sinks = Sinks(spec, "job", tmp_path / "nowhere")
    (trouble,) = await sinks.write(rows(1)[0])
    assert "JsonLines" in trouble


def sample(collector: ClusterCollector) -> Callable[..., float | None]:
    """Reads a series of `collector` by its name and labels."""
    registry = CollectorRegistry()
    registry.register(collector)
    return lambda series, **labels: registry.get_sample_value(series, labels)


async def test_the_version_of_a_policy_is_exported_while_no_trainer_holds_it(
    empty_redis: str,
) -> None:
    redis = RedisAccess(empty_redis)
    log = EventLog(redis)
    record = JobRecord(
        job_id="held-by-nobody",
        request_id="r",
        spec_json=parse_job(job_yaml()).model_dump_json(),
        directory=Path("/tmp/nowhere"),
        created_at=1.0,
        state=common_pb.JOB_STATE_SUBMITTED,
    )
    store = JobStore(redis, log)
    value = sample(ClusterCollector(store, list, {}))

    def version() -> float | None:
        return value("troupe_policy_version", job_id=record.job_id, policy="solver")

    await store.create(record)
    epoch = await store.adopt(record.job_id)
    assert version() is None
    for number in (0, 1):
        await store.note_version(record.job_id, epoch, "solver", number)
        assert version() == number
    # An orchestrator that takes the job over reads its versions.
    second = JobStore(redis, log)
    value = sample(ClusterCollector(second, list, {}))
    await second.move(record.job_id, common_pb.JOB_STATE_STARTING)
    assert version() == 1
    await second.move(record.job_id, common_pb.JOB_STATE_FAILED)
    assert version() is None
    await redis.close()


async def test_series_of_an_engine_stay_while_it_loads_a_version(empty_redis: str) -> None:
    redis = RedisAccess(empty_redis)
    engine = rollout_pb.EngineStatus(job_id="j", policy="p", version=3)
    beat = orchestrator_pb.HeartbeatRequest(
        worker_id="w", kind=orchestrator_pb.WORKER_KIND_ROLLOUT, engines=[engine]
    )
    worker = WorkerHandle(beat, ClientSettings(), 0.0)
    value = sample(ClusterCollector(JobStore(redis, EventLog(redis)), lambda: [worker], {}))
    keys = {"job_id": "j", "policy": "p"}
    for state, version in (("healthy", 3), ("updating", 3), ("suspect", 3), ("draining", None)):
        number = common_pb.EngineState.Value(f"ENGINE_STATE_{state.upper()}")
        worker.beat.engines[0].state = number
        assert value("troupe_engine_oldest_version", **keys) == version
        for other in ("healthy", "updating", "suspect", "draining", "dead"):
            assert value("troupe_engines", **keys, state=other) == (other == state)
    await worker.close()
    await redis.close()


async def test_a_server_that_policies_share_is_counted_once(empty_redis: str) -> None:
    redis = RedisAccess(empty_redis)
    engines = [
        rollout_pb.EngineStatus(engine_id=f"j.{policy}.0@w", job_id="j", policy=policy, host=host)
        for policy, host in (("solver", "j.solver.0@w"), ("critic", "j.solver.0@w"), ("judge", ""))
    ]
    beat = orchestrator_pb.HeartbeatRequest(
        worker_id="w", kind=orchestrator_pb.WORKER_KIND_ROLLOUT, engines=engines
    )
    worker = WorkerHandle(beat, ClientSettings(), 0.0)
    value = sample(ClusterCollector(JobStore(redis, EventLog(redis)), lambda: [worker], {}))
    assert value("troupe_engine_hosts", job_id="j") == 2
    await worker.close()
    await redis.close()


async def test_prometheus_sees_jobs_workers_and_engines(cluster: Cluster) -> None:
    assert cluster.orchestrator is not None
    registry = cluster.orchestrator.telemetry.registry

    def value(series: str, **labels: str) -> float | None:
        return registry.get_sample_value(series, labels)

    worker = cluster.rollouts[0].settings.worker_id
    assert value("troupe_jobs", state="running") == 0
    assert value("troupe_jobs_ended_total", state="failed") == 0
    job_id = await cluster.submit(job_yaml(pipeline__steps=5000))

    def newest() -> float | None:
        return value("troupe_job_metric", job_id=job_id, name="reward/mean")

    await cluster.until(job_id, lambda _: newest() is not None)
    reward = newest()
    # While a job runs, its series are there at every scrape.
    for _ in range(200):
        for kind in ("rollout", "trainer"):
            assert value("troupe_workers", kind=kind, state="usable") == 1
            assert value("troupe_workers", kind=kind, state="lost") == 0
        assert value("troupe_jobs", state="running") == 1
        assert (value("troupe_job_steps", job_id=job_id) or 0.0) >= 1
        assert (value("troupe_policy_version", job_id=job_id, policy="solver") or 0.0) >= 1
        await asyncio.sleep(0)
    await cluster.cancel(job_id)
    # Its series end with it.
    await cluster.until(job_id, lambda _: value("troupe_job_steps", job_id=job_id) is None)
    assert newest() is None
    assert value("troupe_policy_version", job_id=job_id, policy="solver") is None
    assert value("troupe_jobs_ended_total", state="cancelled") == 1
    assert value("troupe_jobs", state="running") == 0
    logged = [one.metrics for one in await cluster.events(job_id) if one.HasField("metrics")]
    assert reward in {row.values["reward/mean"] for row in logged}
    assert value("troupe_worker_rss_bytes", kind="rollout", worker=worker) is not None
