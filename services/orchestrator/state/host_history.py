"""How busy the hosts' CPUs, memory and GPUs were: measured by workers, kept in Redis."""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from services.orchestrator.state.redis import NO_STATE, RedisAccess, host_use_rows
from troupe.rpc import InvalidArgument
from troupe.v1 import orchestrator_pb2 as orchestrator_pb

# Kept rows: (rows of measurements per kept row, number of kept rows). With a row every 10 s these
# are 4 hours of single rows, a day of means over a minute, and two weeks of means over 10 minutes;
# of 64 hosts they take about 11 MB.
TIERS: Final = ((1, 1440), (6, 1440), (60, 2016))
# A host with more silence than this many rows has no values.
_SILENT_ROWS: Final = 3.5
_MOST_HOSTS: Final = 256
_MOST_POINTS: Final = 1000
_POINTS: Final = 240
_DEFAULT_RANGE: Final = 3600.0
# Columns of a row.
_FIELDS: Final = ("cpu", "memory", "gpu", "gpu_memory")


@dataclass
class _Worker:
    """The CPU counters of a worker's host, at the last row and now."""

    before: orchestrator_pb.HostCpu
    now: orchestrator_pb.HostCpu
    seen: float


@dataclass
class _Host:
    """The newest measurements of a host."""

    name: str
    seen: float
    workers: dict[str, _Worker] = field(default_factory=dict)
    memory: tuple[float, float] | None = None
    """Used fraction, and when it was measured."""
    devices: dict[str, tuple[orchestrator_pb.DeviceUse, float]] = field(default_factory=dict)

    def values(self, oldest: float) -> tuple[float, ...]:
        """Return the host's fractions in the order of `_FIELDS`, of measurements since `oldest`,
        and begin to count CPU seconds anew."""
        self.workers = {name: one for name, one in self.workers.items() if one.seen >= oldest}
        self.devices = {name: one for name, one in self.devices.items() if one[1] >= oldest}
        busy = cores = 0.0
        # Workers on the same cores have the same counters, and others add theirs.
        for one in self.workers.values():
            if (seconds := one.now.at - one.before.at) > 0:
                busy += (one.now.busy_seconds - one.before.busy_seconds) / seconds
                cores += one.now.cores
            one.before = one.now
        uses = [use for use, _ in self.devices.values()]
        total = sum(use.memory_bytes for use in uses)
        return (
            min(1.0, max(0.0, busy / cores)) if cores else math.nan,
            self.memory[0] if self.memory and self.memory[1] >= oldest else math.nan,
            sum(use.utilization for use in uses) / len(uses) if uses else math.nan,
            sum(use.used_bytes for use in uses) / total if total else math.nan,
        )


class _Means:
    """Means over rows, by host."""

    def __init__(self) -> None:
        self.rows = 0
        self._sums: dict[str, list[float]] = {}
        self._counts: dict[str, list[int]] = {}

    def add(self, row: Mapping[str, Sequence[float]]) -> None:
        """Add the values of a row, by host; NaN adds nothing."""
        self.rows += 1
        for host, values in row.items():
            sums = self._sums.setdefault(host, [0.0] * len(_FIELDS))
            counts = self._counts.setdefault(host, [0] * len(_FIELDS))
            for i, value in enumerate(values):
                if not math.isnan(value):
                    sums[i] += value
                    counts[i] += 1

    def means(self) -> dict[str, list[float]]:
        """Return the means by host; NaN without values."""
        return {
            host: [
                one / count if count else math.nan
                for one, count in zip(sums, self._counts[host], strict=True)
            ]
            for host, sums in self._sums.items()
        }


