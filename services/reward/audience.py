"""Who hears how an invocation goes: its watchers, and the logs of its function."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from services.reward.logs import Lines
from services.reward.queues import Waiting
from troupe.v1 import reward_pb2 as pb

Watcher = Callable[[pb.InvocationEvent], None]


class Audience:
    """Tells everything but outcomes, which are for those who invoked."""

    def __init__(self) -> None:
        self._watchers: dict[str, list[Watcher]] = {}

    @contextmanager
    def watch(
        self, invocation_id: str, watcher: Watcher, waiting: Waiting | None
    ) -> Iterator[None]:
        """`watcher` is told what happens from now on, first how far `waiting` is, if it is."""
        self._watchers.setdefault(invocation_id, []).append(watcher)
        if waiting is not None:
            watcher(_started(waiting) if waiting.began else _queued(waiting))
        try:
            yield
        finally:
            self._watchers[invocation_id].remove(watcher)
            if not self._watchers[invocation_id]:
                del self._watchers[invocation_id]

    def queued(self, waiting: Waiting) -> None:
        """It waits."""
        self._tell(waiting, _queued)

    def begun(self, waiting: Waiting) -> None:
        """It runs."""
        self._tell(waiting, _started)

    def printed(self, waiting: Waiting, part: bytes) -> None:
        """Its function printed something."""
        if waiting.lines is None:
            waiting.lines = Lines(lambda line: self._line(waiting, line))
        waiting.lines.add(part)

    def ended(self, waiting: Waiting) -> None:
        """It runs no more, and may run again."""
        if waiting.lines is not None:
            waiting.lines.end()

    def log(self, waiting: Waiting, text: str) -> None:
        """A line for the logs of its function."""
        function, call = waiting.function, waiting.call
        function.logs.add(
            pb.LogLine(
                version=function.spec.version,
                job_id=call.job_id,
                trajectory_id=call.trajectory_id,
                invocation_id=waiting.invocation_id,
                text=text,
            )
        )

    def _line(self, waiting: Waiting, line: str) -> None:
        self.log(waiting, line)
        self._tell(waiting, lambda _: pb.InvocationEvent(output=line + "\n"))

    def _tell(self, waiting: Waiting, event: Callable[[Waiting], pb.InvocationEvent]) -> None:
        for watcher in self._watchers.get(waiting.invocation_id, ()):
            watcher(event(waiting))


def _queued(waiting: Waiting) -> pb.InvocationEvent:
    return pb.InvocationEvent(queued=pb.InvocationQueued(ahead=waiting.function.queued))


def _started(waiting: Waiting) -> pb.InvocationEvent:
    return pb.InvocationEvent(
        started=pb.InvocationStarted(
            attempt=waiting.attempts, cores=waiting.cores, host=waiting.host
        )
    )
