"""Keys and records of the store in Redis: samples, endings and commits.

Lua reads and writes the same text (lua/policy.lua): fields separated by tabs, in the order of
`SampleRecord`. Ids hold no control characters (requests.py), so nothing needs escaping.
"""

from __future__ import annotations

import base64
import functools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple, TypeAlias

import xxhash

from services.chassis.redis import KeyName
from troupe import states
from troupe.scheduling.curriculum import TaskPool
from troupe.v1 import common_pb2 as common_pb
from troupe.v1 import experience_store_pb2 as store_pb

PREFIX: Final = "troupe"
# Set: all jobs that have tables, for the sweeper.
JOBS: Final = f"{PREFIX}:jobs"
# Field of staged rows that holds their query and, one a line, their records (`StagedRow.record`).
RECORDS: Final = "records"
# Field of rows that counts what needs their raw rows (`PolicyKeys.rows`).
NEEDED: Final = "needed"
# Items of a hash of success rates (lua/read_pools.lua).
_RATES: Final = 100
# Matches the channels of all policies of all jobs.
CHANNEL_PATTERN: Final = f"{PREFIX}:*:changes"

# Keys of one step under its policy, apart from `rows:<trajectory>` and
# `staged:<trajectory>:<attempt>`.
STEP_KEYS: Final = (
    "step",  # hash: group_size, expected, counts per state, flags
    "ended",  # hash: trajectory -> how it ended, query, reason; its rows are in this table
    "queries",  # hash: query -> trajectories ended
    "book",  # hash: sample -> record (records.py); of a committed step see `SampleRecord.settled`
    "members",  # sorted set: query, group, sample; in this order
    "ready",  # sorted set of claimable samples, in sample order
    "claims",  # hash: claim -> its samples, or why it is lost
    "owners",  # hash: claim -> claimant
    "leases",  # sorted set: live claim -> expiry, ms of the Redis clock
    "held",  # hash: claimant -> samples that it holds
    "fenced",  # hash: claimant -> why it must start over
    "dropped",  # hash: reason -> samples or trajectories
    "roster",  # hash: query that left or came -> how (lua/roster.lua)
    "tallies",  # hash: query, kind -> rows
    "stages",  # set of staged rows, `trajectory:attempt`, to free them with the step
    "leaving",  # hash: sample -> its record in the next step, which the table does not have yet
    "gone",  # hash: returned group -> members whose values were lost earlier, and their rewards
    "returned",  # set of the keys of rows that came from an earlier step
    "completed",  # hash: query -> trajectories completed; only where some are redundant
    "keeping",  # set of the keys `keeping:<claimant>`: index -> rows of a micro-batch
)


