"""Typed errors of workflows: kind, message, field, value and remedy.

The rollout service makes the reason of a failed trajectory from them, and a `Problem` of the job
where the next trajectory would fail in the same way.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

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
        """`traceback`: of user code that raised, as text."""
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
        """Add `text` to the message, as in " (tried 3 times)"."""
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


class EntrypointError(WorkflowError):
    """`module:attribute` of a job cannot be imported, or is not of the kind that the field
    needs."""

    kind = "entrypoint"


class BranchExitedError(WorkflowError):
    """A task of the workflow raised SystemExit or KeyboardInterrupt."""

    kind = "branch_exited"


class TurnError(WorkflowError):
    """A turn has no response: its deadline passed, engines were lost, the prompt was too long."""

    kind = "turn_failed"


class ContextOverflowError(TurnError):
    """The prompt fills the engine's context."""

    kind = "context_overflow"


class ToolError(WorkflowError):
    """A tool call ended without a result; `traceback` is that of the function."""

    kind = "tool_failed"


def as_invalid_argument(error: WorkflowError) -> InvalidArgument:
    """The error of a gRPC call with the message, field, value and remedy of `error`."""
    # Imports gRPC, which workflows and child processes of environments do not need.
    from troupe.rpc.errors import InvalidArgument

    return InvalidArgument(
        error.message,
        kind=error.kind,
        field=error.field,
        value=error.value,
        remedy=error.remedy,
    )


def is_own(error: BaseException) -> bool:
    """Whether the class of `error` is Troupe's own, not derived by a user. Converts its attributes
    to safe texts, since user code may have changed them."""
    kind = type(error)
    if not issubclass(kind, WorkflowError) or not str(kind.__module__).startswith("troupe."):
        return False
    error.kind = safe_text(error.kind, 60)  # type: ignore[attr-defined]
    for name in ("message", "field", "value", "remedy", "traceback", "reason"):
        if (text := getattr(error, name, None)) is not None:
            setattr(error, name, safe_text(text, _MESSAGE_CHARS))
    return True
