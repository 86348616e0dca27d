"""Changes what a step that is held open consists of.

All of an amendment is decided at once under the job's tag (lua/amend_step.lua), then carried out in
every policy's table (rosters.py). What is so already is not changed again, so that an amendment may
be repeated by whoever does not know whether it came through.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from services.experience_store.database import Database
from services.experience_store.keys import JobKeys
from services.experience_store.rosters import Rosters
from services.experience_store.steps import not_open
from services.experience_store.tables import Tables
from troupe.rpc import FailedPrecondition, Internal


@dataclass(frozen=True)
class Amendment:
    """One change of one step's roster."""

    job: str
    step: int
    add: Sequence[str] = ()
    """They come last in the order of the roster."""
    drop: Sequence[str] = ()
    reason: str = ""
    """Why they are dropped."""
    carry: Sequence[str] = ()
    carry_to: int = 0
    """A later step that is held open."""
    close: bool = False
    cursor: int = 0
    """Replaces the step's when larger."""


class Amendments:
    """Amendments of all jobs."""

    def __init__(self, database: Database, tables: Tables, rosters: Rosters) -> None:
        self._database = database
        self._tables = tables
        self._rosters = rosters

    async def amend(self, amendment: Amendment) -> list[str]:
        """Decide and carry out `amendment`; the queries that were to leave but are complete.

        Raises `FailedPrecondition`, and changes nothing, for a step that is not open
        (`step_not_open`) or closed (`step_closed`), a query that the step never had
        (`unknown_query`), that left it otherwise (`query_left`), or that another step has
        (`query_elsewhere`), and for carrying to a step of another group size (`step_differs`).
        """
        await self._tables.get(amendment.job)
        outcome, *rest = await self._database.run(
            "amend_step",
            JobKeys(amendment.job).base,
            amendment.step,
            amendment.reason,
            amendment.carry_to,
            int(amendment.close),
            amendment.cursor,
            len(amendment.add),
            len(amendment.drop),
            len(amendment.carry),
            *amendment.add,
            *amendment.drop,
            *amendment.carry,
        )
        if outcome != b"amended":
            raise _refusal(amendment, outcome.decode(), [value.decode() for value in rest])
        await self._rosters.apply(amendment.job, amendment.step)
        return [query.decode() for query in rest[0]]


def _refusal(
    amendment: Amendment, outcome: str, rest: Sequence[str]
) -> FailedPrecondition | Internal:
    step = amendment.step
    if outcome == "missing":
        return not_open(amendment.job, int(rest[0]))
    if outcome == "closed":
        return FailedPrecondition(
            f"step {rest[0]} is closed: its roster stays as it is",
            kind="step_closed",
            field="step" if int(rest[0]) == step else "carry_to",
            value=int(rest[0]),
            remedy="Open the step with held_open, and amend it before it is closed.",
        )
    if outcome == "unknown_query":
        return FailedPrecondition(
            f"step {step} never had this query",
            kind="unknown_query",
            field=_field_of(amendment, rest[0]),
            value=rest[0],
            remedy="Name queries of GetStep's query_ids.",
        )
    if outcome == "left":
        how, _, detail = rest[1].partition("\t")
        where = f"was carried to step {detail}"
        if how == "dropped":
            where = f"was dropped from step {step} ({detail.partition(chr(9))[2]})"
        return FailedPrecondition(
            f"the query {where}",
            kind="query_left",
            field=_field_of(amendment, rest[0]),
            value=rest[0],
            remedy="A query that left a step does not come back; take a fresh one.",
        )
    if outcome == "elsewhere":
        return FailedPrecondition(
            f"step {rest[1]} has, or had, this query",
            kind="query_elsewhere",
            field=_field_of(amendment, rest[0]),
            value=rest[0],
            remedy="A query is in one live step at a time.",
        )
    if outcome == "group_size":
        return FailedPrecondition(
            f"step {rest[0]} has groups of {rest[1]} trajectories, step {step} has others",
            kind="step_differs",
            field="carry_to",
            value=int(rest[0]),
            remedy="Drop the queries instead.",
        )
    return Internal(f"amend_step answered {outcome}")


def _field_of(amendment: Amendment, query: str) -> str:
    for field, queries in (("add", amendment.add), ("drop", amendment.drop)):
        if query in queries:
            return f"{field}_query_ids"
    return "carry_query_ids"
