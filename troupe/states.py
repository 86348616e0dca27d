"""The state machines of jobs, trajectories, samples, engines and bindings: allowed transitions.

Every component checks a transition with `check` before it makes it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from troupe.v1 import common_pb2 as pb

# Metric of a completed trajectory that opened an endpoint, was rewarded, and made no turn.
UNUSED_ENDPOINT: Final = "endpoint_unused"
# By state: the states that may follow it.
Table = Mapping[int, frozenset[int]]


class IllegalTransition(ValueError):
    """A transition that a state machine's table does not allow."""


def _table(moves: dict[int, set[int]]) -> Table:
    return {state: frozenset(targets) for state, targets in moves.items()}


JOB: Final[Table] = _table(
    {
        pb.JOB_STATE_SUBMITTED: {
            pb.JOB_STATE_STARTING,
            pb.JOB_STATE_PAUSING,
            pb.JOB_STATE_CANCELLING,
            pb.JOB_STATE_FAILED,
        },
        pb.JOB_STATE_STARTING: {
            pb.JOB_STATE_RUNNING,
            pb.JOB_STATE_PAUSING,
            pb.JOB_STATE_CANCELLING,
            pb.JOB_STATE_FAILED,
        },
        pb.JOB_STATE_RUNNING: {
            # An orchestrator that comes back prepares the workers again.
            pb.JOB_STATE_STARTING,
            pb.JOB_STATE_PAUSING,
            pb.JOB_STATE_CANCELLING,
            pb.JOB_STATE_SUCCEEDED,
            pb.JOB_STATE_FAILED,
        },
        pb.JOB_STATE_PAUSING: {
            pb.JOB_STATE_PAUSED,
            pb.JOB_STATE_CANCELLING,
            # The step in flight was the last one.
            pb.JOB_STATE_SUCCEEDED,
            pb.JOB_STATE_FAILED,
        },
        pb.JOB_STATE_PAUSED: {pb.JOB_STATE_SUBMITTED, pb.JOB_STATE_CANCELLING},
        pb.JOB_STATE_CANCELLING: {pb.JOB_STATE_CANCELLED},
        pb.JOB_STATE_SUCCEEDED: set(),
        # A resume starts again from the last committed step.
        pb.JOB_STATE_FAILED: {pb.JOB_STATE_SUBMITTED},
        pb.JOB_STATE_CANCELLED: {pb.JOB_STATE_SUBMITTED},
    },
)

TRAJECTORY: Final[Table] = _table(
    {
        pb.TRAJECTORY_STATE_PENDING: {
            pb.TRAJECTORY_STATE_RUNNING,
            pb.TRAJECTORY_STATE_FAILED,
            pb.TRAJECTORY_STATE_ABORTED,
        },
        pb.TRAJECTORY_STATE_RUNNING: {
            pb.TRAJECTORY_STATE_SCORING,
            pb.TRAJECTORY_STATE_FAILED,
            pb.TRAJECTORY_STATE_ABORTED,
        },
        pb.TRAJECTORY_STATE_SCORING: {
            pb.TRAJECTORY_STATE_COMPLETED,
            pb.TRAJECTORY_STATE_FAILED,
            pb.TRAJECTORY_STATE_ABORTED,
        },
        pb.TRAJECTORY_STATE_COMPLETED: set(),
        pb.TRAJECTORY_STATE_FAILED: set(),
        pb.TRAJECTORY_STATE_ABORTED: set(),
    },
)

SAMPLE: Final[Table] = _table(
    {
        pb.SAMPLE_STATE_PENDING: {pb.SAMPLE_STATE_READY, pb.SAMPLE_STATE_DROPPED},
        pb.SAMPLE_STATE_READY: {pb.SAMPLE_STATE_CLAIMED, pb.SAMPLE_STATE_DROPPED},
        pb.SAMPLE_STATE_CLAIMED: {
            # Lease expired or released.
            pb.SAMPLE_STATE_READY,
            pb.SAMPLE_STATE_TRAINED,
            pb.SAMPLE_STATE_DROPPED,
        },
        pb.SAMPLE_STATE_TRAINED: set(),
        pb.SAMPLE_STATE_DROPPED: set(),
    },
)

