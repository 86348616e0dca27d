"""One call as a worker gets it, and what becomes of it."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Protocol

import xxhash

from troupe.scheduling.elastic import Kin
from troupe.v1 import reward_pb2 as pb

if TYPE_CHECKING:
    from services.reward.function import RegisteredFunction
    from services.reward.groups import CoreLease


@dataclass(eq=False)
class FunctionCall:
    """What a function is called with, on whose behalf, and who hears what it prints."""

    arguments_json: str
    job_id: str = ""
    trajectory_id: str = ""
    query_id: str = ""
    printed: Callable[[bytes], None] | None = None
    # Stateful sandboxes that its trajectory has had.
    sandboxes: Sequence[str] = ()
    # Variables that its process has while it runs.
    environment: Mapping[str, str] = field(default_factory=dict)
    # Trajectories that cannot go on without it, and how long its caller waits.
    waiters: int = 1
    seconds: float | None = None
    # How long it will run with the fewest cores, as its caller or its function says; 0: nobody did.
    expected_seconds: float = 0.0
    # The same by what calls like it took; 0: as others of its function.
    estimated_seconds: float = 0.0
    # Nobody wants it any more: it need not be begun.
    dropped: bool = False

    @cached_property
    def kin(self) -> Kin:
        """What it has in common with other calls of its function."""
        query = f"{self.job_id}/{self.query_id}" if self.query_id else ""
        trajectory = f"{self.job_id}/{self.trajectory_id}" if self.trajectory_id else ""
        # Arguments of another job's call may name another job's files.
        content = xxhash.xxh3_128_hexdigest(f"{self.job_id}/{self.arguments_json}".encode())
        return Kin(query, trajectory, content)


@dataclass(frozen=True)
class CallOutcome:
    """What became of one call: `result_json` after `seconds` of running, or `error`.

    `cold_seconds`: what it took to start a worker and to import the code; 0: both were there.
    """

    result_json: str = ""
    seconds: float = 0.0
    error: pb.InvocationError | None = None
    cold_seconds: float = 0.0
    # The stateful sandbox that it ran in, or that is gone.
    sandbox: str = ""


class WorkerPlace(Protocol):
    """Where calls run, one at a time: a worker process here, or one on another host."""

    name: str
    restarts: int

    @property
    def warm(self) -> bool:
        """Whether there is a process that waits for calls."""

    @property
    def lived(self) -> float:
        """Seconds that there was a process, over its lifetime."""

    async def start(self) -> None:
        """Have a process there, before any call."""

    async def stop(self) -> None:
        """There will be no more calls."""

    def rest(self) -> None:
        """End the process; the next call starts another."""

    async def warm_up(self, function: RegisteredFunction) -> None:
        """Have a process there that has imported `function`, if that works."""

    def holds(self, function: RegisteredFunction) -> bool:
        """Whether the process has imported `function` since its last registration."""

    def suits(self, function: RegisteredFunction) -> bool:
        """Whether the process is confined as `function` wants it."""

    def cancel(self) -> None:
        """End the call that runs now; its outcome is KIND_CANCELLED."""

    def run_many(
        self,
        function: RegisteredFunction,
        calls: Sequence[FunctionCall],
        lease: CoreLease | None = None,
    ) -> AsyncGenerator[tuple[int, CallOutcome]]:
        """Run `calls` one after the other: index and outcome of each as it ends.

        Stops early, after an outcome, when the process is lost: what has no outcome did not begin.
        Those that are `dropped` before they begin are left out.
        """
