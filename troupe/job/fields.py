"""The fields of a job specification, and the values that follow from them.

`JobSpec` (spec.py) checks that the fields agree.
"""

from __future__ import annotations

from functools import cached_property

from pydantic import Field

from troupe.job.section import JOB_NAME, MAX_AGENTS, MAX_FUNCTIONS, MAX_POLICIES, Section, Seed
from troupe.job.sections.agents import AgentSpec, RoutingSpec
from troupe.job.sections.algorithm import REFERENCE_COLUMN, AlgorithmSpec
from troupe.job.sections.balancing import BalancingSpec
from troupe.job.sections.data import JobTasksSpec
from troupe.job.sections.functions import FunctionSpec, ToolSpec
from troupe.job.sections.network import EnvironmentSpec
from troupe.job.sections.policy import PolicySpec
from troupe.job.sections.population import Pools, PopulationSpec
from troupe.job.sections.run import (
    BestSpec,
    CheckpointSpec,
    CodeSpec,
    CurriculumSpec,
    EarlyStopSpec,
    EvaluationSetSpec,
    EvaluationSpec,
    LimitsSpec,
    LoggingSpec,
    OfflineSpec,
    PipelineSpec,
    PreferencesSpec,
    StateSpec,
    SupervisedSpec,
)
from troupe.scheduling.precedence import MAX_PRIORITY


