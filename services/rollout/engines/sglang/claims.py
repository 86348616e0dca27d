"""Which servers engines of this process hold: one server is one engine."""

from __future__ import annotations

import threading
from collections.abc import Hashable

from troupe.job.policy import server_of

_LOCK = threading.Lock()
_HOLDERS: dict[str, Hashable] = {}


def claim(url: str, holder: Hashable) -> bool:
    """Take `url` for `holder`; False when another one has it. Repeatable."""
    with _LOCK:
        return _HOLDERS.setdefault(server_of(url), holder) == holder


def release(holder: Hashable) -> None:
    """Give back all that `holder` has. Repeatable."""
    with _LOCK:
        for url in [url for url, who in _HOLDERS.items() if who == holder]:
            del _HOLDERS[url]
