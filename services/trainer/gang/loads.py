"""Loads that all ranks of a gang do at once: their progress, one deadline, one error for all."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Final, Protocol, TypeVar

import torch

from troupe.disks import SLOWEST_BYTES_PER_SECOND
from troupe.rpc import DeadlineExceeded, TroupeError, from_status, to_status

T = TypeVar("T")
# Seconds between the exchanges of ranks that work `together`.
_EXCHANGE_SECONDS: Final = 0.2
_FIRST_SECONDS: Final = 0.01


class Ranks(Protocol):
    """Rank group of a gang, as far as `together` uses it."""

    rank: int
    size: int
    timeout_seconds: float

    @property
    def report_load(self) -> Callable[[int, int], None]:
        """Called with the loaded and total bytes of all ranks."""

    def summed(self, values: torch.Tensor) -> torch.Tensor:
        """Return the sum over all ranks of `values`."""

    def gather(self, data: bytes) -> list[bytes]:
        """Return the data of all ranks."""


class LoadProgress:
    """Bytes that a rank has to load and has loaded; `add` ends an abandoned load."""

    def __init__(self) -> None:
        self.total, self.done = 0, 0
        self.given_up = threading.Event()

    def add(self, nbytes: int) -> None:
        """Count bytes that have been loaded. Raises TimeoutError once another rank has failed."""
        self.done += nbytes
        if self.given_up.is_set():
            raise TimeoutError("another rank of the gang could not do its part")


def together(group: Ranks, what: str, work: Callable[[LoadProgress], T]) -> T:
    """Call `work` on all ranks at once, and wait for all of them; all ranks must call this.

    Meanwhile ranks exchange their progress, so that the time limit of a working rank depends on its
    bytes, and a dead rank is noticed within the gang's timeout. A `TroupeError` of one rank is
    raised on all. Raises DeadlineExceeded of kind "gang_load_slow".
    """
    progress, found, problems = LoadProgress(), [], []

    def run() -> None:
        try:
            found.append(work(progress))
        except BaseException as error:
            problems.append(error)

    thread = threading.Thread(target=run, name="load", daemon=True)
    thread.start()
    began, pause = time.monotonic(), _FIRST_SECONDS
    while True:
        thread.join(pause)
        pause = min(_EXCHANGE_SECONDS, 2 * pause)
        elapsed = int(time.monotonic() - began) if group.rank == 0 else 0
        ended = not thread.is_alive()
        mine = [progress.done, progress.total, ended, ended and bool(problems), elapsed]
        done, total, finished, failed, seconds = group.summed(torch.tensor(mine)).tolist()
        group.report_load(done, total)
        if finished == group.size:
            break
        limit = group.timeout_seconds + total / SLOWEST_BYTES_PER_SECOND
        if failed or seconds > limit:
            progress.given_up.set()
        if seconds > limit + group.timeout_seconds:
            raise DeadlineExceeded(
                f"{what}: {done:,} of {total:,} bytes were moved in {seconds} s",
                kind="gang_load_slow",
                remedy="Keep models on a disk of the trainers' hosts, or a faster share; look for "
                "a host with a slow disk or network.",
            )
    problem = next(iter(problems), None)
    refusal = to_status(problem) if isinstance(problem, TroupeError) else None
    statuses = group.gather(b"" if refusal is None else refusal.SerializeToString())
    for status in statuses:
        if status:
            raise from_status(status)
    if problem is not None:
        raise problem
    if failed:
        raise TimeoutError(f"{what}: another rank of the gang could not do its part")
    return found[0]
