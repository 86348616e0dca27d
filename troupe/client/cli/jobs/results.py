"""`troupe jobs metrics|logs|compare`: what jobs measured, what they logged, how they differ."""

from __future__ import annotations

import asyncio
import csv
import json
import os
import sys
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from difflib import get_close_matches
from enum import StrEnum
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated, BinaryIO, Final, Self

import typer
from rich.console import Console
from rich.markup import escape

from troupe.client.aio import AsyncClient
from troupe.client.cli import options
from troupe.client.cli.options import call, make_table, number
from troupe.client.comparison import Comparison
from troupe.client.discovery import data_directory
from troupe.client.handle import AsyncJobHandle, frame_of
from troupe.client.records.events import Activity, Event, MetricsLogged, Notice, StateChanged
from troupe.client.records.jobs import MetricsRow
from troupe.contracts import metric_names
from troupe.rpc.errors import InvalidArgument, TroupeError

METRICS_FILE: Final = "metrics.jsonl"
# A running job's log is over for now when it has been silent for so long.
_QUIET_SECONDS: Final = 2.0
# How often files of services and output of functions are read for new lines.
_POLL_SECONDS: Final = 1.0


class TableFormat(StrEnum):
    """The forms in which metrics are printed."""

    TABLE = "table"
    CSV = "csv"
    JSON = "json"


def metrics(
    job_id: options.JobId,
    names: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME,...",
            help="Only these metrics, e.g. reward/mean or '*/entropy'. May be repeated.",
        ),
    ] = None,
    after_step: Annotated[int, typer.Option(min=-1, help="Only later steps.")] = -1,
    form: Annotated[
        TableFormat,
        typer.Option("--format", help="A table of a few metrics, or csv or json of all."),
    ] = TableFormat.TABLE,
    cluster: options.ClusterAddress = None,
    data_dir: options.DataDir = None,
) -> None:
    """Print a job's metrics, one row per step. Scores of an evaluation are in the row of the step
    that it followed. Metrics of a stopped cluster's job come from its data directory."""
    wanted = [part.strip() for one in names or [] for part in one.split(",") if part.strip()]
    stopped = options.stopped_job(job_id, cluster, data_dir)
    if stopped is not None:
        rows = frame_of(row for row in _written(stopped) if row.step > after_step)
    else:
        rows = call(
            cluster, data_dir, lambda client: client.job(job_id).metrics_frame((), after_step)
        )
    columns = [name for name in (rows[0] if rows else {}) if name != "step"]
    if wanted:
        columns = _chosen(columns, wanted) if rows else []
    shown = columns
    if form is TableFormat.TABLE and not wanted:
        shown = _fitting(sorted(columns, key=_rank), Console().width)
    if wanted or shown != columns:
        # Evaluations and training steps have different metrics: rows without any are left out.
        rows = [row for row in rows if any(row[name] is not None for name in shown)]
    table = [{name: row[name] for name in ("step", *shown)} for row in rows]
    if form is TableFormat.JSON:
        print(json.dumps(table))
    elif form is TableFormat.CSV:
        writer = csv.DictWriter(sys.stdout, ("step", *shown), lineterminator="\n")
        writer.writeheader()
        writer.writerows(table)
    else:
        _print_metrics(table, shown, len(columns) - len(shown))


def _written(directory: Path) -> Iterator[MetricsRow]:
    """Yield the rows of `metrics.jsonl` in a job's directory; a half-written line has none."""
    try:
        lines = (directory / METRICS_FILE).read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:  # it ended before its first step
        return
    for line in lines:
        try:
            values = json.loads(line)
            yield MetricsRow(values.pop("step"), values)
        except (ValueError, KeyError, AttributeError):
            continue


def _chosen(known: Sequence[str], wanted: Sequence[str]) -> list[str]:
    """Return the metrics that the patterns select, in their order. Raises `InvalidArgument`."""
    found: list[str] = []
    for pattern in wanted:
        matching = [name for name in known if fnmatchcase(name, pattern)]
        if not matching:
            close = get_close_matches(pattern, known, 5, 0.3) or list(known[:5])
            raise InvalidArgument(
                "the job has no such metric",
                field="--names",
                value=pattern,
                remedy=f"Similar ones: {', '.join(close)}. `--format csv` prints all "
                f"{len(known):,}.",
            )
        found += [name for name in matching if name not in found]
    return found


