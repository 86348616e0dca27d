"""How much of a message is here while the rest of it still comes."""

from __future__ import annotations

import secrets
from typing import Final

# What UCX copies at once out of another process: with where it came from it fits in a core's own
# cache, where it is hashed several times as fast as a whole chunk.
STEP_BYTES: Final = 512 << 10
_WORD: Final = 8
# As likely as any other word to be what comes: then more has come than is seen, no less.
_MARK: Final = secrets.randbits(8 * _WORD)


class Marks:
    """Words at the end of every `step` bytes (a multiple of 8) of the memory to be received into.

    For transports that write in order, in the thread that asks, and whole words between two
    questions, as those within a machine do: what lies before a word that was overwritten has come.
    The rest of the last step is not seen.
    """

    def __init__(self, memory: memoryview, step: int = STEP_BYTES) -> None:
        self._step = step // _WORD
        self._words = memory[: len(memory) // step * step].cast("Q")
        # The next one to be overwritten.
        self._next = self._step - 1
        for place in range(self._next, len(self._words), self._step):
            self._words[place] = _MARK

    @property
    def passed(self) -> bool:
        """Whether more has come than when `upto` was asked last."""
        return self._next < len(self._words) and self._words[self._next] != _MARK

    def upto(self) -> int:
        """So many of the first bytes are here, at the least."""
        while self.passed:
            self._next += self._step
        return (self._next + 1 - self._step) * _WORD
