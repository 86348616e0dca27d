"""A store that dies in the middle of a call to Redis."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from services.experience_store.database import Database

MOMENTS: Final = ("before", "middle", "almost", "after")


class CrashError(Exception):
    """The process is gone."""


class CrashingDatabase(Database):
    """Dies at its `fatal`-th round trip: before, after, or in the middle of sending it.

    `clustered`: takes no way that only one server has, though it is one.
    """

    def __init__(
        self, url: str, fatal: int = 0, moment: str = "before", *, clustered: bool = False
    ) -> None:
        super().__init__(url)
        self.clustered = clustered
        self.trips = 0
        self._fatal = fatal
        self._moment = moment

    def die(self, after: int, moment: str) -> None:
        """Die at the round trip that comes `after` trips from now (1: at the next one)."""
        self._fatal, self._moment = self.trips + after, moment

    def live(self) -> None:
        """Die no more."""
        self._fatal = 0

    async def _load_scripts(self) -> None:
        for script in self._scripts.values():  # no primaries to address: it is one server
            await self._redis.execute_command("SCRIPT LOAD", script.text)

    async def call_each(
        self, commands: Sequence[Sequence[Any]], *, keep_mistyped: bool = False
    ) -> list[Any]:
        self.trips += 1
        if self.trips != self._fatal:
            return await super().call_each(commands, keep_mistyped=keep_mistyped)
        # "middle": only the first command of a pipeline arrives; "almost": all but the last.
        every = len(commands)
        arriving = {"before": 0, "middle": 1, "almost": max(1, every - 1), "after": every}[
            self._moment
        ]
        if arriving:
            await super().call_each(commands[:arriving], keep_mistyped=keep_mistyped)
        raise CrashError
