"""The jobs that this worker is prepared for: everything that their trajectories share."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Protocol

import structlog

from services.rollout.engines.base import Engine
from services.rollout.gate import Gate
from services.rollout.policy import ServedPolicy
from services.rollout.queries import QuerySource
from services.rollout.rewards import JobFunctions
from services.rollout.tokenizers import Language, load_language, stop_ids
from troupe.job import JobSpec, JobSpecError, PolicySpec, parse_job
from troupe.rpc.errors import FailedPrecondition, InvalidArgument
from troupe.transfer import Transfer
from troupe.v1 import common_pb2 as pb
from troupe.v1 import rollout_pb2 as rollout
from troupe.workflow import (
    EntrypointError,
    Role,
    Sampling,
    Workflow,
    WorkflowError,
    load_workflow,
)

if TYPE_CHECKING:
    from troupe.v1.reward_pb2_grpc import RewardAsyncStub

log = structlog.get_logger(__name__)


class EngineFactory(Protocol):
    """Makes an engine that has not been started (`engines.factory.make_engine`)."""

    def __call__(
        self, engine_id: str, policy_name: str, policy_spec: PolicySpec, *, replica: int
    ) -> Engine: ...


@dataclass(frozen=True)
class PreparedJob:
    """A job whose engines run and whose code is loaded."""

    job_id: str
    spec: JobSpec
    workflow: Workflow
    queries: QuerySource
    functions: JobFunctions
    policies: Mapping[str, ServedPolicy]
    roles: Mapping[str, Role]
    gate: Gate
    policy_of: Mapping[str, ServedPolicy] = field(init=False)
    """The served policy of each agent."""
    evaluation_roles: Mapping[str, Role] = field(init=False)
    trained: frozenset[str] = field(init=False)
    """Names of the policies that are trained."""

    def __post_init__(self) -> None:
        temperature = self.spec.evaluation.temperature
        derived = {
            "policy_of": {n: self.policies[a.policy] for n, a in self.spec.agents.items()},
            "trained": frozenset(self.spec.trained_policies),
            "evaluation_roles": self.roles
            if temperature is None
            else {
                name: replace(role, sampling=replace(role.sampling, temperature=temperature))
                for name, role in self.roles.items()
            },
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


class JobTable:
    """Prepared jobs by id."""

    def __init__(
        self,
        transfer: Transfer,
        rewards: RewardAsyncStub,
        worker_id: str,
        make: EngineFactory,
    ) -> None:
        self._transfer = transfer
        self._rewards = rewards
        self._worker_id = worker_id
        self._make_engine = make
        self.before_release: Callable[[str], Awaitable[None]] | None = None
        """Called with the id of a job before its engines stop."""
        self._jobs: dict[str, PreparedJob] = {}
        self._locks: dict[str, asyncio.Lock] = {}

    def __len__(self) -> int:
        return len(self._jobs)

    def all(self) -> list[PreparedJob]:
        """Every prepared job."""
        return list(self._jobs.values())

    def get(self, job_id: str) -> PreparedJob:
        """A prepared job. Raises `FailedPrecondition` of kind `job_not_prepared`."""
        try:
            return self._jobs[job_id]
        except KeyError:
            raise FailedPrecondition(
                f"worker {self._worker_id} is not prepared for job '{job_id}'",
                kind="job_not_prepared",
                field="job_id",
                value=job_id,
                remedy="Call PrepareJob first; a restarted worker has forgotten its jobs.",
            ) from None

    async def prepare(
        self, job_id: str, spec_json: str, weights: Sequence[pb.WeightsRef]
    ) -> PreparedJob:
        """Load the job's code and start its engines at `weights`.

        Idempotent: for a job that is prepared with the same specification only its weights move.
        Raises `InvalidArgument` and `FailedPrecondition` naming the field of the job at fault, and
        what an engine raises that does not come up; nothing is left running then.
        """
        spec = _parse(spec_json)
        refs = _by_policy(spec, weights)
        async with self._locks.setdefault(job_id, asyncio.Lock()):
            known = self._jobs.get(job_id)
            if known is not None and known.spec == spec:
                await self._bring_to(known, refs)
                return known
            if known is not None:
                await self._release(job_id, "the job's specification has changed")
            job = await self._make(job_id, spec, refs)
            self._jobs[job_id] = job
            return job

    async def release(self, job_id: str) -> None:
        """Stop the job's engines and forget it; unknown jobs are released already."""
        async with self._locks.setdefault(job_id, asyncio.Lock()):
            await self._release(job_id, "the job was released")
        self._locks.pop(job_id, None)

    async def close(self) -> None:
        """Release every job."""
        await asyncio.gather(*(self.release(job_id) for job_id in list(self._jobs)))

    async def _release(self, job_id: str, reason: str) -> None:
        job = self._jobs.pop(job_id, None)
        if job is not None:
            if self.before_release is not None:
                await self.before_release(job_id)
            await asyncio.gather(*(policy.release(reason) for policy in job.policies.values()))

    async def _bring_to(self, job: PreparedJob, refs: Mapping[str, pb.WeightsRef]) -> None:
        async def one(name: str, ref: pb.WeightsRef) -> None:
            policy = job.policies[name]
            if ref.version < policy.weights.version:
                # The orchestrator keeps the ledger: an older version here is a resumed job's.
                policy.retarget(ref)
            await policy.update(ref)

        await asyncio.gather(*(one(name, ref) for name, ref in refs.items()))

    async def _make(
        self, job_id: str, spec: JobSpec, refs: Mapping[str, pb.WeightsRef]
    ) -> PreparedJob:
        # What is quick to check comes first: an engine may take minutes to start.
        languages: dict[str, Language] = {}
        for name, policy in spec.policies.items():
            languages[name] = await asyncio.to_thread(
                load_language, policy.model, f"policies.{name}.model"
            )
        roles = {name: _role(spec, name, languages) for name in spec.agents}
        queries = QuerySource(spec.tasks)
        try:
            workflow = await asyncio.to_thread(load_workflow, spec.workflow)
            await queries.load("train")
            if spec.evaluation.queries:
                await queries.load("held_out")
        except EntrypointError as error:
            raise _invalid(error) from error
        functions = JobFunctions(self._rewards, job_id, spec)
        await functions.register()
        policies = {
            name: self._serve(job_id, name, policy, languages[name], refs[name])
            for name, policy in spec.policies.items()
        }
        outcomes = await asyncio.gather(
            *(policy.bring_up() for policy in policies.values()), return_exceptions=True
        )
        for outcome in outcomes:
            if isinstance(outcome, BaseException):
                await asyncio.gather(*(p.release("preparation failed") for p in policies.values()))
                raise outcome
        # What is loaded by now stays. With torch and transformers a full collection that walks it
        # stops the process for a quarter of a second, again and again.
        gc.collect()
        gc.freeze()
        log.info("job prepared", job_id=job_id, policies=sorted(policies))
        return PreparedJob(
            job_id=job_id,
            spec=spec,
            workflow=workflow,
            queries=queries,
            functions=functions,
            policies=policies,
            roles=roles,
            gate=Gate(
                spec.limits.max_concurrent_trajectories,
                one_query=spec.pipeline.mode == "serial",
            ),
        )

    def _serve(
        self, job_id: str, name: str, policy: PolicySpec, language: Language, ref: pb.WeightsRef
    ) -> ServedPolicy:
        urls = policy.engine.urls
        count = len(urls) if urls else policy.engine.replicas
        engines = [
            self._make_engine(
                f"{job_id}.{name}.{number}@{self._worker_id}", name, policy, replica=number
            )
            for number in range(count)
        ]
        return ServedPolicy(name, language, engines, self._transfer, policy.engine, ref)