def _fitting(columns: Sequence[str], width: int) -> list[str]:
    """Return the first columns whose names fit into a terminal, at least one."""
    left = width - len("step")
    shown: list[str] = []
    for name in columns:
        left -= len(name) + 3
        if left < 0 and shown:
            break
        shown.append(name)
    return shown


def _rank(name: str) -> tuple[int, str]:
    """Return a key that sorts metrics by how many users look at them first."""
    first = (
        metric_names.REWARD_MEAN,
        *(f"*/{one}" for one in (metric_names.REWARD_MEAN, metric_names.POLICY_LOSS)),
        "reward/*/mean",
        *(f"*/{one}" for one in (metric_names.ENTROPY, metric_names.KL, metric_names.GRAD_NORM)),
    )
    for place, pattern in enumerate(first):
        if fnmatchcase(name, pattern):
            return place, name
    return len(first), name


def _print_metrics(
    rows: Sequence[dict[str, float | None]], columns: Sequence[str], more: int
) -> None:
    console = Console()
    if not rows:
        console.print("no metrics yet")
        return
    table = make_table((), ("step", *map(escape, columns)))
    for row in rows:
        table.add_row(f"{row['step']:.0f}", *(number(row[name]) for name in columns))
    console.print(table)
    if more > 0:
        console.print(
            f"{more} more metrics: --names '*/entropy' chooses, --format csv has all",
            highlight=False,
        )


def compare(
    job_ids: Annotated[
        list[str],
        typer.Argument(
            metavar="JOB JOB ...",
            help="Ids of two or more jobs.",
            show_default=False,
            autocompletion=options.complete_jobs,
        ),
    ],
    as_json: options.AsJson = False,
    cluster: options.ClusterAddress = None,
    data_dir: options.DataDir = None,
) -> None:
    """Compare jobs: the fields in which they differ, and their held-out scores."""
    if len(job_ids) < 2:
        raise InvalidArgument(
            "needs at least two jobs",
            field="JOB",
            value=job_ids[0],
            remedy="`troupe jobs list` shows their ids.",
        )
    found = call(cluster, data_dir, lambda client: client.compare(*job_ids))
    print(json.dumps(_comparison_values(found), indent=2) if as_json else found)


def _comparison_values(found: Comparison) -> dict[str, object]:
    return {
        "jobs": [job.id for job in found.jobs],
        "steps": [job.step for job in found.jobs],
        "fields": found.fields,
        "scores": found.scores,
        "metrics": found.metrics,
    }


@dataclass(frozen=True)
class LogEntry:
    """One line of a job's log: of the job itself, a function or a service."""

    at: datetime
    source: str
    text: str

    def __str__(self) -> str:
        return f"{self.at.astimezone():%H:%M:%S} {self.source:<12} {self.text}"


def logs(
    job_id: options.JobId,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Go on with new lines until the job ends.")
    ] = False,
    lines: Annotated[int, typer.Option(min=0, help="Number of last lines; 0: all.")] = 200,
    cluster: options.ClusterAddress = None,
    data_dir: options.DataDir = None,
) -> None:
    """Print what a job logged: its states and notices, what its functions printed, and the lines
    about it in the logs of the services.

    Logs of services are read on this host, in the data directory. On other hosts they are in
    logs/ of the data directory there.
    """
    folder = data_directory(data_dir) / "logs"

    async def show(client: AsyncClient) -> None:
        services = ServiceLogs(folder, job_id)
        async with JobLog(client.job(job_id)) as log:
            found = [one async for one in log.so_far()]
            found += await asyncio.to_thread(lambda: list(services.read()))
            told = [one async for one in printed(client, job_id)]
            for one in sorted(found + told, key=lambda one: one.at)[-lines:]:
                print(one, flush=True)
            if follow:
                await _follow(client, log, services, set(told))

    call(cluster, data_dir, show)


async def _follow(
    client: AsyncClient, log: JobLog, services: ServiceLogs, told: set[LogEntry]
) -> None:
    """Print new lines until the job has ended; the lines `told` of functions were printed."""

    async def others() -> None:
        nonlocal told
        found = await asyncio.to_thread(lambda: list(services.read()))
        said = [one async for one in printed(client, log.job_id)]
        fresh, told = [one for one in said if one not in told], set(said)
        for one in sorted(found + fresh, key=lambda one: one.at):
            print(one, flush=True)

    async def poll() -> None:
        while True:
            await asyncio.sleep(_POLL_SECONDS)
            await others()

    polling = asyncio.create_task(poll())
    try:
        async for one in log.rest():
            print(one, flush=True)
            if polling.done():
                polling.result()
    finally:
        polling.cancel()
        await asyncio.gather(polling, return_exceptions=True)
    await others()


