"""Typed errors of workflows and environments, with kind, message, field, value and remedy.

The rollout service derives from them the reason of a failed trajectory, and a `Problem` if the
job's own code or configuration is at fault. `EnvironmentFault`: the process died, hung or raised;
the trajectory may be retried. `MoveError`: a player made an illegal move, which the rule for
illegal moves handles. `EnvironmentContractError`: the environment violates its interface; retrying
does not help.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from troupe.contracts import kinds
from troupe.outcomes import safe_text
from troupe.outcomes import shown as shown

if TYPE_CHECKING:
    from troupe.rpc.errors import InvalidArgument

# Messages may quote values and source code of users.
_MESSAGE_CHARS = 4000


class WorkflowError(Exception):
    """Base class. `kind` is stable and machine-readable; the other fields are for people."""

    kind = "workflow_error"

    def __init__(
        self,
        message: str,
        *,
        kind: str | None = None,
        field: str | None = None,
        value: object = None,
        remedy: str | None = None,
        traceback: str = "",
    ) -> None:
        """Create the error. `traceback`: text of the traceback of user code."""
        if kind is not None:
            self.kind = kind
        self.message = safe_text(message, _MESSAGE_CHARS)
        self.field = None if field is None else safe_text(field)
        show = safe_text if issubclass(type(value), str) else shown
        self.value = None if value is None else show(value, 120)
        self.remedy = None if remedy is None else safe_text(remedy)
        self.traceback = traceback
        super().__init__(self._text())

    def append(self, text: str) -> None:
        """Add `text` to the message, such as " (tried 3 times)"."""
        self.message += text
        self.args = (self._text(),)

    def _text(self) -> str:
        return f"{self.message}. {self.remedy}" if self.remedy else self.message


class UnknownAgentError(WorkflowError, KeyError):
    """The workflow asked for an agent that the job does not have."""

    kind = "unknown_agent"
    __str__ = Exception.__str__  # KeyError.__str__ is the repr


class InvalidMessagesError(WorkflowError, ValueError):
    """The argument of `chat` or `generate` is not a conversation, or not token ids."""

    kind = "invalid_messages"


class ChatTemplateError(WorkflowError):
    """The tokenizer has no chat template, or one that cannot continue a conversation."""

    kind = "chat_template"


class InvalidRewardError(WorkflowError, ValueError):
    """A reward is not a finite number, or belongs to no agent."""

    kind = "invalid_reward"


class InvalidGroupError(WorkflowError, ValueError):
    """The key of a reply's group cannot be stored with its sample."""

    kind = "invalid_group"


class EntrypointError(WorkflowError):
    """`module:attribute` of a job cannot be imported, or is of the wrong kind for the field."""

    kind = "entrypoint"


class BranchExitedError(WorkflowError):
    """A task of the workflow raised SystemExit or KeyboardInterrupt."""

    kind = "branch_exited"


class TurnError(WorkflowError):
    """A turn has no response, for example because its deadline passed, engines were lost or the
    prompt was too long."""

    kind = "turn_failed"


class ContextOverflowError(TurnError):
    """The prompt fills the engine's context."""

    kind = "context_overflow"

    @classmethod
    def of(cls, policy: str, tokens: int | str, context: int) -> ContextOverflowError:
        """Return the error of a prompt whose `tokens` fill the `context`."""
        return cls(
            f"a prompt of {tokens} tokens leaves no room for a response in a context of "
            f"{context} tokens",
            field=f"policies.{policy}.engine.max_context",
            value=context,
            remedy="Shorten the conversation, or raise `max_context`.",
        )


class ToolError(WorkflowError):
    """A tool call ended without a result; `traceback` is the function's traceback."""

    kind = kinds.TOOL_FAILED


def as_invalid_argument(error: WorkflowError) -> InvalidArgument:
    """Convert `error` to the error of a gRPC call, with the same message, field, value and
    remedy."""
    # Imports gRPC, which workflows and child processes of environments do not need.
    from troupe.rpc.errors import InvalidArgument, recast

    return recast(error, InvalidArgument)


def is_own(error: BaseException) -> bool:
    """Return whether the class of `error` is Troupe's own, not derived by a user. Convert its
    attributes to safe texts, since user code may have changed them."""
    kind = type(error)
    if not issubclass(kind, WorkflowError) or not str(kind.__module__).startswith("troupe."):
        return False
    error.kind = safe_text(error.kind, 60)  # type: ignore[attr-defined]
    for name in ("message", "field", "value", "remedy", "traceback", "reason"):
        if (text := getattr(error, name, None)) is not None:
            setattr(error, name, safe_text(text, _MESSAGE_CHARS))
    return True


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
    """The environment refuses a move; its state is unchanged."""

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
    """Return the error of an adapter whose `library` (`package` on PyPI) cannot be imported."""
    return MissingLibraryError(
        f"the {library} adapter needs the package '{package}': {error}",
        field="environment",
        value=package,
        remedy=f"`pip install '{package}'` (or 'troupe-rl[games]') where rollout runs.",
    )


class TooManyTokensError(Exception):
    """A text has more than `most` tokens."""

    def __init__(self, most: int) -> None:
        super().__init__(f"the text has more than {most} tokens")
        self.most = most
