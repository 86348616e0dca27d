"""A function that can be invoked, and what is known of its calls."""

from __future__ import annotations

import math
import sys
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Final

from services.reward.logs import Logs
from services.reward.sandbox import PROCESS, Cage
from services.reward.stock import needs_of
from troupe.scheduling.elastic import SpeedUp
from troupe.v1 import reward_pb2 as pb

if TYPE_CHECKING:
    from services.reward.chunk import Chunk

REWARD: Final = "reward"
KINDS: Final = ("", REWARD, "tool")
# Cold starts that percentiles are of.
_COLD_STARTS: Final = 1000


@dataclass(eq=False)
class Function:
    """A registered function with its counts."""

    spec: pb.FunctionSpec
    # The folder of its uploaded source; None: it is importable as the service is.
    source: Path | None = None
    # Times it was registered: with each, workers look anew whether its code was edited.
    registrations: int = 0
    # How many there had been when even a new worker could not import it.
    unimportable: int = -1
    invocations: int = 0
    errors: int = 0
    retried: int = 0
    # Calls that wait for a worker, and what workers run.
    queued: int = 0
    chunks: set[Chunk] = field(default_factory=set)
    # Cores that its calls hold now.
    cores_held: int = 0
    run_seconds: float = 0.0
    cold_starts: int = 0
    logs: Logs = field(default_factory=Logs)
    # How long its calls take with how many cores, learned from those that ran.
    curve: SpeedUp = field(init=False)
    # What its workers are confined to.
    cage: Cage = field(init=False)
    # What a call takes beside a worker and cores.
    needs: Mapping[str, int] = field(init=False)
    _measured: tuple[SpeedUp | None, float] = (None, 0.0)
    _cold_seconds: deque[float] = field(default_factory=lambda: deque(maxlen=_COLD_STARTS))

    def __post_init__(self) -> None:
        fraction = self.spec.parallel_fraction
        self.curve = SpeedUp(fraction)
        if self.spec.expected_seconds:
            # However long its author takes it to be: a call is ended before.
            expected = min(self.spec.expected_seconds, self.spec.timeout_seconds)
            at_one = expected / self.curve.seconds((max(1, self.cores),))[0]
            self.curve = SpeedUp(fraction, at_one)
        self.cage = Cage.of(self.spec)
        if self.source is not None:
            # Workers of one source never see another's modules, whatever their names.
            self.cage = replace(self.cage, source=str(self.source))
        self.needs = needs_of(self.spec, self.cage.level)

    @cached_property
    def cores(self) -> int:
        """The fewest cores that a call takes."""
        return self.spec.cores if self.spec.HasField("cores") else 1

    @cached_property
    def elastic(self) -> bool:
        """Whether a call can make use of more cores than the fewest."""
        return self.spec.max_cores > max(1, self.cores)

    @cached_property
    def levels(self) -> tuple[int, ...]:
        """Numbers of cores that a call of an elastic function may get."""
        return tuple(range(max(1, self.cores), self.spec.max_cores + 1))

    @property
    def running(self) -> int:
        """Workers that run calls of it."""
        return len(self.chunks)

    @property
    def room(self) -> int:
        """How many more of its calls may run at once."""
        limit = self.spec.max_concurrency
        return max(0, limit - self.running) if limit > 0 else sys.maxsize

    @property
    def seconds(self) -> float:
        """How long a call is expected to take with the fewest cores."""
        # Asked for with every decision, for all that wait.
        if self._measured[0] is not self.curve:
            self._measured = (self.curve, self.curve.seconds((max(1, self.cores),))[0])
        return self._measured[1]

    @property
    def repeatable(self) -> bool:
        """Whether a call may be begun twice: nothing but its result is wanted of it."""
        return self.spec.kind == REWARD or self.spec.retries > 0

    @property
    def stays_warm(self) -> bool:
        """Whether its workers are there for the next call, too."""
        return self.cage.level == PROCESS and not self.own_place

    @property
    def own_place(self) -> bool:
        """Whether its calls run in sandboxes that are opened for them, not in workers."""
        return self.spec.stateful or self.cage.level == "container"

    @cached_property
    def key(self) -> str:
        """Unique among functions."""
        return f"{self.spec.name}@{self.spec.version}"

    @cached_property
    def label(self) -> str:
        """The name without its job: what metrics are grouped by."""
        return self.spec.name.rpartition("/")[2]

    def started_cold(self, seconds: float) -> None:
        """One more call had to wait so long for a worker to start, or to import the code."""
        self.cold_starts += 1
        self._cold_seconds.append(seconds)

    def cold(self, share: float) -> float:
        """That quantile of the last cold starts, in seconds; 0 where there was none."""
        return quantile(self._cold_seconds, share)

    def status(self, warm_workers: int = 0, confinement: Sequence[str] = ()) -> pb.FunctionStatus:
        """The counts as a message."""
        serial, parallel = self.curve.line if self.invocations else (0.0, 0.0)
        return pb.FunctionStatus(
            function=self.spec,
            invocations=self.invocations,
            errors=self.errors,
            running=self.running,
            queued=self.queued + sum(chunk.behind for chunk in self.chunks),
            mean_seconds=self.run_seconds / self.invocations if self.invocations else 0.0,
            serial_seconds=serial,
            parallel_seconds=parallel,
            warm_workers=warm_workers,
            cold_starts=self.cold_starts,
            cold_start_p50_seconds=self.cold(0.5),
            cold_start_p99_seconds=self.cold(0.99),
            retried=self.retried,
            cores_held=self.cores_held,
            confinement=confinement,
        )


def quantile(values: Sequence[float] | deque[float], share: float) -> float:
    """The least of `values` that so many of them do not exceed (nearest rank); 0 of none."""
    if not values:
        return 0.0
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]
