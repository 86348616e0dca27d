"""How processes are ended: in order, by force, with their groups and descendants."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from collections.abc import Sequence

import psutil
import pytest

from tests.support.waiting import PATIENCE
from troupe.processes.ending import (
    close_output,
    exit_text,
    kill_tree,
    stop_process,
    stop_process_async,
)

SECONDS = 60.0
ORDERLY = ["sh", "-c", "trap 'exit 3' TERM; echo; while :; do sleep 0.1; done"]
STUBBORN = ["sh", "-c", "trap '' TERM; echo; while :; do sleep 0.1; done"]
# The shell ends at SIGTERM, and leaves a process in its group that ignores it.
LEAVES_ONE = ["sh", "-c", "trap 'exit 3' TERM; (trap '' TERM; echo; exec sleep 600) & wait"]


def started(command: Sequence[str]) -> subprocess.Popen[bytes]:
    """The process, once it has said that it runs."""
    process = subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True)
    assert process.stdout is not None
    process.stdout.readline()
    process.stdout.close()
    return process


async def started_async(command: Sequence[str]) -> asyncio.subprocess.Process:
    """Start a process as `started` does."""
    process = await asyncio.create_subprocess_exec(
        *command, stdout=asyncio.subprocess.PIPE, start_new_session=True
    )
    assert process.stdout is not None
    await process.stdout.readline()
    return process


@pytest.mark.parametrize("group", [False, True])
async def test_a_process_that_ends_on_sigterm_keeps_its_status(group: bool) -> None:
    assert stop_process(started(ORDERLY), SECONDS, group=group) == 3
    assert await stop_process_async(await started_async(ORDERLY), SECONDS, group=group) == 3


@pytest.mark.parametrize("group", [False, True])
async def test_a_process_that_ignores_sigterm_is_killed(group: bool) -> None:
    assert stop_process(started(STUBBORN), 0.1, group=group) == -signal.SIGKILL
    process = await started_async(STUBBORN)
    assert await stop_process_async(process, 0.1, group=group) == -signal.SIGKILL


async def test_a_process_that_has_ended_is_stopped_again_without_effect() -> None:
    process = started(ORDERLY)
    assert stop_process(process, SECONDS) == stop_process(process, SECONDS, group=True) == 3
    other = await started_async(ORDERLY)
    assert await stop_process_async(other, SECONDS) == 3
    assert await stop_process_async(other, SECONDS) == 3


async def test_children_that_a_process_leaves_are_killed_with_its_group() -> None:
    process = started(LEAVES_ONE)
    left = psutil.Process(process.pid).children()
    assert left
    assert stop_process(process, SECONDS, group=True) == 3
    other = await started_async(LEAVES_ONE)
    left += psutil.Process(other.pid).children()
    # The one that is left holds the output, which is not waited for.
    async with asyncio.timeout(PATIENCE):
        assert await stop_process_async(other, 2 * PATIENCE, group=True) == 3
    _, alive = psutil.wait_procs(left, timeout=SECONDS)
    assert not alive


def test_a_killed_tree_includes_descendants_in_other_sessions() -> None:
    child = "import os, time; os.setsid(); print(flush=True); time.sleep(600)"
    process = started(["sh", "-c", f"{sys.executable} -c '{child}' & wait"])
    below = psutil.Process(process.pid).children(recursive=True)
    assert below
    kill_tree(process.pid)
    assert process.wait(SECONDS) == -signal.SIGKILL
    _, alive = psutil.wait_procs(below, timeout=SECONDS)
    assert not alive
    kill_tree(process.pid)


async def test_the_end_of_a_process_is_seen_while_its_output_waits() -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", "while True: print('x' * 1000)", stdout=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    async with asyncio.timeout(PATIENCE):
        # asyncio does not read on before some of it is taken.
        while not process.stdout._paused:  # type: ignore[attr-defined]  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    process.kill()
    close_output(process)
    async with asyncio.timeout(PATIENCE):
        assert await process.wait() == -9
    close_output(process)


@pytest.mark.parametrize(
    ("status", "text"),
    [
        (0, "exited with status 0"),
        (7, "exited with status 7"),
        (-9, "was killed by SIGKILL"),
        (-40, "was killed by signal 40"),
    ],
)
def test_an_exit_status_reads_as_words(status: int, text: str) -> None:
    assert exit_text(status) == text