class JobLog:
    """A context manager with a job's states and notices: first what it has logged, then what it
    logs until its end."""

    def __init__(self, job: AsyncJobHandle) -> None:
        """Begin to read only on entry."""
        self.job_id = job.id
        self._job = job
        # None after the last event.
        self._events: asyncio.Queue[Event | None] = asyncio.Queue()
        self._ended = False

    async def __aenter__(self) -> Self:
        self._reading = asyncio.create_task(self._read())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._reading.cancel()
        await asyncio.gather(self._reading, return_exceptions=True)

    async def so_far(self) -> AsyncIterator[LogEntry]:
        """Yield what is logged; an activity, which is not, or a silence shows that this is all.

        Raises the error of the stream, such as `NotFound`.
        """
        while not self._ended:
            try:
                async with asyncio.timeout(_QUIET_SECONDS):
                    event = await self._next()
            except TimeoutError:
                return
            if isinstance(event, Activity):
                return
            if event is not None and not isinstance(event, MetricsLogged):
                yield _entry(event)

    async def rest(self) -> AsyncIterator[LogEntry]:
        """Yield what comes until the job has ended."""
        while not self._ended:
            event = await self._next()
            if isinstance(event, StateChanged | Notice):  # `troupe jobs metrics` shows the others
                yield _entry(event)

    async def _next(self) -> Event | None:
        event = await self._events.get()
        if event is None:
            self._ended = True
            await self._reading  # raises its error
        return event

    async def _read(self) -> None:
        try:
            async for event in self._job.watch():
                self._events.put_nowait(event)
        finally:
            self._events.put_nowait(None)


async def printed(client: AsyncClient, job_id: str) -> AsyncIterator[LogEntry]:
    """Yield the lines that calls of functions printed for the job and that are still kept; none if
    the cluster has no reward service."""
    try:
        functions = await client.functions.list()
    except TroupeError:
        return
    for one in functions:
        if one.job_id not in ("", job_id):
            continue
        try:
            async for line in client.functions.logs(one.name, version=one.version, job_id=job_id):
                yield LogEntry(line.at, one.name.rpartition("/")[2], line.text)
        except TroupeError:  # it was deleted meanwhile
            continue


def _entry(event: Event) -> LogEntry:
    return LogEntry(event.at, "job", str(event).partition(" ")[2])


class ServiceLogs:
    """The lines about one job in the log files of a cluster's services (JSON, one object per
    line)."""

    def __init__(self, folder: Path, job_id: str) -> None:
        """`folder`: logs/ of the data directory; it need not exist."""
        self._folder = folder
        self._job_id = job_id
        # Bytes of each file that have been read.
        self._read: dict[Path, int] = {}

    def read(self) -> Iterator[LogEntry]:
        """Yield the lines that came since the last call, service by service."""
        # A log that grows too long is copied to `.log.1` and cut: what is there was read, except
        # the first time.
        older = [] if self._read else sorted(self._folder.glob("*.log.1"))
        for path in (*older, *sorted(self._folder.glob("*.log"))):
            try:
                with path.open("rb") as file:
                    yield from self._new_lines(path, file)
            except OSError:  # the data directory is being removed
                continue

    def _new_lines(self, path: Path, file: BinaryIO) -> Iterator[LogEntry]:
        start = self._read.get(path, 0)
        if start > os.fstat(file.fileno()).st_size:
            start = 0
        needle = json.dumps(self._job_id).encode()
        file.seek(start)
        for line in file:
            if not line.endswith(b"\n"):  # it is being written
                break
            start += len(line)
            if needle in line:
                entry = self._parsed(path.name.partition(".log")[0], line)
                if entry is not None:
                    yield entry
        self._read[path] = start

    def _parsed(self, service: str, line: bytes) -> LogEntry | None:
        try:
            record = json.loads(line)
            if self._job_id not in (record.get("job_id"), record.get("job")):
                return None
            at = datetime.fromisoformat(record["timestamp"])
        except (ValueError, KeyError, AttributeError, TypeError):
            return None
        left_out = ("timestamp", "event", "level", "job_id", "job", "service", "logger")
        more = " ".join(f"{k}={v}" for k, v in record.items() if k not in left_out)
        text = f"{record.get('level', '')}: {record.get('event', '')} {more}"
        return LogEntry(at, service, " ".join(text.split()))
