"""Where things are in Redis.

A job's keys share the hash tag `{job}`, those of one of its policies `{job/policy}`, so that in a
Redis Cluster one policy lives in one slot and policies spread over the nodes. No script touches
two slots: what concerns several policies is decided under the job's tag first and then carried
out in each policy's slot, repeatably (see trajectories.py).

Names of a step's keys are made in Lua too (lua/policy.lua, lua/job.lua); `STEP_KEYS` is the list
that both must agree on.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

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
    "step",  # hash: group_size, expected, counts per state, flags, `layout` of what is counted
    "ended",  # hash: trajectory -> how, query, why; its rows are in this table
    "queries",  # hash: query -> trajectories ended
    "book",  # hash: sample -> record (records.py); of a committed step see `Record.settled`
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
class JobKeys:
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
