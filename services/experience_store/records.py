"""What is kept in Redis about a sample, an ending and a commit, and how it is written there.

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

from troupe import states
from troupe.v1 import common_pb2 as pb
from troupe.v1 import experience_store_pb2 as store_pb

PREFIX: Final = "troupe"
# All jobs that have tables; what the sweeper walks over.
JOBS: Final = f"{PREFIX}:jobs"
# Field of staged rows that holds their records (lua/policy.lua); no id looks like it.
RECORDS: Final = "\t"
# Matches the channels of all policies of all jobs.
CHANNEL_PATTERN: Final = f"{PREFIX}:*:changes"

# Keys of one step under its policy, besides `rows:<trajectory>` and
# `staged:<trajectory>:<attempt>`.
STEP_KEYS: Final = (
    "step",  # hash: group_size, expected, counts per state, flags
    "ended",  # hash: trajectory -> how, query, why; its rows are in this table
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
    "stages",  # set of staged keys, to free them with the step
    "leaving",  # hash: sample -> its record in the next step, which is not in the table yet
    "gone",  # hash: group that came back -> members whose values went before, and their rewards
    "returned",  # set of the keys of rows that came from an earlier step
    "completed",  # hash: query -> trajectories completed; only where some are redundant
)


@dataclass(frozen=True)
class JobTableKeys:
    """Keys of what a job's policies have in common."""

    job: str

    @property
    def base(self) -> str:
        """What every key under the job's tag starts with."""
        return f"{PREFIX}:{{{self.job}}}"

    @property
    def tables(self) -> str:
        """JSON: the policies that have tables, and their required columns."""
        return f"{self.base}:tables"

    @property
    def steps(self) -> str:
        """Sorted set of the steps that exist, committed or not."""
        return f"{self.base}:steps"

    @property
    def live(self) -> str:
        """Sorted set of the steps that some policy has not committed."""
        return f"{self.base}:live"

    @property
    def log(self) -> str:
        """Hash: step -> its roster and endings (log.Roster); outlives the step."""
        return f"{self.base}:log"

    @property
    def logged_tables(self) -> str:
        """What `tables` was; outlives it."""
        return f"{self.base}:logged-tables"

    def step(self, step: int) -> str:
        """Hash: group_size, redundant; versions (JSON); queries, now and as `opened` (JSON);
        expected and ended trajectories; complete queries; held_open; cursor.

        Trajectories of queries that were dropped are expected, and have ended. Queries that were
        carried to another step are gone from here with all that is theirs.
        """
        return f"{self.base}:{step}:step"

    @property
    def rosters(self) -> str:
        """How often a step's roster has changed."""
        return f"{self.base}:rosters"

    def all_of(self, step: int) -> tuple[str, ...]:
        """All keys of a step, the one first by which it is known to be open."""
        names = ("step", "ended", "queries", "left", "came", "completed")
        return tuple(f"{self.base}:{step}:{name}" for name in names)

    def ended(self, step: int) -> str:
        """Hash: trajectory -> its one ending (records.Ending). Those that ended because their query
        was dropped, or complete without them, are named `query TAB number`.
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
        """What every key under the policy's tag starts with."""
        return f"{PREFIX}:{{{self.job}/{self.policy}}}"

    @property
    def commits(self) -> str:
        """Hash: step -> its commit (records.commit_bytes)."""
        return f"{self.base}:commits"

    @property
    def head(self) -> str:
        """Hash: version and step of the latest commit; number of the rosters that it knows."""
        return f"{self.base}:head"

    @property
    def log(self) -> str:
        """Hash: step -> what became of its samples (log.pack); outlives the step."""
        return f"{self.base}:log"

    @property
    def totals(self) -> str:
        """Hash: what the steps that were forgotten add to the counts since the job began."""
        return f"{self.base}:totals"

    @property
    def channel(self) -> str:
        """Where the scripts publish what they changed: `<step> <kind>`."""
        return f"{self.base}:changes"

    def step(self, step: int, name: str) -> str:
        """One of `STEP_KEYS`."""
        return f"{self.base}:{step}:{name}"

    def rows(self, step: int, trajectory: str) -> str:
        """Hash: sample -> payload; `sample TAB column` -> a column that came late.

        `trajectory@step` where samples of an earlier step came back.
        """
        return f"{self.base}:{step}:rows:{trajectory}"

    def staged(self, step: int, trajectory: str, attempt: str) -> str:
        """Rows of an ending that is not decided yet; renamed to `rows` when it wins."""
        return f"{self.base}:{step}:staged:{trajectory}:{attempt}"


