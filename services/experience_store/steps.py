"""Steps: admission, amendment, status, and completion of half-done work after a crash.

The roster of a step (its queries) is decided once under the job's hash tag. Each policy's table
learns of it (`admit`) and of every trajectory that ended (`append_rows`) afterwards; both are
repeatable, and repeated when a table is found to lag behind.
"""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from services.experience_store.database import Database, ScriptCall
from services.experience_store.log import Log
from services.experience_store.notices import Notices
from services.experience_store.records import Ending, JobTableKeys, PolicyKeys, parse_commit
from services.experience_store.requests import clean_reason
from services.experience_store.tables import TableRegistry, TableSchema
from troupe.contracts import kinds
from troupe.rpc import FailedPrecondition, Internal
from troupe.scheduling.curriculum import TaskPool
from troupe.v1 import experience_store_pb2 as store_pb


@dataclass
class StepStatus:
    """The status of one step of a job."""

    step: int
    open: bool
    query_ids: list[str] = field(default_factory=list)
    """In order of arrival; without those that left."""
    versions: dict[str, int] = field(default_factory=dict)
    group_size: int = 0
    redundant: int = 0
    closed: bool = False
    """Whether the roster is final."""
    cursor: int = 0
    expected: int = 0
    """Admitted trajectories, including redundant ones and trajectories of dropped queries."""
    ended: int = 0
    """Ids of the ended trajectories, including trajectories of dropped queries."""
    complete: int = 0
    """Queries whose trajectories have all ended."""
    endings: dict[str, Ending] = field(default_factory=dict)
    """Trajectory -> ending, if requested."""
    queries: list[store_pb.QueryStatus] = field(default_factory=list)
    """Progress in the order of `query_ids`, if requested."""
    counts: list[store_pb.PolicyCounts] = field(default_factory=list)
    commits: list[store_pb.StepCommit] = field(default_factory=list)

    @property
    def sealed(self) -> bool:
        """Whether all trajectories of the step have ended, and no more can come."""
        return self.open and self.closed and self.ended >= self.expected

    @property
    def ended_trajectories(self) -> list[str]:
        """Sorted names of ended trajectories. Trajectories that ended with a dropped query, or as
        redundant, have no name."""
        return sorted(name for name in self.endings if "\t" not in name)

    @staticmethod
    def parse(step: int, stored: Mapping[bytes, bytes]) -> StepStatus:
        """Parse the status from the step hash `stored` (keys.JobKeys.step)."""
        if not stored:
            return StepStatus(step, open=False)
        return StepStatus(
            step,
            open=True,
            query_ids=json.loads(stored[b"queries"]),
            versions=json.loads(stored[b"versions"]),
            group_size=int(stored[b"group_size"]),
            redundant=int(stored[b"redundant"]),
            closed=stored.get(b"held_open") != b"1",
            cursor=int(stored[b"cursor"]),
            expected=int(stored[b"expected"]),
            ended=int(stored[b"ended"]),
            complete=int(stored[b"complete"]),
        )

    def add_table(self, policy: str, reply: Sequence[Any]) -> None:
        """Add one policy's counts, from the reply of lua/count.lua."""
        counts, dropped, commit = reply
        self.counts.append(_policy_counts(policy, self.step, _pairs(counts), _pairs(dropped)))
        if commit:
            self.commits.append(parse_commit(commit))

    def add_queries(
        self, ended: Mapping[bytes, bytes], tallies: Sequence[Mapping[bytes, bytes]]
    ) -> None:
        """Add the queries: their ended trajectories, and the tallies of the tables."""
        total = Counter[str]()
        for tally in tallies:
            total.update({name.decode(): int(number) for name, number in tally.items()})
        for query in self.query_ids:
            trajectories = int(ended.get(query.encode(), 0))
            rows = total[f"{query}\trows"]
            self.queries.append(
                store_pb.QueryStatus(
                    query_id=query,
                    trajectories_ended=trajectories,
                    complete=trajectories >= self.group_size + self.redundant,
                    samples=rows,
                    kept=rows - total[f"{query}\tD"],
                    pending=total[f"{query}\tP"],
                )
            )


