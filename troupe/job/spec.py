"""The job specification as a pydantic model: its fields, and the checks that they agree."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, Final, Self

from pydantic import field_validator, model_validator

from troupe.algorithms.traits import losses_that
from troupe.contracts import metric_names
from troupe.job.engines import KINDS
from troupe.job.engines.sharing import check_sharing, engine_groups, shared_policies
from troupe.job.evaluations import check_evaluations, check_success
from troupe.job.fields import JobFields
from troupe.job.metrics import evaluation_field
from troupe.job.section import MAX_TRAJECTORIES, NAME, Section, check_entrypoint
from troupe.job.sections.agents import AgentSpec, RoutingSpec
from troupe.job.sections.algorithm import AlgorithmSpec
from troupe.job.sections.balancing import BalancingSpec
from troupe.job.sections.data import TasksSpec
from troupe.job.sections.population import Pools, slot_problem
from troupe.rpc.errors import NotFound

# Defaults for jobs with an environment: fragments take equally long and are not compared.
_PIPELINE: Final = {"mode": "sync", "group_size": 1}
# The workflow of jobs whose tasks come from environments of the `verifiers` library.
VERIFIERS_WORKFLOW: Final = "troupe.workflow.environments.adapters.verifiers:play"
# Paradigms that need the joint actions of all agents of a policy.
_TEAMS: Final = ("vdn", "qmix", "maddpg")


def _with_defaults(job: Any) -> Any:
    """Return the unvalidated job with defaults: of the pipeline if it has an environment, and of
    the workflow if all its tasks come from the `verifiers` library."""
    if isinstance(job, dict) and job.get("environment") is not None:
        pipeline = job.get("pipeline")
        if isinstance(pipeline, dict):
            return {**job, "pipeline": {**_PIPELINE, **pipeline}}
    if isinstance(job, dict) and job.get("workflow") is None:
        tasks = job.get("tasks")
        tasks = tasks.model_dump() if isinstance(tasks, Section) else tasks
        if isinstance(tasks, dict):
            mix = tasks.get("mix")
            parts = list(mix.values()) if isinstance(mix, dict) and mix else [tasks]
            if all(isinstance(one, dict) and one.get("verifiers") for one in parts):
                return {**job, "workflow": VERIFIERS_WORKFLOW}
    return job


class JobSpec(JobFields):
    """One training job: agents, policies, the workflow they play, the algorithm."""

    _defaults = model_validator(mode="before")(_with_defaults)

    @field_validator("workflow")
    @classmethod
    def _is_entrypoint(cls, workflow: str | None) -> str | None:
        return None if workflow is None else check_entrypoint(workflow)

    @model_validator(mode="after")
    def _references(self) -> Self:
        for agent, spec in self.agents.items():
            if spec.policy not in self.policies:
                known = ", ".join(sorted(self.policies))
                raise ValueError(
                    f"agents.{agent}.policy: '{spec.policy}' is not a policy; known: {known}"
                )
        played = {agent.policy for agent in self.agents.values()}
        if (pools := self.pools) is not None:
            played.update(pools.slots, pools.learners)
        if (distillation := self.algorithm.distillation) is not None:
            played.update(distillation.teachers.values())
        for one in self.evaluation_sets.values():
            if one.contributions is not None and one.contributions.by is not None:
                played.add(one.contributions.by)
        unused = sorted(set(self.policies) - played)
        if unused:
            raise ValueError(
                f"policies.{unused[0]}: no agent uses it; remove it, or name it in the `policy` of "
                "an agent"
            )
        if not self.trained_policies:
            raise ValueError("policies: none is trainable; set `trainable: true` on at least one")
        if metric_names.TEAM in self.agents:
            raise ValueError(
                "agents.team: the key `team` of rewards is the team's success and belongs to no "
                "agent; choose another name"
            )
        for name in ("evaluation", "evaluations"):
            if name not in self.policies:
                continue
            raise ValueError(
                f"policies.{name}: metrics of evaluations begin with this name, and metrics "
                "of a policy with the policy's; choose another name"
            )
        for section in (
            self.agents,
            self.policies,
            self.tools,
            self.rewards,
            self.evaluations,
        ):
            for name in section:
                if not re.fullmatch(NAME, name):
                    raise ValueError(f"'{name}': names are lower-case letters, digits, '-' and '_'")
        _check_networks(self)
        _check_roles(self)
        return self

    @model_validator(mode="after")
    def _population(self) -> Self:
        if self.population is not None and self.agents and not self._dangling:
            own = {n: p for n, p in self.policies.items() if "--" not in n}
            pools = Pools.of(self.population, self.agents, own)
            if strange := set(self.policies) - set(own) - set(pools.slots):
                raise ValueError(
                    f"policies.{min(strange)}: names with '--' belong to the population's slots "
                    f"({', '.join(pools.slots)}); choose another name"
                )
            _check_population(self, pools)
            if self.pipeline.queries_per_step < (places := len(pools.places)):
                raise ValueError(
                    f"pipeline.queries_per_step: {self.pipeline.queries_per_step} cannot give each "
                    f"of {places} learners and the agents that it learns a query; raise it"
                )
            if self.environment is not None:
                _check_network_pools(self, pools)
            # Added to the job, so that they are served like other policies.
            self.policies.update(pools.added(self.population, own))
        return self

    @model_validator(mode="after")
    def _sharing(self) -> Self:
        check_sharing(self)
        return self

    @model_validator(mode="after")
    def _evaluations(self) -> Self:
        check_evaluations(self)
        return self

    @model_validator(mode="after")
    def _curriculum(self) -> Self:
        if self.curriculum is None:
            return self
        check_success(self, "curriculum", self.curriculum.success)
        if self.environment is not None or self.tasks is None:
            raise ValueError("curriculum: the job has no `tasks` to choose from; leave it out")
        if self.pipeline.early_start:
            raise ValueError(
                "curriculum: not with `pipeline.early_start`, since the tasks of the next step "
                "depend on how this one went; leave one of them out"
            )
        return self

    @model_validator(mode="after")
    def _rewards(self) -> Self:
        for name, tool in self.tools.items():
            if tool.ready is not None:
                raise ValueError(f"tools.{name}.ready: `{tool.ready}` is a reward; see `rewards`")
        columns = self.tasks.columns if self.tasks is not None else {}
        for name, reward in self.rewards.items():
            field = f"rewards.{name}.arguments"
            # They would replace what the function is to score.
            for argument in sorted({"query", "turns", "rewards"} & reward.arguments.keys()):
                raise ValueError(
                    f"{field}.{argument}: each call passes its own `{argument}`; use another name"
                )
            if reward.ready is None:
                continue
            if (agent := reward.arguments.get("agent")) and agent not in self.agents:
                known = ", ".join(sorted(self.agents))
                raise ValueError(f"{field}.agent: '{agent}' is not an agent; known: {known}")
            for argument, wanted in reward.query_fields.items():
                if columns and wanted not in columns:
                    raise ValueError(
                        f"{field}.{argument}: the data set has no field '{wanted}' "
                        f"(`tasks.columns`: {', '.join(sorted(columns))})"
                    )
        return self

    @model_validator(mode="after")
    def _size_of_a_step(self) -> Self:
        pipeline = self.pipeline
        refills = pipeline.max_refills or pipeline.queries_per_step
        queries = pipeline.queries_per_step + pipeline.over_sampling
        queries += refills if pipeline.dynamic_sampling else 0
        total = queries * (pipeline.group_size + pipeline.redundant_trajectories)
        if total > MAX_TRAJECTORIES:
            raise ValueError(
                f"pipeline.queries_per_step: a step may come to {total:,} trajectories "
                f"({queries:,} queries, with over_sampling and refills), more than "
                f"{MAX_TRAJECTORIES:,}; lower it, or group_size"
            )
        return self

    @model_validator(mode="after")
    def _pipeline(self) -> Self:
        pipeline = self.pipeline
        if pipeline.mode == "async":
            if self.algorithm.correction == "none":
                raise ValueError(
                    "algorithm.correction: mode `async` trains on samples of older versions and "
                    "needs a correction; remove it, or choose `truncated`, `masked` or "
                    "`sequence_masked`"
                )
            if pipeline.deterministic:
                raise ValueError(
                    "pipeline.deterministic: in mode `async` the contents of a step depend on "
                    "time; use `sync` or `micro_batch`"
                )
        elif kept := [n for n, p in self.policies.items() if p.engine.cache == "keep"]:
            raise ValueError(
                f"policies.{kept[0]}.engine.cache: tokens that are drawn with keys and values of "
                "former weights need a correction; use mode `async`, or `recompute`"
            )
        elif pipeline.max_uses > 1:
            raise ValueError(
                "pipeline.max_uses: a reused sample comes from an older version; use mode `async`"
            )
        if pipeline.mode == "micro_batch" and self.algorithm.advantage_traits.of_whole_steps:
            raise ValueError(
                f"algorithm.advantage: `{self.algorithm.advantage}` needs the rewards of the whole "
                "step before its first gradient, but mode `micro_batch` begins before they are "
                "known; use pipeline.mode `sync` (or `serial`, `async`), or another advantage"
            )
        if pipeline.mode == "micro_batch" and self.algorithm.updates > 1:
            field = "epochs" if self.algorithm.epochs > 1 else "minibatches"
            raise ValueError(
                f"algorithm.{field}: several updates need all samples of the step before the "
                "first, but mode `micro_batch` begins before they are complete; use pipeline.mode "
                "`sync` (or `serial`, `async`)"
            )
        replaced = self.correction != "none" and self.algorithm.loss_traits.yields
        behaviour = self.algorithm.old_logprobs == "behaviour"
        if self.algorithm.updates > 1 and replaced and behaviour:
            raise ValueError(
                f"algorithm.old_logprobs: with correction `{self.correction}` loss "
                f"`{self.algorithm.loss}` is not clipped against `behaviour`, and nothing keeps "
                "several updates near the weights that the step began with; choose `recomputed`"
            )
        if self.algorithm.dual_clip is not None and replaced and behaviour:
            others = losses_that(lambda traits: traits.reads_dual_clip and not traits.yields)
            raise ValueError(
                f"algorithm.dual_clip: correction `{self.correction}` replaces the clip of loss "
                f"`{self.algorithm.loss}`; remove it, or choose old_logprobs `recomputed`, "
                f"correction `none` or loss {others}"
            )
        compiled = [n for n, p in self.policies.items() if p.trainer.compile == "on"]
        if pipeline.deterministic and compiled:
            raise ValueError(
                f"policies.{compiled[0]}.trainer.compile: compiled kernels round differently for "
                "passes of other sizes; use `off` with `pipeline.deterministic`"
            )
        if pipeline.deterministic and pipeline.over_sampling:
            raise ValueError(
                "pipeline.over_sampling: which queries are complete first depends on time; not "
                "with `pipeline.deterministic`"
            )
        if pipeline.deterministic and pipeline.redundant_trajectories:
            raise ValueError(
                "pipeline.redundant_trajectories: which trajectories complete first depends on "
                "time; not with `pipeline.deterministic`"
            )
        return self

    @model_validator(mode="after")
    def _early_start(self) -> Self:
        pipeline = self.pipeline
        if not pipeline.early_start:
            return self
        if pipeline.mode not in ("sync", "micro_batch"):
            why = "already has trajectories of several steps"
            if pipeline.mode == "serial":
                why = "does one thing after another"
            raise ValueError(
                f"pipeline.early_start: mode `{pipeline.mode}` {why}; leave it out, or use mode "
                "`sync` or `micro_batch`"
            )
        if self.population is not None or self.environment is not None:
            raise ValueError(
                "pipeline.early_start: in a job of populations or networks, the pairing of players "
                "and their "
                "weights are known only when a step opens; leave it out"
            )
        if pipeline.rollout == "batch":
            raise ValueError(
                "pipeline.early_start: with pipeline.rollout `batch` trajectories wait for each "
                "other before every turn; leave it out, or use `trajectory`"
            )
        return self

    @model_validator(mode="after")
    def _colocate(self) -> Self:
        given = [name for name, policy in self.policies.items() if policy.colocate]
        field = "pipeline.colocate" if self.pipeline.colocate else ""
        field = field or (f"policies.{given[0]}.colocate" if given else "")
        if not field:
            return self
        mode = self.pipeline.mode
        if mode not in ("sync", "serial"):
            raise ValueError(
                f"{field}: in mode `{mode}` engines and trainers work at the same time; use mode "
                "`sync` or `serial`, or leave it out"
            )
        if self.pipeline.early_start:
            raise ValueError(
                f"{field}: not with `pipeline.early_start`, which begins trajectories while "
                "policies are trained; leave one of them out"
            )
        if self.population is not None or self.environment is not None:
            raise ValueError(
                f"{field}: not in a job of populations or networks, whose engines play against "
                "each other while policies are trained; leave it out"
            )
        return self

    @model_validator(mode="after")
    def _critic(self) -> Self:
        critic = self.algorithm.value_function
        if critic is None:
            return self
        if critic.observes == "team":
            self._team_critic()
        played = [agent.policy for agent in self.agents.values()]
        shared = any(self.policies[name].trainable and played.count(name) > 1 for name in played)
        if critic.episodes == "team" and self.population is None and not shared:
            raise ValueError(
                "algorithm.critic.episodes: `team` joins the turns of agents that share a trained "
                "policy, and every agent has a policy of its own; use `agent`, or let agents share "
                "a policy (`observes: team` shows each critic the others' turns)"
            )
        return self

    def _team_critic(self) -> None:
        field = "algorithm.critic.observes"
        if len(self.agents) < 2:
            raise ValueError(
                f"{field}: `team` needs the observations of at least two agents, and there is "
                f"one, '{next(iter(self.agents))}'; use `agent`"
            )
        sources = {
            p.language_model.tokenizer_source: name for name, p in sorted(self.policies.items())
        }
        if len(sources) > 1:
            one, other, *_ = sources.values()
            raise ValueError(
                f"{field}: `team` reads the other agents' tokens, but the tokenizers "
                f"of policies '{one}' and '{other}' differ; use `agent`, or give them "
                "one `tokenizer`"
            )
        if self.pipeline.deterministic:
            raise ValueError(
                f"{field}: the replies of other agents at the beginning of a turn may depend on "
                "time; use `agent` with `pipeline.deterministic`"
            )

    @model_validator(mode="after")
    def _distillation(self) -> Self:
        spec = self.algorithm.distillation
        for agent, teacher in {} if spec is None else spec.teachers.items():
            field = f"algorithm.distillation.teachers.{agent}"
            if agent not in self.agents:
                known = ", ".join(sorted(self.agents))
                raise ValueError(f"{field}: the job has no such agent; known: {known}")
            if teacher not in self.policies:
                known = ", ".join(sorted(self.policies))
                raise ValueError(f"{field}: '{teacher}' is not a policy; known: {known}")
            if teacher in self.slots:
                raise ValueError(f"{field}: {slot_problem(teacher)}")
            student, wise = self.policies[self.agents[agent].policy], self.policies[teacher]
            if wise.trainable or not student.trainable:
                which = teacher if wise.trainable else self.agents[agent].policy
                state = "trained" if wise.trainable else "frozen"
                raise ValueError(
                    f"{field}: a trained policy learns from a frozen one, but '{which}' is {state};"
                    " set its `trainable`"
                )
            if None in (student.model, wise.model) or student.simulated or wise.simulated:
                raise ValueError(f"{field}: both must be language models that are not simulated")
            if wise.lora is not None:
                raise ValueError(f"{field}: '{teacher}' has an adapter; merge it into its model")
            sources = [one.language_model.tokenizer_source for one in (student, wise)]
            if sources[0] != sources[1]:
                raise ValueError(
                    f"{field}: both must have the same tokenizer, but theirs are "
                    f"{sources[0]} and {sources[1]}; set `model.tokenizer` of one of them"
                )
        if spec is not None and self.pipeline.dynamic_sampling:
            raise ValueError(
                "pipeline.dynamic_sampling: drops groups whose rewards are equal, but a teacher "
                "also teaches with these; not with `algorithm.distillation`"
            )
        return self

    @model_validator(mode="after")
    def _recorded_logprobs(self) -> Self:
        for name, agent in self.agents.items():
            sampling = agent.sampling
            cut = sampling.top_p < 1 or sampling.top_k > 0
            for policy in self._played_by(name):
                kind = KINDS[self.policies[policy].engine.kind]
                if not (cut or sampling.logprobs != "full") or sampling.logprobs in kind.logprobs:
                    continue
                also = "" if policy == agent.policy else f", which `{policy}` has,"
                raise ValueError(
                    f"agents.{name}.sampling.logprobs: engines of kind `{kind.name}`{also} do not "
                    f"report `{sampling.logprobs}` log-probs of truncated distributions; choose "
                    f"`{kind.logprobs[0]}`, or sample without top_p and top_k"
                )
        return self

    def _played_by(self, agent: str) -> list[str]:
        """Return the policies that may play an agent: its own, one that replaces it in an
        evaluation (`contributions`), and in a population learners and slots."""
        found = [self.agents[agent].policy]
        for name, one in self.evaluation_sets.items():
            if one.contributions and one.contributions.by and agent in self.replaced_agents(name):
                found.append(one.contributions.by)
        if (pools := self.pools) is not None and agent in pools.agents:
            found += [name for name, seats in pools.seats.items() if agent in seats]
            found += [*pools.pool_of(agent).slots, *pools.pool_of(agent).evaluation_slots]
        return list(dict.fromkeys(found))

    @model_validator(mode="after")
    def _offline(self) -> Self:
        spec = self.offline
        if spec is None:
            return self
        section = "supervised" if spec is self.supervised else "preferences"
        joins, once = self.joins_policies, "trainers of joint pairs exchange margins once a step"
        idle = next((n for n in self.trained_policies if self.policies[n].simulated), "")
        for field, given, why in (
            ("environment", self.environment is not None, "networks cannot learn conversations"),
            ("population", self.population is not None, "learners would have no opponents"),
            (
                "pipeline.dynamic_sampling",
                self.pipeline.dynamic_sampling,
                "it would drop rows, whose rewards have no meaning",
            ),
            (
                "pipeline.max_uses",
                self.pipeline.max_uses > 1,
                "rows would be learned again in the steps after theirs, also in those of "
                "reinforcement learning; set it to 1, or make these steps in a job of their own, "
                "and begin with its checkpoint",
            ),
            (
                "algorithm.kl_coefficient",
                self.algorithm.kl_coefficient > 0 and not self.offline_only,
                "it would measure from the weights before these steps; make them in a job of "
                "their own, and begin with its checkpoint",
            ),
            (
                "supervised",
                self.supervised is not None and self.preferences is not None,
                "their reference would be the weights before the demonstrations; learn these in "
                "a job of their own, and begin with its checkpoint",
            ),
            (
                "algorithm.router_aux_loss",
                self.preferences is not None and self.algorithm.router_aux_loss > 0,
                "it weighs samples, and their loss is one of pairs; set it to 0",
            ),
            ("algorithm.epochs", joins and self.algorithm.epochs > 1, f"{once}; set it to 1"),
            ("algorithm.minibatches", joins and self.algorithm.updates > 1, f"{once}; set it to 1"),
            (f"policies.{idle}.simulated", joins and bool(idle), f"{once}, and it has none"),
        ):
            if given:
                raise ValueError(f"{field}: not with `{section}`; {why}")
        if spec.steps > self.pipeline.steps:
            raise ValueError(
                f"{section}.steps: {spec.steps} are more than pipeline.steps, which counts them"
            )
        trained = [n for n, a in self.agents.items() if self.policies[a.policy].trainable]
        if self.preferences is not None and self.preferences.joint and len(trained) < 2:
            raise ValueError(
                "preferences.joint: only one agent learns, and a joint pair is of what several "
                "agents said; remove it, or add agents of trained policies"
            )
        if spec.agent is not None and spec.agent not in trained:
            raise ValueError(
                f"{section}.agent: '{spec.agent}' is not an agent of a trained policy; known: "
                + ", ".join(trained)
            )
        return self

    @model_validator(mode="after")
    def _training(self) -> Self:
        for name, policy in self.policies.items():
            trainer = policy.trainer
            # `gang: auto` is a multiple of what divides passes and experts.
            if max(trainer.ranks, trainer.gang_multiple) == 1 or not policy.trainable:
                continue
            part = "context_parallel" if trainer.context_parallel > 1 else "expert_parallel"
            field = f"policies.{name}.trainer." + ("gang" if trainer.ranks > 1 else part)
            if self.pipeline.deterministic:
                raise ValueError(
                    f"{field}: several devices add in another order and round differently; use 1 "
                    "with `pipeline.deterministic`"
                )
        self.balancing.check(self.policies, shared_policies(self))
        for name, policy in self.policies.items():
            if policy.lora is None:
                continue
            if policy.simulated is not None:
                raise ValueError(
                    f"policies.{name}.lora: a simulated policy does not learn; remove "
                    "`lora` or `simulated`"
                )
            if policy.lora.dropout and self.pipeline.deterministic:
                raise ValueError(
                    f"policies.{name}.lora.dropout: dropout depends on how samples are cut "
                    "into micro-batches; set it to 0 with `pipeline.deterministic`"
                )
        return self

    @model_validator(mode="after")
    def _affinity(self) -> Self:
        for agent in self.routing.affinity.agents:
            if agent not in self.agents:
                known = ", ".join(sorted(self.agents))
                raise ValueError(
                    f"routing.affinity.agents: '{agent}' is not an agent; known: {known}"
                )
        # Engines without pools have the device class of their worker, which is unknown here.
        pools = [policy.engine.pools for policy in self.policies.values()]
        if all(pools):
            classes = {pool.device_class for some in pools for pool in some}
            for field, name in self.routing.affinity.declared():
                if name not in classes:
                    raise ValueError(
                        f"routing.affinity.{field}: no engine has the class '{name}'; known: "
                        + ", ".join(sorted(classes))
                    )
        return self

    @property
    def balances(self) -> bool:
        """Whether engines move between policies."""
        if self.balancing.inter is not None:
            return self.balancing.inter
        return self.balancing.possible(self.policies, shared_policies(self))

    @property
    def summary(self) -> str:
        """A line for people: `2 agents, trains checker, solver, 12 steps`, and which policies share
        engines."""
        trained = ", ".join(self.trained_policies)
        agents = "1 agent" if len(self.agents) == 1 else f"{len(self.agents)} agents"
        steps = "1 step" if self.pipeline.steps == 1 else f"{self.pipeline.steps} steps"
        groups = map(str, engine_groups(self))
        return ", ".join([agents, f"trains {trained}", steps, *groups])

    @property
    def _dangling(self) -> bool:
        """Whether an agent names an unknown policy."""
        return any(agent.policy not in self.policies for agent in self.agents.values())


def _check_roles(job: JobSpec) -> None:
    """Raise ValueError that names the field if a role of a `verifiers` environment is assigned to
    an agent that the job does not have."""
    given: dict[str, TasksSpec | None] = {"tasks": job.tasks}
    given |= {f"evaluations.{name}.tasks": one.tasks for name, one in job.evaluations.items()}
    for section, tasks in given.items():
        for name, one in ({} if tasks is None else tasks.every).items():
            field = f"{section}.mix.{name}" if name else section
            for role, agent in (one.verifiers.roles if one.verifiers else {}).items():
                if agent not in job.agents:
                    raise ValueError(
                        f"{field}.verifiers.roles.{role}: '{agent}' is not an agent of the job; "
                        "known: " + ", ".join(sorted(job.agents))
                    )


def _check_networks(job: JobSpec) -> None:
    """Raise ValueError that names the field for settings that do not match networks or language
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


