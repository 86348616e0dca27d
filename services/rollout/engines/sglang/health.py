"""Whether a server generates: what it says of itself, and now and then a real token."""

from __future__ import annotations

import time
from typing import Final

from services.rollout.engines.sglang.client import SglangClient

# Without an answered turn for this long a server is asked for a real token, when nothing else is
# asked of it or when turns that it should have room for do not end.
PROBE_AFTER_SECONDS: Final = 15.0
STALL_SECONDS: Final = 60.0


class Health:
    """One server's, since it was brought up. `max_running`: turns that it runs at once."""

    def __init__(self, client: SglangClient, max_running: int) -> None:
        self._client = client
        self._max_running = max_running
        self._answered_at = time.monotonic()

    async def well(self, answered: int, in_hand: int, *, serves: bool) -> bool:
        """Whether it generates. `answered`: turns since the last question, which are proof enough.

        A server that is busy passes `/health_generate` with any sign of life, and a page in front
        of a dead one may answer anything: so an ordinary request is sent when it is idle, or when
        it has room and still ends nothing. `in_hand`: turns that it has now.
        """
        if answered:
            self._answered_at = time.monotonic()
            return True
        if not await self._client.healthy():
            return False
        silent = time.monotonic() - self._answered_at
        # A full server may let the probe wait behind long turns: that is no fault.
        idle = not in_hand and silent > PROBE_AFTER_SECONDS
        stuck = 0 < in_hand < self._max_running and silent > STALL_SECONDS
        if not (idle or stuck) or not serves:
            return True
        if not await self._client.probe():
            return False
        self._answered_at = time.monotonic()
        return True