def _pairs(flat: Sequence[bytes]) -> dict[bytes, bytes]:
    return dict(zip(flat[::2], flat[1::2], strict=True))


def _policy_counts(
    policy: str, step: int, counts: Mapping[bytes, bytes], dropped: Mapping[bytes, bytes]
) -> store_pb.PolicyCounts:
    def of(letter: bytes) -> int:
        return int(counts.get(letter, 0))

    return store_pb.PolicyCounts(
        policy=policy,
        step=step,
        pending=of(b"P"),
        ready=of(b"R"),
        claimed=of(b"C"),
        trained=of(b"T"),
        dropped=of(b"D"),
        drop_reasons={reason.decode(): int(number) for reason, number in dropped.items()},
        groups_without_signal=of(b"groups_without_signal"),
        pair_sums=bool(of(b"pair_sums")),
    )


# Committed steps whose records are kept, so that a resumed job and a late duplicate find the
# outcome of their step. Raw rows are freed with the commit.
KEEP_STEPS: Final = 16
# Keys of a curriculum freed at once: a large job has thousands.
_TOGETHER: Final = 1000


class StepStore:
    """The steps of all jobs."""

    def __init__(
        self,
        database: Database,
        tables: TableRegistry,
        notices: Notices,
        log: Log,
        keep: int = KEEP_STEPS,
    ) -> None:
        self._database = database
        self._tables = tables
        self._notices = notices
        self._log = log
        self._keep = keep

    async def apply_rosters(self, job: str, step: int) -> int | None:
        """Bring the rosters of `step` and of all live steps into every table. Repeatable.

        Returns their number; None when the job has no such step.
        """
        table = await self._tables.get(job)
        number, exists, rosters = await self._database.run("rosters", JobTableKeys(job).base, step)
        signal = int(table.drop_without_signal)
        await self._database.run_each(
            [
                ScriptCall("admit", PolicyKeys(job, policy).base, (step, number, signal, rosters))
                for policy in table.policies
            ]
        )
        for policy in table.policies:
            self._notices.written(job, policy, step)
        return int(number) if exists else None

    async def open(self, request: store_pb.OpenStepRequest) -> tuple[bool, list[str]]:
        """Admit a step; return whether it was already open, and which trajectories have ended.

        A query begins with `group_size` trajectories and `redundant` more. As soon as `group_size`
        have completed, the others are ended.

        The first call decides. Raises `FailedPrecondition` when a later call admits queries that
        differ from the step's original and present ones. Versions of policies that committed may
        have moved since: the first ones stay.
        """
        job, step, queries = request.job_id, request.step, list(request.query_ids)
        table = await self._tables.get(job)
        outcome, stored_size, opened, stored_queries, stored_redundant = await self._database.run(
            "open_step",
            JobTableKeys(job).base,
            step,
            request.group_size,
            json.dumps(dict(request.versions), sort_keys=True),
            json.dumps(queries),
            int(request.held_open),
            request.cursor,
            request.redundant,
            *queries,
        )
        existed: bool = outcome == b"existed"
        if existed:
            _check_same(step, "group_size", request.group_size, int(stored_size))
            _check_same(step, "redundant", request.redundant, int(stored_redundant))
            if queries != json.loads(stored_queries):
                _check_same(step, "query_ids", queries, json.loads(opened))
        await self.apply_rosters(job, step)
        if not existed:
            await self._trim(table, step)
            return False, []
        # A resumed job skips ended trajectories, so they must be in the tables by then.
        await self.settle(job, step)
        return True, (await self.status(job, step)).ended_trajectories

    async def amend(self, request: store_pb.AmendStepRequest) -> list[str]:
        """Change a step's roster; return the queries that were to leave but are complete.

        Raises `FailedPrecondition` and changes nothing for a step that is not open
        (`step_not_open`) or closed (`step_closed`), for a query that the step never had
        (`unknown_query`), that left it in another way (`query_left`) or that another step has
        (`query_elsewhere`), and for carrying to a step of another group size (`step_differs`).
        """
        await self._tables.get(request.job_id)
        queries = request.add_query_ids, request.drop_query_ids, request.carry_query_ids
        outcome, *rest = await self._database.run(
            "amend_step",
            JobTableKeys(request.job_id).base,
            request.step,
            clean_reason(request.drop_reason),
            request.carry_to,
            int(request.close),
            request.cursor,
            *map(len, queries),
            *itertools.chain(*queries),
        )
        if outcome != b"amended":
            raise _refusal(request, outcome.decode(), [value.decode() for value in rest])
        await self.apply_rosters(request.job_id, request.step)
        return [query.decode() for query in rest[0]]

    async def on_table(
        self, script: str, job: str, policy: str, step: int, *args: str | bytes | int
    ) -> list[Any]:
        """Run a policy's script, admitting the step there when the job has opened it.

        Raises `FailedPrecondition` when the step is not open.
        """
        calls = [ScriptCall(script, PolicyKeys(job, policy).base, (step, *args))]
        return (await self.on_tables(job, step, calls))[0]

    async def on_tables(self, job: str, step: int, calls: Sequence[ScriptCall]) -> list[list[Any]]:
        """Run `on_table` for several policies at once."""
        replies = await self._database.run_each(calls)
        if any(reply[0] == b"missing" for reply in replies):
            if await self.apply_rosters(job, step) is None:
                raise not_open(job, step)
            replies = await self._database.run_each(calls)
            if any(reply[0] == b"missing" for reply in replies):
                raise not_open(job, step)
        return replies

    async def status(
        self, job: str, step: int, *, endings: bool = True, queries: bool = False
    ) -> StepStatus:
        """Return the progress of a step. Tables may lag briefly behind the endings.

        Reads parts that grow with the step (`endings`, `queries`) only on request.
        """
        table = await self._tables.get(job)
        keys = JobTableKeys(job)
        commands = [("HGETALL", keys.step(step))]
        if endings:
            commands.append(("HGETALL", keys.ended(step)))
        if queries:
            commands.append(("HGETALL", keys.queries(step)))
        stored, *more = await self._database.call_each(commands)
        status = StepStatus.parse(step, stored)
        if not status.open:
            return status
        if endings:
            status.endings = {n.decode(): Ending.parse(e.decode()) for n, e in more[0].items()}
        calls = [ScriptCall("count", PolicyKeys(job, p).base, (step,)) for p in table.policies]
        for policy, (_, *reply) in zip(
            table.policies, await self.on_tables(job, step, calls), strict=True
        ):
            status.add_table(policy, reply)
        if queries:
            tallies = await self._database.call_each(
                [("HGETALL", PolicyKeys(job, p).step(step, "tallies")) for p in table.policies]
            )
            status.add_queries(more[-1], tallies)
        return status

    async def live(self, job: str) -> list[int]:
        """Return the steps that some policy has not committed, oldest first."""
        return [int(s) for s in await self._database.call("ZRANGE", JobTableKeys(job).live, 0, -1)]

    async def all(self, job: str) -> list[int]:
        """Return all steps that are still known, oldest first."""
        return [int(s) for s in await self._database.call("ZRANGE", JobTableKeys(job).steps, 0, -1)]

    async def retire(self, job: str, step: int) -> None:
        """Remove a step that every policy has committed from the list of swept steps, and free what
        its trainers have exchanged."""
        table = await self._tables.get(job)
        bases = [PolicyKeys(job, policy).base for policy in table.policies]
        await self._database.run_each(
            [ScriptCall("free_pair_sums", base, (step,)) for base in bases]
        )
        await self._database.call("ZREM", JobTableKeys(job).live, step)

    async def settle(self, job: str, step: int) -> int:
        """Apply all decisions about rosters and trajectories to all tables; return how many
        trajectories were missing in one.
        """
        await self.apply_rosters(job, step)
        table, keys = await self._tables.get(job), JobTableKeys(job)
        # In this order, so that the number of the rosters covers all endings moved to the step.
        endings, rosters = await self._database.call_each(
            [("HGETALL", keys.ended(step)), ("GET", keys.rosters)]
        )
        missing: set[bytes] = set()
        for policy in table.policies:
            there = await self._database.call("HKEYS", PolicyKeys(job, policy).step(step, "ended"))
            # The roster applies the endings of dropped queries.
            missing |= {name for name in endings if b"\t" not in name} - set(there)
        for trajectory in sorted(missing):
            ending = Ending.parse(endings[trajectory].decode())
            await self.carry_out(table, step, trajectory.decode(), ending, int(rosters or 0))
        return len(missing)

    async def carry_out(
        self, table: TableSchema, step: int, trajectory: str, ending: Ending, rosters: int
    ) -> dict[str, str]:
        """Apply one decided ending to all tables; each learns of the rosters up to this number
        first. Repeatable. Returns `SampleRecord.since` of the rows, for every policy whose table
        got some in this call.
        """
        entered: dict[str, str] = {}
        while True:
            replies = await self.on_tables(
                table.job,
                step,
                [
                    ScriptCall(
                        "append_rows",
                        PolicyKeys(table.job, policy).base,
                        (
                            step,
                            trajectory,
                            ending.query,
                            ending.attempt,
                            ending.state,
                            ending.reason,
                            rosters,
                            ending.spare or 0,
                        ),
                    )
                    for policy in table.policies
                ],
            )
            for policy in table.policies:
                self._notices.written(table.job, policy, step)
            for policy, reply in zip(table.policies, replies, strict=True):
                if reply[0] == b"appended" and reply[1]:
                    entered[policy] = reply[1].decode()
            carried = [int(reply[1]) for reply in replies if reply[0] == b"carried"]
            if not carried:
                return entered
            # Its query was carried on meanwhile. Queries move forward only, so this ends.
            rosters = await self.follow(table.job, carried[0])
            step = carried[0]

    async def follow(self, job: str, to: int) -> int:
        """Apply the rosters of step `to`, to which queries were carried; return their number."""
        rosters = await self.apply_rosters(job, to)
        if rosters is None:
            raise not_open(job, to)
        return rosters

    async def _trim(self, table: TableSchema, newest: int) -> None:
        """Forget committed steps that are more than `keep` steps old."""
        keys = JobTableKeys(table.job)
        old = await self._database.call("ZRANGEBYSCORE", keys.steps, "-inf", newest - self._keep)
        for step in (int(s) for s in old):
            if not await self._log.has(table.job, step):
                if not await self._committed(table, step):
                    continue
                await self._log.keep(table.job, table.policies, step)
            # Under the job's tag first, so that no later call admits it in a policy's table again.
            await self._database.call_each([("UNLINK", key) for key in keys.all_of(step)])
            await self._database.run_each(
                [
                    ScriptCall("forget_step", PolicyKeys(table.job, p).base, (step, 1))
                    for p in table.policies
                ]
            )
            await self._database.call_each(
                [("ZREM", key, str(step)) for key in (keys.live, keys.steps)]
            )

    async def _committed(self, table: TableSchema, step: int) -> bool:
        """Return whether every policy has committed the step."""
        return all(
            await self._database.call_each(
                [
                    ("HEXISTS", PolicyKeys(table.job, policy).commits, step)
                    for policy in table.policies
                ]
            )
        )