def _check_network_pools(job: JobSpec, pools: Pools) -> None:
    """Raise ValueError that names the field for population settings that networks do not
    support."""
    population = job.population
    assert population is not None, "its pools are given"
    if population.engine is not None:
        raise ValueError(
            "population.engine: networks run inside the rollout workers, without engines; remove it"
        )
    for name in pools.learners:
        network = job.policies[name].network
        if network is None:
            return
        field = f"policies.{name}.network"
        roster, learning = pools.roster(name), network.learning.paradigm
        if learning in _TEAMS and len(roster) > 1 and not pools.together:
            raise ValueError(
                f"{field}.learning.paradigm: `{learning}` learns from joint actions of its agents, "
                f"but opponents replace some of {', '.join(roster)}; use ppo, mappo or "
                "dqn"
            )
        if population.game is not None and network.kind != "mlp":
            raise ValueError(
                f"{field}.kind: with `population.game` a decision must depend only on the "
                "information "
                "state; use `mlp`, or remove `game`"
            )


def _foreign(job: JobSpec) -> Iterator[tuple[str, bool, str]]:
    """Yield fields without a meaning for networks: path, whether it is set, and the remedy."""
    gone = "networks play `environment`; remove it"
    for name in ("workflow", "tasks"):
        yield name, getattr(job, name) is not None, gone
    for name in ("tools", "rewards"):
        yield name, bool(getattr(job, name)), "an environment gives its own rewards; remove it"
    learning = "policies.<name>.network.learning defines how a network learns; remove it"
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
    batch = "the copies of an environment already move together; remove it"
    yield "pipeline.rollout", pipeline.rollout == "batch", batch
    kept = "the replay buffer of policies.<name>.network.learning reuses samples; remove"
    yield "pipeline.max_uses", pipeline.max_uses > 1, f"{kept} it"
    filled = "columns of fragments cannot be filled; remove it"
    yield "pipeline.required_columns", bool(pipeline.required_columns), filled
    temperature = "networks explore as in training, or not at all; remove it, or set it to 0"
    for name, one in {"": job.evaluation, **job.evaluations}.items():
        field = evaluation_field(name)
        yield f"{field}.temperature", (one.temperature or 0) != 0, temperature
        words = "networks write no replies; remove it"
        yield f"{field}.answer_pattern", one.answer_pattern is not None, words
        yield f"{field}.judges", bool(one.judges), words
        yield f"{field}.contributions", one.contributions is not None, words


