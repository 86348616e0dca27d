"""Sections of a job for its run: code, pipeline, evaluation, checkpoints, limits, logging.

The docstring under a field is its documentation: `troupe job schema`, the job reference
and editors show it.
"""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, field_validator, model_validator

from troupe.contracts import metric_names
from troupe.job.section import (
    MAX_AGENTS,
    MAX_COEFFICIENT,
    MAX_NORM,
    MAX_QUERIES,
    MAX_STEPS,
    MAX_TRAJECTORIES,
    ColumnName,
    Queries,
    Rate,
    Seconds,
    Section,
    Steps,
    StepsOrNone,
    TokensOrNone,
    check_pattern,
)
from troupe.job.sections.data import TasksSpec
from troupe.scheduling.defaults import CPU


class CodeSpec(Section):
    """Files of the job's own code, sent with it at submission. Workers import the workflow, tasks,
    environment, tools and rewards from them in preference to installed modules."""

    include: list[str] = Field(min_length=1, max_length=256)
    """Files, folders and patterns (`conf/*.yaml`) below `root`: at most 1,000 files, of 16 MiB in
    total."""
    exclude: list[str] = Field(default=[], max_length=256)
    """Patterns of paths below `root` that are left out: `my_team/data`, `*.csv`."""
    root: str = Field(default=".", min_length=1)
    """Folder from which modules are imported, relative to the directory of submission: `src` for
    `src/my_team/flow.py` as `my_team.flow`."""
    sha256: str | None = Field(default=None, pattern=r"^[0-9a-f]{64}$")
    """Hash of the files, filled in at submission. If given, nothing is sent: the cluster already
    has the files."""

    @field_validator("include", "exclude")
    @classmethod
    def _below(cls, names: list[str]) -> list[str]:
        for name in names:
            parts = name.split("/")
            if not name or "\0" in name or name.startswith("/") or ".." in parts:
                raise ValueError(f"{name!r} does not name files below `root`; leave out '..'")
        return [name.rstrip("/") for name in names]


class OfflineSpec(Section):
    """Steps that learn from rows of a data set, which nobody plays, before reinforcement learning
    or alone."""

    tasks: TasksSpec
    """The rows, of the split "train"."""
    steps: Steps
    """Steps of this kind, a part of `pipeline.steps`. If they are all of them, the job does nothing
    else and, without evaluations, needs neither `workflow` nor `tasks`."""
    rows_per_step: int = Field(default=0, ge=0, le=MAX_QUERIES)
    """Rows per step; 0: `queries_per_step` times `group_size`."""
    agent: str | None = None
    """The agent whose policy learns rows without `agent`. Default: the only agent."""
    template: bool = True
    """Format texts as a user's message and replies with the tokenizer's chat template; false: join
    them unchanged."""
    max_tokens: TokensOrNone = 0
    """Longest sample, in tokens; longer ones are cut off at the end, or left out if the prompt
    alone is as long. 0: the model's positions."""
    lr: Rate | None = None
    """Learning rate of these steps, with the schedule of the policy's `optimizer` over them.
    Default: the policy's."""

    @field_validator("tasks")
    @classmethod
    def _demonstrated(cls, tasks: TasksSpec) -> TasksSpec:
        if tasks.verifiers is not None:
            raise ValueError(
                "`verifiers` is an environment, whose tasks are not demonstrations; give a "
                "`dataset` "
                "or a `source`"
            )
        return tasks


class SupervisedSpec(OfflineSpec):
    """Supervised fine-tuning (SFT): the job's first steps learn from demonstrations, by the
    cross-entropy of the assistant's tokens, in the same trainer. Reinforcement learning follows."""

    tasks: TasksSpec
    """Demonstrations, one per row of the split "train": `messages` (a conversation), or `prompt`
    and `completion` (texts, or messages); and `agent`, if several agents learn."""
    turns: Literal["all", "last"] = "all"
    """Assistant messages of `messages` to learn; each is a sample."""


