"""Decisions that a paced job's services took are taken again, and alike, from their log alone."""

from __future__ import annotations

import json
import os
import pickle
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.papers.pipeline import workload
from tests.support import decision_log
from tests.support.decision_log import Decision, DecisionLog, replay
from troupe.client import AsyncClient
from troupe.cluster import ClusterSettings, EmbeddedCluster, inventory
from troupe.job import JobSpec

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

SCHEDULING = "troupe.scheduling."
Change = Callable[[Decision], Decision | None]
# What a job of five policies decides, whatever the machine's load.
TAKEN = {
    f"{SCHEDULING}{name}"
    for name in (
        "admission.due_wave",
        "admission.spread_queries",
        "admission.next_move",
        "admission.holding_back",
        "binding.decide",
        "binding.ready_micro_batches",
        "balancing.decide",
        "routing.next_wave",
        "elastic.decide_over",
        "elastic.cells.plan",
    )
} | {
    "troupe.cluster.inventory.split",
    "Fleet.choose",
    "Fleet.give",
    "Fleet.take_back",
    "TurnQueue.push",
    "TurnQueue.pop",
    "AdaptiveLimit.ended",
}


def paced_job(directory: Path) -> JobSpec:
    """Five policies with a cost model, tools that share cores, spare queries and trajectories,
    a model on devices, and engines that move."""
    mode = workload.Mode("async", "", "", {"mode": "async", "alpha": 1, "over_sampling": 2}, 3)
    job = workload.job(mode, workload.quick(workload.CA), directory).model_dump(exclude_unset=True)
    job["pipeline"]["redundant_trajectories"] = 1
    job["tools"]["run"] |= {"max_cores": 2, "expected_seconds": 0.1, "model_service": "judge"}
    job["balancing"] = {
        "inter": True,
        "threshold": 1,
        "hysteresis": 0,
        "sustain_seconds": 0,
        "cooldown_seconds": 0.2,
        "drain_seconds": 0.1,
    }
    for policy in job["policies"].values():
        policy["engine"] |= {"replicas": 2, "max_running": 2}
    return JobSpec.model_validate(job)


async def logs_of_a_paced_job(directory: Path, patch: pytest.MonkeyPatch) -> list[Path]:
    """Run the job on services in separate processes; return the logs of its decisions."""
    logs = directory / "decisions"
    logs.mkdir()
    site = decision_log.sitecustomize_for(logs)
    patch.setenv("PYTHONPATH", f"{site}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    here = DecisionLog(patch.setattr, logs / "node.log")
    here.watch(inventory, "plan", "split")
    server = str(Path(__file__).parents[1] / "reward/model_server.py")
    command = [sys.executable, server, "{port}", str(directory / "judge")]
    judge = {"command": command, "concurrency": 8, "start_seconds": 60}
    settings = ClusterSettings(
        data_dir=directory / "runs",
        trainers=2,
        rollouts=2,
        panel=False,
        devices="5xH100-80GB",
        start_seconds=300,
        environment={
            "TROUPE_HEARTBEAT_SECONDS": "0.1",
            "TROUPE_REWARD_CORES": "2",
            "TROUPE_REWARD_GPUS": "1",
            "TROUPE_REWARD_MODELS": json.dumps({"judge": judge}),
        },
    )
    async with (
        EmbeddedCluster(settings) as cluster,
        AsyncClient(cluster.state.orchestrator_address) as client,
    ):
        handle = await client.submit(paced_job(directory))
        record = await handle.wait(timeout=400)
        assert record.state == "succeeded", record
    return sorted(logs.glob("*.log"))


async def test_a_paced_jobs_decisions_follow_from_their_records(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    logs = await logs_of_a_paced_job(tmp_path, monkeypatch)
    monkeypatch.undo()
    counts: Counter[str] = Counter()
    for log in logs:
        counts.update(replay(log))
    assert counts.keys() >= TAKEN
    # A record that says something else gives another decision.
    for name, change in CHANGES.items():
        assert any(differs(log, name, change) for log in logs), name


def differs(log: Path, name: str, change: Change) -> bool:
    """Whether the log is found to differ with one record changed; False where it has none."""
    decisions = decision_log.entries(log)
    for at, one in enumerate(decisions):
        if one.name.endswith(name) and (new := change(one)):
            changed = log.with_suffix(".changed")
            decision_log.write(changed, [*decisions[:at], new, *decisions[at + 1 :]])
            return bool(decision_log.replayed(changed)["differing"])
    return False


def without(number: int) -> Change:
    """Empties an argument of a decision that had a result."""

    def change(one: Decision) -> Decision | None:
        args, kwargs = decision_log.load(one.given)
        result = decision_log.load(one.result)
        if not getattr(result, "moves", result):
            return None
        given = pickle.dumps(([*args[:number], [], *args[number + 1 :]], kwargs))
        return one._replace(given=given)

    return change


def refusing(one: Decision) -> Decision | None:
    """The chosen engine did not serve."""
    chosen, _ = decision_log.load(one.result)
    return one._replace(told=(one.told or {}) | {chosen: False}) if chosen else None


CHANGES = {
    "admission.due_wave": without(0),
    "admission.spread_queries": without(1),
    "binding.decide": without(2),
    "elastic.decide_over": without(0),
    "Fleet.choose": refusing,
}
