"""Lanes that are kept between reads. One thread at a time has one."""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import Final

from troupe.transfer.remote.lane import Lane

# Each has a UCX worker, some hundred KiB and a few file descriptors.
_MOST_KEPT: Final = 32


class Lanes:
    """Idle lanes by what tells them apart. Safe to use from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._closed = False
        self._idle: OrderedDict[tuple[bool, bytes], list[Lane]] = OrderedDict()

    def take(self, *, near: bool, address: bytes = b"") -> Lane:
        """An idle lane, connected to `address` unless that is empty, or a new one.

        Raises LaneBroken.
        """
        with self._lock:
            idle = self._idle.get((near, address))
            if idle:
                lane = idle.pop()
                lane.heard = False
                return lane
        lane = Lane(near=near)
        if address:
            try:
                lane.connect(address)
            except BaseException:
                lane.close()
                raise
        return lane

    def give(self, lane: Lane, *, address: bytes = b"") -> None:
        """Back, with no request in flight."""
        with self._lock:
            idle = self._idle.setdefault((lane.near, address), [])
            idle.append(lane)
            self._idle.move_to_end((lane.near, address))
            surplus = [idle.pop()] if self._closed else []
            # Those of readers that did not come back for the longest time go.
            while sum(map(len, self._idle.values())) > _MOST_KEPT:
                surplus += self._idle.popitem(last=False)[1]
        for old in surplus:
            old.close()

    def close(self) -> None:
        """End all that are idle, and those that are given back from now on."""
        with self._lock:
            self._closed = True
            lanes = [lane for idle in self._idle.values() for lane in idle]
            self._idle.clear()
        for lane in lanes:
            lane.close()
