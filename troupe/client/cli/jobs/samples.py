"""`troupe samples ...`: count and export a job's rows in the experience store."""

from __future__ import annotations

import dataclasses
import json
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator
from pathlib import Path, PurePath
from typing import IO, Annotated, Any, Final, Self

import typer
from rich.console import Console
from rich.markup import escape

from troupe.client.aio import AsyncClient
from troupe.client.cli import options
from troupe.client.cli.options import call, duration, make_table, size
from troupe.client.handle import AsyncJobHandle
from troupe.client.records.samples import Sample
from troupe.rpc.errors import FailedPrecondition, InvalidArgument
from troupe.storage import place_at

# Rows per Parquet row group: enough to compress well, few enough to hold in memory.
_GROUP_ROWS: Final = 1000

app = typer.Typer(
    help="Count and export the rows that policies are trained on. Texts: `troupe conversations`.",
    no_args_is_help=True,
)
Policy = Annotated[
    str | None,
    typer.Option(
        help="Policy, or an agent that it plays; default: every trained policy.",
        autocompletion=options.complete_policies,
    ),
]
Step = Annotated[
    int | None, typer.Option(min=0, max=2**63 - 1, help="Only this step, counted from 0.")
]
State = Annotated[
    str | None, typer.Option(help="Only pending, ready, claimed, trained or dropped rows.")
]


@app.command()
def counts(
    job_id: options.JobId,
    as_json: options.AsJson = False,
    cluster: options.ClusterAddress = None,
    data_dir: options.DataDir = None,
) -> None:
    """Count a job's samples by policy and state, and show how far each table lags."""
    tables = call(cluster, data_dir, lambda client: client.job(job_id).tables())
    if as_json:
        print(json.dumps(dataclasses.asdict(tables), indent=2))
        return
    console = Console()
    names = ("pending", "ready", "claimed", "trained", "dropped")
    grid = make_table(("policy",), ("version", *names, "size"))
    for one in tables.tables:
        grid.add_row(
            escape(one.policy),
            str(max(one.version, 0)),
            *(f"{getattr(one, name):,}" for name in names),
            size(one.payload_bytes),
        )
    console.print(grid)
    for one in tables.tables:
        steps = f"{one.lag} step{'' if one.lag == 1 else 's'}"
        waits = f"{escape(one.policy)} has {steps} to commit"
        if one.oldest_pending_sample:
            age = duration(one.oldest_pending_seconds)
            waits += f"; pending for longest, {age}: {escape(one.oldest_pending_sample)}"
        console.print(waits, highlight=False)
    for one in tables.tables:
        for reason, number in sorted(one.drop_reasons.items()):
            # A trajectory that ended before it had rows counts as one.
            what = f"{escape(one.policy)} dropped {number:,} rows or trajectories"
            console.print(f"{what}: {escape(reason)}", soft_wrap=True)
    bound = f" of {size(tables.high_water_bytes)}" if tables.high_water_bytes else ""
    full = "; above the mark, rollout is pushed back" if tables.over_high_water else ""
    console.print(
        f"store: {size(tables.payload_bytes)}{bound} of rows, Redis {size(tables.redis_bytes)}"
        f"{full}",
        highlight=False,
    )


@app.command()
def export(
    job_id: options.JobId,
    file: Annotated[
        str,
        typer.Argument(
            metavar="FILE",
            show_default=False,
            help="New FILE.parquet or FILE.jsonl: a path, or a URL such as s3://BUCKET/FILE.jsonl.",
        ),
    ],
    policy: Policy = None,
    step: Step = None,
    state: State = None,
    cluster: options.ClusterAddress = None,
    data_dir: options.DataDir = None,
) -> None:
    """Write rows to a Parquet or JSON Lines file.

    Rows of committed steps have no token ids and log-probs: the store has freed them.
    """
    kind, place = writer_of(file), place_at(file, "FILE")

    async def fetch(client: AsyncClient) -> int:
        number = 0
        async for sample in _slice(client.job(job_id), policy, step, state):
            writer.add(sample)
            number += 1
        return number

    with place.new_file() as draft, kind(draft) as writer:
        number = call(cluster, data_dir, fetch)
    Console().print(f"wrote {number:,} samples to {place.name}", highlight=False, soft_wrap=True)


async def _slice(
    job: AsyncJobHandle, policy: str | None, step: int | None, state: str | None
) -> AsyncIterator[Sample]:
    policies = [policy] if policy else [one.policy for one in (await job.tables()).tables]
    for name in policies:
        async for sample in job.samples(name, step=step, state=state):
            yield sample


def writer_of(file: str) -> type[SampleWriter]:
    """Return the class that writes files of this suffix. Raises `InvalidArgument`."""
    kinds: dict[str, type[SampleWriter]] = {".jsonl": _Jsonl, ".parquet": _Parquet}
    kind = kinds.get(PurePath(file).suffix)
    if kind is None:
        raise InvalidArgument(
            "is neither Parquet nor JSON Lines",
            field="FILE",
            value=file,
            remedy="Name it FILE.parquet or FILE.jsonl.",
        )
    return kind


class SampleWriter(ABC):
    """A context manager that writes samples to a new file."""

    @abstractmethod
    def __init__(self, path: Path) -> None:
        """Open the file. Raises `FailedPrecondition` if a package is missing."""

    @abstractmethod
    def add(self, sample: Sample) -> None:
        """Write one row."""

    @abstractmethod
    def _close(self) -> None:
        """Write the remaining rows and close the file."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._close()


class _Jsonl(SampleWriter):
    def __init__(self, path: Path) -> None:
        self._file: IO[str] = path.open("x")

    def add(self, sample: Sample) -> None:
        self._file.write(json.dumps(dataclasses.asdict(sample)) + "\n")

    def _close(self) -> None:
        self._file.close()


class _Parquet(SampleWriter):
    """A Parquet file: one column per field; user-defined columns and payloads are JSON."""

    def __init__(self, path: Path) -> None:
        try:
            import pyarrow
            import pyarrow.parquet
        except ImportError as error:
            raise FailedPrecondition(
                "Parquet needs the package pyarrow, which is not installed",
                field="FILE",
                value=path.name,
                remedy="`pip install 'troupe-rl[parquet]'`, or export to FILE.jsonl.",
            ) from error
        self._arrow = pyarrow
        text, number = pyarrow.string(), pyarrow.int64()
        ids = pyarrow.list_(pyarrow.int32())
        self._schema = pyarrow.schema(
            [
                *((name, text) for name in ("id", "policy", "query_id", "trajectory_id", "agent")),
                ("turn", number),
                ("group_id", text),
                ("state", text),
                ("reward", pyarrow.float64()),
                ("version", number),
                ("uses", number),
                ("prompt_ids", ids),
                ("response_ids", ids),
                ("logprobs", pyarrow.list_(pyarrow.float32())),
                ("columns", text),
                ("payloads", text),
            ]
        )
        self._writer = pyarrow.parquet.ParquetWriter(path, self._schema)
        self._rows: list[dict[str, Any]] = []

    def add(self, sample: Sample) -> None:
        fields = dataclasses.asdict(sample)
        as_json = {name: json.dumps(fields[name]) for name in ("columns", "payloads")}
        self._rows.append({**fields, **as_json})
        if len(self._rows) >= _GROUP_ROWS:
            self._flush()

    def _flush(self) -> None:
        if self._rows:
            table = self._arrow.Table.from_pylist(self._rows, schema=self._schema)
            self._writer.write_table(table)
            self._rows = []

    def _close(self) -> None:
        self._flush()
        self._writer.close()