class TaskPools:
    """Pools of the tasks of curricula: how often each was solved, and when it was asked last.

    The scripts that change rosters also change the pools (lua/tasks.lua). A task leaves its pool
    when a query asks it. When the query's step is counted (lua/read_pools.lua), the task joins the
    pool of its new success rate. Steps are counted once and in order, when another one opens.
    """

    def __init__(self, database: Database) -> None:
        self._database = database

    async def read(self, request: store_pb.ReadTaskPoolsRequest) -> store_pb.ReadTaskPoolsResponse:
        """Count the steps before `before_step` that are not counted yet, and list the pools.

        Raises `FailedPrecondition`: a step was not opened (`step_not_open`), or not all of its
        trajectories have ended (`step_not_sealed`).
        """
        outcome, *rest = await self._database.run(
            "read_pools",
            JobTableKeys(request.job_id).base,
            request.before_step,
            repr(request.low),
            repr(request.high),
            repr(request.memory),
            *request.wanted,
        )
        if outcome == b"missing":
            raise not_open(request.job_id, int(rest[0]))
        if outcome == b"unsealed":
            step, ended, expected = map(int, rest)
            raise FailedPrecondition(
                f"step {step} is not over: {ended} of {expected} trajectories have ended",
                kind="step_not_sealed",
                field="before_step",
                value=request.before_step,
                remedy="Name a step such that every policy has committed all steps before it.",
            )
        response = store_pb.ReadTaskPoolsResponse()
        for next_new, *pools in rest[0]:
            source = response.sources.add(next_new=next_new)
            for pool, (size, items) in zip(TaskPool, pools, strict=True):
                source.pools[pool].size = size
                source.pools[pool].items.extend(map(int, items))
        return response

    async def free(self, job: str) -> None:
        """Delete the pools and success rates of a job. Repeatable."""
        keys = JobTableKeys(job)
        # Delete the hash that lists the pools last.
        stored = await self._database.call("HGETALL", keys.curriculum)
        names = [*keys.task_keys(stored), keys.curriculum]
        for first in range(0, len(names), _TOGETHER):
            part = names[first : first + _TOGETHER]
            await self._database.call_each([("UNLINK", name) for name in part])


