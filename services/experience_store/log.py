"""The log: the fate of every sample, kept after the records of its step are forgotten.

A step that is trimmed leaves one compressed record per policy (`LoggedStep`: its commit and the
fate of each sample) and one for the job (`StepMembership`: its queries, and how each trajectory
ended). The steps, in order and each repeatable: log every policy -> log the roster -> forget the
records. A crash between two of them loses nothing: a step is in the log, in the live records, or
identically in both.
"""

from __future__ import annotations

import asyncio
import json
import zlib
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Final

import xxhash

from services.experience_store.database import Database
from services.experience_store.records import (
    STATE_OF,
    Ending,
    JobTableKeys,
    PolicyKeys,
    SampleRecord,
    parse_commit,
)
from services.experience_store.requests import clean_reason
from troupe.contracts import kinds
from troupe.experience import samples_digest
from troupe.v1 import common_pb2 as common_pb
from troupe.v1 import experience_store_pb2 as store_pb

# Reason of rows of an uncommitted step that are DROPPED with the tables.
JOB_OVER: Final = "job_over"

# Records read at once, so that a long table blocks neither Redis nor this process.
_PAGE: Final = 1000
# From so many samples, or bytes of their record, another thread (de)compresses.
_LONG: Final = 10_000
_FINAL: Final = frozenset({common_pb.SAMPLE_STATE_TRAINED, common_pb.SAMPLE_STATE_DROPPED})


@dataclass(frozen=True)
class StepMembership:
    """A job's record of one step: its roster, and how its trajectories ended."""

    step: int
    fields: dict[str, str]
    """The step's hash in Redis (keys.JobKeys.step)."""
    endings: dict[str, Ending]
    """Trajectory -> how it ended."""

    @property
    def queries(self) -> list[str]:
        """The queries that the step consists of."""
        return [str(query) for query in json.loads(self.fields["queries"])]

    @property
    def group_size(self) -> int:
        """Trajectories per query that count."""
        return int(self.fields["group_size"])

    @property
    def redundant(self) -> int:
        """Further trajectories per query, which are ended once `group_size` have completed."""
        return int(self.fields["redundant"])

    def format(self) -> bytes:
        """Return the compressed text in Redis."""
        endings = {trajectory: ending.format() for trajectory, ending in self.endings.items()}
        return zlib.compress(json.dumps({"fields": self.fields, "endings": endings}).encode())

    @staticmethod
    def parse(step: int, stored: bytes) -> StepMembership:
        """Return the roster that `format` wrote."""
        value = json.loads(zlib.decompress(stored))
        endings = {name: Ending.parse(text) for name, text in value["endings"].items()}
        return StepMembership(step, value["fields"], endings)


