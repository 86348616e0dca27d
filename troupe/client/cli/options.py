"""Options, calls of a cluster and formats of numbers that several commands share."""

from __future__ import annotations

import asyncio
import functools
import inspect
import math
import os
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Protocol, TypeVar

import typer
from pydantic import ValidationError
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    DownloadColumn,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.progress import Progress as BytesProgress
from rich.table import Table

from troupe.client.discovery import (
    ADDRESS_VARIABLE,
    data_directory,
    resolve_address,
    settings_for,
)
from troupe.cluster.settings import ClusterSettings
from troupe.cluster.state import running_state
from troupe.rpc.errors import InvalidArgument
from troupe.rpc.retry import RetryPolicy

if TYPE_CHECKING:
    from troupe.checkpoints.merging import ByteBar
    from troupe.client.aio import AsyncClient

T = TypeVar("T")
# Long enough for a restart of the orchestrator, short enough for a user with a mistyped address.
_RETRY = RetryPolicy(max_attempts=7)

# The shell waits for completions; jobs that it is offered at most.
_COMPLETION_SECONDS = 1.0
_COMPLETED = 200
# Columns whose values the next command takes.
_COPIED = ("job", "trajectory", "policy", "function")
# Characters shown of a long message.
_SHOWN = 600
_BARS = "▁▂▃▄▅▆▇█"
_PLAIN_BARS = "_.-~=+*#"


def complete_jobs(incomplete: str) -> list[str]:
    """Return the ids of the cluster's newest jobs that begin with `incomplete`, for the shell;
    none if the cluster does not answer at once."""

    async def ask(client: AsyncClient) -> list[str]:
        async with asyncio.timeout(_COMPLETION_SECONDS):
            return [job.id for job in await client.jobs(limit=_COMPLETED)]

    return _completed(ask, incomplete)


def complete_policies(context: typer.Context, incomplete: str) -> list[str]:
    """Return the policies and agents of the job that the command line names, for the shell."""
    job_id = context.params.get("job_id")

    async def ask(client: AsyncClient) -> list[str]:
        async with asyncio.timeout(_COMPLETION_SECONDS):
            spec = (await client.job(str(job_id)).info()).spec
        return sorted({*spec.get("policies", {}), *spec.get("agents", {})})

    return _completed(ask, incomplete) if job_id else []


def _completed(ask: Callable[[AsyncClient], Awaitable[list[str]]], incomplete: str) -> list[str]:
    # A shell that completes must neither hang nor show an error between the user's words.
    with suppress(Exception):
        return [one for one in call(None, None, ask) if one.startswith(incomplete)]
    return []


JobId = Annotated[
    str,
    typer.Argument(
        metavar="JOB",
        show_default=False,
        help="Id of the job.",
        autocompletion=complete_jobs,
    ),
]
ExportTarget = Annotated[
    str,
    typer.Argument(
        metavar="DIR",
        show_default=False,
        help="New directory: a path, or a URL such as s3://BUCKET/FOLDER.",
    ),
]
ClusterAddress = Annotated[
    str | None,
    typer.Option(
        "--cluster",
        metavar="HOST:PORT",
        help="Orchestrator; default: the cluster's that runs in the data directory.",
        show_default=False,
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Assignments = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY.PATH=VALUE",
        help="Change a field of the job, e.g. --set pipeline.steps=20. May be repeated.",
    ),
]

Tags = Annotated[
    list[str] | None,
    typer.Option("--tag", help="A word to find the job by; may be repeated.", show_default=False),
]
Notes = Annotated[str, typer.Option(help="Text for people, kept with the job.")]


