"""When a job ends before its last step: by a metric (`stop`), or by its time
(`limits.job_seconds`).

A decision is written to the job's record together with the row of metrics that it follows from, so
a runner that takes the job over neither decides it twice nor forgets it.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Final

from services.orchestrator.state.records import JobRecord
from troupe.job import JobSpec
from troupe.job.sections.run import EarlyStopSpec

STOP: Final = "stop"
JOB_SECONDS: Final = "limits.job_seconds"
# Seconds between looks at the clock, and between its durable readings: what a crash may forget.
_TICK_SECONDS: Final = 0.5
_NOTE_SECONDS: Final = 10.0


@dataclass(frozen=True)
class Watched:
    """The values of its metric that `stop` has seen. `rule`: the section as it was; another one
    begins anew."""

    rule: str
    best: float | None = None
    # Steps that were done at the best value.
    step: int = 0
    # Values since then.
    waited: int = 0

    @classmethod
    def of(cls, stop: EarlyStopSpec, stored: Mapping[str, Any]) -> Watched:
        """Return what a job's record has `stored`, if it is about this section."""
        rule = _rule(stop)
        return cls(**stored) if stored.get("rule") == rule else cls(rule)

    def after(self, stop: EarlyStopSpec, value: float, step: int) -> tuple[Watched, str]:
        """Return the state after the metric's value at `step` done steps, and why the job stops
        then; empty: it does not."""
        sign = 1.0 if stop.mode == "max" else -1.0
        if self.best is None or sign * (value - self.best) > stop.min_delta:
            found = replace(self, best=value, step=step, waited=0)
        else:
            found = replace(self, waited=self.waited + 1)
        if stop.at is not None and sign * (value - stop.at) >= 0:
            how = "at least" if stop.mode == "max" else "at most"
            why = f"{stop.metric} = {value:g} after step {step} is {how} {stop.at:g} (stop.at)"
            return found, why
        if stop.patience is not None and found.waited >= stop.patience:
            count = f"{found.waited} value" + ("s" if found.waited > 1 else "")
            why = (
                f"{stop.metric} did not improve on {found.best:g} of step {found.step} in {count}, "
                f"the last one {value:g} after step {step} (stop.patience)"
            )
            return found, why
        return found, ""


@dataclass(frozen=True)
class EarlyEnd:
    """The decision that a job ends after its open steps."""

    field: str
    # Steps that were done when it was decided.
    step: int
    # For people.
    text: str
    # The values of the fields that decided; the decision holds while the job has them.
    rule: str

    @classmethod
    def of(cls, spec: JobSpec, record: JobRecord) -> EarlyEnd | None:
        """Return the decision in a job's record, if it holds under `spec`."""
        if not record.early_end:
            return None
        found = cls(**record.early_end)
        if found.field == JOB_SECONDS:
            limit = spec.limits.job_seconds
            return found if limit is not None and record.ran_seconds >= limit else None
        return found if spec.stop is not None and found.rule == _rule(spec.stop) else None


class EarlyEnds:
    """The decisions about one job, each with the state that they follow from."""

    def __init__(self, spec: JobSpec, record: JobRecord, clock: RunClock) -> None:
        self._spec, self._clock = spec, clock
        self._watched = None if spec.stop is None else Watched.of(spec.stop, record.watched)
        self.decided = EarlyEnd.of(spec, record)
        # Whether the record still has a decision that held before the job was resumed.
        self._stale = bool(record.early_end) and self.decided is None

    def look(
        self, values: Mapping[str, float], step: int
    ) -> tuple[EarlyEnd | None, dict[str, Any]]:
        """Return the decision after a row of metrics at `step` done steps, and the fields of the
        record to write with the row.

        Nothing is remembered before `take` gets them back.
        """
        fields: dict[str, Any] = {"ran_seconds": self._clock.seconds}
        stop, watched, end = self._spec.stop, self._watched, self.decided
        if end is None and stop is not None and watched is not None and step > 0:
            value = values.get(stop.metric, math.nan)
            if math.isfinite(value):
                watched, why = watched.after(stop, value, step)
                fields["watched"] = asdict(watched)
                end = EarlyEnd(STOP, step, why, watched.rule) if why else None
        if end is None and self._clock.over:
            limit = self._spec.limits.job_seconds or 0.0
            text = f"it has run for {limit:g} s (limits.job_seconds)"
            end = EarlyEnd(JOB_SECONDS, step, text, repr(limit))
        if end is not None and end is not self.decided:
            fields["early_end"] = asdict(end)
        elif self._stale:
            fields["early_end"] = {}
        return end, fields

    def take(self, end: EarlyEnd | None, fields: Mapping[str, Any]) -> None:
        """Remember what `look` returned, now that it is written."""
        self.decided, self._stale = end, False
        if "watched" in fields:
            self._watched = Watched(**fields["watched"])


class RunClock:
    """The time that a job has run, over all its runners."""

    def __init__(self, seconds: float, limit: float | None, stands: Callable[[], bool]) -> None:
        """`seconds`: what earlier runners have counted. `stands`: whether the job waits for others
        now, so that its time does not count."""
        self._seconds, self._limit = seconds, limit
        self._stands = stands
        self._since: float | None = None

    @property
    def seconds(self) -> float:
        """Seconds counted until now."""
        self._count()
        return self._seconds

    @property
    def over(self) -> bool:
        """Whether the time is over."""
        return self._limit is not None and self.seconds >= self._limit

    def start(self) -> None:
        """Count from now on."""
        self._since = time.monotonic()

    async def run(self, note: Callable[[float], Any]) -> None:
        """Count until cancelled. With a limit, await `note(seconds)` now and then."""
        noted = time.monotonic()
        while True:
            await asyncio.sleep(_TICK_SECONDS)
            self._count()
            if self._limit is not None and time.monotonic() - noted >= _NOTE_SECONDS:
                await note(self._seconds)
                noted = time.monotonic()

    def _count(self) -> None:
        if self._since is None:
            return
        now = time.monotonic()
        if not self._stands():
            self._seconds += now - self._since
        self._since = now


def _rule(stop: EarlyStopSpec) -> str:
    return stop.model_dump_json(exclude={"best"})
