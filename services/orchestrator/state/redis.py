"""The orchestrator's Redis: names of its keys, Lua scripts, errors."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from services.chassis.redis import KeyName, RedisClient
from troupe.rpc import FailedPrecondition, ResourceExhausted, RetryPolicy, TroupeError, Unavailable
from troupe.rpc.errors import recast

_PREFIX: Final = "troupe:orchestrator"
_LUA: Final = Path(__file__).parent / "lua"
_RETRY: Final = RetryPolicy(max_attempts=1000, initial_backoff=0.05, max_backoff=1.0)
_TIMEOUT: Final = 10.0

# Sorted set: ids of all jobs by when they were created.
INDEX: Final = f"{_PREFIX}:jobs"
# Set: ids of jobs with published weights on hosts.
STATES: Final = f"{_PREFIX}:jobs:states"


def host_use_rows(rows: int) -> str:
    """Return the stream with the utilization of all hosts, as `HostUseRow` messages that are means
    over `rows` measurements."""
    return f"{_PREFIX}:hosts:{rows}"


# Stored tokens of some trajectories, from rollout and from trainers.
TOKEN_KINDS: Final = ("tokens", "trained")


class StateUnavailable(Unavailable):
    """The orchestrator's Redis is unreachable: nothing can be decided or recorded until it is
    back."""

    default_kind = "redis_unavailable"


class StateFull(ResourceExhausted):
    """The orchestrator's Redis is at its memory limit: nothing can be recorded until it has room.

    Gives no hint when to retry, since the orchestrator itself waits and its callers learn of it
    soon.
    """

    default_kind = "redis_full"


# Errors during which jobs wait.
NO_STATE: Final = (StateUnavailable, StateFull)


@dataclass(frozen=True)
class JobKeys:
    """Names of one job's keys; the braces keep them in one slot of a Redis Cluster."""

    job_id: str

    @property
    def base(self) -> str:
        """The prefix of all keys."""
        return f"{_PREFIX}:{{{self.job_id}}}"

    record = KeyName("record")
    """Hash: the job record."""
    events = KeyName("events")
    """Stream: the event log."""
    rows = KeyName("rows")
    """List: measured values, as `MetricsLogged` messages in the order they were logged."""
    latest = KeyName("latest")
    """Hash: newest value of every metric."""
    given = KeyName("given")
    """String: the specification as its author wrote it."""
    resolved = KeyName("resolved")
    """Set: `ResolvedSetting` messages of its workers."""
    profile = KeyName("profile")
    """String: the job's measured profile (`JobProfile.pack`)."""
    population = KeyName("population")
    """Hash: pools, payoffs, meta-strategies, members in slots."""
    answers = KeyName("population:answers")
    """Hash: members' answers in every information state of a game, by pool and member."""

    @property
    def matches(self) -> tuple[str, str]:
        """Matches of the population: order (list), how they ended (hash)."""
        return f"{self.base}:matches:order", f"{self.base}:matches"

    @property
    def all(self) -> list[str]:
        """Every key that a job may have."""
        return [
            self.record,
            self.events,
            self.rows,
            self.latest,
            self.given,
            self.resolved,
            self.profile,
            self.population,
            *self.matches,
            self.answers,
            *(key for kind in TOKEN_KINDS for key in self.trajectories(kind)),
        ]

    def trajectories(self, kind: str) -> tuple[str, str, str]:
        """Return the stored tokens of a kind: their order (list), and hashes of which the first is
        unused and the second has the tokens."""
        base = f"{self.base}:trajectories:{kind}"
        return base, f"{base}:summaries", f"{base}:full"


class RedisAccess(RedisClient):
    """The orchestrator's Redis. Calls to an unreachable Redis are repeated for `patience` seconds,
    which covers a restart.
    """

    unavailable = StateUnavailable
    waits_for = NO_STATE
    one_server = True

    def __init__(self, url: str, *, patience: float = 20.0, disk: Path | None = None) -> None:
        """`disk`: the directory of a Redis on this machine, which fails when its disk is full."""
        super().__init__(
            url,
            {path.stem: path.read_text(encoding="utf-8") for path in _LUA.glob("*.lua")},
            name="troupe-orchestrator",
            retries=_RETRY,
            timeout=_TIMEOUT,
            patience=patience,
            disk=disk,
        )
        parts = urlsplit(url)
        self.address = parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()

    def _converted(self, error: TroupeError) -> TroupeError:
        if isinstance(error, ResourceExhausted):
            return recast(error, StateFull)
        if isinstance(error, FailedPrecondition) and self.ready:
            # A refused password may be corrected, so jobs wait for that.
            return recast(error, StateUnavailable)
        return error