class PreferencesSpec(OfflineSpec):
    """Direct preference optimization: the job's first steps learn from pairs of a preferred and a
    rejected reply, in the same trainer. Reinforcement learning follows. The reference is the
    policy's first version."""

    tasks: TasksSpec
    """Pairs, one per row of the split "train": `prompt`, `chosen` and `rejected` (texts, or
    messages), or `chosen` and `rejected` (whole conversations); and `agent`, if several agents
    learn. With `joint`, `agents`: these fields by the name of each agent."""
    joint: bool = False
    """Whether a pair is of joint replies: m is the sum over the row's agents, so that one sigmoid
    compares what the team said (docs/algorithms.md). Trainers of several policies exchange their
    parts of m once per step. False: each agent's pair is a pair of its own."""
    loss: Literal["dpo", "ipo"] = "dpo"
    """With m the log-ratio log pi/pi_ref of the preferred reply minus the rejected reply's: `dpo`,
    -log sigmoid(`beta` m) (Rafailov et al. 2023, equation 7); `ipo`, (m - 1/(2 `beta`))^2, the
    log-ratios averaged over a reply's tokens (Azar et al. 2024, equation 17)."""
    beta: float = Field(default=0.1, gt=0, le=MAX_COEFFICIENT)
    """How strongly the reference holds the policy; `ipo`: tau."""

    @model_validator(mode="after")
    def _of_a_team(self) -> Self:
        if self.joint and self.agent is not None:
            raise ValueError(
                "agent: the rows of `joint` pairs name their agents; remove it, or `joint`"
            )
        return self


class PipelineSpec(Section):
    """How rollout and training are interleaved."""

    mode: Literal["serial", "sync", "micro_batch", "async"] = "micro_batch"
    """Pipeline mode; see docs/architecture.md."""
    alpha: int = Field(default=1, ge=1, le=64)
    """`async`: staleness bound. A sample is trained by a version at most this many versions newer
    than the one that its trajectory started with (RollArt's bounded staleness)."""
    deterministic: bool = False
    """The same seed gives bitwise the same weights, independent of timing and crashes;
    docs/guarantees.md states the cost. Not in mode `async`."""
    steps: StepsOrNone
    """Optimizer steps per trained policy; 0: only evaluate (`troupe evaluate`)."""
    queries_per_step: int = Field(ge=1, le=MAX_QUERIES)
    """Queries in a global batch. A step has at most 262,144 trajectories, `over_sampling` and
    `max_refills` included."""
    group_size: int = Field(default=8, ge=1, le=4096)
    """Trajectories per query. They start together, on one rollout worker."""
    redundant_trajectories: int = Field(default=0, ge=0, le=4096)
    """Trajectories started per query beyond `group_size` (RollArt's redundant environments). The
    first `group_size` that complete form the group, the others are dropped as "redundant"; they
    also replace failed ones. Favours short trajectories; the metrics `redundancy/...` measure that.
    Not with `deterministic`."""
    rollout: Literal["trajectory", "batch"] = "trajectory"
    """`trajectory`: trajectories do not wait for each other. `batch`: a barrier of all trajectories
    of a rollout worker before every turn and tool call, as in environments that are stepped as one
    batch; a baseline for measurements."""
    early_start: bool = False
    """Begin the trajectories of the next step while the current one is trained: load queries, reset
    environments, make prompts; the first turn waits for the new weights. Modes `sync` and
    `micro_batch`; not with populations or networks."""
    colocate: bool = False
    """Engines and trainers take turns on the same devices: while policies are trained their engines
    sleep, and while trajectories are rolled out the training state is in the host's memory. Modes
    `sync` and `serial`; not with populations or networks."""
    micro_batch_samples: int = Field(default=32, ge=1, le=65_536)
    """Samples per micro-batch."""
    micro_batch_tokens: TokensOrNone = 0
    """Upper bound of tokens in a micro-batch; 0: none."""
    balance_tokens: bool = False
    """Form micro-batches of about equally many tokens."""
    over_sampling: Queries = 0
    """Queries in flight beyond `queries_per_step`; a step takes the first that are complete. The
    others are dropped as "surplus"; in mode `async` the next step takes them unless they are too
    old."""
    dynamic_sampling: bool = False
    """Drop groups whose rewards are all equal, and replace each query without remaining samples by
    a further one (DAPO, section 3.2)."""
    max_refills: Queries = 0
    """`dynamic_sampling`: maximum number of further queries per step; 0: `queries_per_step`."""
    max_uses: int = Field(default=1, ge=1, le=16)
    """Optimizer steps that a sample may contribute to; above 1 only in mode `async`, within
    `alpha`."""
    required_columns: list[ColumnName] = Field(default=[], max_length=64)
    """Columns, in addition to the reward, that must be filled before a sample is trained, except
    demonstrations. Workflows and other services fill them."""

    @field_validator("required_columns")
    @classmethod
    def _columns(cls, names: list[str]) -> list[str]:
        for name in names:
            if name == "reward":
                raise ValueError("every sample already waits for 'reward'; remove it")
        return list(dict.fromkeys(names))


