"""The experience store without gRPC: the wiring of its parts, and its background tasks.

`TableWatcher` pushes counts to watchers, `Sweeper` expires leases and completes work left by
crashes, `LogAuditor` compares logs and commits, `HighWater` refuses appends when rows take too much
memory, `Descriptions` summarizes tables for people.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence
from operator import itemgetter
from typing import Final, TypeAlias

import structlog

from services.experience_store.claims import Claims, KeptRows, PairExchange
from services.experience_store.database import Database, ScriptCall
from services.experience_store.log import Log, StepAudit
from services.experience_store.notices import CLAIMABLE, COUNTS, Background, Notices
from services.experience_store.records import JOBS, JobTableKeys, PolicyKeys, SampleRecord
from services.experience_store.samples import DEFAULT_BYTES, RecentRows, Samples
from services.experience_store.steps import KEEP_STEPS, StepStatus, StepStore, TaskPools
from services.experience_store.tables import DAMAGED, TableRegistry, TableSchema
from services.experience_store.trajectories import Trajectories
from services.experience_store.versions import PolicyVersions
from troupe.contracts import kinds
from troupe.rpc import DeadlineExceeded, NotFound, ResourceExhausted, TroupeError, Unavailable
from troupe.v1 import experience_store_pb2 as store_pb

# Changes within so many seconds form one message: hundreds of trajectories may end in a second.
COALESCE_SECONDS: Final = 0.05
# Interval of checks without a notice: the end of a lease gives none.
REFRESH_SECONDS: Final = 30.0


class TableWatcher:
    """Streams of table statuses."""

    def __init__(
        self,
        tables: TableRegistry,
        steps: StepStore,
        notices: Notices,
        high_water: HighWater,
    ) -> None:
        self._high_water = high_water
        self._tables = tables
        self._steps = steps
        self._notices = notices

    async def watch(self, job: str) -> AsyncIterator[store_pb.TableStatus]:
        """Yield the status of every live step (or of the newest one), then every change.

        Ends when the tables are dropped or the service stops. Raises `NotFound` without tables.
        """
        await self._tables.get(job)
        sent: dict[int, bytes] = {}
        with self._notices.listen(job, kinds=frozenset({CLAIMABLE, COUNTS})) as subscription:
            steps = set(await self._steps.live(job)) or set((await self._steps.all(job))[-1:])
            while True:
                with contextlib.suppress(TroupeError):
                    await self._high_water.look(at_most_every=1.0)
                for step in sorted(steps):
                    status = await self._steps.status(job, step, endings=False)
                    message = table_status(job, status, self._high_water)
                    wire = message.SerializeToString(deterministic=True)
                    if status.open and sent.get(step) != wire:
                        sent[step] = wire
                        yield message
                await subscription.wait(REFRESH_SECONDS)
                await asyncio.sleep(COALESCE_SECONDS)
                if subscription.dropped or self._notices.closing:
                    return
                steps = subscription.take_steps() or set(await self._steps.live(job))
                # Only the newest steps can still change.
                sent = {step: sent[step] for step in sorted(sent)[-16:]}


def table_status(job: str, status: StepStatus, high_water: HighWater) -> store_pb.TableStatus:
    """Return the status of a step, as watchers get it."""
    return store_pb.TableStatus(
        job_id=job,
        step=status.step,
        sealed=status.sealed,
        trajectories_expected=status.expected,
        trajectories_ended=status.ended,
        counts=status.counts,
        closed=status.closed,
        queries_complete=status.complete,
        payload_bytes=high_water.payload_bytes,
        over_high_water=high_water.over,
    )


log = structlog.get_logger(__name__)

# A few commands per live step: cheap enough for every replica, and short compared with a lease.
PERIOD_SECONDS: Final = 5.0


class Sweeper:
    """The periodic task that expires leases and completes half-applied changes of live steps, for
    all jobs."""

    def __init__(
        self,
        database: Database,
        tables: TableRegistry,
        steps: StepStore,
        period: float = PERIOD_SECONDS,
    ) -> None:
        self._database = database
        self._tables = tables
        self._steps = steps
        self._period = period
        self._background = Background()
        # Endings decided by the last round: later ones may still be on their way to the tables.
        self._decided: dict[tuple[str, int], int] = {}

    async def start(self) -> None:
        """Begin to sweep."""
        self._background.start(self._sweep_forever(), "sweeper")

    async def stop(self) -> None:
        """End the sweeping."""
        await self._background.stop()

    async def _sweep_forever(self) -> None:
        while True:
            await asyncio.sleep(self._period)
            try:
                await self.sweep()
            except TroupeError as error:
                # The next round finds the same work again.
                log.warning("sweep_failed", kind=error.kind, error=str(error))

    async def sweep(self) -> None:
        """Sweep all jobs once. A job that cannot be swept is logged and skipped.

        Raises Unavailable and DeadlineExceeded, which concern Redis as a whole.
        """
        before, self._decided = self._decided, {}
        for job in await self._jobs():
            try:
                await self._sweep_job(job, before)
            except (Unavailable, DeadlineExceeded):
                raise
            except (TroupeError, *DAMAGED) as error:
                log.warning("sweep_failed", job=job, error=repr(error))

    async def _jobs(self) -> list[str]:
        """Return the jobs that have live steps, in one round trip, since most jobs have ended."""
        jobs = [name.decode() for name in await self._database.call("SMEMBERS", JOBS)]
        try:
            live = await self._database.call_each([("EXISTS", JobTableKeys(j).live) for j in jobs])
        except (Unavailable, DeadlineExceeded):
            raise
        except TroupeError:  # a node of a cluster answers only for its own slots
            return jobs
        return [job for job, found in zip(jobs, live, strict=True) if found]

    async def _sweep_job(self, job: str, before: dict[tuple[str, int], int]) -> None:
        try:
            # Amendments that did not reach the tables because of a crash.
            if steps := await self._steps.live(job):
                await self._steps.follow(job, steps[-1])
        except TroupeError as error:
            if error.kind != kinds.TABLES_NOT_FOUND:
                raise
        for step in await self._steps.live(job):
            try:
                await self._sweep_step(job, step, before.get((job, step), 0))
            except TroupeError as error:
                if error.kind not in (kinds.TABLES_NOT_FOUND, kinds.STEP_NOT_OPEN):
                    raise

    async def _sweep_step(self, job: str, step: int, decided: int) -> None:
        table = await self._tables.get(job)
        calls = [
            ScriptCall("sweep", PolicyKeys(job, policy).base, (step,)) for policy in table.policies
        ]
        replies = await self._steps.on_tables(job, step, calls)
        for policy, (_, returned, _) in zip(table.policies, replies, strict=True):
            if returned:
                log.info("leases_expired", job=job, policy=policy, step=step, samples=returned)
        if all(state == b"committed" for state, _, _ in replies):
            await self._steps.retire(job, step)
            return
        if any(there < decided for _, _, there in replies):
            lagged = await self._steps.settle(job, step)
            log.info("endings_completed", job=job, step=step, trajectories=lagged)
        ended = await self._database.call("HGET", JobTableKeys(job).step(step), "ended")
        self._decided[job, step] = int(ended or 0)


# A running job changes while it is read, so violations are checked again.
_LOOKS: Final = 3
_PAUSE_SECONDS: Final = 0.5
# Samples in one message of ReadLog: well under the message limit, however long their ids.
PART: Final = 20_000


class LogAuditor:
    """An auditor and reader of logs, whether the job's tables exist or were dropped."""

    def __init__(
        self, tables: TableRegistry, steps: StepStore, log: Log, versions: PolicyVersions
    ) -> None:
        self._tables = tables
        self._steps = steps
        self._log = log
        self._versions = versions

    async def tables(self, job: str) -> TableSchema:
        """Return the job's tables, even after they were dropped. Raises `NotFound` without a
        log."""
        try:
            return await self._tables.get(job)
        except NotFound:
            stored = await self._log.tables(job)
            if stored is None:
                raise
            return TableSchema.parse(job, stored)

    async def check(self, job: str) -> store_pb.AuditTablesResponse:
        """Check that every sample was trained once or dropped with a reason.

        Raises `NotFound` for a job that has neither tables nor a log.
        """
        table = await self.tables(job)
        for look in range(_LOOKS):
            newest = await self._versions.newest(job)
            begun = {one.weights.policy: one.step for one in newest}
            audit = await self._add_up(table)
            versions = {p: await self._versions.all(job, p) for p in table.policies}
            report = audit.report(versions, begun)
            if not report.violations or not audit.live or look == _LOOKS - 1:
                break
            await asyncio.sleep(_PAUSE_SECONDS)
        return report

    async def read(
        self, job: str, policy: str, from_step: int
    ) -> AsyncIterator[store_pb.LoggedStep]:
        """Yield the fate of every sample of a policy, step by step, beginning with `from_step`.

        A step of many samples comes in parts, each with the fields of the step. Raises
        `NotFound` for an unknown job or policy.
        """
        table = await self.tables(job)
        table.check(policy)
        for step in await self._log.steps(job):
            if step >= from_step:
                for part in parts(await self._log.policy_step(job, policy, step)):
                    yield part

    async def _add_up(self, table: TableSchema) -> StepAudit:
        job = table.job
        audit = StepAudit(table.policies, table.max_uses)
        for step in await self._log.steps(job):
            # Endings first: `settle` brings all endings seen here into the tables.
            roster = await self._log.roster(job, step)
            if roster is not None and not await self._log.has(job, step):
                try:
                    await self._steps.settle(job, step)
                except TroupeError as error:
                    # Forgotten in between, so it is in the log.
                    if error.kind not in (kinds.STEP_NOT_OPEN, kinds.TABLES_NOT_FOUND):
                        raise
            logged = {
                policy: await self._log.policy_step(job, policy, step) for policy in table.policies
            }
            # In a thread: long steps take a while.
            await asyncio.to_thread(audit.add, step, roster, logged)
        return audit


