"""`Arena`: the environments of one job of networks, and the engines that hold their weights."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Final

import structlog

from services.rollout.engines.base import ServingEngine, Tensors
from services.rollout.engines.errors import BadTurn, EngineStale
from services.rollout.engines.requests import EngineResponse, Memory
from services.rollout.engines.weights import check_fit, verify
from troupe.contracts import kinds
from troupe.job import JobSpec, NetworkSpec
from troupe.networks.actor import Actor, PlayedCopies, Seat
from troupe.networks.jobs import agents_of, close_environment, environment_of
from troupe.networks.modules import identity_width
from troupe.networks.vector import (
    Actions,
    BrokenEnvironment,
    Observed,
    Stepped,
    VectorEnvironment,
    name_of,
)
from troupe.outcomes import described, traceback_text
from troupe.rpc.errors import InvalidArgument, TroupeError, recast
from troupe.v1 import common_pb2 as common_pb
from troupe.workflow import WorkflowError
from troupe.workflow.backend import Sampling
from troupe.workflow.environments.host import COUNTERS
from troupe.workflow.errors import EnvironmentFault, FaultReason

if TYPE_CHECKING:
    import torch

    from services.rollout.engines.turns import EngineTurn
    from services.rollout.engines.weights import Adapted
    from troupe.networks.vector import Spaces

log = structlog.get_logger(__name__)

# Actors that are cached, by seating. A population has as many seatings as ways to combine its
# slots; building an actor takes a moment.
_ACTORS: Final = 32
# Which policy plays which agents: (policy, agents), sorted.
Seating = tuple[tuple[str, tuple[str, ...]], ...]
# A step that takes longer after its episode was cancelled may never end.
STUCK_SECONDS: Final = 5.0


@dataclass(frozen=True)
class ServedVersion:
    """One verified version of a policy. The tensors are read-only."""

    version: int
    checksum: str
    tensors: dict[str, torch.Tensor]


class NetworkEngine(ServingEngine):
    """Holds the verified weights of one policy for `Arena.play`; it takes no turns."""

    kind: ClassVar[str] = "network"

    def __init__(
        self, engine_id: str, policy: str, spec: NetworkSpec, spaces: Spaces, agents: int
    ) -> None:
        """`agents`: the number of agents that the network was made for."""
        super().__init__(engine_id, policy)
        self._spec, self._spaces, self._agents = spec, spaces, agents
        self._model: torch.nn.Module | None = None
        self._held: dict[str, torch.Tensor] = {}

    @property
    def served(self) -> ServedVersion:
        """The version in service. Raises `EngineStale` without verified weights."""
        if self.version is None:
            raise EngineStale(self.engine_id, self._life.name)
        return ServedVersion(self.version, self.checksum, self._held)

    async def generate(
        self,
        request_id: str,
        prompt_ids: Sequence[int],
        sampling: Sampling,
        *,
        deadline_seconds: float,
    ) -> EngineResponse:
        """Raise `BadTurn`: a network has no tokens."""
        raise BadTurn(
            "the policy is a network: it moves in its environment and generates no text",
            field="policy",
            value=self.policy,
            remedy="Ask a policy that is a language model.",
        )

    async def abort(self, request_id: str) -> None:
        """Do nothing: there are no turns."""

    async def check(self) -> common_pb.EngineState.ValueType:
        """Return the state; nothing can hang."""
        return self.state

    async def stop(self) -> None:
        """Release the weights; the state is STOPPED. Repeatable."""
        self._life.stopped()
        self._held = {}

    async def _begin(self) -> None:
        # The model that published weights are compared with; actors have their own.
        self._model = await asyncio.to_thread(self._build)

    def _build(self) -> torch.nn.Module:
        from troupe.networks.acting import ActingNetwork

        return ActingNetwork(self._spec, self._spaces, self._agents)

    async def _serve(self, turn: EngineTurn) -> EngineResponse:
        raise AssertionError("`generate` takes no turns")

    def _drop(self, turn: EngineTurn) -> None:
        raise AssertionError("`generate` takes no turns")

    def _fail_turns(self, error: Exception) -> None:
        """Do nothing: there are no turns."""

    async def _release(self, tags: frozenset[Memory]) -> None:
        self._held = {}

    async def _resume(self, tags: frozenset[Memory]) -> None:
        """Do nothing: an update loads weights."""

    async def _fits(self, tensors: Tensors, ref: common_pb.WeightsRef) -> None:
        assert self._model is not None, "`start` has built it"
        check_fit(tensors, self._model, ref.key)

    async def _prepared(
        self, tensors: Tensors, ref: common_pb.WeightsRef, adapted: Adapted | None
    ) -> tuple[Tensors, common_pb.WeightsRef]:
        return await asyncio.to_thread(self._verified, tensors, ref), ref

    def _verified(self, tensors: Tensors, ref: common_pb.WeightsRef) -> Tensors:
        # Copies: published tensors are deleted two versions later.
        held = {name: tensor.clone() for name, tensor in tensors.items()}
        assert self._model is not None
        verify(held, self._model, ref)
        return held

    async def _apply(self, tensors: Tensors, ref: common_pb.WeightsRef) -> float:
        self._held = dict(tensors)
        return 0.0


@dataclass(frozen=True)
class Play:
    """How policies play."""

    explore: bool
    """Whether actions are sampled at all."""
    earnest: tuple[str, ...] = ()
    """Policies that do not explore; stochastic ones sample as they learned to."""


class EpisodesCancelled(Exception):
    """The episodes were cancelled."""


class Interruptible:
    """An environment that stops between two steps once the event `stop` is set."""

    def __init__(self, environment: VectorEnvironment) -> None:
        self._environment = environment
        self.agents, self.spaces = environment.agents, environment.spaces
        self.copies, self.name = environment.copies, name_of(environment)
        self.stop = threading.Event()

    def reset(self, seed: int) -> Observed:
        """Reset the environment. Raises `EpisodesCancelled`."""
        self._check_stop()
        return self._environment.reset(seed)

    def step(self, actions: Actions) -> Stepped:
        """Step the environment. Raises `EpisodesCancelled`."""
        self._check_stop()
        return self._environment.step(actions)

    def close(self) -> None:
        """Close the environment."""
        self._environment.close()

    def _check_stop(self) -> None:
        if self.stop.is_set():
            raise EpisodesCancelled


class ArenaTable:
    """One environment and the cached actors that play it, one at a time."""

    def __init__(self, environment: Interruptible) -> None:
        self._environment = environment
        self._actors: dict[Seating, Actor] = {}
        # Version and checksum that each actor's policies have loaded.
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
        """Play one episode of every copy. Raises `EpisodesCancelled` between two steps once `stop`
        is set, and any error of the environment."""
        self._environment.stop = stop
        actor, loaded = self._actors.pop(seating, None), self._loaded.pop(seating, {})
        if actor is None:
            actor = Actor(self._environment, _seats(job, self._environment.agents, seating))
        # Most recently used last.
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
        """Close the environment, and suppress its errors."""
        close_environment(self._environment)


def _seats(job: JobSpec, agents: tuple[str, ...], seating: Seating) -> dict[str, Seat]:
    found = {}
    for policy, played in seating:
        network = job.policies[policy].network
        assert network is not None, "all policies of the job are networks"
        found[policy] = Seat(network, played, agents_of(job, agents, policy))
    return found


class Arena:
    """The environments of one job on this worker, one for each episode played at once."""

    def __init__(self, job: JobSpec, first: VectorEnvironment, places: int) -> None:
        """`places`: the number of environments that play at once, each in its own thread."""
        assert job.environment is not None, "a job of networks"
        self._job, self._source = job, job.environment.source
        self.agents, self.spaces = first.agents, first.spaces
        # The game tree, of an environment that has one.
        self.tree: object = getattr(first, "histories", None)
        self._free = asyncio.Semaphore(places)
        self._most = places
        self._idle = [ArenaTable(Interruptible(first))]
        # Cancelled calls whose environments have not stopped yet, with the time of cancellation.
        self._cancelled: dict[asyncio.Future[Any], float] = {}
        self._closed = False

    @classmethod
    def open(cls, job: JobSpec, places: int) -> Arena:
        """Open the arena with a first environment. Blocking.

        Raises `InvalidArgument` naming the field of the job at fault.
        """
        return cls(job, environment_of(job), places)

    def seating(self, policy_of: Mapping[str, str]) -> Seating:
        """Return the agents of each policy, in the environment's order; `policy_of`: by agent."""
        found: dict[str, list[str]] = {}
        for agent in self.agents:
            found.setdefault(policy_of[agent], []).append(agent)
        return tuple(sorted((policy, tuple(agents)) for policy, agents in found.items()))

    def engine(self, engine_id: str, policy: str) -> NetworkEngine:
        """Return an engine for a policy, not started."""
        spec = self._job.policies[policy]
        assert spec.network is not None, "all policies of the job are networks"
        agents = len(self.roster(policy))
        return NetworkEngine(engine_id, policy, spec.network, self.spaces, agents)

    def roster(self, policy: str) -> tuple[str, ...]:
        """Return the agents that a policy's network was made for, in the environment's order."""
        return agents_of(self._job, self.agents, policy)

    def check_cast(self, cast: Mapping[str, str], field: str) -> None:
        """Raise InvalidArgument of kind "cast_does_not_fit" for a policy in `cast` (by agent) whose
        network was not made for the agent."""
        for agent, policy in cast.items():
            roster = self.roster(policy)
            if agent not in roster:
                network = self._job.policies[policy].network
                assert network is not None, "all policies of the job are networks"
                seen = self.spaces.observation
                made = seen + identity_width(network, len(roster))
                raise InvalidArgument(
                    f"policy '{policy}' is a network for {', '.join(roster) or 'no agent'}, with "
                    f"inputs [{len(roster)}, {made}]; agent '{agent}' is not one of them, and its "
                    f"observation [{seen}] does not fit there",
                    kind="cast_does_not_fit",
                    field=field,
                    value=f"{agent}: {policy}",
                    remedy="Cast it as an agent that it was made for, or let a learner's `agents` "
                    "name the agent.",
                )

    async def play(
        self, seating: Seating, served: Mapping[str, ServedVersion], seed: int, how: Play
    ) -> PlayedCopies:
        """Play one whole episode of every copy, with these weights by policy.

        When cancelled, the environment stops after its current step and keeps its place until then.
        Raises `EnvironmentFault` for errors of the environment, and when all places are taken by
        environments that do not stop; `WorkflowError` for values that the job's networks cannot
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
                self._cancelled[playing] = time.monotonic()
        COUNTERS.count("resets", self._source, len(played.lengths))
        COUNTERS.count("steps", self._source, int(played.lengths.sum()))
        return played

    def close(self) -> None:
        """Close the environments; those that play are closed afterwards. Blocking. Repeatable."""
        self._closed = True
        while (table := self._taken()) is not None:
            table.close()

    def _refuse_if_stuck(self) -> None:
        now = time.monotonic()
        stuck = sum(now - since >= STUCK_SECONDS for since in self._cancelled.values())
        if stuck >= self._most:
            raise self._fault(
                "deadline",
                f"{stuck} of them are still in a step, long after they were told to stop",
                remedy="Let `step` end, or restart the rollout worker.",
            )

    def _stopped(self, playing: asyncio.Future[Any]) -> None:
        self._free.release()
        self._cancelled.pop(playing, None)
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
        """Play in a thread. An environment that failed is closed."""
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
        if self._closed:  # checked last: `close` may have run meanwhile
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
        if isinstance(error, BrokenEnvironment):
            message, remedy = f"{self._source}: {error.message}", error.remedy or ""
            if error.kind == kinds.NOT_FINITE and error.field == "rewards":
                return WorkflowError(message, kind="reward_not_finite", remedy=remedy)
            return self._fault("raised", message, remedy=remedy)
        if isinstance(error, TroupeError):  # weights or shapes that do not fit
            return recast(error, WorkflowError)
        if isinstance(error, WorkflowError):
            return error
        return self._fault("raised", described(error), traceback=traceback_text(error))

    def _fault(self, reason: FaultReason, message: str, **more: str) -> EnvironmentFault:
        error = EnvironmentFault(message, reason=reason, environment=self._source, **more)
        error.kind = kinds.ENVIRONMENT_PREFIX + reason  # the kind that workflows get
        return error