class SuccessSpec(Section):
    """The condition for success in a task."""

    success: str | None = Field(default=None, min_length=1, max_length=256)
    """Value that decides whether a trajectory solves its query: `team`, an agent's reward, or one
    of `rewards`, by name. Default: `team` if the workflow returns it, otherwise the agents' mean
    reward."""
    threshold: float = Field(default=1.0, ge=-MAX_COEFFICIENT, le=MAX_COEFFICIENT)
    """Lowest value of `success` that counts as solved."""


Share = Annotated[float, Field(ge=0, le=1)]


class CurriculumSpec(SuccessSpec):
    """Tasks by difficulty: most queries ask tasks that are solved sometimes, few ask tasks that
    nearly always fail or nearly always succeed. The experience store keeps each task's success
    rate."""

    band: tuple[Share, Share] = (0.1, 0.9)
    """Lowest and highest success rate of the tasks that teach."""
    explore: Share = 0.25
    """Share of queries that ask new tasks, while there are any."""
    replay: Share = 0.1
    """Share of queries that repeat tasks below the band, least recently asked first."""
    review: Share = 0.05
    """Share of queries that repeat tasks above the band, least recently asked first. The remaining
    queries ask tasks within the band; if one kind of task is lacking, the next kind takes its
    place."""
    memory: Share = 0.5
    """Weight of a task's earlier outcomes each time it is asked again; 0: only the last outcomes
    count, 1: all count alike."""

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        low, high = self.band
        if low > high:
            raise ValueError(f"band: {low:g} is above {high:g}; give the lower rate first")
        if (total := self.explore + self.replay + self.review) > 1:
            raise ValueError(
                "explore: it, `replay` and `review` are shares of a step, but their sum is "
                f"{total:g}; "
                "lower one of them"
            )
        return self


class ContributionsSpec(Section):
    """Contributions of agents: success as played, minus success with one agent replaced
    (docs/team-monitors.md). Costs the trajectories of its queries once more for each agent."""

    queries: int = Field(ge=1, le=MAX_QUERIES)
    """Number of the evaluation's first queries that are played again."""
    by: str | None = None
    """Frozen policy that plays the replaced agent, such as the model that training began with.
    Default: none, the agent's turns are empty."""
    agents: list[str] = Field(default=[], max_length=MAX_AGENTS)
    """Agents that are replaced, one at a time. Default: all that `by` does not play anyway."""


