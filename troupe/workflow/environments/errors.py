"""Typed errors of environments.

An `EnvironmentFault`: the process died, hung or raised; the trajectory may be retried. A
`MoveError`: a player made an illegal move, which the rule for illegal moves handles. An
`EnvironmentContractError`: the environment violates its interface; retrying does not help.
"""

from __future__ import annotations

from typing import Literal

from troupe.workflow.errors import EntrypointError, WorkflowError

FaultReason = Literal["raised", "died", "deadline", "too_large", "not_started", "no_process"]


class EnvironmentFault(WorkflowError):
    """An environment failed; the trajectory as a whole may be retried.

    `reason`: it `raised`, its process `died`, it exceeded its `deadline` (and was killed), its
    answer was `too_large`, its process was `not_started`, or `no_process` was free in time.
    `traceback`: the end of the environment's traceback or stderr.
    """

    kind = "environment"

    def __init__(
        self,
        message: str,
        *,
        reason: FaultReason,
        environment: str = "",
        remedy: str | None = None,
        traceback: str = "",
    ) -> None:
        super().__init__(
            message,
            field="environment",
            value=environment or None,
            remedy=remedy,
            traceback=traceback,
        )
        self.reason = reason
        self.environment = environment


class MoveError(WorkflowError, ValueError):
    """A move that the environment refuses; its state is unchanged."""

    kind = "move"


class IllegalMoveError(MoveError):
    """The move of `seat` is not among the legal ones, or no move could be read from its text."""

    kind = "illegal_move"

    def __init__(
        self, message: str, *, seat: str = "", value: object = None, remedy: str | None = None
    ) -> None:
        super().__init__(message, field=f"actions.{seat}", value=value, remedy=remedy)
        self.seat = seat


class UnknownPlayerError(MoveError):
    """Actions name a seat that does not move now, or lack one that does."""

    kind = "unknown_player"


class EpisodeOverError(MoveError):
    """`step` after the end of the episode, or before the first `reset`."""

    kind = "episode_over"


class EnvironmentContractError(WorkflowError):
    """The environment violates its interface; `field` names the part."""

    kind = "environment_contract"


class ObservationTooLargeError(EnvironmentContractError):
    """An observation has more characters than the environment declares."""

    kind = "observation_too_large"


class RewardNotFiniteError(EnvironmentContractError):
    """A reward of a step is not a finite number."""

    kind = "environment_reward"


class MissingLibraryError(EntrypointError):
    """The library of an adapter is not installed; the remedy names the package."""


def missing_library(library: str, package: str, error: ImportError) -> MissingLibraryError:
    """The error of an adapter whose `library` (`package` on PyPI) cannot be imported."""
    return MissingLibraryError(
        f"the {library} adapter needs the package '{package}': {error}",
        field="environment",
        value=package,
        remedy=f"pip install '{package}' where rollout runs (or troupe[games]).",
    )