def parts(logged: store_pb.LoggedStep) -> Iterator[store_pb.LoggedStep]:
    """Yield `logged`, or several such steps with `PART` of its samples each."""
    if len(logged.samples) <= PART:
        yield logged
        return
    samples = list(logged.samples)
    del logged.samples[:]
    for start in range(0, len(samples), PART):
        part = store_pb.LoggedStep(samples=samples[start : start + PART])
        part.MergeFrom(logged)
        yield part


MIB: Final = 2**20
_LOOK_SECONDS: Final = 0.5
_RETRY_MS: Final = 1000


class HighWater:
    """The count of rows' bytes, and the refusal of appends above the high-water mark."""

    def __init__(
        self, database: Database, tables: TableRegistry, notices: Notices, mark_bytes: int = 0
    ) -> None:
        self._database = database
        self._tables = tables
        self._notices = notices
        self.mark_bytes = mark_bytes
        """0: no bound."""
        self.payload_bytes = 0
        """Bytes of rows of all jobs as of the last look, plus bytes that this process admitted
        since."""
        self._looked = -1.0
        self._looking = asyncio.Lock()
        self._background = Background()

    @property
    def over(self) -> bool:
        """Whether rows are refused."""
        return 0 < self.mark_bytes <= self.payload_bytes

    async def start(self) -> None:
        """Start to look periodically if there is a mark, so that watchers learn when it is
        passed."""
        await self.look()
        if self.mark_bytes:
            self._background.start(self._look_forever(), "high water")

    async def stop(self) -> None:
        """Stop looking."""
        await self._background.stop()

    async def admit(self, job: str, step: int, size: int) -> None:
        """Admit `size` bytes of rows of a step. Raises `ResourceExhausted` to refuse them for now.

        Rows of a job's oldest uncommitted step are always admitted.
        """
        if not self.mark_bytes or not size:
            return
        await self.look(at_most_every=_LOOK_SECONDS)
        if self.payload_bytes + size > self.mark_bytes and not await self._goes_on(job, step):
            raise ResourceExhausted(
                f"the experience store holds {self.payload_bytes / MIB:.1f} MiB of rows",
                kind="store_full",
                field="TROUPE_STORE_HIGH_WATER_MIB",
                value=f"{self.mark_bytes / MIB:g}",
                remedy=(
                    "Rows are accepted again after a step is committed; "
                    "raise the mark if Redis has memory."
                ),
                retry_after_ms=_RETRY_MS,
            )
        self.payload_bytes += size

    async def look(self, *, at_most_every: float = 0.0) -> None:
        """Add up the bytes of all tables."""
        async with self._looking:
            if time.monotonic() - self._looked < at_most_every:
                return
            before = self.over
            jobs = [name.decode() for name in await self._database.call("SMEMBERS", JOBS)]
            places = list[PolicyKeys]()
            for job in jobs:
                # Damaged tables of one job (the sweeper logs them) must not keep others out.
                with contextlib.suppress(*DAMAGED):
                    places += await self._places(job)
            total = sum((await self._bytes(places)).values())
            self.payload_bytes, self._looked = total, time.monotonic()
        if self.over != before:
            log.info("high_water", over=self.over, payload_bytes=total, mark=self.mark_bytes)
            self._notices.wake_all()

    async def of_job(self, job: str) -> dict[str, int]:
        """Return the bytes of the rows in each policy's table."""
        found = await self._bytes(await self._places(job))
        return {place.policy: number for place, number in found.items()}

    async def _places(self, job: str) -> list[PolicyKeys]:
        try:
            table = await self._tables.get(job)
        except NotFound:
            return []
        return [PolicyKeys(job, policy) for policy in table.policies]

    async def _bytes(self, places: Sequence[PolicyKeys]) -> dict[PolicyKeys, int]:
        replies = await self._database.call_each(
            [("HGET", place.head, "bytes") for place in places]
        )
        return {place: int(number or 0) for place, number in zip(places, replies, strict=True)}

    async def _goes_on(self, job: str, step: int) -> bool:
        """Return whether rows of this step are admitted even above the mark: rows of the oldest
        step, or of an earlier one whose query was carried to it.
        """
        oldest = await self._oldest(job)
        return oldest is not None and step <= oldest

    async def _oldest(self, job: str) -> int | None:
        """Return the job's oldest step that some policy has not committed."""
        table = await self._tables.get(job)
        for text in await self._database.call("ZRANGE", JobTableKeys(job).live, 0, -1):
            step = int(text)
            commits = await self._database.call_each(
                [("HEXISTS", PolicyKeys(job, policy).commits, step) for policy in table.policies]
            )
            if not all(commits):
                return step
        return None

    async def _look_forever(self) -> None:
        while True:
            await asyncio.sleep(_LOOK_SECONDS)
            with contextlib.suppress(TroupeError):
                await self.look(at_most_every=_LOOK_SECONDS)