class EvaluationSpec(SuccessSpec):
    """Held-out evaluation before, during and after training."""

    queries: Queries = 0
    """Held-out queries per evaluation; 0: no evaluation."""
    every: StepsOrNone = 0
    """Steps between evaluations; 0: only before the first and after the last step."""
    temperature: float | None = Field(default=None, ge=0, le=1000)
    """Temperature of all agents in evaluations; 0: greedy. Default: as in training."""
    samples: int = Field(default=1, ge=1, le=1024)
    """Trajectories per query. With several, or with `success`, pass@k is reported, for k = 1, 2, 4,
    ... and `samples`."""
    answer_pattern: str | None = Field(default=None, min_length=1, max_length=4096)
    """Regular expression that cuts the answer out of a trajectory's last reply: the first group of
    its last match. With it, or where the workflow sets `query.answer`, maj@k is reported; with it,
    also how often agents agree."""
    judges: dict[str, Annotated[str, Field(min_length=1, max_length=4096)]] = Field(
        default={}, max_length=MAX_AGENTS
    )
    """Agents that judge, each with a regular expression that its last reply contains if it accepts.
    How often each accepts what does not solve the query, and rejects what does, is reported."""
    contributions: ContributionsSpec | None = None
    """Contributions of agents to success. Default: not measured."""

    _pattern = field_validator("answer_pattern")(check_pattern)

    @field_validator("judges")
    @classmethod
    def _accept(cls, judges: dict[str, str]) -> dict[str, str]:
        for pattern in judges.values():
            check_pattern(pattern)
        return judges

    @property
    def counts_solved(self) -> bool:
        """Whether pass@k is reported."""
        return self.samples > 1 or self.success is not None

    @model_validator(mode="after")
    def _different(self) -> Self:
        if self.samples > 1 and self.temperature == 0:
            raise ValueError(
                f"samples: {self.samples} greedy samples of a query are all the same; use 1, or "
                "raise `temperature`"
            )
        if self.queries * self.samples > MAX_TRAJECTORIES:
            raise ValueError(
                f"samples: {self.samples} of {self.queries} queries are more than "
                f"{MAX_TRAJECTORIES:,} trajectories; lower one of them"
            )
        return self


class EvaluationSetSpec(EvaluationSpec):
    """A named evaluation, on its own tasks or on the job's held-out tasks."""

    tasks: TasksSpec | None = None
    """Source of queries: all rows of a data set's `split`, or the split "held_out" of your class.
    Default: the held-out queries of the job's own `tasks`."""
    queries: Queries = 0
    """Queries per evaluation, at most as many as there are; 0: all."""

    @field_validator("tasks")
    @classmethod
    def _all_held_out(cls, tasks: TasksSpec | None) -> TasksSpec | None:
        if tasks is not None and tasks.held_out is not None:
            raise ValueError("`held_out` is for training data; name the rows to use as `split`")
        return tasks


class BestSpec(Section):
    """The evaluation metric that selects the best checkpoint."""

    metric: str = Field(min_length=1, max_length=256)
    """A metric of an evaluation: `evaluation/team/mean`, `evaluations/gsm8k/pass@1`."""
    mode: Literal["max", "min"] = "max"
    """Whether higher or lower values are better."""

    @field_validator("metric")
    @classmethod
    def _of_evaluation(cls, metric: str) -> str:
        if not metric.startswith((metric_names.EVALUATION, metric_names.EVALUATIONS)):
            raise ValueError(
                "is not a metric of an evaluation; write `evaluation/team/mean`, or "
                "`evaluations/NAME/pass@1` of a named one"
            )
        return metric


class EarlyStopSpec(Section):
    """End the job early, by the values of one metric. The last checkpoint and the final evaluation
    follow, as after the last step (docs/training.md)."""

    metric: str = Field(min_length=1, max_length=256)
    """A metric of steps or of an evaluation: `reward/mean`, `solver/entropy`,
    `evaluation/team/mean`. Values before the first step do not count."""
    mode: Literal["max", "min"] = "max"
    """Whether higher or lower values are better."""
    at: float | None = Field(default=None, ge=-MAX_NORM, le=MAX_NORM)
    """Stop as soon as a value is as good as this. Default: no threshold."""
    patience: int | None = Field(default=None, ge=1, le=MAX_STEPS)
    """Stop after so many values in succession that do not improve on the best one. Default: no
    limit."""
    min_delta: float = Field(default=0.0, ge=0, le=MAX_NORM)
    """`patience`: a value improves if it is better than the best one by more than this."""
    best: Literal["kept", "exported"] | None = None
    """`kept`: also keep the checkpoint with the best value of the metric, whatever
    `checkpoint.keep` is; `exported`: and exports without a version take it. If the metric is one of
    steps, a checkpoint is written after each step that is the best so far; not in mode `async`."""

    @model_validator(mode="after")
    def _decides(self) -> Self:
        if self.at is None and self.patience is None:
            raise ValueError("neither `at` nor `patience` is given, so it never stops; give one")
        if self.min_delta and self.patience is None:
            raise ValueError("min_delta: only `patience` heeds it; give that, or leave it out")
        return self

    @property
    def of_evaluation(self) -> bool:
        """Whether evaluations log the metric, rather than steps."""
        return self.metric.startswith((metric_names.EVALUATION, metric_names.EVALUATIONS))


