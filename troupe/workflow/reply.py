"""One generation, as a workflow sees it."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

from troupe.outcomes import NotFiniteError, finite_number
from troupe.workflow.columns import Columns
from troupe.workflow.errors import InvalidRewardError, shown
from troupe.workflow.toolcalls import ToolCall


class Reply:
    """One generation, as the workflow sees it."""

    __slots__ = (
        "__weakref__",
        "_earned",
        "_reward",
        "_siblings",
        "agent",
        "chain",
        "columns",
        "content",
        "finish_reason",
        "logprobs",
        "prompt_ids",
        "reasoning_content",
        "text",
        "token_ids",
        "tool_calls",
        "turn",
        "unmet",
    )

    def __init__(
        self,
        agent: str,
        turn: int,
        text: str,
        prompt_ids: tuple[int, ...],
        token_ids: tuple[int, ...],
        logprobs: tuple[float, ...],
        finish_reason: str,
        content: str | None = None,
        tool_calls: tuple[ToolCall, ...] = (),
        reasoning_content: str = "",
    ) -> None:
        self.agent = agent
        self.turn = turn
        """How many turns this agent had begun before this one; see `Turn.number`."""
        self.text = text
        """Without the stop token and other special tokens."""
        self.prompt_ids = prompt_ids
        self.token_ids = token_ids
        """As generated, the stop token included."""
        self.logprobs = logprobs
        self.finish_reason = finish_reason
        """`stop` or `length`."""
        self.content = text if content is None else content
        """The text apart from `tool_calls` and `reasoning_content`."""
        self.reasoning_content = reasoning_content
        """What it thought: the text between `<think>` and `</think>`."""
        self.tool_calls = tool_calls
        """Calls that it makes of the tools that it was offered."""
        self.unmet: tuple[str, ...] = ()
        """Fields of an endpoint's request that the reply does not keep (`response_format`, ...)."""
        self._siblings: tuple[weakref.ref[Reply], ...] = ()
        self.columns = Columns(f"{agent}[{turn}]", len(token_ids))
        """Further values that are stored with this turn's sample: `reply.columns[name] = value`."""
        self.chain = ""
        """For a critic (`advantage: gae`): turns of one agent with equal `chain` are one episode.
        An agent that plays several sides of a game gives each a name of its own."""
        self._reward: float | None = None
        self._earned: float | None = None

    @property
    def siblings(self) -> tuple[Reply, ...]:
        """All replies of its `chat(n=...)`, itself among them; none when it was drawn alone.

        Their trajectory keeps them. Without it those are left that somebody else keeps.
        """
        found = (reply() for reply in self._siblings)
        return tuple(reply for reply in found if reply is not None)

    @siblings.setter
    def siblings(self, replies: Sequence[Reply]) -> None:
        # Replies that kept each other would stay until the garbage collector comes.
        self._siblings = tuple(weakref.ref(reply) for reply in replies)

    @property
    def message(self) -> dict[str, Any]:
        """The reply as the message to append to its conversation."""
        message: dict[str, Any] = {"role": "assistant", "content": self.content}
        if self.reasoning_content:
            message["reasoning_content"] = self.reasoning_content
        if self.tool_calls:
            message["tool_calls"] = [call.message for call in self.tool_calls]
        return message

    @property
    def reward(self) -> float | None:
        """Reward of this turn alone; unset, the turn gets its agent's reward."""
        return self._reward

    @reward.setter
    def reward(self, value: float | None) -> None:
        self._reward = None if value is None else finite(value, f"{self.agent}[{self.turn}].reward")

    @property
    def earned(self) -> float | None:
        """What the turn earned, for a critic (`advantage: gae`), where that is not `reward`: of a
        return from the turn on, say, only what came before the agent's next turn."""
        return self._earned

    @earned.setter
    def earned(self, value: float | None) -> None:
        self._earned = None if value is None else finite(value, f"{self.agent}[{self.turn}].earned")

    def __repr__(self) -> str:
        return f"Reply({self.agent}[{self.turn}], {self.text!r}, {self.finish_reason})"


def finite(value: Any, field: str) -> float:
    """`value` as a finite float. Raises `InvalidRewardError` naming `field`."""
    try:
        return finite_number(value)
    except NotFiniteError as error:
        raise InvalidRewardError(
            f"{field} must be a finite number, not {shown(value)}",
            field=field,
            value=value,
            remedy="Return numbers; give a failed attempt a low reward instead of NaN.",
        ) from error
