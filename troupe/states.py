"""The state machines of jobs, trajectories, samples, engines and bindings: allowed transitions.

Every component checks a transition with `check` before it makes it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from troupe.v1 import common_pb2 as common_pb

# The split of tickets whose queries are rows to learn from (`supervised`, `preferences`).
OFFLINE: Final = "offline"
# By state: the states that may follow it.
Table = Mapping[int, frozenset[int]]


class IllegalTransition(ValueError):
    """A transition that a state machine's table does not allow."""


def _table(enum: Any, moves: Mapping[str, str]) -> Table:
    """Return the table of `enum`; `moves` has each state's successors, without the prefix."""
    prefix = enum.Name(0).removesuffix("UNSPECIFIED")
    return {
        enum.Value(prefix + state): frozenset(enum.Value(prefix + one) for one in after.split())
        for state, after in moves.items()
    }


JOB: Final[Table] = _table(
    common_pb.JobState,
    {
        "SUBMITTED": "STARTING PAUSING CANCELLING FAILED",
        "STARTING": "RUNNING PAUSING CANCELLING FAILED",
        # STARTING: an orchestrator that comes back prepares the workers again.
        "RUNNING": "STARTING PAUSING CANCELLING SUCCEEDED FAILED",
        # SUCCEEDED: the step in flight was the last one.
        "PAUSING": "PAUSED CANCELLING SUCCEEDED FAILED",
        "PAUSED": "SUBMITTED CANCELLING",
        "CANCELLING": "CANCELLED",
        # A resume starts again from the last committed step; a job that has succeeded gets more.
        "SUCCEEDED": "SUBMITTED",
        "FAILED": "SUBMITTED",
        "CANCELLED": "SUBMITTED",
    },
)

TRAJECTORY: Final[Table] = _table(
    common_pb.TrajectoryState,
    {
        "PENDING": "RUNNING FAILED ABORTED",
        "RUNNING": "SCORING FAILED ABORTED",
        "SCORING": "COMPLETED FAILED ABORTED",
        "COMPLETED": "",
        "FAILED": "",
        "ABORTED": "",
    },
)

SAMPLE: Final[Table] = _table(
    common_pb.SampleState,
    {
        "PENDING": "READY DROPPED",
        "READY": "CLAIMED DROPPED",
        # READY: the lease expired or was released.
        "CLAIMED": "READY TRAINED DROPPED",
        "TRAINED": "",
        "DROPPED": "",
    },
)

ENGINE: Final[Table] = _table(
    common_pb.EngineState,
    {
        "STARTING": "STALE DEAD STOPPED",
        "STALE": "UPDATING DEAD STOPPED",
        # STALE: the update failed or could not be verified.
        "UPDATING": "HEALTHY STALE DEAD STOPPED",
        "HEALTHY": "UPDATING SUSPECT DRAINING DEAD STOPPED",
        "SUSPECT": "HEALTHY STALE DEAD STOPPED",
        "DRAINING": "STALE DEAD STOPPED",
        # Only through STALE and a verified update does a dead engine serve again.
        "DEAD": "STALE STOPPED",
        "STOPPED": "",
    },
)

BINDING: Final[Table] = _table(
    common_pb.BindingState,
    {
        "BINDING": "IDLE RELEASED",
        "IDLE": "ACCUMULATING SUSPENDING RELEASED",
        # IDLE: the step was cancelled or lost its leases, and gradients are discarded.
        "ACCUMULATING": "STEPPING IDLE SUSPENDING RELEASED",
        # IDLE: a skipped (NaN) or empty step.
        "STEPPING": "PUBLISHING IDLE RELEASED",
        "PUBLISHING": "IDLE RELEASED",
        # IDLE: there was no memory for its state, and it stays bound.
        "SUSPENDING": "SUSPENDED IDLE RELEASED",
        "SUSPENDED": "BINDING RELEASED",
        "RELEASED": "BINDING",
    },
)

_ENUMS: Final = {
    id(JOB): common_pb.JobState,
    id(TRAJECTORY): common_pb.TrajectoryState,
    id(SAMPLE): common_pb.SampleState,
    id(ENGINE): common_pb.EngineState,
    id(BINDING): common_pb.BindingState,
}


def allowed(table: Table, source: int, target: int) -> bool:
    """Return whether `table` allows the move from `source` to `target`."""
    return target in table.get(source, frozenset())


def check(table: Table, source: int, target: int) -> None:
    """Raise `IllegalTransition`, naming both states, unless the transition is allowed."""
    if not allowed(table, source, target):
        enum: Any = _ENUMS[id(table)]
        raise IllegalTransition(f"{enum.Name(source)} -> {enum.Name(target)} is not allowed")


def is_terminal(table: Table, state: int) -> bool:
    """Return whether no state follows `state`."""
    return not table[state]