_PAGE: Final = 1000
# Pages of one table read for the oldest pending sample; only these pages count.
_MOST_PAGES: Final = 100
# Fields of a policy's totals that count a reason.
_REASON: Final = "reason:"


# Milliseconds of the Redis clock since which a sample is PENDING, and its id.
_Pending: TypeAlias = tuple[int, str]


class Descriptions:
    """Descriptions of jobs' tables."""

    def __init__(
        self,
        database: Database,
        tables: TableRegistry,
        steps: StepStore,
        high_water: HighWater,
        versions: PolicyVersions,
    ) -> None:
        self._database = database
        self._tables = tables
        self._steps = steps
        self._high_water = high_water
        self._versions = versions

    async def describe(self, job: str) -> store_pb.DescribeTablesResponse:
        """Return all tables of a job. Raises `NotFound` when it has none."""
        table = await self._tables.get(job)
        summaries = {policy: store_pb.TableSummary(policy=policy) for policy in table.policies}
        newest = {one.weights.policy: one for one in await self._versions.newest(job)}
        known = await self._steps.all(job)
        for policy, size in (await self._high_water.of_job(job)).items():
            summaries[policy].payload_bytes = size
        pending: dict[str, list[int]] = {policy: [] for policy in table.policies}
        for step in known:
            status = await self._steps.status(job, step, endings=False)
            committed = {commit.policy for commit in status.commits}
            for counts in status.counts:
                _add(summaries[counts.policy], counts)
                if counts.pending and counts.policy not in committed:
                    pending[counts.policy].append(step)
        for policy, summary in summaries.items():
            await self._add_history(job, summary)
            summary.version = newest[policy].weights.version if policy in newest else -1
            summary.newest_step = known[-1] if known else -1
            await self._add_oldest(PolicyKeys(job, policy), summary, pending[policy])
        await self._high_water.look()
        info = await self._database.info()
        return store_pb.DescribeTablesResponse(
            tables=summaries.values(),
            payload_bytes=self._high_water.payload_bytes,
            high_water_bytes=self._high_water.mark_bytes,
            over_high_water=self._high_water.over,
            redis_bytes=int(info["used_memory"]),
        )

    async def _add_history(self, job: str, summary: store_pb.TableSummary) -> None:
        """Add the newest commit, and the totals of forgotten steps."""
        keys = PolicyKeys(job, summary.policy)
        commits, totals = await self._database.call_each(
            [("HKEYS", keys.commits), ("HGETALL", keys.totals)]
        )
        summary.committed_step = max((int(step) for step in commits), default=-1)
        for name, number in totals.items():
            field = name.decode()
            if field == "T":
                summary.trained += int(number)
            elif field == "D":
                summary.dropped += int(number)
            elif field.startswith(_REASON):
                summary.drop_reasons[field.removeprefix(_REASON)] += int(number)

    async def _add_oldest(
        self, keys: PolicyKeys, summary: store_pb.TableSummary, steps: list[int]
    ) -> None:
        each = [await self._oldest_pending(keys, step) for step in steps]
        if found := [oldest for oldest in each if oldest is not None]:
            since, summary.oldest_pending_sample = min(found, key=itemgetter(0))
            # By the clock of the node that set the time: in a cluster each node has its own.
            clock = "return redis.call('TIME')"
            seconds, micros = await self._database.call("EVAL", clock, 1, keys.base)
            now = int(seconds) + int(micros) / 1e6
            summary.oldest_pending_seconds = max(0.0, now - since / 1000)

    async def _oldest_pending(self, keys: PolicyKeys, step: int) -> _Pending | None:
        oldest: _Pending | None = None
        cursor = 0
        for _ in range(_MOST_PAGES):
            cursor, page = await self._database.call(
                "HSCAN", keys.step(step, "book"), cursor, "COUNT", _PAGE
            )
            for sample, text in page.items():
                record = SampleRecord.parse(text.decode())
                if record.state != "P" or not record.since:
                    continue
                since = int(record.since)
                if oldest is None or since < oldest[0]:
                    oldest = since, sample.decode()
            cursor = int(cursor)
            if cursor == 0:
                break
        return oldest


