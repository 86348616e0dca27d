"""Holds back prompts that are being read already, so that they are read once.

The trajectories of a group open with the same prompt at the same moment. The prefix cache helps
only those that arrive after the first was read; this gate makes the others wait that one step.
"""

from __future__ import annotations

import threading

from services.rollout.engines.front import EngineTurn


class PromptGate:
    """Leader and followers per prompt. Thread-safe: the engine's thread opens the gate."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._followers: dict[tuple[int, ...], list[EngineTurn]] = {}
        self._leads: dict[int, tuple[int, ...]] = {}

    def enter(self, turn: EngineTurn) -> bool:
        """Whether `turn` may go on now; if not, a later `opened` returns it."""
        prompt = tuple(turn.prompt_ids)
        with self._lock:
            followers = self._followers.get(prompt)
            if followers is not None:
                followers.append(turn)
                return False
            self._followers[prompt] = []
            self._leads[id(turn)] = prompt
            return True

    def opened(self, turn: EngineTurn) -> list[EngineTurn]:
        """`turn` has its first token, or has ended: who waited for it. Repeatable."""
        with self._lock:
            prompt = self._leads.pop(id(turn), None)
            return [] if prompt is None else self._followers.pop(prompt)
