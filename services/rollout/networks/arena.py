"""Where the networks of one job play: its environment, and actors that take it through episodes."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Final

import structlog

from services.rollout.engines.base import (
    BadTurn,
    EngineResponse,
    EngineStale,
    Memory,
    SamplingParams,
)
from services.rollout.engines.front import EngineFront, Tensors
from services.rollout.engines.weights import check_fit, verify
from troupe.job import JobSpec, NetworkSpec
from troupe.networks.actor import Actor, NotFinite, PlayedCopies, Seat
from troupe.networks.jobs import agents_of, close_environment, environment_of
from troupe.networks.modules import identity_width
from troupe.networks.vector import Actions, Observed, Stepped, VectorEnvironment
from troupe.outcomes import described, traceback_text
from troupe.rpc.errors import InvalidArgument, TroupeError
from troupe.v1 import common_pb2 as pb
from troupe.workflow import WorkflowError
from troupe.workflow.environments.errors import EnvironmentFault, FaultReason
from troupe.workflow.environments.host import COUNTERS

if TYPE_CHECKING:
    import torch

    from services.rollout.engines.front import EngineTurn
    from services.rollout.engines.weights import Adapted
    from troupe.networks.vector import Spaces


@dataclass(frozen=True)
class ServedVersion:
    """One verified version of a policy. Nobody writes into the tensors."""

    version: int
    checksum: str
    tensors: dict[str, torch.Tensor]


class NetworkEngine(EngineFront):
    """Holds the verified weights of one policy."""

    kind: ClassVar[str] = "network"

    def __init__(
        self, engine_id: str, policy: str, spec: NetworkSpec, spaces: Spaces, agents: int
    ) -> None:
        """`agents`: how many the policy plays."""
        super().__init__(engine_id, policy)
        self._spec, self._spaces, self._agents = spec, spaces, agents
        self._model: torch.nn.Module | None = None
        self._held: dict[str, torch.Tensor] = {}

    @property
    def served(self) -> ServedVersion:
        """What to play with. Raises `EngineStale` where nothing verified is here."""
        if self.version is None:
            raise EngineStale(self.engine_id, self._life.name)
        return ServedVersion(self.version, self.checksum, self._held)

    async def generate(
        self,
        request_id: str,
        prompt_ids: list[int],
        sampling: SamplingParams,
        *,
        deadline_seconds: float,
        priority: int = 0,
        adapter: str | None = None,
    ) -> EngineResponse:
        """A network knows no tokens: always raises `BadTurn`."""
        raise BadTurn(
            "the policy is a network: it moves in its environment and generates no text",
            field="policy",
            value=self.policy,
            remedy="Ask a policy that is a language model.",
        )

    async def abort(self, request_id: str) -> None:
        """There are no turns."""

    async def check(self) -> pb.EngineState.ValueType:
        """The state: there is nothing that could hang."""
        return self.state

    async def stop(self) -> None:
        """Let go of the weights; the state is STOPPED. Repeatable."""
        self._life.stopped()
        self._held = {}

    async def _begin(self) -> None:
        # A model to compare weights with; what is played with is the actors'.
        self._model = await asyncio.to_thread(self._build)

    def _build(self) -> torch.nn.Module:
        from troupe.networks.acting import ActingNetwork

        return ActingNetwork(self._spec, self._spaces, self._agents)

    async def _serve(self, turn: EngineTurn) -> EngineResponse:
        raise AssertionError("`generate` takes no turns")

    def _drop(self, turn: EngineTurn) -> None:
        raise AssertionError("`generate` takes no turns")

    def _fail_turns(self, error: Exception) -> None:
        """There are none."""

    async def _release(self, tags: frozenset[Memory]) -> None:
        self._held = {}

    async def _resume(self, tags: frozenset[Memory]) -> None:
        """An update brings the weights."""

    async def _fits(self, tensors: Tensors, ref: pb.WeightsRef) -> None:
        assert self._model is not None, "`start` has built it"
        check_fit(tensors, self._model, ref.key)

    async def _prepared(
        self, tensors: Tensors, ref: pb.WeightsRef, adapted: Adapted | None
    ) -> tuple[Tensors, pb.WeightsRef]:
        return await asyncio.to_thread(self._verified, tensors, ref), ref

    def _verified(self, tensors: Tensors, ref: pb.WeightsRef) -> Tensors:
        # Copies: what is published goes when two versions have followed.
        held = {name: tensor.clone() for name, tensor in tensors.items()}
        assert self._model is not None
        verify(held, self._model, ref)
        return held

    async def _apply(self, tensors: Tensors, ref: pb.WeightsRef) -> float:
        self._held = dict(tensors)
        return 0.0


# Actors that are kept. Of a population there are as many seatings as ways to put its slots to the
# table; to make one anew takes a moment.
_ACTORS: Final = 32
# Who plays which agents: (policy, agents), sorted.
Seating = tuple[tuple[str, tuple[str, ...]], ...]


@dataclass(frozen=True)
class Play:
    """How policies play."""

    explore: bool
    """Whether anything is drawn at all."""
    earnest: tuple[str, ...] = ()
    """Policies that try nothing out: what they draw is what they have learned to draw."""


class EpisodesCancelled(Exception):
    """Nobody wants the episodes any more."""


class Interruptible:
    """An environment that stops between two steps when it is told to."""

    def __init__(self, environment: VectorEnvironment) -> None:
        self._environment = environment
        self.agents, self.spaces = environment.agents, environment.spaces
        self.copies = environment.copies
        self.stop = threading.Event()

    def reset(self, seed: int) -> Observed:
        """As the environment's. Raises `EpisodesCancelled`."""
        self._go_on()
        return self._environment.reset(seed)

    def step(self, actions: Actions) -> Stepped:
        """As the environment's. Raises `EpisodesCancelled`."""
        self._go_on()
        return self._environment.step(actions)

    def close(self) -> None:
        """As the environment's."""
        self._environment.close()

    def _go_on(self) -> None:
        if self.stop.is_set():
            raise EpisodesCancelled