@dataclass(frozen=True)
class JobTableKeys:
    """Keys shared by a job's policies."""

    job: str

    @property
    def base(self) -> str:
        """The prefix of every key under the job's hash tag."""
        return f"{PREFIX}:{{{self.job}}}"

    tables = KeyName("tables")
    """JSON: the policies that have tables, and their required columns."""
    steps = KeyName("steps")
    """Sorted set of the steps that exist, committed or not."""
    live = KeyName("live")
    """Sorted set of the steps that some policy has not committed."""
    log = KeyName("log")
    """Hash: step -> its roster and endings (log.Roster). Outlives the step."""
    logged_tables = KeyName("logged-tables")
    """The value of `tables`, kept after the tables are dropped."""
    rosters = KeyName("rosters")
    """Counts changes of steps' rosters."""
    versioned = KeyName("versioned")
    """Set of the policies that have versions (versions.py). Outlives the tables."""
    curriculum = KeyName("curriculum")
    """Hash: `counted` steps; `sources`; `next:<source>`, its first item that was never asked
    (lua/tasks.lua)."""

    def pool(self, source: int, pool: str) -> str:
        """Sorted set: item of the source -> number of the query that asked it last."""
        return f"{self.base}:tasks:{source}:{pool}"

    def task_keys(self, stored: Mapping[bytes, bytes]) -> list[str]:
        """Return all keys of pools and success rates; `stored`: the hash `curriculum`."""
        found: list[str] = []
        for source in range(int(stored.get(b"sources", 0))):
            found += (self.pool(source, pool) for pool in TaskPool)
            items = int(stored.get(f"next:{source}".encode(), 0))
            found += (self.rates(source, block) for block in range(-(-items // _RATES)))
        return found

    def rates(self, source: int, block: int) -> str:
        """Hash: item of the source -> solved and ended trajectories, weighted; of 100 items, so
        that Redis keeps each in some ten bytes."""
        return f"{self.base}:rates:{source}:{block}"

    def step(self, step: int) -> str:
        """Hash: group_size, redundant; versions (JSON); queries, now and as `opened` (JSON);
        expected and ended trajectories; complete queries; held_open; cursor.

        Trajectories of dropped queries count as expected and as ended. Queries carried to another
        step are removed from here with everything that belongs to them.
        """
        return f"{self.base}:{step}:step"

    def all_of(self, step: int) -> tuple[str, ...]:
        """Return all keys of a step, first the key whose existence says that it is open."""
        names = ("step", "ended", "queries", "left", "came", "completed")
        return tuple(f"{self.base}:{step}:{name}" for name in names)

    def ended(self, step: int) -> str:
        """Hash: trajectory -> its only ending (records.Ending). Trajectories that ended because
        their query was dropped, or complete without them, are named `query TAB number`.
        """
        return f"{self.base}:{step}:ended"

    def queries(self, step: int) -> str:
        """Hash: query that the step has now -> trajectories ended."""
        return f"{self.base}:{step}:queries"


@dataclass(frozen=True)
class PolicyKeys:
    """Keys of one policy's table."""

    job: str
    policy: str

    @property
    def base(self) -> str:
        """The prefix of every key under the policy's hash tag."""
        return f"{PREFIX}:{{{self.job}/{self.policy}}}"

    commits = KeyName("commits")
    """Hash: step -> its commit (records.commit_bytes)."""
    head = KeyName("head")
    """Hash: bytes of rows, number of known rosters, newest version with its training state on disk,
    and its checksum."""
    versions = KeyName("versions")
    """List: every version, oldest first, as `<steps done> <version> NEWLINE <PolicyVersion>`
    (versions.py). Outlives the tables, as does `checksums`."""
    checksums = KeyName("checksums")
    """Hash: version -> checksum of its weights."""
    kept = KeyName("kept")
    """Sorted set: versions after that one, whose rows are kept (lua/kept.lua). Related hashes:
    `kept:<version>`: index -> rows of a micro-batch; `kept:commits` and `kept:bytes`, by version.
    """
    log = KeyName("log")
    """Hash: step -> fate of its samples (log.pack). Outlives the step."""
    totals = KeyName("totals")
    """Hash: counts of the steps that were forgotten, since the job began."""
    channel = KeyName("changes")
    """Channel on which the scripts publish changes: `<step> <kind>`."""

    def step(self, step: int, name: str) -> str:
        """Return the key `name`, one of `STEP_KEYS`, of a step."""
        return f"{self.base}:{step}:{name}"

    def rows(self, step: int, trajectory: str) -> str:
        """Hash: turn -> raw row of its sample; `turn TAB column` -> a column that came late;
        `needed` -> `,turn=number` for each raw row that others refer to: 1, and 1 for each of them
        (lua/samples.lua).

        `trajectory@step` where samples of an earlier step came back.
        """
        return f"{self.base}:{step}:rows:{trajectory}"

    def staged(self, step: int, trajectory: str, attempt: str) -> str:
        """Hash: rows of an ending that is not decided yet; renamed to `rows` when it wins."""
        return f"{self.base}:{step}:staged:{trajectory}:{attempt}"


def parse_channel(channel: str) -> tuple[str, str]:
    """Return (job, policy) of a policy's channel."""
    job, _, policy = channel[channel.index("{") + 1 : channel.index("}")].partition("/")
    return job, policy


# A serialized sample: its own bytes, or a view of the message that contained it.
RawRow: TypeAlias = bytes | memoryview

REWARD: Final = "reward"

STATE_OF: Final[dict[str, common_pb.SampleState.ValueType]] = {
    "P": common_pb.SAMPLE_STATE_PENDING,
    "R": common_pb.SAMPLE_STATE_READY,
    "C": common_pb.SAMPLE_STATE_CLAIMED,
    "T": common_pb.SAMPLE_STATE_TRAINED,
    "D": common_pb.SAMPLE_STATE_DROPPED,
}
LETTER_OF: Final[dict[int, str]] = {state: letter for letter, state in STATE_OF.items()}
_PENDING: Final = LETTER_OF[common_pb.SAMPLE_STATE_PENDING]
_CLAIMED: Final = LETTER_OF[common_pb.SAMPLE_STATE_CLAIMED]
_TRAINED: Final = LETTER_OF[common_pb.SAMPLE_STATE_TRAINED]
# Bytes of a hash that make up `SampleRecord.spread`; three bytes give four characters.
_SPREAD_BYTES: Final = 12


class StagedRow(NamedTuple):
    """A sample that is being appended: its raw row, and the fields of its first record."""

    sample: str
    policy: str
    raw_row: RawRow
    tokens: int
    turn: int
    agent: str
    group: str
    reward: float | None
    columns: Sequence[str]
    """Sorted."""
    version: str
    """As in `SampleRecord`."""
    parent: int | None = None
    """Turn of the sample that its stem refers to."""
    shared: int = 0
    """Tokens of its stem; they count among `tokens`."""
    names: int = 0
    """Bytes at the beginning of `raw_row` that identify the row. They are not stored, since the
    table, the key and the record identify it too (`SampleRecord.named`)."""
    demonstration: bool = False
    """Whether it waits for no column: nothing plays it, and its loss reads none."""

    @property
    def stored(self) -> RawRow:
        """The raw row as Redis holds it."""
        return self.raw_row[self.names :]

    @staticmethod
    def of(
        sample: store_pb.Sample, raw_row: RawRow, own_tokens: int, names: store_pb.Sample
    ) -> StagedRow:
        """Return the row of `sample`.

        `raw_row`: its serialization; `own_tokens`: its tokens without its stem's. `names`: a
        message with only its query and trajectory, in which the other fields that identify the row
        are set here. All rows of an ending use one message, which is faster than making one each.
        """
        name, policy, turn = sample.sample_id, sample.policy, sample.turn
        agent, group = sample.agent, sample.group_id
        names.sample_id, names.policy, names.turn = name, policy, turn
        names.agent, names.group_id = agent, group
        begin = names.SerializeToString()
        versions = [span.version for span in sample.versions]
        columns = sample.columns
        parent, shared = None, 0
        if sample.HasField("stem"):
            parent, shared = sample.stem.turn, sample.stem.tokens
        return StagedRow(
            name,
            policy,
            raw_row,
            shared + own_tokens,
            turn,
            agent,
            group,
            sample.reward if sample.HasField("reward") else None,
            sorted(columns) if columns else (),
            str(min(versions)) if versions else "",
            parent,
            shared,
            # Other writers may serialize the fields in another order.
            len(begin) if bytes(raw_row[: len(begin)]) == begin else 0,
            sample.demonstration,
        )

    def record(self, required: Collection[str], stem: str = "") -> str:
        """Format the first `SampleRecord` of a sample, without query and trajectory, which all rows
        of an ending share. `required`: columns in addition to the reward; `stem`: as in the
        record."""
        waits = () if self.demonstration else required
        missing = [name for name in waits if name not in self.columns]
        if self.reward is None:
            missing.append(REWARD)
        reward = "" if self.reward is None else repr(self.reward)
        lacks, early = ",".join(sorted(missing)), ",".join(self.columns)
        digest = xxhash.xxh3_128_digest(self.sample.encode())[:_SPREAD_BYTES]
        spread = base64.b64encode(digest).decode()
        size = len(self.raw_row) - self.names
        # A `SampleRecord` in the order of its fields, written out because it is made for every row.
        return (
            f"{_PENDING}\t{self.tokens}\t{size}\t{self.turn}\t{reward}\t{lacks}\t{early}"
            f"\t\t{self.agent}\t{self.group}\t\t{self.version}\t0\t\t\t{stem}\t{spread}"
        )


class StemTree:
    """How the rows of one trajectory and policy refer to each other (Sample.stem)."""

    def __init__(self, rows: Sequence[StagedRow]) -> None:
        """`rows`: each after the row that it refers to."""
        self._turns: dict[int, tuple[list[int], int]] = {}
        self._referring: dict[int, int] = {}
        if all(row.parent is None for row in rows):
            return
        sizes = {row.turn: len(row.raw_row) - row.names for row in rows}
        for row in rows:
            if row.parent is None:
                continue
            path, size = self._turns.get(row.parent, ([], 0))
            self._turns[row.turn] = [*path, row.parent], size + sizes[row.parent]
            self._referring[row.parent] = self._referring.get(row.parent, 0) + 1

    @property
    def needed(self) -> str:
        """The value of `NEEDED`; empty where no row refers to another."""
        return "".join(f",{turn}={number + 1}" for turn, number in self._referring.items())

    def text(self, turn: int) -> str:
        """Return `SampleRecord.stem` of a row."""
        if turn not in self._turns:
            return ""
        path, size = self._turns[turn]
        ranges: list[list[int]] = []
        for one in path:
            if ranges and ranges[-1][1] == one - 1:
                ranges[-1][1] = one
            else:
                ranges.append([one, one])
        turns = (f"{first}-{last}" if first < last else f"{first}" for first, last in ranges)
        return f"{','.join(turns)} {size}"


class SampleRecord(NamedTuple):
    """The record of one sample in Redis: everything but its raw row."""

    state: str
    """A key of `STATE_OF`."""
    tokens: str
    """Prompt and response together."""
    size: str
    """Bytes of the raw row."""
    turn: str
    reward: str
    """As `repr` of the float, never parsed in Lua; empty until known."""
    missing: str
    """Missing required columns, joined by commas; `reward` is one of them."""
    early: str
    """Columns that came with the append, joined by commas."""
    late: str
    """Columns filled after the append, joined by commas."""
    query: str
    trajectory: str
    agent: str
    group: str
    reason: str
    """Why it was dropped."""
    version: str
    """The oldest version among its spans; empty for a row without spans."""
    uses: str
    """Applied optimizer steps that it contributed to."""
    since: str
    """When it entered the table, ms of the Redis clock; empty while it is only staged."""
    origin: str
    """The step of its append, if the sample returned in a later one; else empty."""
    stem: str
    """The turns whose samples hold the beginning of its prompt, as `0-3,7`, from the first on, a
    blank, and the bytes of their raw rows; empty for none."""
    spread: str
    """Random characters. Lua hashes only every third to eighth character of a string of this
    length. Records that differ in few others would share one bucket of its string table, and each
    new one would be compared with all of them."""

    def format(self) -> str:
        """Return the text in Redis."""
        return "\t".join(self)

    def ancestors(self) -> list[str]:
        """Return the samples whose raw rows hold the beginning of its prompt."""
        return [f"{self.query}_{turn}_{self.trajectory}" for turn in self.ancestor_turns()]

    def ancestor_turns(self) -> list[int]:
        """Return the turns of `ancestors`."""
        found: list[int] = []
        for part in self.stem.partition(" ")[0].split(",") if self.stem else ():
            first, _, last = part.partition("-")
            found += range(int(first), int(last or first) + 1)
        return found

    @staticmethod
    def parse(text: str) -> SampleRecord:
        """Return the record that `format` wrote."""
        return SampleRecord(*text.split("\t"))

    def settled(self, committed: bool) -> SampleRecord:
        """Return the record as of its step's commit, if that is `committed`. A commit does not
        rewrite the records of samples that are used once: CLAIMED then means TRAINED
        (lua/commit.lua).
        """
        if not committed or self.state != _CLAIMED:
            return self
        return self._replace(state=_TRAINED, uses=str(int(self.uses) + 1))

    def apply_to(self, sample: store_pb.Sample) -> None:
        """Set the fields of `sample` that change after its append: state, reward, uses, group."""
        sample.state = STATE_OF[self.state]
        sample.uses = int(self.uses)
        if self.origin:
            # The same query may be in this step again, with rewards of its own.
            sample.group_id = f"{self.group}@{self.origin}"
        if self.reward:
            sample.reward = float(self.reward)

    def read(self, raw_row: bytes) -> store_pb.Sample:
        """Return the sample: its raw row, and the fields that changed since its append."""
        sample = store_pb.Sample.FromString(raw_row)
        self.apply_to(sample)
        return sample

    def moved(self) -> bytes:
        """Return the fields that `apply_to` sets, serialized: appended to the raw row they
        merge."""
        if self.origin:
            sample = store_pb.Sample()
            self.apply_to(sample)
            return sample.SerializeToString()
        return _moved(self.state, self.uses, self.reward)

    @property
    def rows(self) -> str:
        """The last part of its raw row's key (`PolicyKeys.rows`)."""
        return f"{self.trajectory}@{self.origin}" if self.origin else self.trajectory

    def named(self, sample_id: str, policy: str) -> store_pb.Sample:
        """Return the fields that identify the row, which its raw row in Redis omits."""
        return store_pb.Sample(
            sample_id=sample_id,
            policy=policy,
            query_id=self.query,
            trajectory_id=self.trajectory,
            agent=self.agent,
            turn=int(self.turn),
            group_id=self.group,
        )

    def turn_of(self, ancestor: str) -> int:
        """Return the turn of the sample that its stem refers to."""
        return int(ancestor[len(self.query) + 1 : -len(self.trajectory) - 1])

    def named_ancestor(self, sample_id: str, policy: str) -> store_pb.Sample:
        """Return the part of `named` that stems need, for a sample that its stem refers to."""
        return store_pb.Sample(
            sample_id=sample_id,
            policy=policy,
            query_id=self.query,
            trajectory_id=self.trajectory,
            turn=self.turn_of(sample_id),
        )

    def outline(self, sample_id: str, policy: str) -> store_pb.Sample:
        """Return the sample without its raw row (which is freed when its step is committed)."""
        sample = self.named(sample_id, policy)
        self.apply_to(sample)
        return sample


class Ending(NamedTuple):
    """How a trajectory ended: decided once per job, then applied to every policy's table."""

    state: str
    attempt: str
    """The append that won. Its rows are staged under this name until they are in the table."""
    query: str
    reason: str
    rows: str = ""
    """The number of its rows, `policy=number` joined by commas, which the audit compares."""
    solved: str = ""
    """"1" if it solved the task of its query; only where a job has a curriculum."""
    spare: str = ""
    """Redundant trajectories of its query that ended with it; empty for none (written in Lua)."""

    def format(self) -> str:
        """Return the text that Redis holds."""
        return "\t".join(self)

    @staticmethod
    def parse(text: str) -> Ending:
        """Return the ending that `format` wrote."""
        return Ending(*text.split("\t"))

    def claimed_rows(self) -> Mapping[str, int]:
        """Return the rows that came with it, per policy."""
        return _rows_of(self.rows)


@functools.lru_cache(maxsize=1024)
def _moved(state: str, uses: str, reward: str) -> bytes:
    """Return `SampleRecord.moved` of a sample in its first step. Cached, since many samples have
    the same reward."""
    sample = store_pb.Sample(state=STATE_OF[state], uses=int(uses))
    if reward:
        sample.reward = float(reward)
    return sample.SerializeToString()


@functools.lru_cache(maxsize=1024)
def _rows_of(text: str) -> dict[str, int]:
    """Parse `Ending.rows`. Cached, since millions of endings have few different values."""
    pairs = (part.partition("=") for part in text.split(",") if part)
    return {policy: int(number) for policy, _, number in pairs}


def commit_bytes(commit: store_pb.StepCommit) -> bytes:
    """Return a commit as Redis holds it; the script puts `num_samples` before it."""
    return commit.SerializeToString(deterministic=True)


def parse_commit(stored: bytes) -> store_pb.StepCommit:
    """Return the commit whose stored form is `<number of samples> NEWLINE <bytes>`."""
    number, _, body = stored.partition(b"\n")
    commit = store_pb.StepCommit.FromString(body)
    commit.num_samples = int(number)
    return commit


def lua_transitions() -> str:
    """Return the transitions of sample states as a Lua table, for the scripts."""
    rows = []
    for source, targets in states.SAMPLE.items():
        moves = ", ".join(f"{LETTER_OF[target]} = true" for target in sorted(targets))
        rows.append(f"{LETTER_OF[source]} = {{{moves}}}")
    return f"local ALLOWED = {{{', '.join(rows)}}}\n"
