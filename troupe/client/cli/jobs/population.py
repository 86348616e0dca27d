"""`troupe population ...`: show pools, payoffs and matches of a job; export members."""

from __future__ import annotations

import dataclasses
import json
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from troupe.checkpoints.verifying import LINEAGE
from troupe.client.cli import options
from troupe.client.cli.options import call, duration, make_table, number, size, sparkline
from troupe.client.records.populations import MetaStrategy, Pool, Population
from troupe.storage import place_at

app = typer.Typer(help="Inspect pools of policies and their matches.", no_args_is_help=True)
# Rows and columns of the payoff matrix on a terminal; the panel and --json have all.
_COLUMNS = 12


@app.command()
def show(
    job_id: options.JobId,
    as_json: options.AsJson = False,
    cluster: options.ClusterAddress = None,
    data_dir: options.DataDir = None,
) -> None:
    """Show pools and their members, the payoff matrix, and the opponents of learners."""
    found = call(cluster, data_dir, lambda client: client.job(job_id).population())
    if as_json:
        print(json.dumps(dataclasses.asdict(found), indent=2, default=str))
        return
    console = Console()
    for line in _facts(found):
        console.print(line, highlight=False, soft_wrap=True)
    for pool in found.pools:
        console.print(_members(found, pool))
    if (matrix := _payoffs(found)) is not None:
        console.print(matrix)


@app.command()
def matches(
    job_id: options.JobId,
    member: Annotated[str, typer.Option(help="Show only matches of this member.")] = "",
    limit: Annotated[int, typer.Option(min=1, help="Maximum number of matches.")] = 30,
    as_json: options.AsJson = False,
    cluster: options.ClusterAddress = None,
    data_dir: options.DataDir = None,
) -> None:
    """List matches between members, newest first."""
    found = call(cluster, data_dir, lambda client: client.job(job_id).matches(member, limit))
    if as_json:
        print(json.dumps([dataclasses.asdict(one) for one in found], default=str))
        return
    console = Console()
    if not found:
        console.print("no matches")
        return
    grid = make_table(("match", "iteration", "payoffs", "state", "took"))
    for one in found:
        players = (
            f"{agent} {member} {number(one.payoffs.get(agent))}"
            for agent, member in one.members.items()
        )
        state = f"{one.state}: {one.reason}" if one.reason else one.state
        grid.add_row(
            escape(one.trajectory_id),
            str(one.iteration),
            escape(", ".join(players)),
            escape(state),
            duration(one.seconds),
        )
    console.print(grid)


@app.command()
def export(
    job_id: options.JobId,
    member: Annotated[
        str, typer.Argument(metavar="MEMBER", show_default=False, help="As `show` names it.")
    ],
    directory: options.ExportTarget,
    cluster: options.ClusterAddress = None,
    data_dir: options.DataDir = None,
) -> None:
    """Copy the weights of one member into DIR. transformers and SGLang load them from there;
    `troupe.networks.exported` loads a small network."""
    place = place_at(directory, "DIR")
    with place.new_folder(last=LINEAGE) as draft:
        call(cluster, data_dir, lambda client: client.job(job_id).export_member(member, draft))
    Console().print(f"exported {member} to {place.name}", highlight=False, soft_wrap=True)


def _facts(found: Population) -> list[str]:
    game = "symmetric" if found.symmetric else f"of {len(found.pools)} pools"
    due = f", {found.matches_due:,} due" if found.matches_due else ""
    lines = [
        f"{found.algorithm}, {game}, iteration {found.iteration}, "
        f"{found.matches_played:,} matches played{due}"
    ]
    if curve := [one.nash_conv for one in found.history if one.nash_conv is not None]:
        lines.append(f"NashConv {number(curve[0])} -> {number(curve[-1])}  {sparkline(curve)}")
    if found.history and (gains := found.history[-1].gains):
        shown = ", ".join(
            f"{pool.name} {number(gain)}" for pool, gain in zip(found.pools, gains, strict=False)
        )
        lines.append(f"newest members gained {shown}")
    for slot in found.slots:
        share = f" in {slot.probability:.0%} of its games" if slot.probability else ""
        lines.append(f"{escape(slot.policy)} plays {escape(slot.member_id)}{share}")
    if found.stopped:
        lines.append(f"complete: {escape(found.stopped)}")
    elif found.activity:
        lines.append(escape(found.activity))
    return lines


def _members(found: Population, pool: Pool) -> Table:
    solved = found.history[-1] if found.history else None
    ratings = {one.member_id: one for one in found.ratings}
    grid = make_table(
        ("member", "state", "from"),
        ("after step", "share", "rating", "matches", "weights"),
        f"{pool.name} ({', '.join(pool.agents)})",
    )
    for one in pool.members:
        rating = ratings.get(one.id)
        kind = "" if one.kind in ("", "main") else f" ({one.kind.replace('_', ' ')})"
        grid.add_row(
            escape(one.id) + kind,
            one.state,
            escape(one.parent) or "-",
            str(one.step),
            _share(solved, pool, one.id),
            f"{rating.mean:.1f} ± {rating.deviation:.1f}" if rating else "-",
            str(rating.matches) if rating else "0",
            size(one.num_bytes),
        )
    return grid


def _share(solved: MetaStrategy | None, pool: Pool, member_id: str) -> str:
    if solved is None:
        return "-"
    share = solved.mixtures.get(pool.name, {}).get(member_id, 0.0)
    return f"{share:.1%}" if share else "-"


def _payoffs(found: Population) -> Table | None:
    """Return the payoff matrix of the first agent; None unless the game has two agents."""
    if len(found.agents) != 2 or not found.cells:
        return None
    row_pool, column_pool = (found.pool_of(agent) for agent in found.agents)
    kept = {
        pool.name: [at for at, one in enumerate(pool.members) if one.state != "retired"]
        for pool in (row_pool, column_pool)
    }
    columns = kept[column_pool.name][-_COLUMNS:]
    rows = kept[row_pool.name][-_COLUMNS:]
    title = f"payoffs of {found.agents[0]}"
    if len(columns) < len(kept[column_pool.name]) or len(rows) < len(kept[row_pool.name]):
        title += f" (the newest {_COLUMNS}; --json has all)"
    grid = make_table(("",), [escape(column_pool.members[at].id) for at in columns], title)
    for row in rows:
        cells = [_payoff(found, row, column) for column in columns]
        grid.add_row(escape(row_pool.members[row].id), *cells)
    return grid


def _payoff(found: Population, row: int, column: int) -> str:
    """Return the first agent's mean payoff in a cell, with its confidence interval; a dot if the
    cell has not been played."""
    for cell in found.cells:
        if cell.members == (row, column):
            at = 0
        elif found.symmetric and cell.members == (column, row):
            at = 1
        else:
            continue
        sure = "" if cell.exact or cell.half_width is None else f" ± {number(cell.half_width)}"
        return f"{number(cell.mean[at])}{sure}"
    return "."
