"""Code of one job that exits, interrupts, hangs or stops the event loop, wherever it runs: that job
ends and says why, no service ends, and another job on the cluster lives on."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from tests.e2e.standing import BAD, ROOT, Standing, ended, stand_up
from tests.support.waiting import PATIENCE
from troupe.client.records.jobs import JobState
from troupe.cluster.state import running_state

pytestmark = pytest.mark.slow

WORLDS = '''
import os
import sys

from troupe.networks.environments.matrix import TwoStep


def exits(copies):
    sys.exit(0)


def interrupted(copies):
    raise BaseExceptionGroup("g", [KeyboardInterrupt(), SystemExit(1)])


def stops(copies):
    raise StopIteration


class ClosesBadly(TwoStep):
    def close(self):
        sys.exit("of close")


def dies(copies):
    os._exit(0)


class Tasks:
    """Reads a command line that is not its own."""

    def __init__(self, split):
        import argparse

        argparse.ArgumentParser().parse_args(["--no-such-option"])


async def stops_the_loop(query, agents, tools):
    import asyncio

    loop = asyncio.get_running_loop()
    loop.call_soon(sys.exit, 3)
    loop.call_soon(loop.stop)

    async def interrupt():
        raise KeyboardInterrupt

    import contextvars

    task = loop.create_task(interrupt(), context=contextvars.Context())
    await asyncio.sleep(0.05)
    await task


async def exits_in_a_group(query, agents, tools):
    raise BaseExceptionGroup("g", [SystemExit(0), KeyboardInterrupt()])
'''
WANDB = """
import os
import sys
import time


class Run:
    def log(self, row, step):
        time.sleep(3600)

    def finish(self):
        raise KeyboardInterrupt


def init(project, **how):
    if project == "exits":
        sys.exit(1)
    if project == "hangs":
        time.sleep(3600)
    return Run()
"""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Standing]:
    with stand_up(tmp_path_factory.mktemp("standing")) as standing:
        (standing.code / "worlds_of_evil.py").write_text(WORLDS)
        (standing.code / "wandb.py").write_text(WANDB)
        yield standing


def networks(source: str) -> str:
    """A job of networks whose environment is `source`."""
    spec = yaml.safe_load((ROOT / "examples" / "particles" / "two_step.yaml").read_text())
    spec["environment"] |= {"source": f"worlds_of_evil:{source}", "copies": 2}
    spec["pipeline"] |= {"steps": 1, "queries_per_step": 2}
    spec["evaluation"] |= {"queries": 0}
    spec["logging"] = {"tensorboard": False}
    return yaml.safe_dump(spec)


def _restarts(cluster: Standing) -> int:
    state = running_state(cluster.data_dir)
    assert state is not None, "the cluster is gone"
    return sum(service.restarts for service in state.services)


async def test_a_job_lives_on_while_others_misbehave(cluster: Standing) -> None:
    before = _restarts(cluster)  # another process may have taken a port while the cluster started
    async with cluster.client() as client:
        good = await client.submit(cluster.yaml(BAD + "quick", **{"pipeline.steps": 60}))
        for source, message in {
            "exits": "SystemExit: 0",
            "interrupted": "BaseExceptionGroup: g (KeyboardInterrupt; SystemExit: 1)",
            "stops": "StopIteration",
        }.items():
            end = await ended(await client.submit(networks(source)))
            assert end.job.state == JobState.FAILED, source
            assert end.problem.field == "environment.source"
            assert message in str(end.problem), end.problem
        end = await ended(await client.submit(networks("ClosesBadly")))
        assert end.job.state == JobState.SUCCEEDED, end.problem
        tasks: dict[str, Any] = {"tasks": {"source": "worlds_of_evil:Tasks"}}
        end = await ended(await client.submit(cluster.yaml(**tasks)))
        assert (end.job.state, end.problem.field) == (JobState.FAILED, "tasks.source")
        for play in ("stops_the_loop", "exits_in_a_group"):
            end = await ended(await client.submit(cluster.yaml(f"worlds_of_evil:{play}")))
            assert (end.job.state, end.problem.kind) == (
                JobState.FAILED,
                "too_many_failed_trajectories",
            )
        job = await good.wait(timeout=PATIENCE)
        assert job.state == JobState.SUCCEEDED, job.problem
    assert _restarts(cluster) == before


@pytest.mark.parametrize(
    ("project", "notice"),
    [
        ("exits", "no Weights & Biases: UserCodeExit: SystemExit: 1"),
        ("hangs", "Weights & Biases does not answer: the job continues"),
        ("logs", "Weights & Biases does not answer: the job continues"),
    ],
)
async def test_a_sink_that_exits_or_hangs_is_a_notice(
    cluster: Standing, project: str, notice: str
) -> None:
    pid = cluster.pid("orchestrator")
    changes = {"logging.wandb_project": project, "limits.step_seconds": 60}
    end = await cluster.run(cluster.yaml(**changes))
    assert end.job.state == JobState.SUCCEEDED, end.problem
    assert any(notice in one for one in end.notices), end.notices
    assert cluster.pid("orchestrator") == pid


async def test_a_clean_exit_of_workers_ends_the_job_at_fault_alone(cluster: Standing) -> None:
    before = _restarts(cluster)
    async with cluster.client() as client:
        good = await client.submit(cluster.yaml(BAD + "quick", **{"pipeline.steps": 40}))
        # Jobs that share deaths take turns of a minute.
        end = await ended(await client.submit(networks("dies")), 300)
        assert end.job.state == JobState.FAILED
        assert end.problem.kind == "workers_keep_dying"
        end = await ended(good, 300)
        assert end.job.state == JobState.SUCCEEDED, end.problem
    assert 3 <= _restarts(cluster) - before <= 6
