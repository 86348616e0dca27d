"""A prepared job of this worker: everything that its trajectories share."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from services.rollout.program import JobProgram
from services.rollout.rewards import JobFunctions
from services.rollout.serving.engine_moves import EngineMoves
from services.rollout.serving.policy import ServedPolicy, wait_for_all
from services.rollout.serving.router import PolicyRouter
from services.rollout.trajectories.concurrency import ConcurrencyGate, Turnstile
from services.rollout.trajectories.lockstep import Lockstep
from services.rollout.trajectories.transcripts import TranscriptChoice
from troupe.job import JobSpec
from troupe.rpc.errors import InvalidArgument
from troupe.scheduling.elastic.order import group_waiters
from troupe.transfer import Transfer
from troupe.v1 import rollout_pb2 as rollout_pb
from troupe.workflow import Role


class OpenGroups:
    """Counts of each query's trajectories that have not ended. A group runs on one worker."""

    def __init__(self, routers: Iterable[PolicyRouter]) -> None:
        """Start with no groups. `routers` raise the priority of a group's turns when it becomes
        smaller."""
        self._routers = list(routers)
        self._left: Counter[str] = Counter()
        self._begun: Counter[str] = Counter()

    def left(self, query_id: str) -> int:
        """Return the number of the query's trajectories that have not ended."""
        return self._left[query_id]

    def waiters(self, query_id: str) -> int:
        """Return the number of trajectories that wait for the next action of one of the query's
        trajectories."""
        return group_waiters(self._begun[query_id], self._left[query_id])

    def begin(self, query_id: str) -> None:
        """Count a trajectory that starts."""
        self._begun[query_id] += 1
        self._left[query_id] += 1

    def end(self, query_id: str) -> None:
        """Count a trajectory that has ended in any way."""
        left = self._left[query_id] = self._left[query_id] - 1
        if left <= 0:
            del self._left[query_id], self._begun[query_id]
            return
        for router in self._routers:
            router.regroup(query_id, left)


@dataclass(frozen=True)
class Cast:
    """The policy behind each agent, with the agents' roles."""

    policy_of: Mapping[str, ServedPolicy]
    roles: Mapping[str, Role]
    evaluation_roles: Mapping[str, Mapping[str, Role]]
    """By name of an evaluation."""


class Casts:
    """The casts of one job, each made only once."""

    def __init__(
        self,
        program: JobProgram,
        policies: Mapping[str, ServedPolicy],
    ) -> None:
        self._program = program
        self._spec = program.spec
        self._policies = policies
        own = {name: policies[agent.policy] for name, agent in program.spec.agents.items()}
        self.own = Cast(own, program.roles, self._evaluation_roles(program.roles))
        self._known: dict[frozenset[tuple[str, str]], Cast] = {}

    def of(self, named: Mapping[str, str], field: str = "ticket.cast") -> Cast:
        """Return the job's own cast, with the policies of the agents in `named` replaced.

        Raises `InvalidArgument` for an unknown agent or policy, or one that cannot play the agent.
        """
        if not named:
            return self.own
        key = frozenset(named.items())
        if key not in self._known:
            self._known[key] = self._make(named, field)
        return self._known[key]

    def _make(self, named: Mapping[str, str], field: str) -> Cast:
        for what, names, known in (
            ("an agent", named, self._spec.agents),
            ("a policy", named.values(), self._policies),
        ):
            for name in names:
                if name not in known:
                    raise InvalidArgument(
                        f"is not {what} of this job",
                        field=field,
                        value=name,
                        remedy=f"Known: {', '.join(sorted(known))}.",
                    )
        roles = {**self.own.roles, **self._program.cast_roles(named, field)}
        policy_of = {**self.own.policy_of, **{n: self._policies[p] for n, p in named.items()}}
        return Cast(policy_of, roles, self._evaluation_roles(roles))

    def _evaluation_roles(self, roles: Mapping[str, Role]) -> Mapping[str, Mapping[str, Role]]:
        return {
            evaluation: roles
            if (temperature := one.temperature) is None
            else {
                name: replace(role, sampling=replace(role.sampling, temperature=temperature))
                for name, role in roles.items()
            }
            for evaluation, one in {"": self._spec.evaluation, **self._spec.evaluations}.items()
        }


@dataclass(eq=False)
class PreparedJob:
    """A job whose engines run and whose code is loaded."""

    job_id: str
    spec: JobSpec
    program: JobProgram
    """The program that its trajectories run."""
    functions: JobFunctions
    policies: Mapping[str, ServedPolicy]
    gate: ConcurrencyGate
    moves: EngineMoves
    transfer: Transfer
    casts: Casts = field(init=False)
    """The policies of the agents."""
    lockstep: Lockstep | None = field(init=False)
    """The barrier of `pipeline.rollout: batch`; else None."""
    turnstile: Turnstile = field(init=False, default_factory=Turnstile)
    """Limit of trajectories that continue with a reply simultaneously."""
    trained: frozenset[str] = field(init=False)
    """Names of the trained policies."""
    groups: OpenGroups = field(init=False)
    """Open trajectories by query."""
    transcripts: TranscriptChoice = field(init=False)
    """The trajectories whose texts are sent."""

    def __post_init__(self) -> None:
        self.casts = Casts(self.program, self.policies)
        self.trained = frozenset(self.spec.trained_policies)
        self.groups = OpenGroups(policy.router for policy in self.policies.values())
        self.transcripts = TranscriptChoice(self.spec)
        self.lockstep = Lockstep() if self.spec.pipeline.rollout == "batch" else None

    def policy(self, name: str) -> ServedPolicy:
        """Return a policy by name. Raises `InvalidArgument` naming the known ones."""
        try:
            return self.policies[name]
        except KeyError:
            raise InvalidArgument(
                f"job {self.job_id} has no policy '{name}'",
                field="policy",
                value=name,
                remedy=f"Known: {', '.join(sorted(self.policies))}.",
            ) from None

    async def sleep(self, names: Iterable[str]) -> None:
        """Take the engines of these policies off their devices. Raises `InvalidArgument` for an
        unknown policy, and the error of an engine that keeps its memory."""
        policies = [self.policy(name) for name in names]
        await self.moves.settled()
        await wait_for_all(policy.sleep() for policy in policies)

    async def wake(self, names: Iterable[str]) -> None:
        """Bring the engines of these policies back to their devices and targets. Raises
        `InvalidArgument` for an unknown policy, and the error of one that no engine serves."""
        await wait_for_all(policy.wake() for policy in [self.policy(name) for name in names])

    def statuses(self, worker_id: str) -> list[rollout_pb.EngineStatus]:
        """Return one status per engine."""
        return [
            status
            for policy in self.policies.values()
            for status in policy.statuses(self.job_id, worker_id)
        ]

    def loads(self, worker_id: str) -> list[rollout_pb.PolicyLoad]:
        """Return one load per policy."""
        return [policy.load(self.job_id, worker_id) for policy in self.policies.values()]