class Log:
    """The log of a store. Reads combine it with the live records."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def keep(self, job: str, policies: Iterable[str], step: int) -> None:
        """Log a step that every policy has committed. The first record of a step stays."""
        for policy in policies:
            keys = PolicyKeys(job, policy)
            if not await self._database.call("HEXISTS", keys.log, step):
                logged = await self._live(keys, step)
                await self._database.call("HSETNX", keys.log, step, await packed(logged))
        roster = await self._live_roster(job, step)
        if roster is not None:
            await self._database.call("HSETNX", JobTableKeys(job).log, step, roster.format())

    async def keep_unfinished(self, job: str, policy: str, step: int, *, keep: bool = True) -> bool:
        """Log a policy's step whose job is over, if `keep`: rows that were not final are DROPPED.

        Returns whether the policy had committed it.
        """
        keys = PolicyKeys(job, policy)
        stored, there = await self._database.call_each(
            [("HGET", keys.log, step), ("EXISTS", keys.step(step, "step"))]
        )
        if stored is not None:
            committed = unpack(stored).HasField("commit")
            if committed or not there:
                return committed
        logged = await self._live(keys, step)
        committed = logged.HasField("commit")
        if not keep:
            return committed
        if not committed:
            logged.job_over = True
            for sample in logged.samples:
                if sample.state not in _FINAL:
                    sample.state, sample.reason = common_pb.SAMPLE_STATE_DROPPED, JOB_OVER
        await self._database.call("HSET", keys.log, step, await packed(logged))
        return committed

    async def keep_roster(self, job: str, roster: StepMembership) -> None:
        """Log a roster, instead of the one that is there."""
        await self._database.call("HSET", JobTableKeys(job).log, roster.step, roster.format())

    async def keep_tables(self, job: str, declaration: str) -> None:
        """Keep the declaration of tables (`TableSchema.format`) that are about to be dropped."""
        await self._database.call("SET", JobTableKeys(job).logged_tables, declaration)

    async def tables(self, job: str) -> bytes | None:
        """Return the declaration of a job's dropped tables; None while the tables exist."""
        stored: bytes | None = await self._database.call("GET", JobTableKeys(job).logged_tables)
        return stored

    async def purge(self, job: str, policies: Iterable[str]) -> None:
        """Delete the log of a job, and the versions of its policies."""
        keys = JobTableKeys(job)
        versioned = await self._database.call("SMEMBERS", keys.versioned)
        for policy in {*policies, *(name.decode() for name in versioned)}:
            own = PolicyKeys(job, policy)
            for key in (own.log, own.totals, own.versions, own.checksums):
                await self._database.call("UNLINK", key)
        for key in (keys.log, keys.logged_tables, keys.versioned):
            await self._database.call("UNLINK", key)

    async def has(self, job: str, step: int) -> bool:
        """Return whether all of a step is in the log."""
        return bool(await self._database.call("HEXISTS", JobTableKeys(job).log, step))

    async def steps(self, job: str) -> list[int]:
        """Return all steps that the job has opened, oldest first."""
        keys = JobTableKeys(job)
        logged, known = await self._database.call_each(
            [("HKEYS", keys.log), ("ZRANGE", keys.steps, 0, -1)]
        )
        return sorted({int(step) for step in (*logged, *known)})

    async def roster(self, job: str, step: int) -> StepMembership | None:
        """Return a step's roster, from the log or from the live job; None for a step never
        opened."""
        # Read twice, since it may be logged and forgotten between the two reads.
        for _ in range(2):
            stored = await self._database.call("HGET", JobTableKeys(job).log, step)
            if stored is not None:
                return await asyncio.to_thread(StepMembership.parse, step, stored)
            if (live := await self._live_roster(job, step)) is not None:
                return live
        return None

    async def policy_step(self, job: str, policy: str, step: int) -> store_pb.LoggedStep:
        """Return the fate of every sample of a policy's step, so far."""
        keys = PolicyKeys(job, policy)
        logged = store_pb.LoggedStep(step=step)
        for _ in range(2):
            stored = await self._database.call("HGET", keys.log, step)
            if stored is not None:
                return await unpacked(stored)
            logged = await self._live(keys, step)
            if logged.samples or logged.HasField("commit"):
                break
        return logged

    async def _live(self, keys: PolicyKeys, step: int) -> store_pb.LoggedStep:
        """Return the live records of a policy's step. A commit in the meantime triggers another
        read."""
        while True:
            before = await self._database.call("HGET", keys.commits, step)
            samples = await self._book(keys, step, before is not None)
            after, dropped = await self._database.call_each(
                [("HGET", keys.commits, step), ("HGETALL", keys.step(step, "dropped"))]
            )
            if (before is None) == (after is None):
                break
        logged = store_pb.LoggedStep(step=step, samples=[samples[name] for name in sorted(samples)])
        if after is not None:
            logged.commit.CopyFrom(parse_commit(after))
        for reason, number in dropped.items():
            logged.drop_reasons[reason.decode()] = int(number)
        return logged

    async def _book(
        self, keys: PolicyKeys, step: int, committed: bool
    ) -> dict[str, store_pb.LoggedSample]:
        found: dict[str, store_pb.LoggedSample] = {}
        cursor = 0
        while True:
            cursor, page = await self._database.call(
                "HSCAN", keys.step(step, "book"), cursor, "COUNT", _PAGE
            )
            for name, text in page.items():
                record = SampleRecord.parse(text.decode()).settled(committed)
                sample = name.decode()
                found[sample] = store_pb.LoggedSample(
                    sample_id=sample,
                    state=STATE_OF[record.state],
                    reason=record.reason,
                    uses=int(record.uses),
                    trajectory_id=record.trajectory,
                    origin_step=int(record.origin) if record.origin else None,
                )
            cursor = int(cursor)
            if cursor == 0:
                return found

    async def _live_roster(self, job: str, step: int) -> StepMembership | None:
        keys = JobTableKeys(job)
        stored, ended = await self._database.call_each(
            [("HGETALL", keys.step(step)), ("HGETALL", keys.ended(step))]
        )
        if not stored:
            return None
        fields = {name.decode(): value.decode() for name, value in stored.items()}
        endings = {name.decode(): Ending.parse(text.decode()) for name, text in ended.items()}
        return StepMembership(step, fields, endings)


