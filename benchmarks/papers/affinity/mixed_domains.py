"""Two task domains of opposite kinds: a game with mostly prefill, a proof with mostly decoding.

`game`: several turns, each with a long observation and a short answer (prefill-heavy). `proof`: one
turn with a short question and a long answer (decode-heavy). The texts are meaningless.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

MOVE_TOKENS: Final = 12


class Queries:
    """Games and proofs in turn."""

    def __init__(self, split: str, turns: int = 6, observation: int = 1500) -> None:
        self._turns, self._observation = turns, observation

    def __len__(self) -> int:
        return 1_000_000

    def __getitem__(self, index: int) -> dict[str, Any]:
        if index % 2:
            return {"domain": "proof", "prompts": [f"Prove proposition {index}."]}
        prompts = [
            (f"Game {index}, turn {turn}. " * self._observation)[: self._observation]
            for turn in range(self._turns)
        ]
        return {"domain": "game", "prompts": prompts}


async def play(query: Mapping[str, Any], agents: Any, tools: Any) -> dict[str, float]:
    """Play a game or a proof."""
    limits = {"max_new_tokens": MOVE_TOKENS} if query["domain"] == "game" else {}
    for prompt in query["prompts"]:
        await agents["player"].chat([{"role": "user", "content": prompt}], **limits)
    return {"player": 0.0}
