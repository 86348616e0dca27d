"""Workflows that language models play: the code of a job, its roles, queries and rows."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass, replace

from services.rollout.engines.base import ServingEngine
from services.rollout.engines.factory import engine_class_of
from services.rollout.games import describe
from services.rollout.program import JobProgram, Trajectory
from services.rollout.serving.policy import ServedPolicy
from services.rollout.trajectories.demonstrated import DemonstratedTrajectory
from services.rollout.trajectories.queries import QuerySource
from services.rollout.trajectories.trajectory import RunningTrajectory
from troupe.data.demonstrations import TRIED_ROWS, renderer_of
from troupe.job import JobSpec
from troupe.job.sections.run import OfflineSpec
from troupe.outcomes import shown
from troupe.rpc.errors import InvalidArgument
from troupe.states import OFFLINE
from troupe.v1 import rollout_pb2 as rollout_pb
from troupe.workflow import Role, WorkflowError, load_workflow
from troupe.workflow.errors import as_invalid_argument
from troupe.workflow.languages import Language, load_language, role_of, token_counter

MakeEngine = Callable[[str, str], ServingEngine]


@dataclass
class WorkflowProgram(JobProgram):
    """A workflow on queries, or rows of demonstrations, with language models."""

    _: KW_ONLY
    make: MakeEngine
    """Makes an engine: (engine_id, policy)."""

    @classmethod
    async def open(cls, spec: JobSpec, make: MakeEngine) -> WorkflowProgram:
        """Load the job's code and the first rows. Raises `InvalidArgument` naming the field at
        fault."""
        languages: dict[str, Language] = {}
        for name, policy in spec.policies.items():
            language = await asyncio.to_thread(
                load_language, policy.language_model, f"policies.{name}.model"
            )
            engines = await asyncio.to_thread(engine_class_of, name, policy)
            languages[name] = replace(language, payload_kinds=engines.payload_kinds)
        roles = {name: role_of(spec, name, languages) for name in spec.agents}
        workflow, queries, demonstrations = None, None, None
        count_tokens = token_counter(spec, languages)
        try:
            if spec.offline is not None:
                field = "preferences.tasks" if spec.preferences else "supervised.tasks"
                demonstrations = QuerySource(
                    spec.offline.tasks, spec.seed, count_tokens, field=field
                )
                await _try_rows(spec, spec.offline, demonstrations, roles, languages)
            if spec.workflow is not None and spec.tasks is not None:
                evaluations = {name: one.tasks for name, one in spec.evaluations.items()}
                queries = QuerySource(spec.tasks, spec.seed, count_tokens, evaluations)
                workflow = await asyncio.to_thread(load_workflow, spec.workflow)
                await queries.load("train")
                for name in spec.evaluation_sets:
                    await queries.load("held_out", name)
        except WorkflowError as error:
            raise as_invalid_argument(error) from error
        return cls(spec, workflow, queries, demonstrations, roles, languages, make=make)

    def make_engine(self, engine_id: str, policy: str) -> ServingEngine:
        """Return an engine for a policy, not started."""
        return self.make(engine_id, policy)

    def cast_roles(self, cast: Mapping[str, str], field: str) -> Mapping[str, Role]:
        """Return the roles of the agents in `cast`."""
        return {
            name: role_of(self.spec, name, self.languages, policy) for name, policy in cast.items()
        }

    def trajectory(self, split: str) -> Callable[..., Trajectory]:
        """Return what makes a trajectory of this split."""
        return DemonstratedTrajectory if split == OFFLINE else RunningTrajectory

    def describe_game(self, game: str) -> rollout_pb.DescribeGameResponse:
        """Return the questions that the job's players are asked in every information state."""
        return describe(self.workflow, self.spec, game)

    async def behave(
        self, policy: ServedPolicy, request: rollout_pb.BehaveRequest
    ) -> rollout_pb.BehaveResponse:
        """Raise `InvalidArgument`: a language model only answers questions."""
        raise InvalidArgument(
            "is a language model, which does nothing without being asked",
            field="policy",
            value=policy.name,
            remedy="Score its answers to the questions of DescribeGame.",
        )


async def _try_rows(
    spec: JobSpec,
    offline: OfflineSpec,
    rows: QuerySource,
    roles: Mapping[str, Role],
    languages: Mapping[str, Language],
) -> None:
    """Loads the rows that the job's first steps learn from, and renders the first ones, so that a
    fault ends the job before it starts. Raises `WorkflowError`."""
    learners = {name: one for name, one in roles.items() if one.policy in spec.trained_policies}
    positions = [languages[one.policy].positions for one in learners.values()]
    render = renderer_of(offline, learners, positions)
    for index in range(min(await rows.load("train"), TRIED_ROWS)):
        row = await rows.get("train", index)
        try:
            await asyncio.to_thread(render, row)
        except WorkflowError as error:
            error.append(f" (the row is {shown(row, 200)})")
            raise