class CheckpointSpec(Section):
    """Checkpoints that `transformers` loads."""

    every: StepsOrNone = 0
    """Steps between checkpoints; 0: only after the last step."""
    keep: int = Field(default=2, ge=1, le=1_000_000)
    """Newest checkpoints kept per policy."""
    best: BestSpec | None = None
    """Also keep the checkpoint that evaluated best. Default: only the newest ones."""


class StateSpec(Section):
    """When training state (weights, optimizer, random generators) is written to disk
    (docs/guarantees.md). Steps since then are computed again after a crash."""

    every: int | None = Field(default=None, ge=1, le=64)
    """Steps between durable states. Default: from the measured writing time: 1, before the commit,
    if writing is short; otherwise as many steps as writing takes, in the background."""
    background: bool = True
    """Write while the next steps run, from a copy in the host's memory; `false`: before the step is
    committed."""


class LimitsSpec(Section):
    """Deadlines and bounds."""

    turn_seconds: Seconds | None = None
    """Time limit of one turn, queueing included. Not applied with `pipeline.deterministic`.
    Default: 120 where engines compute on CPUs, 600 on GPUs."""
    trajectory_seconds: Seconds = 600
    """Time limit of one trajectory. With `pipeline.deterministic` only the workflow's own time
    counts, without waits for engines and the reward service."""
    step_seconds: Seconds = 7200
    """Time limit of one step, rollout and training together."""
    job_seconds: Seconds | None = None
    """The job ends after the step or evaluation in which it has run for this long, in the same way
    as after its last step. Its time in the state `running` counts, unless policies with work wait
    for trainers that other jobs have. Default: no limit."""
    trajectory_retries: int = Field(default=0, ge=0, le=100)
    """Retries of a trajectory whose environment or tool failed, with the same seed and within
    `trajectory_seconds`. A failed attempt leaves nothing behind."""
    max_failed_fraction: float = Field(default=0.5, ge=0, le=1)
    """The job fails when more than this fraction of a step's trajectories fail."""
    max_concurrent_trajectories: int = Field(default=1024, ge=1, le=MAX_TRAJECTORIES)
    """Trajectories in flight at once."""
    worker_deaths: int = Field(default=3, ge=1, le=1_000_000)
    """The job fails when this many worker processes in succession died at the same trajectory or
    step, or this many orchestrators just after they launched the job."""

    @property
    def turn_limit(self) -> float:
        """`turn_seconds`; a rollout worker fills in its default before trajectories start."""
        return self.turn_seconds or CPU.turn_seconds


class LoggingSpec(Section):
    """Metric sinks in addition to `metrics.jsonl`, and the conversations to keep."""

    trajectories: int = Field(default=64, ge=0, le=MAX_TRAJECTORIES)
    """Trajectories per step and per evaluation whose conversations are kept for people to read:
    drawn at random, plus as many failed ones per rollout worker. For the others only numbers are
    kept. The oldest are deleted when a job's conversations exceed 1 GiB."""

    tensorboard: bool = True
    """Write TensorBoard events."""
    wandb_project: str | None = None
    """Weights & Biases project; needs `pip install wandb`."""
    trackio_project: str | None = None
    """Trackio project, in its local database; needs `pip install trackio`."""
    mlflow_experiment: str | None = None
    """MLflow experiment at `MLFLOW_TRACKING_URI`; needs `pip install mlflow-skinny`."""
