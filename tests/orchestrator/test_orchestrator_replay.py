"""Live services' decisions follow from their recorded inputs alone: no clock, no order of a set, no
state of the process."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

import pytest

from tests.rollout.hand_engines import ask, make
from tests.support.cluster import Cluster, job_yaml
from tests.support.decision_log import ADMISSION, METHODS, DecisionLog, replay
from troupe.scheduling import admission, balancing, binding
from troupe.v1 import common_pb2 as common_pb


@pytest.mark.parametrize("mode", ["micro_batch", "async"])
async def test_admission_binding_and_balancing_are_replayed(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    log = DecisionLog(monkeypatch.setattr, tmp_path / "log")
    log.watch(admission, *ADMISSION)
    log.watch(binding, "decide", "ready_micro_batches")
    log.watch(balancing, "decide", "succeeded")
    await cluster.add_rollout()
    await cluster.add_trainer()
    for worker in cluster.rollouts:
        worker.script.waiting = {"checker": 30}
    job_id = await cluster.submit(
        job_yaml(
            policies=("solver", "checker", "critic"),
            pipeline={
                "steps": 3,
                "queries_per_step": 6,
                "group_size": 2,
                "mode": mode,
                "over_sampling": 2 if mode == "async" else 0,
            },
            limits={"step_seconds": 60, "max_concurrent_trajectories": 6},
            balancing={"threshold": 2, "sustain_seconds": 0, "cooldown_seconds": 0.1},
            **{"policies.solver.engine": {"replicas": 3}},
        )
    )
    await cluster.wait(job_id, [common_pb.JOB_STATE_SUCCEEDED], 60)
    counts = replay(tmp_path / "log")
    wanted = {f"troupe.scheduling.admission.{name}" for name in ADMISSION[:4]}
    wanted |= {"troupe.scheduling.binding.decide", "troupe.scheduling.balancing.decide"}
    assert wanted <= counts.keys()
    assert all(counts[name] > 0 for name in wanted)


@pytest.mark.parametrize("policy", ["least_work", "round_robin", "random_hash"])
async def test_routing_is_replayed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, policy: Any
) -> None:
    log, rng = DecisionLog(monkeypatch.setattr, tmp_path / "log"), random.Random(0)
    for cls in METHODS:
        log.watch_class(cls)
    router, engines = make(count=4, limit=3, policy=policy)
    tasks = [ask(router, f"c{n % 12}/{n}", seconds=30, group=f"q{n % 4}") for n in range(80)]
    while not all(task.done() for task in tasks):
        await asyncio.sleep(0)
        held = [(one, name) for one in engines for name in one.held]
        if held:
            engine, name = rng.choice(held)
            engine.answer(name, tokens=rng.randint(1, 9))
    counts = replay(tmp_path / "log")
    assert counts["Fleet.choose"] >= 80
    assert counts["Fleet.give"] == counts["Fleet.take_back"] == 80
    assert counts["TurnQueue.push"] == counts["TurnQueue.pop"] > 0


def test_a_decision_that_depends_on_something_else_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = DecisionLog(monkeypatch.setattr, tmp_path / "log")
    decide = admission.spread_queries

    def spread_queries(sizes: Any, workers: Any, *, turn: int = 0) -> Any:
        return decide(sizes, workers, turn=turn + 1)

    monkeypatch.setattr(admission, "spread_queries", spread_queries)
    log.watch(admission, "spread_queries")
    workers = [admission.RolloutWorker(f"w{n}") for n in range(3)]
    admission.spread_queries([2, 2], workers)
    with pytest.raises(AssertionError, match="spread_queries"):
        replay(tmp_path / "log")
