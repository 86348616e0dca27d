"""Sections of a job besides its policies and functions: agents, tasks, pipeline, limits.

The docstring under a field is its documentation: `troupe job schema`, the job reference
and editors show it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from troupe.job.section import (
    COLUMN,
    MAX_AGENTS,
    MAX_QUERIES,
    MAX_TOKENS,
    MAX_TRAJECTORIES,
    NAME,
    Queries,
    Rate,
    Seconds,
    Section,
    Steps,
    StepsOrNone,
    Tokens,
    TokensOrNone,
    check_entrypoint,
    check_json,
)


class AffinitySpec(Section):
    """Which device class fits which turns. A turn goes elsewhere when no engine of its class serves
    or all of them have far more to do."""

    domains: dict[str, str] = Field(default={}, max_length=4096)
    """Device class by task domain: the `domain` of a query."""
    agents: dict[str, str] = Field(default={}, max_length=MAX_AGENTS)
    """Device class by agent, for queries whose domain is not listed."""
    infer: bool = True
    """What is not declared follows from the prompt and response tokens that turns of a domain and
    agent had, where engines of two or more classes say what they do per second."""
    default: str = ""
    """Device class of the default pool; empty: any."""

    def declared(self) -> Iterator[tuple[str, str]]:
        """Field and device class of what is declared."""
        yield from ((f"domains.{domain}", name) for domain, name in self.domains.items())
        yield from ((f"agents.{agent}", name) for agent, name in self.agents.items())
        if self.default:
            yield "default", self.default


class PoolSpec(Section):
    """Engines of one device class."""

    device_class: str = Field(pattern=NAME)
    """Their device class: a name of your own, as in `compute` and `bandwidth`."""
    replicas: int = Field(default=1, ge=1, le=1024)
    """How many of them there are per rollout worker."""
    prefill_tokens_per_second: Rate | None = None
    """Prompt tokens that one of them reads per second, as measured. Give both rates or none."""
    decode_tokens_per_second: Rate | None = None
    """Response tokens that one of them draws per second for all its turns together."""


class RoutingSpec(Section):
    """How turns find engines; docs/rollout.md explains it. The switches exist to be measured."""

    policy: Literal["least_work", "round_robin", "random_hash"] = "least_work"
    """`least_work`: the engine with the least to do; `round_robin` and `random_hash` give
    conversations out in turn or by their id, whatever the load, and their turns wait for that
    engine."""
    sticky: bool = True
    """A conversation stays with the engine that holds its prefix, unless another has far less to
    do."""
    priority: bool = True
    """Where turns wait, those whose group has the fewest trajectories left go first."""
    adaptive_limit: bool = True
    """`least_work`: an engine gets as many turns at once as still make it faster, up to
    `max_running`."""
    affinity: AffinitySpec = AffinitySpec()
    """`least_work`: which device class fits which turns."""

    @model_validator(mode="after")
    def _heeded(self) -> Self:
        if self.policy != "least_work" and any(self.affinity.declared()):
            raise ValueError(
                f"affinity: `{self.policy}` does not look at device classes; remove it, or choose "
                "`least_work`"
            )
        return self


class SamplingSpec(Section):
    """How an agent's tokens are drawn."""

    temperature: float = Field(default=1.0, ge=0, le=1000)
    """0: greedy."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Nucleus: the smallest set of tokens with at least this probability."""
    top_k: int = Field(default=-1, ge=-1, le=MAX_TOKENS)
    """The k most likely tokens; -1: all."""
    max_new_tokens: Tokens = 256
    """Longest response, in tokens."""
    stop: list[str] = Field(default=[], max_length=64)
    """Strings, each one token of the vocabulary, that end a response besides end-of-sequence."""


class EndpointSpec(Section):
    """What clients of an agent's endpoint may decide, where the workflow does not say otherwise."""

    lenient: bool = False
    """Take what only constrained decoding could keep (`tool_choice: required`, a JSON schema): the
    model is told, and a reply that does not keep it says so. Otherwise it is refused."""
    sampling: Literal["job", "client"] = "job"
    """Who decides temperature, top_p and top_k: `sampling` of the agent, or each request."""


class AgentSpec(Section):
    """A role in the workflow."""

    policy: str
    """Name of the policy that plays it; several agents may share one."""
    sampling: SamplingSpec = SamplingSpec()
    """How its tokens are drawn."""
    system_prompt: str | None = None
    """Put before every conversation of this agent that has no system message of its own."""
    endpoint: EndpointSpec = EndpointSpec()
    """What clients of OpenAI's API may decide that speak as this agent (docs/openai.md)."""


class TasksSpec(Section):
    """Where queries come from."""

    source: str
    """`package.module:attribute`: called with `split=` ("train" or "held_out") and `args`;
    returns an object with `__len__` and `__getitem__(index) -> dict` (JSON values)."""
    args: dict[str, Any] = {}
    """Keyword arguments of `source`."""

    _source = field_validator("source")(check_entrypoint)
    _json = field_validator("args")(check_json)


