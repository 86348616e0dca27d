"""How many worker processes there are: started for what waits, ended when nothing does."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Mapping
from typing import Final

from services.reward.function import Function, quantile
from services.reward.host import Host
from services.reward.queues import Queues, Waiting
from troupe.scheduling.elastic.provision import workers_to_start

# Until a worker has started: what that is expected to take. Of so many it is the median.
_COLD_SECONDS: Final = 0.15
_COLD_STARTS: Final = 100
# Timers are not exact: looking a little later finds what is due.
_LATE_SECONDS: Final = 0.005


class Workforce:
    """The processes of all hosts."""

    def __init__(self, hosts: Mapping[str, Host]) -> None:
        """`hosts` by name, as they come and go."""
        self._hosts = hosts
        self._cold: deque[float] = deque(maxlen=_COLD_STARTS)
        self._timer: asyncio.TimerHandle | None = None

    @property
    def alive(self) -> int:
        """Those that are there, or being started."""
        return sum(host.alive for host in self._hosts.values())

    @property
    def cold(self) -> int:
        """Those that could be started."""
        return sum(host.cold for host in self._hosts.values())

    @property
    def cold_seconds(self) -> float:
        """How long one is expected to take to start."""
        return quantile(self._cold, 0.5) or _COLD_SECONDS

    def started(self, seconds: float) -> None:
        """One took so long to start."""
        self._cold.append(seconds)

    def startable(self, queues: Queues, head: Waiting, now: float) -> int:
        """How many may be started for what waits; `head` is the first."""
        cold = self.cold
        if not cold:
            return 0
        seconds = self.cold_seconds
        backlog = queues.seconds(seconds)
        for host in self._hosts.values():
            # What takes longer than was expected is expected to take as long again.
            backlog += sum(
                r.ends - now if r.ends > now else now - r.ends for r in host.running.values()
            )
        return workers_to_start(backlog, now - head.since, self.alive, cold, seconds)

    def idle(self, host: Host, function: Function) -> None:
        """A worker of `host` has nothing to do since now; `function` was its last."""
        self._look(host.idle_seconds(function))

    def close(self) -> None:
        """No more of it."""
        if self._timer is not None:
            self._timer.cancel()

    def _reap(self) -> None:
        """End those that were idle for too long, and look again when the next one is."""
        self._timer = None
        looks = [look for host in self._hosts.values() if (look := host.reap()) is not None]
        if looks:
            self._look(min(looks))

    def _look(self, seconds: float) -> None:
        loop = asyncio.get_running_loop()
        due = loop.time() + seconds + _LATE_SECONDS
        if self._timer is not None:
            if self._timer.when() <= due:
                return
            self._timer.cancel()
        self._timer = loop.call_at(due, self._reap)