ENGINE: Final[Table] = _table(
    {
        pb.ENGINE_STATE_STARTING: {
            pb.ENGINE_STATE_STALE,
            pb.ENGINE_STATE_DEAD,
            pb.ENGINE_STATE_STOPPED,
        },
        pb.ENGINE_STATE_STALE: {
            pb.ENGINE_STATE_UPDATING,
            pb.ENGINE_STATE_DEAD,
            pb.ENGINE_STATE_STOPPED,
        },
        pb.ENGINE_STATE_UPDATING: {
            pb.ENGINE_STATE_HEALTHY,
            # The update failed or could not be verified.
            pb.ENGINE_STATE_STALE,
            pb.ENGINE_STATE_DEAD,
            pb.ENGINE_STATE_STOPPED,
        },
        pb.ENGINE_STATE_HEALTHY: {
            pb.ENGINE_STATE_UPDATING,
            pb.ENGINE_STATE_SUSPECT,
            pb.ENGINE_STATE_DRAINING,
            pb.ENGINE_STATE_DEAD,
            pb.ENGINE_STATE_STOPPED,
        },
        pb.ENGINE_STATE_SUSPECT: {
            pb.ENGINE_STATE_HEALTHY,
            pb.ENGINE_STATE_STALE,
            pb.ENGINE_STATE_DEAD,
            pb.ENGINE_STATE_STOPPED,
        },
        pb.ENGINE_STATE_DRAINING: {
            pb.ENGINE_STATE_STALE,
            pb.ENGINE_STATE_DEAD,
            pb.ENGINE_STATE_STOPPED,
        },
        # Only through STALE and a verified update does a dead engine serve again.
        pb.ENGINE_STATE_DEAD: {pb.ENGINE_STATE_STALE, pb.ENGINE_STATE_STOPPED},
        pb.ENGINE_STATE_STOPPED: set(),
    },
)

BINDING: Final[Table] = _table(
    {
        pb.BINDING_STATE_BINDING: {pb.BINDING_STATE_IDLE, pb.BINDING_STATE_RELEASED},
        pb.BINDING_STATE_IDLE: {
            pb.BINDING_STATE_ACCUMULATING,
            pb.BINDING_STATE_SUSPENDING,
            pb.BINDING_STATE_RELEASED,
        },
        pb.BINDING_STATE_ACCUMULATING: {
            pb.BINDING_STATE_STEPPING,
            # The step was cancelled or lost its leases: gradients are discarded.
            pb.BINDING_STATE_IDLE,
            pb.BINDING_STATE_SUSPENDING,
            pb.BINDING_STATE_RELEASED,
        },
        pb.BINDING_STATE_STEPPING: {
            pb.BINDING_STATE_PUBLISHING,
            # Skipped (NaN) or empty step.
            pb.BINDING_STATE_IDLE,
            pb.BINDING_STATE_RELEASED,
        },
        pb.BINDING_STATE_PUBLISHING: {pb.BINDING_STATE_IDLE, pb.BINDING_STATE_RELEASED},
        pb.BINDING_STATE_SUSPENDING: {
            pb.BINDING_STATE_SUSPENDED,
            # There was no memory for its state: it stays bound.
            pb.BINDING_STATE_IDLE,
            pb.BINDING_STATE_RELEASED,
        },
        pb.BINDING_STATE_SUSPENDED: {pb.BINDING_STATE_BINDING, pb.BINDING_STATE_RELEASED},
        pb.BINDING_STATE_RELEASED: {pb.BINDING_STATE_BINDING},
    },
)

_ENUMS: Final = {
    id(JOB): pb.JobState,
    id(TRAJECTORY): pb.TrajectoryState,
    id(SAMPLE): pb.SampleState,
    id(ENGINE): pb.EngineState,
    id(BINDING): pb.BindingState,
}


def allowed(table: Table, source: int, target: int) -> bool:
    """Whether `table` allows the move from `source` to `target`."""
    return target in table.get(source, frozenset())


def check(table: Table, source: int, target: int) -> None:
    """Raises `IllegalTransition`, naming both states, unless the transition is allowed."""
    if not allowed(table, source, target):
        enum: Any = _ENUMS[id(table)]
        raise IllegalTransition(f"{enum.Name(source)} -> {enum.Name(target)} is not allowed")


def is_terminal(table: Table, state: int) -> bool:
    """Whether no state follows `state`."""
    return not table[state]
