"""Results of the parts, as tables and as fields of the last line."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from rich.console import Console
from rich.table import Table

from benchmarks.command import quantile
from benchmarks.papers.actions import simulated
from benchmarks.papers.actions.live import Result
from benchmarks.papers.actions.simulated import Batch, Pool, Several
from testbed.simulator.rollout import BatchResult


def live(console: Console, title: str, rows: Sequence[tuple[Result, BatchResult]]) -> None:
    """Print one row per batch and mode, with the simulator's figures."""
    table = Table(title=title)
    for name in (
        "trajectories",
        "cores",
        "mode",
        "ACT ms",
        "of it for a reservation",
        "all ended s",
        "beyond the function",
        "service CPU ms/action",
        "simulated ACT ms",
        "ended s",
    ):
        table.add_column(name, justify="left" if name == "mode" else "right")
    for result, twin in rows:
        table.add_row(
            f"{result.trajectories}",
            f"{result.cores}",
            result.mode,
            f"{result.act * 1e3:.0f}",
            f"{result.wait_seconds * 1e3:.0f}",
            f"{result.seconds:.1f}",
            f"{result.overhead:.1%}",
            f"{result.service_cpu / len(result.ran) * 1e3:.2f}",
            f"{twin.act * 1e3:.0f}",
            f"{twin.seconds:.1f}",
        )
    console.print(table)


def batches(console: Console, rows: Sequence[Batch]) -> None:
    """Print elastic against static, by size."""
    hosts = f"{simulated.HOSTS} x {simulated.HOST_CORES} cores"
    table = Table(title=f"Simulated: {hosts}, pods of {simulated.POD_CORES}")
    for name in (
        "trajectories",
        "ACT s",
        "waiting s",
        "ended s",
        "static ACT s",
        "ended s",
        "gain",
    ):
        table.add_column(name, justify="right")
    for row in rows:
        static = row.static
        table.add_row(
            f"{row.trajectories}",
            f"{row.elastic.act:.2f}",
            f"{row.elastic.wait:.3f}",
            f"{row.elastic.seconds:.0f}",
            "" if static is None else f"{static.act:.2f}",
            "" if static is None else f"{static.seconds:.0f}",
            "" if static is None else f"{row.gain:.1f}",
        )
    console.print(table)


def several(console: Console, rows: Sequence[Several]) -> None:
    """Print gains by number of cores."""
    table = Table(title="Simulated: gains over reservations of one core")
    for name in ("cores", *_GAINS[:-1]):
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(f"{row.cores}", *_gains_of(row)[:-1])
    console.print(table)


def likeness(console: Console, rows: Mapping[float, Several]) -> None:
    """Print gains by the part of the spread of durations that the query determines."""
    table = Table(title="Simulated: the same, by the query's part of the spread")
    for name in ("the query's", *_GAINS):
        table.add_column(name, justify="right")
    for alike, row in rows.items():
        table.add_row(f"{alike:.0%}", *_gains_of(row))
    console.print(table)


_GAINS: Final = ("first come", "elastic", "durations known", "at most", "elastic, again")


def _gains_of(row: Several) -> list[str]:
    return [f"{gain:.2f}" for gain in (row.fcfs, row.elastic, row.told, row.most, row.again)]


def pools(console: Console, busy: float, own: Pool, shared: Sequence[Pool]) -> None:
    """Print latency by size of a shared pool."""
    table = Table(title=f"Simulated: {simulated.SERVICES} model services, each busy {busy:.0%}")
    for name in ("GPUs", "mean s", "x dedicated", "p99 s", "restores per call"):
        table.add_column(name, justify="right")
    for pool in (own, *shared):
        table.add_row(
            f"{pool.gpus}" + (" dedicated" if pool is own else ""),
            f"{pool.mean:.2f}",
            f"{pool.mean / own.mean:.2f}",
            f"{pool.p99:.2f}",
            f"{pool.restores:.2f}",
        )
    console.print(table)


def ideal(console: Console, own: Pool, pool: Pool, foreseen: Pool, free: Pool) -> None:
    """Print the components of a pool's latency."""
    console.print(
        f"{pool.gpus} GPUs: x {pool.mean / own.mean:.2f}; with evictions that know the future, x "
        f"{foreseen.mean / own.mean:.2f}; with instant restores, x {free.mean / own.mean:.2f}"
    )


def decisions(console: Console, spent: Sequence[float], first: float) -> Mapping[str, Any]:
    """Print and return CPU milliseconds per decision."""
    found = {
        "decision_p50_ms": round(quantile(spent, 0.5) * 1e3, 2),
        "decision_p99_ms": round(quantile(spent, 0.99) * 1e3, 2),
        "decision_first_ms": round(first * 1e3, 1),
    }
    console.print(f"{len(spent)} decisions with 4,096 queued and 64 levels, CPU time: {found}")
    return found
