"""What can go wrong between a workflow and its environment.

Three kinds of fault are kept apart. An `EnvironmentFault` is the world's: the process died, hung or
raised; the trajectory may be played again. A `MoveError` is the player's: an illegal move, which a
rule of the game answers. An `EnvironmentContractError` is the environment author's: repetition does
not cure it.
"""

from __future__ import annotations

from typing import Literal

from troupe.workflow.errors import EntrypointError, WorkflowError

FaultReason = Literal["raised", "died", "deadline", "too_large", "not_started", "no_process"]


class EnvironmentFault(WorkflowError):
    """An environment failed under way; the trajectory as a whole may be tried again.

    `reason`: it `raised`, its process `died`, it passed its `deadline` (and was killed), what it
    answered was `too_large`, its process did `not_start`, or `no_process` was free in time.
    `traceback` holds the environment's own last lines, if it raised.
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
        super().__init__(message, field="environment", value=environment or None, remedy=remedy)
        self.reason = reason
        self.environment = environment
        self.traceback = traceback


class MoveError(WorkflowError, ValueError):
    """A move that the environment does not take; its state is as before."""

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
    """Actions came for a seat that does not move now, or none for one that does."""

    kind = "unknown_player"


class EpisodeOverError(MoveError):
    """`step` after the end of the episode, or before the first `reset`."""

    kind = "episode_over"


class EnvironmentContractError(WorkflowError):
    """The environment broke the contract of the interface; `field` names the part of it."""

    kind = "environment_contract"


class ObservationTooLargeError(EnvironmentContractError):
    """An observation has more characters than the environment declares."""

    kind = "observation_too_large"


class RewardNotFiniteError(EnvironmentContractError):
    """A reward of a step is not a finite number."""

    kind = "environment_reward"


class MissingLibraryError(EntrypointError):
    """The library behind an adapter is not installed; the remedy names the package."""


def missing_library(library: str, package: str, error: ImportError) -> MissingLibraryError:
    """The error of an adapter whose `library` cannot be imported; pip knows it as `package`."""
    return MissingLibraryError(
        f"the {library} adapter needs the package '{package}': {error}",
        field="environment",
        value=package,
        remedy=f"pip install '{package}' where rollout runs (or troupe[games]).",
    )