# The type, default and help of each option of commands that start a cluster, by the field of
# `ClusterSettings` that it sets.
_CLUSTER_OPTIONS: Final[Mapping[str, tuple[Any, Any, str]]] = {
    "data_dir": (
        Path | None,
        None,
        "Directory of jobs, logs and the cluster's state; default: $TROUPE_DATA_DIR or runs.",
    ),
    "name": (str | None, None, "Name of the node; default: the host's name."),
    "host": (str, "0.0.0.0", "Interface to listen on."),
    "advertise": (
        str | None,
        None,
        "Name or address at which other hosts reach this one; default: --host, or the machine's "
        "name if --host is all interfaces.",
    ),
    "port": (int | None, None, "Port of the orchestrator."),
    "rollouts": (int | None, None, "Rollout workers to start."),
    "trainers": (int | None, None, "Trainer workers to start."),
    "threads": (
        int | None,
        None,
        "Threads per rollout and trainer worker; default: fair shares.",
    ),
    "panel": (bool, True, "Start the control panel."),
    "panel_port": (int | None, None, "Port of the control panel; default: 8080 or a free one."),
    "redis_url": (str | None, None, "A running Redis to use instead of an embedded one."),
    "redis_port": (int | None, None, "Port of the embedded Redis."),
    "start_timeout": (float, 120.0, "Seconds that a service may take to become ready."),
    "trainer_idle_seconds": (
        float | None,
        None,
        "Seconds after which unused trainers stop, until a policy needs one; default: never.",
    ),
    "devices": (
        str | None,
        None,
        "Devices of this host, instead of the driver's list, such as 8xH100-80GB; "
        "default: $TROUPE_DEVICES.",
    ),
    "engine_devices": (int | None, None, "Devices for engines; default: half, rounded up."),
    "trainer_devices": (int | None, None, "Devices for trainers; default: the rest."),
    "devices_per_trainer": (
        int | None,
        None,
        "Devices of each trainer, for gangs of that size; default: 1.",
    ),
    "jobs_dir": (
        Path | None,
        None,
        "Directory of jobs, if all hosts share one; default: the data directory.",
    ),
    "colocate": (
        bool,
        False,
        "Let engines and trainers take turns on all devices, for jobs with pipeline.colocate.",
    ),
}


def cluster_option(name: str) -> Any:
    """Return Typer's description of a cluster's option."""
    _, default, text = _CLUSTER_OPTIONS[name]
    # Help does not show the opposite of a flag that is off by default.
    flags = [f"--{name.replace('_', '-')}"] if default is False else []
    return typer.Option(*flags, help=text, show_default=default is not None)


DataDir = Annotated[Path | None, cluster_option("data_dir")]


class MakeSettings(Protocol):
    """A maker of a cluster's settings from a command's options; `given` are further fields."""

    def __call__(self, **given: Any) -> ClusterSettings: ...


