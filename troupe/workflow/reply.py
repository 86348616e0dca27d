"""One generation, as a workflow sees it."""

from __future__ import annotations

import math
from typing import Any

from troupe.workflow.columns import Columns
from troupe.workflow.errors import InvalidRewardError, shown


class Reply:
    """One generation, as the workflow sees it."""

    __slots__ = (
        "_reward",
        "agent",
        "columns",
        "finish_reason",
        "logprobs",
        "prompt_ids",
        "text",
        "token_ids",
        "turn",
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
    ) -> None:
        self.agent = agent
        self.turn = turn
        """How many turns this agent had begun before this one."""
        self.text = text
        """Without the stop token and other special tokens."""
        self.prompt_ids = prompt_ids
        self.token_ids = token_ids
        """As generated, the stop token included."""
        self.logprobs = logprobs
        self.finish_reason = finish_reason
        """`stop` or `length`."""
        self.columns = Columns(f"{agent}[{turn}]", len(token_ids))
        """Further values that are stored with this turn's sample: `reply.columns[name] = value`."""
        self._reward: float | None = None

    @property
    def message(self) -> dict[str, str]:
        """The reply as the message to append to its conversation."""
        return {"role": "assistant", "content": self.text}

    @property
    def reward(self) -> float | None:
        """Reward of this turn alone; unset, the turn gets its agent's reward."""
        return self._reward

    @reward.setter
    def reward(self, value: float | None) -> None:
        self._reward = None if value is None else finite(value, f"{self.agent}[{self.turn}].reward")

    def __repr__(self) -> str:
        return f"Reply({self.agent}[{self.turn}], {self.text!r}, {self.finish_reason})"


def finite(value: Any, field: str) -> float:
    """`value` as a finite float. Raises `InvalidRewardError` naming `field`."""
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = math.nan
    if isinstance(value, str) or not math.isfinite(number):
        raise InvalidRewardError(
            f"{field} must be a finite number, not {shown(value)}",
            field=field,
            value=value,
            remedy="Return numbers; give a failed attempt a low reward instead of NaN.",
        )
    return number