class PipelineSpec(Section):
    """How rollout and training take turns."""

    mode: Literal["serial", "sync", "micro_batch", "async"] = "micro_batch"
    """See docs/architecture.md, pipeline modes."""
    alpha: int = Field(default=1, ge=1, le=64)
    """`async`: a sample is trained by a version at most this many newer than the one that its
    trajectory started with (RollArt's bounded staleness)."""
    deterministic: bool = False
    """The same seed gives bitwise the same weights, whatever arrives when and whatever crashes; see
    docs/guarantees.md for its price. Not in mode `async`."""
    steps: Steps
    """Optimizer steps per trained policy."""
    queries_per_step: int = Field(ge=1, le=MAX_QUERIES)
    """Queries in a global batch. With `over_sampling` and `max_refills`, times the trajectories of
    each, at most 262,144 trajectories."""
    group_size: int = Field(default=8, ge=1, le=4096)
    """Trajectories per query. They start together, on one rollout worker."""
    redundant_trajectories: int = Field(default=0, ge=0, le=4096)
    """Trajectories started per query beyond `group_size` (RollArt's redundant environments). The
    first `group_size` to complete are the group, the others are dropped as "redundant"; they take
    the place of failed ones, too. Favours short trajectories: `redundancy/...` in the metrics says
    by how much. Not with `deterministic`."""
    rollout: Literal["trajectory", "batch"] = "trajectory"
    """`trajectory`: none waits for another. `batch`: before every turn and tool call each waits for
    all that run on its rollout worker, as environments stepped as one batch do; a baseline to
    measure against."""
    early_start: bool = False
    """Begin the trajectories of the next step while the last one is trained: queries are loaded,
    environments reset and prompts made; the first turn waits for the new weights. Modes `sync` and
    `micro_batch`; not with populations or networks."""
    micro_batch_samples: int = Field(default=32, ge=1, le=65_536)
    """Samples whose gradient is computed at once."""
    micro_batch_tokens: TokensOrNone = 0
    """Upper bound of tokens in a micro-batch; 0: none."""
    balance_tokens: bool = False
    """Choose micro-batches such that they have about equally many tokens."""
    over_sampling: Queries = 0
    """Queries in flight beyond `queries_per_step`: a step takes those that are complete first.
    The others are dropped as "surplus"; in mode `async` they go on for the next step unless they
    are too old."""
    dynamic_sampling: bool = False
    """Drop groups whose rewards are all equal, and take a further query for each query that is left
    with no sample (DAPO, section 3.2)."""
    max_refills: Queries = 0
    """`dynamic_sampling`: at most so many further queries per step; 0: `queries_per_step`."""
    max_uses: int = Field(default=1, ge=1, le=16)
    """Optimizer steps that a sample may contribute to; above 1 only in mode `async`, within
    `alpha`."""
    required_columns: list[str] = Field(default=[], max_length=64)
    """Columns, besides the reward, that a sample waits for before it is trained. Workflows and
    other services fill them."""

    @field_validator("required_columns")
    @classmethod
    def _columns(cls, names: list[str]) -> list[str]:
        for name in names:
            if name == "reward":
                raise ValueError("every sample waits for 'reward' anyway; remove it")
            if not re.match(COLUMN, name):
                raise ValueError(
                    f"{name!r} does not name a column: up to 64 letters, digits, '.', '_' or '-', "
                    "a letter or '_' first"
                )
        return list(dict.fromkeys(names))


class EvaluationSpec(Section):
    """Held-out evaluation before, during and after training."""

    queries: Queries = 0
    """Held-out queries per evaluation; 0: no evaluation."""
    every: StepsOrNone = 0
    """Steps between evaluations; 0: only before the first and after the last step."""
    temperature: float | None = Field(default=None, ge=0, le=1000)
    """Overrides the agents' temperature; default: as in training."""


class CheckpointSpec(Section):
    """Checkpoints that `transformers` loads."""

    every: StepsOrNone = 0
    """Steps between checkpoints; 0: only after the last step."""
    keep: int = Field(default=2, ge=1, le=1_000_000)
    """Newest checkpoints kept per policy."""


class LimitsSpec(Section):
    """Deadlines and bounds. Every wait ends."""

    turn_seconds: Seconds = 120
    """Longest generation of one turn, queueing included. Not applied with
    `pipeline.deterministic`."""
    trajectory_seconds: Seconds = 600
    """Longest run of one trajectory. With `pipeline.deterministic` only the workflow's own time
    counts: not what it spends with engines and the reward service."""
    step_seconds: Seconds = 7200
    """Longest step, rollout and training together."""
    trajectory_retries: int = Field(default=0, ge=0, le=100)
    """A trajectory whose environment or tool failed is begun anew at most so often, with its seed
    and within its `trajectory_seconds`; then it fails. Nothing is kept of a failed attempt."""
    max_failed_fraction: float = Field(default=0.5, ge=0, le=1)
    """The job fails when more than this fraction of a step's trajectories fail."""
    max_concurrent_trajectories: int = Field(default=1024, ge=1, le=MAX_TRAJECTORIES)
    """Trajectories in flight at once."""
    worker_deaths: int = Field(default=3, ge=1, le=1_000_000)
    """The job fails when this many worker processes died one after another while they did one and
    the same trajectory or step: what kills them would kill the next one too. So it does when this
    many orchestrators died just after they had launched it."""


class LoggingSpec(Section):
    """Where metrics go besides `metrics.jsonl`."""

    tensorboard: bool = True
    """Write TensorBoard events."""
    wandb_project: str | None = None
    """Weights & Biases project; needs `pip install wandb`."""