class ArenaTable:
    """An environment with the actors that have played it, one at a time."""

    def __init__(self, environment: Interruptible) -> None:
        self._environment = environment
        self._actors: dict[Seating, Actor] = {}
        # What each actor's policies play with.
        self._loaded: dict[Seating, dict[str, tuple[int, str]]] = {}

    def play(
        self,
        job: JobSpec,
        seating: Seating,
        served: Mapping[str, ServedVersion],
        seed: int,
        how: Play,
        stop: threading.Event,
    ) -> PlayedCopies:
        """Raises `EpisodesCancelled` between two steps once `stop` is set, and whatever the
        environment raises."""
        self._environment.stop = stop
        actor, loaded = self._actors.pop(seating, None), self._loaded.pop(seating, {})
        if actor is None:
            actor = Actor(self._environment, _seats(job, self._environment.agents, seating))
        # The newest is the last.
        self._actors[seating], self._loaded[seating] = actor, loaded
        if len(self._actors) > _ACTORS:
            oldest = next(iter(self._actors))
            del self._actors[oldest], self._loaded[oldest]
        for policy, weights in served.items():
            version = (weights.version, weights.checksum)
            if loaded.get(policy) != version:
                actor.load(policy, weights.tensors, weights.version)
                loaded[policy] = version
        return actor.sample(seed, explore=how.explore, earnest=how.earnest)

    def close(self) -> None:
        """Give the environment up, whatever it raises."""
        close_environment(self._environment)


def _seats(job: JobSpec, agents: tuple[str, ...], seating: Seating) -> dict[str, Seat]:
    found = {}
    for policy, played in seating:
        network = job.policies[policy].network
        assert network is not None, "all policies of the job are networks"
        found[policy] = Seat(network, played, agents_of(job, agents, policy))
    return found


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
        self._idle = [ArenaTable(Interruptible(first))]
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
        self, seating: Seating, served: Mapping[str, ServedVersion], seed: int, how: Play
    ) -> PlayedCopies:
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
        served: Mapping[str, ServedVersion],
        seed: int,
        how: Play,
        stop: threading.Event,
    ) -> PlayedCopies:
        """In a thread. One that failed is not played again."""
        table = self._taken()
        try:
            if table is None:
                table = ArenaTable(Interruptible(environment_of(self._job)))
            played = table.play(self._job, seating, served, seed, how, stop)
        except BaseException as error:
            if table is not None:
                table.close()
            raise self._explained(error) from error
        self._idle.append(table)
        if self._closed:  # looked at last: `close` may have been quicker
            self.close()
        return played

    def _taken(self) -> ArenaTable | None:
        try:
            return self._idle.pop()
        except IndexError:
            return None

    def _explained(self, error: BaseException) -> BaseException:
        if isinstance(error, EpisodesCancelled):
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