def pack(logged: store_pb.LoggedStep) -> bytes:
    """Return a policy's logged step, compressed, as Redis holds it."""
    return zlib.compress(logged.SerializeToString(deterministic=True))


async def packed(logged: store_pb.LoggedStep) -> bytes:
    """Run `pack` without blocking this process for a long step."""
    if len(logged.samples) < _LONG:
        return pack(logged)
    return await asyncio.to_thread(pack, logged)


async def unpacked(stored: bytes) -> store_pb.LoggedStep:
    """Run `unpack` without blocking this process for a long step."""
    if len(stored) < _LONG:
        return unpack(stored)
    return await asyncio.to_thread(unpack, stored)


def unpack(stored: bytes) -> store_pb.LoggedStep:
    """Return the step that `pack` wrote."""
    return store_pb.LoggedStep.FromString(zlib.decompress(stored))


# Maximum number of violations that a report lists; its figures count all of them.
LONGEST_LIST: Final = 200
_TRAINED, _DROPPED = common_pb.SAMPLE_STATE_TRAINED, common_pb.SAMPLE_STATE_DROPPED
# Reason of rows rejected because another trajectory has a row of the same id: counted, not
# recorded.
_TAKEN: Final = "sample_id_taken"


@dataclass
class _Policy:
    """The sums of one policy."""

    audit: store_pb.PolicyAudit
    committed: dict[int, int] = field(default_factory=dict)
    """Step -> version that its commit names."""
    uses: dict[int, int] = field(default_factory=dict)
    """Hash of a sample's name and origin -> applied steps that trained it."""