def _add(summary: store_pb.TableSummary, counts: store_pb.PolicyCounts) -> None:
    summary.pending += counts.pending
    summary.ready += counts.ready
    summary.claimed += counts.claimed
    summary.trained += counts.trained
    summary.dropped += counts.dropped
    reasons = Counter(summary.drop_reasons) + Counter(counts.drop_reasons)
    summary.drop_reasons.update(reasons)


class Store:
    """The store, as the parts that the servicer calls."""

    def __init__(
        self,
        database: Database,
        *,
        keep_steps: int = KEEP_STEPS,
        sweep_seconds: float = PERIOD_SECONDS,
        high_water_bytes: int = 0,
        recent_bytes: int = DEFAULT_BYTES,
    ) -> None:
        self.database = database
        self.notices = Notices(database)
        self.log = Log(database)
        self.tables = TableRegistry(database, self.log)
        self.steps = StepStore(database, self.tables, self.notices, self.log, keep_steps)
        self.recent = RecentRows(recent_bytes)
        self.trajectories = Trajectories(
            database, self.tables, self.steps, self.notices, self.recent
        )
        self.task_pools = TaskPools(database)
        self.samples = Samples(database, self.tables, self.steps, self.notices, self.recent)
        self.claims = Claims(database, self.tables, self.steps, self.samples, self.notices)
        self.pairs = PairExchange(database, self.tables, self.steps, self.notices)
        self.kept_rows = KeptRows(database, self.tables, self.steps)
        self.versions = PolicyVersions(database, self.tables)
        self.audit = LogAuditor(self.tables, self.steps, self.log, self.versions)
        self.high_water = HighWater(database, self.tables, self.notices, high_water_bytes)
        self.descriptions = Descriptions(
            database, self.tables, self.steps, self.high_water, self.versions
        )
        self.watching = TableWatcher(self.tables, self.steps, self.notices, self.high_water)
        self.sweeper = Sweeper(database, self.tables, self.steps, sweep_seconds)

    async def start(self) -> None:
        """Wait until Redis answers, then subscribe to notices and start to sweep.

        Raises `FailedPrecondition` if waiting cannot help (`RedisClient.wait_ready`).
        """
        info = await self.database.wait_ready()
        await self.notices.start()
        await self.sweeper.start()
        await self.high_water.start()
        log.info("redis_ready", redis=self.database.address, version=info.get("redis_version"))

    async def stop(self) -> None:
        """Answer waiting calls and close the connections."""
        await self.high_water.stop()
        await self.sweeper.stop()
        await self.notices.stop()
        await self.database.close()