def parse_channel(channel: str) -> tuple[str, str]:
    """(job, policy) of a policy's channel."""
    job, _, policy = channel[channel.index("{") + 1 : channel.index("}")].partition("/")
    return job, policy


# A sample, serialized: a text of its own, or where it lies in the message that it came in.
Payload: TypeAlias = bytes | memoryview

REWARD: Final = "reward"
# Why trajectories end that a group did not need (lua/end_trajectory.lua).
REDUNDANT: Final = "redundant"

STATE_OF: Final[dict[str, pb.SampleState.ValueType]] = {
    "P": pb.SAMPLE_STATE_PENDING,
    "R": pb.SAMPLE_STATE_READY,
    "C": pb.SAMPLE_STATE_CLAIMED,
    "T": pb.SAMPLE_STATE_TRAINED,
    "D": pb.SAMPLE_STATE_DROPPED,
}
LETTER_OF: Final[dict[int, str]] = {state: letter for letter, state in STATE_OF.items()}
_PENDING: Final = LETTER_OF[pb.SAMPLE_STATE_PENDING]
_CLAIMED: Final = LETTER_OF[pb.SAMPLE_STATE_CLAIMED]
_TRAINED: Final = LETTER_OF[pb.SAMPLE_STATE_TRAINED]
# Bytes of a hash that make `SampleRecord.spread`, four of its characters each three.
_SPREAD_BYTES: Final = 12


class StagedRow(NamedTuple):
    """A sample on its way into a table: what its record begins with, read once."""

    sample: str
    policy: str
    payload: Payload
    tokens: int
    turn: int
    agent: str
    group: str
    reward: float | None
    columns: Sequence[str]
    """Sorted."""
    version: str
    """As in `SampleRecord`."""

    @staticmethod
    def of(sample: store_pb.Sample, payload: Payload | None = None) -> StagedRow:
        """The row of `sample`, which is `payload` if that is known."""
        versions = sample.versions
        columns = sample.columns
        return StagedRow(
            sample.sample_id,
            sample.policy,
            sample.SerializeToString() if payload is None else payload,
            sum(sample.prompt_ids.shape) + sum(sample.response_ids.shape),
            sample.turn,
            sample.agent,
            sample.group_id,
            sample.reward if sample.HasField("reward") else None,
            sorted(columns) if columns else (),
            str(min(span.version for span in versions)) if versions else "",
        )

    def record(self, query: str, trajectory: str, required: Collection[str]) -> str:
        """Its first `SampleRecord`, formatted; `required` are columns besides the reward."""
        missing = [name for name in required if name not in self.columns]
        if self.reward is None:
            missing.append(REWARD)
        reward = "" if self.reward is None else repr(self.reward)
        lacks, early = ",".join(sorted(missing)), ",".join(self.columns)
        digest = xxhash.xxh3_128_digest(self.sample.encode())[:_SPREAD_BYTES]
        spread = base64.b64encode(digest).decode()
        # A `SampleRecord`, in the order of its fields; written out, as it is once per row.
        return (
            f"{_PENDING}\t{self.tokens}\t{len(self.payload)}\t{self.turn}\t{reward}\t{lacks}\t{early}"
            f"\t\t{query}\t{trajectory}\t{self.agent}\t{self.group}\t\t{self.version}\t0\t\t\t{spread}"
        )