class HostHistory:
    """The utilization of all hosts over time.

    Heartbeats bring measurements; every `seconds` a row with all hosts is written to Redis, and
    less often means over rows, which are kept for longer (`TIERS`). What was measured since the
    last row is lost in a restart.
    """

    def __init__(
        self, redis: RedisAccess, seconds: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._redis = redis
        self._seconds = seconds
        self._clock = clock
        self._hosts: dict[str, _Host] = {}
        self._means = {rows: _Means() for rows, _ in TIERS[1:]}

    def note(
        self,
        host_id: str,
        name: str,
        worker: str,
        cpu: orchestrator_pb.HostCpu,
        use: orchestrator_pb.HostUse | None,
    ) -> None:
        """Note what `worker` has measured on a host. `name`: the host's name for people."""
        now = self._clock()
        host = self._hosts.get(host_id)
        if host is None:
            if len(self._hosts) >= _MOST_HOSTS:
                return
            host = self._hosts[host_id] = _Host(name, now)
        host.name, host.seen = name, now
        known = host.workers.get(worker)
        host.workers[worker] = _Worker(known.before if known else cpu, cpu, now)
        if use is None:
            return
        if use.memory_bytes:
            host.memory = use.used_bytes / use.memory_bytes, now
        for device in use.devices:
            host.devices[device.uuid] = device, now

    async def run(self) -> None:
        """Write rows until cancelled; skip those for which Redis has no room or does not answer."""
        while True:
            await asyncio.sleep(self._seconds)
            with suppress(*NO_STATE):
                await self.write_row()

    async def write_row(self) -> None:
        """Write what was measured since the last row."""
        oldest = self._clock() - _SILENT_ROWS * self._seconds
        self._hosts = {key: one for key, one in self._hosts.items() if one.seen >= oldest}
        names = Counter(host.name for host in self._hosts.values())
        row = {
            host.name
            if names[host.name] == 1
            # Hosts of one name differ in their boots.
            else f"{host.name} ({host_id.rpartition('/')[2][:8]})": host.values(oldest)
            for host_id, host in self._hosts.items()
        }
        if not row:
            return
        for rows, most in TIERS:
            if rows == 1:
                await self._append(rows, most, row)
                continue
            means = self._means[rows]
            means.add(row)
            if means.rows >= rows:
                self._means[rows] = _Means()
                await self._append(rows, most, means.means())

    async def _append(self, rows: int, most: int, values: Mapping[str, Sequence[float]]) -> None:
        hosts = sorted(values)
        row = orchestrator_pb.HostUseRow(
            hosts=hosts,
            **{name: [values[host][i] for host in hosts] for i, name in enumerate(_FIELDS)},
        )
        key = host_use_rows(rows)
        text = row.SerializeToString()
        await self._redis.call("XADD", key, "MAXLEN", "~", most, "*", "r", text)

    async def between(
        self, since: float | None, until: float | None, points: int
    ) -> orchestrator_pb.ListHostUseResponse:
        """Return the utilization of each host between two times (seconds since the epoch; by
        default the last hour), as at most `points` means.

        Times come in whole multiples of their distance, so that the same parts of the past have the
        same values in every answer. Raises `InvalidArgument`.
        """
        now = time.time()
        until = now if until is None else min(until, now)
        since = until - _DEFAULT_RANGE if since is None else since
        if since >= until:
            raise InvalidArgument(
                "is not before the end of the range",
                field="since",
                value=since,
                remedy="Give a time in the past that is before `until`.",
            )
        if not 0 <= points <= _MOST_POINTS:
            raise InvalidArgument(
                f"is not between 0 and {_MOST_POINTS}", field="points", value=points
            )
        # The finest rows that reach back far enough.
        rows = next(
            (n for n, most in TIERS if now - since <= n * most * self._seconds), TIERS[-1][0]
        )
        width = max(rows * self._seconds, (until - since) / (points or _POINTS))
        found = await self._redis.call(
            "XRANGE",
            host_use_rows(rows),
            max(0, round(1000 * since)),
            max(0, round(1000 * until)),
        )
        return await asyncio.to_thread(_binned, found or (), width)


def _binned(
    entries: Iterable[tuple[bytes, Any]], width: float
) -> orchestrator_pb.ListHostUseResponse:
    """Return the rows of a stream as means over parts of `width` seconds."""
    found: list[tuple[float, orchestrator_pb.HostUseRow]] = []
    for entry_id, fields in entries:
        data = fields[b"r"] if isinstance(fields, dict) else fields[1]
        at = int(entry_id.partition(b"-")[0]) / 1000
        found.append((at, orchestrator_pb.HostUseRow.FromString(data)))
    places = {name: i for i, name in enumerate(sorted({h for _, row in found for h in row.hosts}))}
    parts: dict[int, int] = {}
    times: list[float] = []
    for at, _ in found:
        place = parts.setdefault(int(at // width), len(parts))
        times[place:] = [at]
    sums = np.zeros((len(times), len(_FIELDS), len(places)))
    counts = np.zeros_like(sums)
    for at, row in found:
        part = parts[int(at // width)]
        hosts = [places[name] for name in row.hosts]
        values = np.array([getattr(row, name) for name in _FIELDS])
        sums[part][:, hosts] += np.nan_to_num(values)
        counts[part][:, hosts] += ~np.isnan(values)
    with np.errstate(invalid="ignore"):
        means = sums / counts
    response = orchestrator_pb.ListHostUseResponse(times=times)
    for name, place in places.items():
        columns = {one: means[:, i, place] for i, one in enumerate(_FIELDS)}
        response.hosts.add(host=name, **columns)
    return response
