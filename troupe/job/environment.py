"""The section `environment` of jobs whose policies are networks, and checks of such jobs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from pydantic import Field, field_validator

from troupe.job.algorithm import AlgorithmSpec
from troupe.job.balancing import BalancingSpec
from troupe.job.section import Section, check_json
from troupe.job.sections import AgentSpec, RoutingSpec

if TYPE_CHECKING:
    from troupe.job.data import TasksSpec
    from troupe.job.population import Pools
    from troupe.job.spec import JobSpec

# Defaults of jobs with an environment: fragments take equally long and are not compared.
PIPELINE = {"mode": "sync", "group_size": 1}
# Of jobs whose tasks are those of environments of the `verifiers` library.
VERIFIERS_WORKFLOW = "troupe.workflow.environments.adapters.verifiers:play"
# Paradigms that need the joint actions of all agents of a policy.
_TEAMS = ("vdn", "qmix", "maddpg")


class EnvironmentSpec(Section):
    """A vectorised environment (docs/networks.md), instead of `workflow` and `tasks`."""

    source: str = Field(min_length=1)
    """Name of a built-in environment, or `package.module:attribute` that returns a
    `VectorEnvironment` when called with `copies` and `args`. Rollout workers and trainers import
    it."""
    args: dict[str, Any] = {}
    """Keyword arguments of `source`."""
    copies: int = Field(default=32, ge=1, le=65_536)
    """Episodes per trajectory. They are played together, with one forward pass per step and policy,
    and form one sample of each trained policy."""

    _json = field_validator("args")(check_json)

    @field_validator("args")
    @classmethod
    def _copies_has_a_field(cls, args: dict[str, Any]) -> dict[str, Any]:
        if "copies" in args:
            raise ValueError("copies: set `environment.copies`; `source` is called with it")
        return args


def with_defaults(job: Any) -> Any:
    """The unvalidated job, with the pipeline defaults of jobs that have an environment, and the
    workflow of those whose tasks are all of the `verifiers` library."""
    if isinstance(job, dict) and job.get("environment") is not None:
        pipeline = job.get("pipeline")
        if isinstance(pipeline, dict):
            return {**job, "pipeline": {**PIPELINE, **pipeline}}
    if isinstance(job, dict) and job.get("workflow") is None:
        tasks = job.get("tasks")
        tasks = tasks.model_dump() if isinstance(tasks, Section) else tasks
        if isinstance(tasks, dict):
            mix = tasks.get("mix")
            parts = list(mix.values()) if isinstance(mix, dict) and mix else [tasks]
            if all(isinstance(one, dict) and one.get("verifiers") for one in parts):
                return {**job, "workflow": VERIFIERS_WORKFLOW}
    return job


def check_roles(job: JobSpec) -> None:
    """Raise ValueError, naming the field, for a role of an environment of the `verifiers` library
    that is given to no agent of the job."""
    given: dict[str, TasksSpec | None] = {"tasks": job.tasks}
    given |= {f"evaluations.{name}.tasks": one.tasks for name, one in job.evaluations.items()}
    for section, tasks in given.items():
        for name, one in ({} if tasks is None else tasks.every).items():
            field = f"{section}.mix.{name}" if name else section
            for role, agent in (one.verifiers.roles if one.verifiers else {}).items():
                if agent not in job.agents:
                    raise ValueError(
                        f"{field}.verifiers.roles.{role}: '{agent}' is no agent of the job; known: "
                        + ", ".join(sorted(job.agents))
                    )


def check(job: JobSpec) -> None:
    """Raise ValueError, naming the field, for settings that do not fit networks, or language
    models."""
    networks = [name for name, policy in job.policies.items() if policy.network is not None]
    if job.environment is None:
        if networks:
            raise ValueError(
                f"policies.{networks[0]}.network: a network plays an environment; add the section "
                "`environment`, or give the policy a `model`"
            )
        for name in ("workflow", "tasks"):
            if getattr(job, name) is None and not job.offline_only:
                raise ValueError(f"{name}: is missing; language models play a workflow on tasks")
        return
    for name, policy in job.policies.items():
        if policy.network is None:
            raise ValueError(
                f"policies.{name}.model: a language model cannot play the vectorised environment; "
                "give the policy a `network`, or take `workflow` and `tasks` instead of "
                "`environment`"
            )
    for field, given, why in _foreign(job):
        if given:
            raise ValueError(f"{field}: {why}")


def check_pools(job: JobSpec, pools: Pools) -> None:
    """Raise ValueError, naming the field, for population settings that networks do not support."""
    population = job.population
    assert population is not None, "its pools are given"
    if population.engine is not None:
        raise ValueError(
            "population.engine: networks play inside of the rollout workers, which nothing serves; "
            "remove it"
        )
    for name in pools.learners:
        network = job.policies[name].network
        if network is None:
            return
        field = f"policies.{name}.network"
        roster, learning = pools.roster(name), network.learning.paradigm
        if learning in _TEAMS and len(roster) > 1 and not pools.together:
            raise ValueError(
                f"{field}.learning.paradigm: `{learning}` learns of what its agents do together, "
                f"and opponents take the places of some of {', '.join(roster)}; take ppo, mappo or "
                "dqn"
            )
        if population.game is not None and network.kind != "mlp":
            raise ValueError(
                f"{field}.kind: with `population.game` a decision is known by the information "
                "state alone; take `mlp`, or remove `game`"
            )


def _foreign(job: JobSpec) -> Iterator[tuple[str, bool, str]]:
    """Fields without a meaning for networks: path, whether it is set, what to do."""
    gone = "networks play `environment`; remove it"
    for name in ("workflow", "tasks"):
        yield name, getattr(job, name) is not None, gone
    for name in ("tools", "rewards"):
        yield name, bool(getattr(job, name)), "an environment gives its own rewards; remove it"
    learning = "how a network learns is said in policies.<name>.network.learning; remove it"
    yield "algorithm", job.algorithm != AlgorithmSpec(), learning
    text = "networks generate no turns; remove it"
    yield "routing", job.routing != RoutingSpec(), text
    yield "balancing", job.balancing != BalancingSpec(), text
    for name, agent in job.agents.items():
        yield f"agents.{name}", agent != AgentSpec(policy=agent.policy), f"`policy` is all: {text}"
    yield from _foreign_to_steps(job)


def _foreign_to_steps(job: JobSpec) -> Iterator[tuple[str, bool, str]]:
    pipeline = job.pipeline
    whole = "a network is updated on its whole step at once; use `sync`, `async` or `serial`"
    yield "pipeline.mode", pipeline.mode == "micro_batch", whole
    alone = "fragments of networks are not compared with each other; set it to"
    yield "pipeline.group_size", pipeline.group_size != 1, f"{alone} 1, or remove it"
    for name, none in (("redundant_trajectories", 0), ("dynamic_sampling", False)):
        yield f"pipeline.{name}", getattr(pipeline, name) != none, f"{alone} {none}, or remove it"
    tokens = "fragments of networks have no tokens; remove it"
    yield "pipeline.micro_batch_tokens", pipeline.micro_batch_tokens > 0, tokens
    yield "pipeline.balance_tokens", pipeline.balance_tokens, tokens
    batch = "the copies of an environment move together as they are; remove it"
    yield "pipeline.rollout", pipeline.rollout == "batch", batch
    kept = "what is used again is in the replay buffer of policies.<name>.network.learning; remove"
    yield "pipeline.max_uses", pipeline.max_uses > 1, f"{kept} it"
    filled = "columns of fragments cannot be filled; remove it"
    yield "pipeline.required_columns", bool(pipeline.required_columns), filled
    temperature = "networks explore as in training, or not at all; remove it, or set it to 0"
    for name, one in {"": job.evaluation, **job.evaluations}.items():
        field = f"evaluations.{name}" if name else "evaluation"
        yield f"{field}.temperature", (one.temperature or 0) != 0, temperature