class StepAudit:
    """An audit of a job's log: `add` takes the steps in order, `report` returns the result."""

    def __init__(self, policies: Collection[str], max_uses: int) -> None:
        self._max_uses = max_uses
        self._policies = {name: _Policy(store_pb.PolicyAudit(policy=name)) for name in policies}
        self._ended: dict[int, int] = {}
        self._report = store_pb.AuditTablesResponse()
        self._hidden = 0
        self._last: int | None = None
        self.live = False
        """Whether some step is not over, so that a later audit may differ."""

    def add(
        self, step: int, roster: StepMembership | None, tables: Mapping[str, store_pb.LoggedStep]
    ) -> None:
        """Add the next step: its roster, its endings, and the fate of their rows."""
        if self._last is not None and step != self._last + 1:
            self._say(f"the log lacks steps {self._last + 1} to {step - 1}")
        self._last = step
        self._report.steps += 1
        if roster is None:
            self._say(f"step {step}: the log lacks its roster")
            return
        over = any(table.HasField("commit") for table in tables.values())
        self._add_endings(roster, over=over)
        for name, policy in self._policies.items():
            self._add_table(policy, step, roster, tables[name])

    def report(
        self,
        versions: Mapping[str, Sequence[store_pb.PolicyVersion]],
        begun: Mapping[str, int],
    ) -> store_pb.AuditTablesResponse:
        """Return the audit. `versions`: all versions of each policy, oldest first, read after the
        log. `begun`: the steps that each policy had done when the log was read first."""
        for name, policy in self._policies.items():
            audit = policy.audit
            audit.version = next(reversed(policy.committed.values()), -1)
            audit.lost = max(0, audit.appended - audit.trained - audit.dropped - audit.live)
            done = begun.get(name, 0)
            for fault in check_versions(name, policy.committed, versions[name], done):
                self._say(fault)
            self._report.policies.append(audit)
        if self._hidden:
            self._report.violations.append(f"and {self._hidden} more")
        return self._report

    def _say(self, violation: str) -> None:
        if len(self._report.violations) < LONGEST_LIST:
            self._report.violations.append(violation)
        else:
            self._hidden += 1

    # -- trajectories

    def _add_endings(self, roster: StepMembership, *, over: bool) -> None:
        step, size = roster.step, roster.group_size + roster.redundant
        ended = Counter(ending.query for ending in roster.endings.values())
        self._compare_groups(roster)
        queries = roster.queries
        # All trajectories of queries that left are ended too.
        left = ended.keys() - set(queries)
        self._report.trajectories_admitted += size * (len(queries) + len(left))
        self._report.trajectories_ended += len(roster.endings)
        for query in [*queries, *sorted(left)]:
            number = ended[query]
            if number > size or (number < size and (over or query in left)):
                self._say(f"step {step}: {number} of {size} trajectories of query {query} ended")
        for trajectory, ending in roster.endings.items():
            self._report.trajectories_by_state[ending.state] += 1
            if "\t" in trajectory:
                # It has no name, and another step may take the query again.
                continue
            name = xxhash.xxh3_64_intdigest(trajectory.encode())
            earlier = self._ended.setdefault(name, step)
            if earlier != step:
                self._say(f"trajectory {trajectory} ended in step {earlier} and in step {step}")

    def _compare_groups(self, roster: StepMembership) -> None:
        """Check redundant trajectories: no group has more members than its size, and a trajectory
        is ended as redundant only when its group is full."""
        if not roster.redundant:
            return
        where, size = f"step {roster.step}", roster.group_size
        endings = roster.endings.items()
        completed = Counter(ending.query for _, ending in endings if ending.state == "COMPLETED")
        for query, number in sorted(completed.items()):
            if number > size:
                self._say(f"{where}: {number} of {size} trajectories of query {query} completed")
        left_out = {ending.query for name, ending in endings if _was_redundant(name, ending)}
        for query in sorted(left_out):
            if completed[query] < size:
                self._say(
                    f"{where}: trajectories of query {query} were ended as redundant, but only "
                    f"{completed[query]} of {size} had completed"
                )

    # -- rows

    def _add_table(
        self, policy: _Policy, step: int, roster: StepMembership, table: store_pb.LoggedStep
    ) -> None:
        own = [sample for sample in table.samples if not sample.HasField("origin_step")]
        self._compare_endings(policy, roster, own, table)
        committed = table.HasField("commit")
        over = committed or table.job_over
        self.live = self.live or not over
        for sample in table.samples:
            self._add_sample(policy, step, sample, committed=committed, over=over)
        if committed:
            policy.committed[step] = table.commit.weights.version
            self._compare_commit(policy, roster, table)

    def _compare_endings(
        self,
        policy: _Policy,
        roster: StepMembership,
        own: Collection[store_pb.LoggedSample],
        table: store_pb.LoggedStep,
    ) -> None:
        """Check that the rows of each ending are in the table, and no others."""
        name, step = policy.audit.policy, roster.step
        there = Counter(sample.trajectory_id for sample in own)
        # Only the number of rejected rows is known, not which ones.
        excused = table.drop_reasons.get(_TAKEN, 0)
        missing: list[str] = []
        for trajectory, ending in roster.endings.items():
            wrote = ending.claimed_rows().get(name, 0) if ending.rows else there[trajectory]
            policy.audit.appended += max(wrote, there[trajectory])
            if wrote != there[trajectory]:
                missing.append(
                    f"step {step}, {name}: trajectory {trajectory} wrote {wrote} rows, "
                    f"the table has {there[trajectory]}"
                )
            if there[trajectory] < wrote:
                short = wrote - there[trajectory]
                pardoned = min(short, excused)
                excused -= pardoned
                policy.audit.appended -= pardoned
                if pardoned == short:
                    missing.pop()
        for violation in missing:
            self._say(violation)
        for trajectory in there.keys() - roster.endings.keys():
            policy.audit.appended += there[trajectory]
            self._say(f"step {step}, {name}: rows of {trajectory}, which has not ended there")

    def _add_sample(
        self,
        policy: _Policy,
        step: int,
        sample: store_pb.LoggedSample,
        *,
        committed: bool,
        over: bool,
    ) -> None:
        audit, name, state = policy.audit, sample.sample_id, sample.state
        back = sample.HasField("origin_step")
        origin = sample.origin_step if back else step
        key = xxhash.xxh3_64_intdigest(f"{origin}\t{name}".encode())
        used = policy.uses.get(key, 0)
        wrong: list[str] = []
        if back and not used:
            wrong.append(f"comes back from step {sample.origin_step}, which did not train it")
        if state == _TRAINED:
            if not committed:
                wrong.append("is trained, but the step is not committed")
            policy.uses[key] = used = used + 1
            if used > self._max_uses:
                audit.duplicated += 1
                wrong.append(f"is trained {used} times, {self._max_uses} allowed")
            elif sample.uses > self._max_uses:
                wrong.append(f"says that it was used {sample.uses} times")
            if not back:
                audit.trained += 1
        elif state == _DROPPED:
            if not sample.reason:
                wrong.append("is dropped without a reason")
            if not back:
                audit.dropped += 1
                audit.drop_reasons[sample.reason.partition(":")[0][:64]] += 1
        elif over:
            word = common_pb.SampleState.Name(state).removeprefix("SAMPLE_STATE_")
            wrong.append(f"is {word}, but the step is over")
        elif not back:
            audit.live += 1
        for what in wrong:
            self._say(f"step {step}, {audit.policy}: {name} {what}")

    # -- commits

    def _compare_commit(
        self, policy: _Policy, roster: StepMembership, table: store_pb.LoggedStep
    ) -> None:
        """Check the commit's fields against its rows."""
        commit, audit = table.commit, policy.audit
        where = f"step {roster.step}, {audit.policy}"
        trained = [s.sample_id for s in table.samples if s.state == _TRAINED]
        if commit.outcome == store_pb.STEP_OUTCOME_APPLIED:
            audit.steps_applied += 1
            expected = len(trained)
            named = commit.samples_digest if commit.HasField("samples_digest") else None
            if named not in (None, samples_digest(trained)):
                self._say(f"{where}: the trainer accumulated other samples than the trained ones")
        else:
            if commit.outcome == store_pb.STEP_OUTCOME_SKIPPED:
                audit.steps_skipped += 1
                reason = clean_reason(commit.reason) or "step_skipped"
                expected = sum(s.state == _DROPPED and s.reason == reason for s in table.samples)
            else:
                audit.steps_empty += 1
                expected = 0
            if trained:
                self._say(f"{where}: {len(trained)} samples are trained, but no step was applied")
        if commit.num_samples != expected:
            self._say(f"{where}: the commit counts {commit.num_samples} samples, not {expected}")


