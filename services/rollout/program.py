"""`JobProgram`: what a job's trajectories run, and on which engines.

Workflows on language models are `services.rollout.workflow_program`, networks that play an
environment `services.rollout.networks.program`; `services.rollout.job_setup` opens the one that a
job needs, and nothing else tells them apart.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from services.rollout.engines.base import ServingEngine
from services.rollout.serving.policy import ServedPolicy
from services.rollout.trajectories.queries import QuerySource
from troupe.job import JobSpec
from troupe.v1 import rollout_pb2 as rollout_pb
from troupe.workflow import Role, Workflow
from troupe.workflow.languages import Language


class Trajectory(Protocol):
    """A run that ends by itself, or is aborted."""

    async def run(self) -> None:
        """Run to the end and store it."""

    async def abort(self, reason: str) -> None:
        """Store that it was aborted."""


@dataclass
class JobProgram(ABC):
    """The program that the trajectories of one job run."""

    spec: JobSpec
    workflow: Workflow | None = None
    queries: QuerySource | None = None
    """What `workflow` plays; None, like it, if no language model plays."""
    demonstrations: QuerySource | None = None
    """The rows of `supervised` or `preferences`."""
    roles: Mapping[str, Role] = field(default_factory=dict)
    """The roles of the agents in the job; empty if they have no language model."""
    languages: Mapping[str, Language] = field(default_factory=dict)
    """Tokenizer and chat template of each policy that is a language model."""

    @property
    def most_trajectories(self) -> int:
        """How many trajectories run at once on this worker."""
        return self.spec.limits.max_concurrent_trajectories

    @abstractmethod
    def make_engine(self, engine_id: str, policy: str) -> ServingEngine:
        """Return an engine for a policy, not started. An engine that moves to another policy
        keeps its id and replica number."""

    @abstractmethod
    def cast_roles(self, cast: Mapping[str, str], field: str) -> Mapping[str, Role]:
        """Return the roles of the agents in `cast` (policy by agent), as those policies play them.

        Raises `InvalidArgument`, naming `field`, for a policy that cannot play its agent.
        """

    @abstractmethod
    def trajectory(self, split: str) -> Callable[..., Trajectory]:
        """Return what makes a trajectory of this split (arguments: `RunningTrajectory`)."""

    @abstractmethod
    def describe_game(self, game: str) -> rollout_pb.DescribeGameResponse:
        """Return the questions to the players of OpenSpiel's `game` in every information state.
        Blocking. Raises FailedPrecondition of kind "game_not_enumerable"."""

    @abstractmethod
    async def behave(
        self, policy: ServedPolicy, request: rollout_pb.BehaveRequest
    ) -> rollout_pb.BehaveResponse:
        """Return a policy's action probabilities in every information state of a game. Raises
        `InvalidArgument` for a policy that only answers questions."""

    def close(self) -> None:  # noqa: B027 (most programs share nothing)
        """Release what trajectories share. Blocking. Repeatable."""
