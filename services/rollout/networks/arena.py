"""Where the networks of one job play: its environment, and actors that take it through episodes."""

from __future__ import annotations

import asyncio
import threading
import time
import traceback
from collections.abc import Mapping
from functools import partial
from typing import Any, Final

import structlog

from services.rollout.networks.engine import NetworkEngine, Served
from troupe.job import JobSpec
from troupe.networks.actor import Actor, Played, Seat
from troupe.networks.jobs import environment_of
from troupe.networks.vector import Actions, Observed, Stepped, VectorEnvironment
from troupe.rpc.errors import TroupeError
from troupe.workflow import WorkflowError
from troupe.workflow.environments.counters import COUNTERS
from troupe.workflow.environments.errors import EnvironmentFault, FaultReason

log = structlog.get_logger(__name__)

# A step that takes longer after its episode was given up may never end.
STUCK_SECONDS: Final = 5.0
# Who plays which agents: (policy, agents), sorted.
Seating = tuple[tuple[str, tuple[str, ...]], ...]


class Interrupted(Exception):
    """Nobody wants the episodes any more."""


class _Interruptible:
    """An environment that stops between two steps when it is told to."""

    def __init__(self, environment: VectorEnvironment) -> None:
        self._environment = environment
        self.agents, self.spaces = environment.agents, environment.spaces
        self.copies = environment.copies
        self.stop = threading.Event()

    def reset(self, seed: int) -> Observed:
        """As the environment's. Raises `Interrupted`."""
        self._go_on()
        return self._environment.reset(seed)

    def step(self, actions: Actions) -> Stepped:
        """As the environment's. Raises `Interrupted`."""
        self._go_on()
        return self._environment.step(actions)

    def close(self) -> None:
        """As the environment's."""
        self._environment.close()

    def _go_on(self) -> None:
        if self.stop.is_set():
            raise Interrupted


class _Table:
    """An environment with the actors that have played it, one at a time."""

    def __init__(self, environment: _Interruptible) -> None:
        self._environment = environment
        self._actors: dict[Seating, Actor] = {}
        # What each actor's policies play with.
        self._loaded: dict[tuple[Seating, str], tuple[int, str]] = {}

    def play(
        self,
        job: JobSpec,
        seating: Seating,
        served: Mapping[str, Served],
        seed: int,
        explore: bool,
        stop: threading.Event,
    ) -> Played:
        """Raises `Interrupted` between two steps once `stop` is set, and whatever the environment
        raises."""
        self._environment.stop = stop
        actor = self._actors.get(seating)
        if actor is None:
            actor = self._actors[seating] = Actor(self._environment, _seats(job, seating))
        for policy, weights in served.items():
            version = (weights.version, weights.checksum)
            if self._loaded.get((seating, policy)) != version:
                actor.load(policy, weights.tensors, weights.version)
                self._loaded[seating, policy] = version
        return actor.sample(seed, explore=explore)

    def close(self) -> None:
        """Give the environment up, whatever it raises."""
        try:
            self._environment.close()
        except Exception as error:  # the user's code
            log.warning("an environment did not close", error=repr(error))


def _seats(job: JobSpec, seating: Seating) -> dict[str, Seat]:
    found = {}
    for policy, agents in seating:
        network = job.policies[policy].network
        assert network is not None, "all policies of the job are networks"
        found[policy] = Seat(network, agents)
    return found