def _role(spec: JobSpec, name: str, languages: Mapping[str, Language]) -> Role:
    agent = spec.agents[name]
    language = languages[agent.policy]
    sampling = agent.sampling
    return Role(
        name=name,
        policy=agent.policy,
        tokenizer=language.chat,
        sampling=Sampling(
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            max_new_tokens=sampling.max_new_tokens,
            stop_token_ids=stop_ids(sampling.stop, language, f"agents.{name}.sampling.stop"),
        ),
        system_prompt=agent.system_prompt,
    )


def _parse(spec_json: str) -> JobSpec:
    try:
        return parse_job(spec_json)
    except JobSpecError as error:
        first = error.problems[0]
        raise InvalidArgument(
            first.message, field=first.field, value=first.value, remedy=first.remedy
        ) from error


def _by_policy(spec: JobSpec, weights: Sequence[pb.WeightsRef]) -> dict[str, pb.WeightsRef]:
    refs = {ref.policy: ref for ref in weights}
    for name in spec.policies:
        if name not in refs:
            raise InvalidArgument(
                f"no weights are given for policy '{name}'",
                field="weights",
                remedy="Give one reference per policy, frozen ones included.",
            )
    return {name: refs[name] for name in spec.policies}


def _invalid(error: WorkflowError) -> InvalidArgument:
    return InvalidArgument(
        error.message,
        kind=error.kind,
        field=error.field,
        value=error.value,
        remedy=error.remedy,
    )