def check_versions(
    policy: str,
    committed: Mapping[int, int],
    versions: Sequence[store_pb.PolicyVersion],
    begun: int,
) -> list[str]:
    """Describe the faults in a policy's `versions` (oldest first).

    A version follows from the previous one by one step, whose commit names it, or has the first
    one's content without a step (a restart). `committed`: the version of each step's commit.
    `begun`: steps that are certainly among them; later ones may have been committed meanwhile.
    """
    found: list[str] = []
    for before, one in pairwise(versions):
        step, version = one.step, one.weights.version
        rise = int(one.restarted or one.outcome == store_pb.STEP_OUTCOME_APPLIED)
        how = "a restart" if one.restarted else f"step {step - 1}"
        if version != before.weights.version + rise:
            found.append(f"{policy}: {how} moved version {before.weights.version} to {version}")
        if step != before.step + (not one.restarted):
            found.append(f"{policy}: {how} moved {before.step} steps done to {step}")
        if not rise and one.weights.checksum != before.weights.checksum:
            found.append(f"{policy}: version {version} has two checksums")
        if one.restarted:
            if one.weights.checksum != versions[0].weights.checksum:
                found.append(f"{policy}: version {version} is a restart without the first weights")
        elif (named := committed.get(step - 1, version)) != version:
            found.append(f"{policy}: {how} is committed as version {named}, recorded as {version}")
    recorded = {one.step - 1 for one in versions[1:] if not one.restarted}
    found += (
        f"{policy}: step {step} is committed, but has no version"
        for step in sorted(committed.keys() - recorded)
    )
    found += (
        f"{policy}: step {step} has a version, but is not committed"
        for step in sorted(recorded - committed.keys())
        if step < max(begun, max(committed, default=0))
    )
    return found


def _was_redundant(name: str, ending: Ending) -> bool:
    """Return whether the store ended it because its group was complete. Such an ending has no
    name."""
    return "\t" in name and ending.reason == kinds.REDUNDANT