class SampleRecord(NamedTuple):
    """The bookkeeping of one sample: everything but its payload."""

    state: str
    """A key of `STATE_OF`."""
    tokens: str
    """Prompt and response together."""
    size: str
    """Bytes of the payload."""
    turn: str
    reward: str
    """As `repr` of the float, never parsed in Lua; empty until known."""
    missing: str
    """Required columns not there yet, joined by commas; `reward` is one of them."""
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
    """The step that it was appended to, where it comes back in a later one; else empty."""
    spread: str
    """Characters that differ from row to row, because of a text of this length Lua hashes but every
    third to eighth: records that differ in few others were all found in one bucket, and to make one
    of them took as long as to compare it with all that were there."""

    def format(self) -> str:
        """The text that Redis holds."""
        return "\t".join(self)

    @staticmethod
    def parse(text: str) -> SampleRecord:
        """The record that `format` wrote."""
        return SampleRecord(*text.split("\t"))

    def settled(self, committed: bool) -> SampleRecord:
        """What it says, its step being committed or not: a commit leaves records as they are where
        nobody uses a sample again, and what it found CLAIMED is TRAINED (lua/commit.lua).
        """
        if not committed or self.state != _CLAIMED:
            return self
        return self._replace(state=_TRAINED, uses=str(int(self.uses) + 1))

    def apply_to(self, sample: store_pb.Sample) -> None:
        """Set on `sample` what moves after the append: its state, reward, uses and group."""
        sample.state = STATE_OF[self.state]
        sample.uses = int(self.uses)
        if self.origin:
            # The same query may be in this step again, with rewards of its own.
            sample.group_id = f"{self.group}@{self.origin}"
        if self.reward:
            sample.reward = float(self.reward)

    def read(self, payload: bytes, into: store_pb.Sample | None = None) -> store_pb.Sample:
        """The sample (in `into`, an empty one): its payload, and what moved since."""
        sample = store_pb.Sample() if into is None else into
        sample.ParseFromString(payload)
        self.apply_to(sample)
        return sample

    def moved(self) -> bytes:
        """What `apply_to` sets, serialized: put behind the payload it merges."""
        if self.origin:
            sample = store_pb.Sample()
            self.apply_to(sample)
            return sample.SerializeToString()
        return _moved(self.state, self.uses, self.reward)

    @property
    def rows(self) -> str:
        """What its payload's key is made of (keys.PolicyKeys.rows)."""
        return f"{self.trajectory}@{self.origin}" if self.origin else self.trajectory

    def outline(self, sample_id: str, policy: str) -> store_pb.Sample:
        """The sample without its payload (which is freed when its step is committed)."""
        sample = store_pb.Sample(
            sample_id=sample_id,
            policy=policy,
            query_id=self.query,
            trajectory_id=self.trajectory,
            agent=self.agent,
            turn=int(self.turn),
            group_id=self.group,
        )
        self.apply_to(sample)
        return sample


@dataclass(frozen=True)
class Ending:
    """How a trajectory ended: decided once per job, carried out in every policy's table."""

    state: str
    attempt: str
    """Which append won; its rows are staged under this name until they are in the table."""
    query: str
    reason: str
    rows: str = ""
    """Rows that came with it, `policy=number` joined by commas: what the audit looks for."""
    spare: str = ""
    """Redundant trajectories of its query that ended with it; empty for none (written in Lua)."""

    def format(self) -> str:
        """The text that Redis holds."""
        return "\t".join((self.state, self.attempt, self.query, self.reason, self.rows, self.spare))

    @staticmethod
    def parse(text: str) -> Ending:
        """The ending that `format` wrote."""
        return Ending(*text.split("\t"))

    def claimed_rows(self) -> Mapping[str, int]:
        """Rows that came with it, per policy."""
        return _rows_of(self.rows)


@functools.lru_cache(maxsize=1024)
def _moved(state: str, uses: str, reward: str) -> bytes:
    """`SampleRecord.moved` of a sample in its first step: many have the same reward."""
    sample = store_pb.Sample(state=STATE_OF[state], uses=int(uses))
    if reward:
        sample.reward = float(reward)
    return sample.SerializeToString()


@functools.lru_cache(maxsize=1024)
def _rows_of(text: str) -> dict[str, int]:
    """`Ending.rows` parsed: millions of endings have few different ones."""
    pairs = (part.partition("=") for part in text.split(",") if part)
    return {policy: int(number) for policy, _, number in pairs}


def commit_bytes(commit: store_pb.StepCommit) -> bytes:
    """What Redis holds of a commit; `num_samples` is put before it by the script."""
    return commit.SerializeToString(deterministic=True)


def parse_commit(stored: bytes) -> store_pb.StepCommit:
    """The commit whose stored form is `<number of samples> NEWLINE <bytes>`."""
    number, _, body = stored.partition(b"\n")
    commit = store_pb.StepCommit.FromString(body)
    commit.num_samples = int(number)
    return commit


def lua_transitions() -> str:
    """`states.SAMPLE` as a Lua table, so that the scripts obey the same one."""
    rows = []
    for source, targets in states.SAMPLE.items():
        moves = ", ".join(f"{LETTER_OF[target]} = true" for target in sorted(targets))
        rows.append(f"{LETTER_OF[source]} = {{{moves}}}")
    return f"local ALLOWED = {{{', '.join(rows)}}}\n"