def not_open(job: str, step: int) -> FailedPrecondition:
    """Return the error of a step that was never opened, or was forgotten."""
    return FailedPrecondition(
        f"step {step} of job {job} is not open",
        kind=kinds.STEP_NOT_OPEN,
        field="step",
        value=step,
        remedy=f"Call OpenStep first; steps are forgotten {KEEP_STEPS} steps after their commit.",
    )


def _check_same(step: int, name: str, ours: object, stored: object) -> None:
    if ours != stored:
        raise FailedPrecondition(
            f"step {step} is open with different contents ({name}: {str(stored)[:200]})",
            kind="step_differs",
            field=name,
            value=str(ours)[:200],
            remedy="Two orchestrators may be running one job; stop one of them.",
        )


def _refusal(
    request: store_pb.AmendStepRequest, outcome: str, rest: Sequence[str]
) -> FailedPrecondition | Internal:
    step = request.step

    def of_query(kind: str, message: str, remedy: str) -> FailedPrecondition:
        lists = ("add_query_ids", "drop_query_ids")
        field = next((one for one in lists if rest[0] in getattr(request, one)), "carry_query_ids")
        return FailedPrecondition(message, kind=kind, field=field, value=rest[0], remedy=remedy)

    if outcome == "missing":
        return not_open(request.job_id, int(rest[0]))
    if outcome == "closed":
        return FailedPrecondition(
            f"step {rest[0]} is closed: its roster is final",
            kind="step_closed",
            field="step" if int(rest[0]) == step else "carry_to",
            value=int(rest[0]),
            remedy="Open the step with held_open, and amend it before it is closed.",
        )
    if outcome == "unknown_query":
        message = f"step {step} never had this query"
        return of_query("unknown_query", message, "Name queries of GetStep's query_ids.")
    if outcome == "left":
        how, _, detail = rest[1].partition("\t")
        where = f"was carried to step {detail}"
        if how == "dropped":
            where = f"was dropped from step {step} ({detail.partition(chr(9))[2]})"
        remedy = "A query that left a step does not come back; take a fresh one."
        return of_query("query_left", f"the query {where}", remedy)
    if outcome == "elsewhere":
        message = f"step {rest[1]} has, or had, this query"
        return of_query("query_elsewhere", message, "A query is in one live step at a time.")
    if outcome == "group_size":
        return FailedPrecondition(
            f"step {rest[0]} has groups of {rest[1]} trajectories, unlike step {step}",
            kind="step_differs",
            field="carry_to",
            value=int(rest[0]),
            remedy="Drop the queries instead.",
        )
    return Internal(f"amend_step answered {outcome}")
