"""Devices of a whole cluster: servers, trainers and ranks of a job each see their own.

The machine has none: an inventory of eight is declared, and what each process was given is read
from its environment.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.support.interpreters import sglang_double
from tests.support.tiny_team import job
from tests.support.waiting import PATIENCE
from troupe.client import AsyncClient
from troupe.cluster import ClusterSettings, EmbeddedCluster
from troupe.rpc import FailedPrecondition

pytestmark = pytest.mark.slow


def given(process: psutil.Process, module: str) -> list[str]:
    """CUDA_VISIBLE_DEVICES of each process below that runs a module; torchrun is left out."""
    found = []
    for child in process.children(recursive=True):
        try:
            environment, command = child.environ(), child.cmdline()
        except psutil.NoSuchProcess:  # it has ended since it was listed
            continue
        if module in command and not (module.endswith("rank") and "RANK" not in environment):
            found.append(environment["CUDA_VISIBLE_DEVICES"])
    return sorted(found)


async def test_two_policies_of_two_replicas_and_a_gang_share_nothing(
    tmp_path: Path, models: Path
) -> None:
    settings = ClusterSettings(
        data_dir=tmp_path / "runs", panel=False, devices="8xH100-80GB", devices_per_trainer=2
    )
    engine = {
        "kind": "sglang",
        "python": sglang_double(tmp_path),
        "replicas": 2,
        "update": "disk",
        "max_context": 128,
    }
    over = {
        "pipeline.steps": 2,
        "policies.solver.engine": engine,
        "policies.checker.engine": engine,
        "policies.solver.trainer": {"gang": 2},
        "policies.checker.trainer": {"gang": 1},
        "policies.solver.optimizer": {"lr": 1e-3, "eps": 1e-3},
    }
    async with (
        EmbeddedCluster(settings) as cluster,
        AsyncClient(cluster.state.orchestrator_address) as client,
    ):
        # More than there is: refused before anything starts.
        greedy = job(models, **{**over, "policies.solver.engine": {**engine, "replicas": 4}})
        with pytest.raises(FailedPrecondition) as refused:
            await client.submit(greedy)
        assert refused.value.kind == "devices_missing"
        assert "4 x H100" in str(refused.value)

        handle = await client.submit(job(models, **over), "first")
        assert (await handle.wait(timeout=400)).state == "succeeded"
        assert not (await handle.audit()).violations
        me = psutil.Process(os.getpid())
        servers = given(me, "tests.support.sglang_process")
        assert servers == ["0", "1", "2", "3"]
        assert given(me, "services.trainer") == ["4,5", "6,7"]
        assert given(me, "services.rollout") == ["0,1,2,3"]
        for module in ("services.orchestrator", "services.experience_store", "services.reward"):
            assert given(me, module) == [""]
        ranks = given(me, "services.trainer.gang.rank")
        assert ranks in (["4", "5"], ["6", "7"])
        # The job's engines stay until others need their devices; until then they are its own.
        holders = [
            holder
            for node in (await client.cluster()).nodes
            for device in node.devices
            for holder in device.holders
        ]
        assert sum(one.startswith("first.") for one in holders) == 4
        shown = await asyncio.to_thread(
            subprocess.run,
            [sys.executable, "-m", "troupe.client.cli", "status"],
            env={**os.environ, "TROUPE_DATA_DIR": str(settings.data_dir), "COLUMNS": "160"},
            capture_output=True,
            text=True,
            timeout=PATIENCE,
        )
        lines = [line.split() for line in shown.stdout.splitlines() if " H100 " in line]
        assert len(lines) == 8, shown.stdout + shown.stderr
        served = sorted(line[-3:] for line in lines if "rollout-0" in line)
        assert served == [
            [policy, "v2", "healthy"] for policy in ("checker", "checker", "solver", "solver")
        ]


async def test_a_job_without_numbers_uses_all_devices(tmp_path: Path, models: Path) -> None:
    settings = ClusterSettings(data_dir=tmp_path / "runs", panel=False, devices="6xH100-80GB")
    engine = {
        "kind": "sglang",
        "python": sglang_double(tmp_path),
        "update": "disk",
        "max_context": 128,
    }
    over = {
        "pipeline.steps": 1,
        "policies.solver.engine": engine,
        "policies.checker.engine": engine,
        "policies.solver.optimizer": {"lr": 1e-3, "eps": 1e-3},
    }
    async with (
        EmbeddedCluster(settings) as cluster,
        AsyncClient(cluster.state.orchestrator_address) as client,
    ):
        # The second job gets the devices on which the first one's engines stay after its end.
        for name in ("whole", "again"):
            handle = await client.submit(job(models, **over), name)
            assert (await handle.wait(timeout=400)).state == "succeeded"
            assert not (await handle.audit()).violations
            servers = given(psutil.Process(os.getpid()), "tests.support.sglang_process")
            assert servers == ["0", "1", "2"]
            decided = {
                one.field: int(one.value)
                for one in (await handle.info()).resolved
                if one.source.startswith("auto: ")
            }
            assert len(decided) == 4
            for leaf in ("engine.replicas", "trainer.gang"):
                both = [decided[f"policies.{policy}.{leaf}"] for policy in ("solver", "checker")]
                assert sorted(both) == [1, 2]
