"""The gangs that a worker leads: one of each size that its policies ask for."""

from __future__ import annotations

import contextlib
import os
import threading

import torch

from services.trainer.compute import choose_device
from services.trainer.gang.gang import Gang
from services.trainer.settings import TrainerSettings
from troupe.rpc import Aborted, FailedPrecondition


def ranks_here(settings: TrainerSettings) -> int:
    """Ranks that this host has room for."""
    if settings.gang_ranks:
        return settings.gang_ranks
    if choose_device(settings.trainer_device).type == "cuda":
        return torch.cuda.device_count()
    return len(os.sched_getaffinity(0))


def capacity(settings: TrainerSettings) -> int:
    """Ranks of the largest gang that a worker can lead."""
    return ranks_here(settings) * settings.gang_nodes


def check_size(settings: TrainerSettings, policy: str, size: int) -> None:
    """Raise FailedPrecondition of kind "gang_too_large" or "gang_uneven" for a size that a worker
    cannot lead."""
    field = f"policies.{policy}.trainer.gang"
    most, nodes = capacity(settings), settings.gang_nodes
    if size > most:
        raise FailedPrecondition(
            f"this worker leads gangs of at most {most} ranks: {ranks_here(settings)} on each of "
            f"{nodes} host(s)",
            kind="gang_too_large",
            field=field,
            value=size,
            remedy="Ask for a smaller gang, or give the worker more devices (TROUPE_GANG_RANKS, "
            "TROUPE_GANG_NODES).",
        )
    if nodes > 1 and size != most:
        raise FailedPrecondition(
            f"a gang over {nodes} hosts takes all of their {most} ranks",
            kind="gang_uneven",
            field=field,
            value=size,
            remedy=f"Ask for {most}, or for 1.",
        )


class Gangs:
    """Starts gangs when they are asked for, and ends them when no policy needs them. Safe to use
    from several threads."""

    def __init__(self, settings: TrainerSettings) -> None:
        self._settings = settings
        self._gangs: dict[int, Gang] = {}
        # Policies by gang.
        self._keys: dict[int, set[str]] = {}
        self._given_up = threading.Event()
        # Of both tables; not held while ranks carry orders out.
        self._lock = threading.Lock()

    def check(self, policy: str, size: int) -> None:
        """Raise FailedPrecondition unless a gang of this size can be had."""
        check_size(self._settings, policy, size)

    def of(self, size: int) -> Gang:
        """The gang of this size; starts it if it is not there. Raises as `Gang`."""
        with self._lock:
            gang = self._gangs.get(size)
            if gang is None or gang.lost:
                # Its devices are needed.
                for other in [n for n, keys in self._keys.items() if n != size and not keys]:
                    self._end(other)
                self._keys[size] = set()
                gang = self._gangs[size] = Gang(self._settings, size, self._given_up)
            return gang

    def keep(self, gang: Gang, key: str) -> None:
        """A policy lives in it."""
        with self._lock:
            self._keys.setdefault(gang.size, set()).add(key)

    def forget(self, gang: Gang, key: str) -> None:
        """The policy has left; the ranks stay for the next one."""
        with self._lock:
            if self._gangs.get(gang.size) is gang:
                self._keys[gang.size].discard(key)
        with contextlib.suppress(Aborted):  # it was lost: so be it
            gang.order("close", key=key)

    def give_up(self) -> None:
        """What waits for ranks fails now, and they are ended; from any thread, for good."""
        self._given_up.set()
        # Without the lock: whoever waits for a new gang holds it until that one sees the event.
        for gang in list(self._gangs.values()):
            gang.end()

    def close(self) -> None:
        """End all ranks."""
        with self._lock:
            for size in list(self._gangs):
                self._end(size)

    def _end(self, size: int) -> None:
        self._keys.pop(size, None)
        if gang := self._gangs.pop(size, None):
            gang.close()