def _check_population(job: JobSpec, pools: Pools) -> None:
    """Raise ValueError that names the field for population settings that do not match the job."""
    population = job.population
    assert population is not None, "its pools are given"
    for name in pools.slots:
        # A job that passed through a service already has its slots, all frozen.
        if name in job.policies and job.policies[name].trainable:
            raise ValueError(
                f"policies.{name}: is a slot, which the population adds; choose another name, or "
                "remove it"
            )
    for name in pools.learners if population.restart == "base" else ():
        origin = job.policies[name].init_from
        if origin is not None and origin.optimizer:
            raise ValueError(
                f"policies.{name}.init_from.optimizer: each restart (population.restart: base) "
                "begins with a new optimizer; leave it out, or restart from the latest weights"
            )
    if population.algorithm != "regularized":
        return
    for name in pools.learners:
        network = job.policies[name].network
        if network is not None:
            held = getattr(network.learning, "entropy_coefficient", 0.0) > 0
            by = f"policies.{name}.network.learning.entropy_coefficient (ppo, mappo)"
        else:
            held = job.algorithm.kl_coefficient > 0 or job.algorithm.entropy_coefficient > 0
            by = "algorithm.kl_coefficient or algorithm.entropy_coefficient"
        if not held:
            raise ValueError(
                f"population.algorithm: '{name}' has no regularizer, so `regularized` would equal "
                f"`self_play`; set {by}, or use `self_play`"
            )


def policy_of(spec: Mapping[str, Any], name: str) -> str:
    """Return the policy called `name`, or else the policy that plays the agent called `name`.

    `spec`: a specification as JSON, perhaps of an older release. Raises `NotFound`.
    """
    policies, agents = spec.get("policies", {}), spec.get("agents", {})
    if name in policies:
        return name
    if name in agents:
        return str(agents[name]["policy"])
    played = [f"{agent} (plays {one['policy']})" for agent, one in sorted(agents.items())]
    raise NotFound(
        f"the job has no policy and no agent called {name!r}",
        field="policy",
        value=name,
        remedy=f"Policies: {', '.join(sorted(policies)) or 'none'}; "
        f"agents: {', '.join(played) or 'none'}.",
    )