def with_cluster_options(*names: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command these options of a cluster, after its own.

    Its parameter `settings` (`MakeSettings`) turns them into `cluster_settings`.
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(command)
        def run(**given: Any) -> None:
            chosen = {name: given.pop(name) for name in names}
            command(**given, settings=functools.partial(cluster_settings, **chosen))

        signature = inspect.signature(command, eval_str=True)
        own = [p for name, p in signature.parameters.items() if name != "settings"]
        added = [
            inspect.Parameter(
                name,
                inspect.Parameter.KEYWORD_ONLY,
                default=_CLUSTER_OPTIONS[name][1],
                annotation=Annotated[_CLUSTER_OPTIONS[name][0], cluster_option(name)],
            )
            for name in names
        ]
        # Typer derives the command line from the signature.
        run.__signature__ = signature.replace(parameters=[*own, *added])  # type: ignore[attr-defined]
        return run

    return decorate


def cluster_settings(
    *, data_dir: Path | None, start_timeout: float, **given: Any
) -> ClusterSettings:
    """Make settings from options; `given` are fields of `ClusterSettings`, None if the user left
    the option out. Raises `InvalidArgument`, which names the option that is out of range."""
    try:
        return ClusterSettings(
            data_dir=data_directory(data_dir),
            start_seconds=start_timeout,
            **{name: value for name, value in given.items() if value is not None},
        )
    except ValidationError as error:
        first = error.errors()[0]
        name = str(first["loc"][0])
        option = {"start_seconds": "start-timeout"}.get(name, name.replace("_", "-"))
        raise InvalidArgument(
            f"{first['msg']}.", field=f"--{option}", value=first["input"]
        ) from error


def call(
    address: str | None, data_dir: Path | None, use: Callable[[AsyncClient], Awaitable[T]]
) -> T:
    """Run `use(client)` on the cluster at `address`, else on the one that runs in `data_dir`."""
    # Not for commands that call no cluster: the client takes half a second to import.
    from troupe.client.aio import AsyncClient

    async def run() -> T:
        target = resolve_address(address, data_dir)
        settings = settings_for(target, data_dir).model_copy(update={"retry": _RETRY})
        async with AsyncClient(target, settings=settings) as client:
            return await use(client)

    return asyncio.run(run())


def stopped_job(job_id: str, address: str | None, data_dir: Path | None) -> Path | None:
    """Return the directory of a job whose cluster has stopped, below `data_dir`; None if a cluster
    is named or runs there, or if there is no such job."""
    root = data_directory(data_dir)
    if address or os.environ.get(ADDRESS_VARIABLE) or running_state(root) is not None:
        return None
    from troupe.job.loading import SPEC_FILE  # slow to import

    # An id has no separator: it does not lead out of the data directory.
    directory = root / Path(job_id).name
    return directory if (directory / SPEC_FILE).is_file() else None


def make_table(left: Sequence[str] = (), right: Sequence[str] = (), title: str = "") -> Table:
    """Return a table with its left-aligned columns first, then its right-aligned ones."""
    table = Table(
        box=box.SIMPLE_HEAD, pad_edge=False, title=escape(title) or None, title_justify="left"
    )
    for column in left:
        # A narrow terminal shortens other columns: users copy these into the next command.
        table.add_column(column, no_wrap=column in _COPIED)
    for column in right:
        table.add_column(column, justify="right")
    return table


def duration(seconds: float | None) -> str:
    """Return a duration as `42s`, `3m07s`, `2h05m` or `3d04h`; a dash when unknown."""
    if seconds is None or not math.isfinite(seconds):
        return "-"
    whole = max(0, round(seconds))
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    if whole < 86400:
        return f"{whole // 3600}h{whole % 3600 // 60:02d}m"
    return f"{whole // 86400}d{whole % 86400 // 3600:02d}h"


def number(value: float | None) -> str:
    """Return a number with three significant digits, without trailing zeros; a dash if unknown."""
    if value is None:
        return "-"
    if not math.isfinite(value):
        return str(value)
    if value == 0:
        return "0"
    size = abs(value)
    if size >= 1000:
        return f"{value:,.0f}"
    if size < 0.001:
        return f"{value:.1e}"
    decimals = max(0, 2 - math.floor(math.log10(size)))
    return f"{value:.{decimals}f}"


def score(value: float | None) -> str:
    """Return a reward or success rate with three decimals, so that a column lines up."""
    return "-" if value is None else f"{value:.3f}"


def change(before: float | None, after: float | None) -> str:
    """Return the signed difference; empty when a value is unknown."""
    return "" if before is None or after is None else f"{after - before:+.3f}"


def size(num_bytes: float) -> str:
    """Return a size as `512 B`, `4.0 KiB` or `1.2 GiB`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if num_bytes < 1024:
            return f"{num_bytes:.0f} {unit}" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.1f} TiB"


@contextmanager
def byte_bar() -> Iterator[ByteBar]:
    """Return a context with progress bars of bytes on standard error, if that is a terminal."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    console = Console(stderr=True)
    with BytesProgress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as bars:

        def begin(what: str, total: int) -> Callable[[int], None]:
            task = bars.add_task(what, total=total or None)
            return lambda nbytes: bars.advance(task, nbytes)

        yield begin


def sparkline(values: Sequence[float], width: int = 24, *, ascii_only: bool = False) -> str:
    """Return the newest `width` values as bars, scaled between their minimum and maximum."""
    bars = _PLAIN_BARS if ascii_only else _BARS
    shown = [v for v in values[-width:] if math.isfinite(v)]
    if not shown:
        return ""
    if math.isinf(max(shown) - min(shown)):  # the range overflows
        shown = [v / 4 for v in shown]
    low, high = min(shown), max(shown)
    if high - low < 1e-9:
        return bars[0] * len(shown)
    return "".join(bars[round((v - low) / (high - low) * (len(bars) - 1))] for v in shown)


def shortened(text: str) -> str:
    """Return a text, cut if it is long, with its length."""
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}... ({len(text):,} characters)"
