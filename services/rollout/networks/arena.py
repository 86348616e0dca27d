"""Where the networks of one job play: its environment, and actors that take it through episodes."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Mapping
from functools import partial
from typing import Any, Final

import structlog

from services.rollout.networks.engine import NetworkEngine, Served
from services.rollout.networks.table import Interrupted, Interruptible, Play, Seating, Table
from troupe.job import JobSpec
from troupe.networks.actor import NotFinite, Played
from troupe.networks.jobs import agents_of, environment_of
from troupe.networks.modules import identity_width
from troupe.networks.vector import VectorEnvironment
from troupe.outcomes import described, traceback_text
from troupe.rpc.errors import InvalidArgument, TroupeError
from troupe.workflow import WorkflowError
from troupe.workflow.environments.counters import COUNTERS
from troupe.workflow.environments.errors import EnvironmentFault, FaultReason

log = structlog.get_logger(__name__)

# A step that takes longer after its episode was given up may never end.
STUCK_SECONDS: Final = 5.0


class Arena:
    """The environment of one job on this worker, as many of it as play at once."""

    def __init__(self, job: JobSpec, first: VectorEnvironment, places: int) -> None:
        """`places`: how many play at once, each in a thread of its own."""
        assert job.environment is not None, "a job of networks"
        self._job, self._source = job, job.environment.source
        self.agents, self.spaces = first.agents, first.spaces
        # Where it plays a game whose tree is known.
        self.tree: object = getattr(first, "histories", None)
        self._free = asyncio.Semaphore(places)
        self._most = places
        self._idle = [Table(Interruptible(first))]
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
        assert spec.network is not None, "all policies of the job are networks"
        agents = len(self.roster(policy))
        return NetworkEngine(engine_id, policy, spec.network, self.spaces, agents)

    def roster(self, policy: str) -> tuple[str, ...]:
        """Whom a policy's network was made for, in the environment's order."""
        return agents_of(self._job, self.agents, policy)

    def check_cast(self, cast: Mapping[str, str], field: str) -> None:
        """`cast`: agent -> policy. Raises InvalidArgument of kind "cast_does_not_fit" for a network
        that was not made for the agent that it is to play."""
        for agent, policy in cast.items():
            roster = self.roster(policy)
            if agent not in roster:
                network = self._job.policies[policy].network
                assert network is not None, "all policies of the job are networks"
                seen = self.spaces.observation
                made = seen + identity_width(network, len(roster))
                raise InvalidArgument(
                    f"policy '{policy}' is a network for {', '.join(roster) or 'no agent'}, with "
                    f"inputs [{len(roster)}, {made}]; agent '{agent}' is none of them, and what it "
                    f"sees [{seen}] has no place there",
                    kind="cast_does_not_fit",
                    field=field,
                    value=f"{agent}: {policy}",
                    remedy="Cast it as an agent that it was made for, or let a learner's `agents` "
                    "name the agent.",
                )

    async def play(
        self, seating: Seating, served: Mapping[str, Served], seed: int, how: Play
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
        play = partial(self._play, seating, served, seed, how, stop)
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
        how: Play,
        stop: threading.Event,
    ) -> Played:
        """In a thread. One that failed is not played again."""
        table = self._taken()
        try:
            if table is None:
                table = Table(Interruptible(environment_of(self._job)))
            played = table.play(self._job, seating, served, seed, how, stop)
        except BaseException as error:
            if table is not None:
                table.close()
            raise self._explained(error) from error
        self._idle.append(table)
        if self._closed:  # looked at last: `close` may have been quicker
            self.close()
        return played

    def _taken(self) -> Table | None:
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
        if isinstance(error, NotFinite):
            message = f"{self._source}: {error}"
            if error.what == "rewards":
                remedy = "Let `step` return finite rewards."
                return WorkflowError(message, kind="reward_not_finite", remedy=remedy)
            return self._fault("raised", message, remedy="Let it return finite observations.")
        return self._fault("raised", described(error), traceback=traceback_text(error))

    def _fault(self, reason: FaultReason, message: str, **more: str) -> EnvironmentFault:
        error = EnvironmentFault(message, reason=reason, environment=self._source, **more)
        error.kind = f"environment_{reason}"  # as where a workflow meets it
        return error