class Arena:
    """The environment of one job on this worker, as many of it as play at once."""

    def __init__(self, job: JobSpec, first: VectorEnvironment, places: int) -> None:
        """`places`: how many play at once, each in a thread of its own."""
        assert job.environment is not None, "a job of networks"
        self._job, self._source = job, job.environment.source
        self.agents, self.spaces = first.agents, first.spaces
        self._free = asyncio.Semaphore(places)
        self._most = places
        self._idle = [_Table(_Interruptible(first))]
        # Calls that nobody waits for any more, whose environments have not stopped yet: since when.
        self._left: dict[asyncio.Future[Any], float] = {}
        self._closed = False

    @classmethod
    def open(cls, job: JobSpec, places: int) -> Arena:
        """With a first environment. Blocking.

        Raises `InvalidArgument` naming the field of the job at fault.
        """
        return cls(job, environment_of(job), places)

    def seating(self, policy_of: Mapping[str, str]) -> Seating:
        """Who plays which agents, in the environment's order; `policy_of`: by agent."""
        found: dict[str, list[str]] = {}
        for agent in self.agents:
            found.setdefault(policy_of[agent], []).append(agent)
        return tuple(sorted((policy, tuple(agents)) for policy, agents in found.items()))

    def engine(self, engine_id: str, policy: str) -> NetworkEngine:
        """The engine of a policy, which has not been started."""
        spec = self._job.policies[policy]
        agents = [name for name, agent in self._job.agents.items() if agent.policy == policy]
        assert spec.network is not None, "all policies of the job are networks"
        return NetworkEngine(engine_id, policy, spec.network, self.spaces, len(agents))

    async def play(
        self, seating: Seating, served: Mapping[str, Served], seed: int, *, explore: bool
    ) -> Played:
        """One whole episode of every copy, with these weights by policy.

        When it is cancelled the environment stops after the step that it is in, and has its place
        until then. Raises `EnvironmentFault` for what the environment raises, and where all places
        are of environments that do not stop; `WorkflowError` for what the job's networks cannot
        play.
        """
        self._refuse_if_stuck()
        await self._free.acquire()
        stop = threading.Event()
        play = partial(self._play, seating, served, seed, explore, stop)
        playing = asyncio.ensure_future(asyncio.to_thread(play))
        playing.add_done_callback(self._stopped)
        try:
            played = await asyncio.shield(playing)
        except EnvironmentFault:
            COUNTERS.count("faults", self._source)
            raise
        finally:
            if not playing.done():
                stop.set()
                self._left[playing] = time.monotonic()
        COUNTERS.count("resets", self._source, len(played.lengths))
        COUNTERS.count("steps", self._source, int(played.lengths.sum()))
        return played

    def close(self) -> None:
        """Give the environments up. Blocking. Repeatable; those that play are given up after."""
        self._closed = True
        while (table := self._taken()) is not None:
            table.close()

    def _refuse_if_stuck(self) -> None:
        now = time.monotonic()
        stuck = sum(now - since >= STUCK_SECONDS for since in self._left.values())
        if stuck >= self._most:
            raise self._fault(
                "deadline",
                f"{stuck} of them are still in a step, long after they were to stop",
                remedy="Let `step` end, or restart the rollout worker.",
            )

    def _stopped(self, playing: asyncio.Future[Any]) -> None:
        self._free.release()
        self._left.pop(playing, None)
        if not playing.cancelled():
            playing.exception()  # seen

    def _play(
        self,
        seating: Seating,
        served: Mapping[str, Served],
        seed: int,
        explore: bool,
        stop: threading.Event,
    ) -> Played:
        """In a thread. One that failed is not played again."""
        table = self._taken()
        try:
            if table is None:
                table = _Table(_Interruptible(environment_of(self._job)))
            played = table.play(self._job, seating, served, seed, explore, stop)
        except BaseException as error:
            if table is not None:
                table.close()
            raise self._explained(error) from error
        self._idle.append(table)
        if self._closed:  # looked at last: `close` may have been quicker
            self.close()
        return played

    def _taken(self) -> _Table | None:
        try:
            return self._idle.pop()
        except IndexError:
            return None

    def _explained(self, error: BaseException) -> BaseException:
        if isinstance(error, Interrupted):
            return error
        if isinstance(error, TroupeError):  # of the library: weights or shapes that do not fit
            return WorkflowError(
                error.message,
                kind=error.kind,
                field=error.field,
                value=error.value,
                remedy=error.remedy,
            )
        if isinstance(error, WorkflowError):
            return error
        lines = "".join(traceback.format_exception(error)[-3:])
        return self._fault("raised", f"{type(error).__name__}: {error}", traceback=lines)

    def _fault(self, reason: FaultReason, message: str, **more: str) -> EnvironmentFault:
        error = EnvironmentFault(message, reason=reason, environment=self._source, **more)
        error.kind = f"environment_{reason}"  # as where a workflow meets it
        return error
