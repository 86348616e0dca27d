"""Where a benchmark runs in a real-time class (`chrt -r`): who goes before whom."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Iterator
from typing import Final

import psutil

# What other work on the machine gets after each batch that is played.
_PAUSE_SECONDS: Final = 5.0


def go_ahead(service: psutil.Process) -> None:
    """The service and this process go before workers that burn, as they do without a real-time
    class: in one nobody gets a core until another's turn is over."""
    if not _real_time():
        return
    priority = os.sched_param(os.sched_getparam(0).sched_priority + 1)
    for process in (service, psutil.Process()):
        for thread in process.threads():
            with contextlib.suppress(ProcessLookupError):
                os.sched_setscheduler(thread.id, os.SCHED_RR, priority)


@contextlib.contextmanager
def modestly() -> Iterator[None]:
    """What measures no time but its own CPU's, or none, needs no class."""
    policy, parameters = os.sched_getscheduler(0), os.sched_getparam(0)
    if _real_time():
        os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
    try:
        yield
    finally:
        os.sched_setscheduler(0, policy, parameters)


async def breathe() -> None:
    """Let others have the machine for a while."""
    if _real_time():
        await asyncio.sleep(_PAUSE_SECONDS)


def _real_time() -> bool:
    return os.sched_getscheduler(0) == os.SCHED_RR
