"""A job that this worker is prepared for: everything that its trajectories share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from services.rollout.casting import Casts
from services.rollout.gate import Gate
from services.rollout.groups import Groups
from services.rollout.lockstep import Lockstep
from services.rollout.moves import EngineMoves
from services.rollout.policy import ServedPolicy
from services.rollout.queries import QuerySource
from services.rollout.rewards import JobFunctions
from troupe.job import JobSpec
from troupe.rpc.errors import InvalidArgument
from troupe.transfer import Transfer
from troupe.v1 import rollout_pb2 as rollout
from troupe.workflow import Role, Workflow

if TYPE_CHECKING:
    from services.rollout.networks.arena import Arena


@dataclass(frozen=True)
class PreparedJob:
    """A job whose engines run and whose code is loaded."""

    job_id: str
    spec: JobSpec
    workflow: Workflow | None
    queries: QuerySource | None
    """Both None where networks play in `arena`."""
    arena: Arena | None
    functions: JobFunctions
    policies: Mapping[str, ServedPolicy]
    roles: Mapping[str, Role]
    gate: Gate
    moves: EngineMoves
    transfer: Transfer
    casts: Casts = field(init=False)
    """Who plays whom."""
    lockstep: Lockstep | None = field(init=False)
    """Where trajectories wait for each other, in a job that says so."""
    trained: frozenset[str] = field(init=False)
    """Names of the policies that are trained."""
    groups: Groups = field(init=False)
    """How far the queries are."""

    def __post_init__(self) -> None:
        derived = {
            "casts": Casts(
                self.spec,
                self.policies,
                self.roles,
                None if self.arena is None else self.arena.check_cast,
            ),
            "trained": frozenset(self.spec.trained_policies),
            "groups": Groups(policy.router for policy in self.policies.values()),
            "lockstep": Lockstep() if self.spec.pipeline.rollout == "batch" else None,
        }
        for name, value in derived.items():
            object.__setattr__(self, name, value)

    def policy(self, name: str) -> ServedPolicy:
        """A policy by name. Raises `InvalidArgument` naming the known ones."""
        try:
            return self.policies[name]
        except KeyError:
            raise InvalidArgument(
                f"job {self.job_id} has no policy '{name}'",
                field="policy",
                value=name,
                remedy=f"Known: {', '.join(sorted(self.policies))}.",
            ) from None

    def statuses(self, worker_id: str) -> list[rollout.EngineStatus]:
        """One per engine."""
        return [
            status
            for policy in self.policies.values()
            for status in policy.statuses(self.job_id, worker_id)
        ]

    def loads(self, worker_id: str) -> list[rollout.PolicyLoad]:
        """One per policy."""
        return [policy.load(self.job_id, worker_id) for policy in self.policies.values()]
