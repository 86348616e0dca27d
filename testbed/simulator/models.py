"""Model services on GPUs: each on its own devices, or all in a pool from which they are evicted on
demand.

In a pool the services are in host memory and are restored to devices when they are called;
`troupe.scheduling.elastic.cells` chooses the services to evict (ARL-Tangram, section 3).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from typing import Any

import simpy

from troupe.scheduling.elastic.cells import DeviceCell, Model, plan


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model that takes `gpus` devices and serves `concurrency` calls at once."""

    name: str
    gpus: int
    concurrency: int = 1


class Dedicated:
    """Model services with their own devices."""

    def __init__(self, env: simpy.Environment, services: Sequence[ServedModel]) -> None:
        self._env = env
        self._places = {s.name: simpy.Resource(env, s.concurrency) for s in services}

    def run(self, service: str, seconds: float) -> Generator[simpy.Event, Any, None]:
        """Wait for the service, then hold it for the call's seconds."""
        with self._places[service].request() as turn:
            yield turn
            yield self._env.timeout(seconds)


@dataclass(slots=True)
class _State:
    service: ServedModel
    cell: DeviceCell | None = None
    last: float = 0.0
    running: int = 0
    # Fires when the service is restored; None: it is not being restored.
    ready: simpy.Event | None = None
    waiting: deque[tuple[int, simpy.Event]] = field(default_factory=deque)


class SharedPool:
    """All services on `devices` devices; restoring one takes `restore_seconds`."""

    def __init__(
        self,
        env: simpy.Environment,
        services: Sequence[ServedModel],
        *,
        devices: int,
        restore_seconds: float,
        next_call: Callable[[str, float], float] | None = None,
    ) -> None:
        """`next_call`: the time of a service's next call after a given time (an oracle): evicts the
        service whose next call is last (Belady 1966) instead of the least recently used."""
        self._env = env
        self._next_call = next_call
        self._devices = devices
        self._restore_seconds = restore_seconds
        self._states = {s.name: _State(s) for s in services}
        self._arrivals = 0
        self.restores = 0

    def run(self, service: str, seconds: float) -> Generator[simpy.Event, Any, None]:
        """Wait until the service is loaded and has capacity, then hold it."""
        state, started = self._states[service], self._env.event()
        self._arrivals += 1
        state.waiting.append((self._arrivals, started))
        self._decide()
        yield started
        if state.ready is not None:
            yield state.ready
        yield self._env.timeout(seconds)
        state.running -= 1
        state.last = self._env.now
        self._decide()

    def _decide(self) -> None:
        states = self._states
        heads = sorted((s.waiting[0][0], name) for name, s in states.items() if s.waiting)
        if not heads:
            return
        models = [
            Model(n, s.service.gpus, s.cell, None, self._worth(s), s.running, s.service.concurrency)
            for n, s in states.items()
        ]
        chosen = plan(self._devices, models, [name for _, name in heads])
        for name in chosen.evicted:
            states[name].cell = None
        for name, cell in chosen.cells.items():
            states[name].cell = cell
            states[name].ready = self._restored(states[name])
            self.restores += 1
        for name, room in chosen.room.items():
            state = states[name]
            for _ in range(min(room, len(state.waiting))):
                _, started = state.waiting.popleft()
                state.running += 1
                state.last = self._env.now
                started.succeed()

    def _worth(self, state: _State) -> float:
        """Return the eviction key of a service: the smallest is evicted first."""
        if self._next_call is None:
            return state.last
        return -self._next_call(state.service.name, self._env.now)

    def _restored(self, state: _State) -> simpy.Event:
        ready = self._env.timeout(self._restore_seconds)
        assert ready.callbacks is not None

        def done(_: simpy.Event) -> None:
            state.ready = None

        ready.callbacks.append(done)
        return ready