class JobFields(Section):
    """The fields of `JobSpec`, not checked against each other."""

    name: str = Field(pattern=JOB_NAME)
    """Short name: lower-case letters, digits, '-', '_' and '.'; the job's id has '-' for '.'."""
    priority: int = Field(default=0, ge=-MAX_PRIORITY, le=MAX_PRIORITY)
    """Precedence over other jobs in the queue of jobs, at trainers and at the reward service
    (docs/sharing.md): a unit counts as a minute of waiting."""
    seed: Seed = 0
    """Root of all randomness of the job."""
    workflow: str | None = None
    """`package.module:attribute`: an async function of (query, agents, tools). Required for
    language models, unless all tasks are `verifiers`, which bring their own."""
    tasks: JobTasksSpec | None = None
    """Source of queries. Required for language models."""
    curriculum: CurriculumSpec | None = None
    """Choose tasks by their success rate (docs/data.md). Default: all tasks in turn."""
    code: CodeSpec | None = None
    """Files of the job's own code that are sent with it. Default: its modules are importable
    wherever workers run."""
    supervised: SupervisedSpec | None = None
    """Steps that learn from demonstrations, before the others or alone. Default: none."""
    preferences: PreferencesSpec | None = None
    """Steps that learn from pairs of replies (DPO, IPO), before the others or alone. Default:
    none."""
    environment: EnvironmentSpec | None = None
    """Environment of networks, instead of `workflow` and `tasks`."""
    agents: dict[str, AgentSpec] = Field(min_length=1, max_length=MAX_AGENTS)
    """The roles of the workflow or environment by name."""
    policies: dict[str, PolicySpec] = Field(min_length=1, max_length=MAX_POLICIES)
    """The policies by name."""
    tools: dict[str, ToolSpec] = Field(default={}, max_length=MAX_FUNCTIONS)
    """Functions, and MCP servers, that the workflow may call: `await tools.call(name, ...)`."""
    rewards: dict[str, FunctionSpec] = Field(default={}, max_length=MAX_FUNCTIONS)
    """Functions that are called with each finished trajectory. Their rewards per agent are added to
    the workflow's."""
    algorithm: AlgorithmSpec = AlgorithmSpec()
    """Policy optimization."""
    pipeline: PipelineSpec
    """How rollout and training are interleaved."""
    population: PopulationSpec | None = None
    """Pools of frozen versions that learners play against. Default: none."""
    balancing: BalancingSpec = BalancingSpec()
    """Moves of engines between policies."""
    routing: RoutingSpec = RoutingSpec()
    """Routing of turns to engines."""
    evaluation: EvaluationSpec = EvaluationSpec()
    """Held-out evaluation on the job's own tasks, without a name."""
    evaluations: dict[str, EvaluationSetSpec] = Field(default={}, max_length=MAX_FUNCTIONS)
    """Evaluations by name; their metrics are `evaluations/<name>/...`."""
    checkpoint: CheckpointSpec = CheckpointSpec()
    """Checkpoints."""
    state: StateSpec = StateSpec()
    """Durable training state, from which a job continues after a crash."""
    limits: LimitsSpec = LimitsSpec()
    """Deadlines and bounds."""
    stop: EarlyStopSpec | None = None
    """End the job early, by a metric. Default: it runs for `pipeline.steps`."""
    logging: LoggingSpec = LoggingSpec()
    """Metric sinks."""

    @property
    def offline(self) -> OfflineSpec | None:
        """The section of the steps that learn from rows; None: all are reinforcement learning."""
        return self.preferences or self.supervised

    @property
    def offline_only(self) -> bool:
        """Whether no trajectories are played, because all steps learn from rows and there are no
        evaluations."""
        return self.steps_are_offline and not self.evaluation_sets

    @property
    def steps_are_offline(self) -> bool:
        """Whether all steps learn from rows."""
        return self.offline is not None and self.offline.steps >= self.pipeline.steps

    def is_offline(self, step: int) -> bool:
        """Return whether the step, counted from 0, learns from rows."""
        return self.offline is not None and step < self.offline.steps

    @property
    def joins_policies(self) -> bool:
        """Whether joint pairs may have replies of several policies, whose trainers exchange sums
        over them."""
        joint = self.preferences is not None and self.preferences.joint
        return joint and len(self.trained_policies) > 1

    def exchanges_pairs(self, step: int) -> bool:
        """Return whether the trainers exchange sums over joint pairs in the step, counted from
        0."""
        return self.joins_policies and self.is_offline(step)

    def teachers_of(self, policy: str) -> tuple[str, ...]:
        """Return the teachers that the trainer of a policy holds (`distillation.divergence:
        full`)."""
        spec = self.algorithm.distillation
        if spec is None or spec.divergence != "full":
            return ()
        learned = self._learned_agents(policy)
        return tuple(sorted({one for agent, one in spec.teachers.items() if agent in learned}))

    def _learned_agents(self, policy: str) -> set[str]:
        """Return the agents whose samples a policy learns: its own, and in a population those whose
        seats it takes."""
        found = {name for name, agent in self.agents.items() if agent.policy == policy}
        if self.pools is not None:
            found.update(self.pools.seats.get(policy, ()))
        return found

    @property
    def evaluation_sets(self) -> dict[str, EvaluationSpec]:
        """All evaluations by name; "" is the section `evaluation`."""
        short = {"": self.evaluation} if self.evaluation.queries else {}
        return {**short, **self.evaluations}

    def evaluation_of(self, name: str) -> EvaluationSpec:
        """Return an evaluation by name; "" is the section `evaluation`, even if it has no
        queries."""
        return self.evaluations[name] if name else self.evaluation

    def replaced_agents(self, evaluation: str) -> list[str]:
        """Return the agents whose contribution an evaluation measures; "" is the section
        `evaluation`."""
        spec = self.evaluation_of(evaluation).contributions
        if spec is None:
            return []
        return spec.agents or [n for n, agent in self.agents.items() if agent.policy != spec.by]

    @property
    def best(self) -> BestSpec | EarlyStopSpec | None:
        """The section whose `metric` and `mode` choose the best checkpoint; None: none is kept."""
        kept = self.stop if self.stop is not None and self.stop.best else None
        return self.checkpoint.best or kept

    @property
    def best_intervals(self) -> list[int]:
        """The numbers of steps between values of the metric that chooses the best checkpoint; 0:
        only after the last step. Empty if no best checkpoint is kept."""
        best = self.best
        if isinstance(best, EarlyStopSpec) and not best.of_evaluation:
            return [1]
        return [] if best is None else [one.every for one in self.evaluation_sets.values()]

    def alpha_of(self, policy: str) -> int:
        """Return the staleness bound of a policy: 0 in the on-policy modes."""
        if self.pipeline.mode != "async":
            return 0
        own = self.policies[policy].alpha
        return self.pipeline.alpha if own is None else own

    @property
    def colocated(self) -> list[str]:
        """The policies whose engines and trainers take turns on the same devices."""
        default = self.pipeline.colocate
        policies = self.policies.items()
        return [
            name for name, one in policies if (default if one.colocate is None else one.colocate)
        ]

    @property
    def correction(self) -> str:
        """The importance correction, default resolved."""
        if self.algorithm.correction is not None or self.pipeline.mode != "async":
            return self.algorithm.correction or "none"
        return "truncated" if self.algorithm.loss_traits.yields else "masked"

    @property
    def needs_reference(self) -> bool:
        """Whether a loss needs log-probs of the first version that samples do not bring."""
        brought = REFERENCE_COLUMN in self.pipeline.required_columns
        penalised = self.algorithm.kl_coefficient > 0 and not brought
        return penalised or self.preferences is not None

    def constant_tokens(self, policy: str) -> int:
        """Divisor of `normalize: constant` per sequence of a policy, in tokens."""
        agents = self._learned_agents(policy)
        own = (self.agents[name].sampling.max_new_tokens for name in agents)
        # A teacher may have no agent, but then it has no loss.
        return self.algorithm.constant_tokens or max(own, default=1)

    @cached_property
    def pools(self) -> Pools | None:
        """The pools of the population; None without one."""
        if self.population is None:
            return None
        own = {name: policy for name, policy in self.policies.items() if "--" not in name}
        return Pools.of(self.population, self.agents, own)

    @property
    def slots(self) -> tuple[str, ...]:
        """Frozen policies that the population adds."""
        return () if self.pools is None else self.pools.slots

    def roster(self, policy: str) -> tuple[str, ...]:
        """Return all agents that a policy may play: its own, and agents that a population assigns
        to it. A network has inputs for all of them."""
        own = {name for name, agent in self.agents.items() if agent.policy == policy}
        if self.pools is not None:
            own.update(self.pools.roster(policy))
        return tuple(name for name in self.agents if name in own)

    @property
    def trained_policies(self) -> list[str]:
        """Names of the policies that are trained, sorted."""
        return sorted(name for name, policy in self.policies.items() if policy.trainable)
