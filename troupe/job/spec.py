"""The job specification as pydantic models.

The docstring under a field is its documentation: `troupe job schema`, the job reference
and editors show it.
"""

from __future__ import annotations

import json
import os
import re
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator
from pydantic_core import PydanticSerializationError, to_jsonable_python

_ENTRYPOINT = re.compile(r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$")
_URL = re.compile(r"^https?://[^/\s]+(/\S*)?$")
NAME = r"^[a-z0-9]([a-z0-9_-]{0,61}[a-z0-9])?$"


class _Section(BaseModel):
    # An unknown field is nearly always a misspelt one: refuse it instead of ignoring it.
    # Infinity and NaN are no numbers of JSON, in which services pass the specification on.
    model_config = ConfigDict(
        extra="forbid", use_attribute_docstrings=True, frozen=True, allow_inf_nan=False
    )


def _check_entrypoint(value: str) -> str:
    if not _ENTRYPOINT.match(value):
        raise ValueError("must look like 'package.module:attribute'")
    return value


def _check_json(value: Any) -> Any:
    try:
        json.dumps(to_jsonable_python(value), allow_nan=False)
    except (ValueError, PydanticSerializationError) as error:
        raise ValueError(f"must consist of JSON values: {error}") from error
    return value


def _expand_home(value: str | None) -> str | None:
    # Whoever writes "~" means his own home, not the services'.
    return os.path.expanduser(value) if value is not None and value.startswith("~") else value


class ModelSpec(_Section):
    """Where a policy's architecture, first weights and tokenizer come from."""

    path: str | None = None
    """Local directory or hub id of a Hugging Face causal LM. Exactly one of path and config."""
    config: dict[str, Any] | None = None
    """A transformers configuration (with `model_type`) for random first weights."""
    tokenizer: str | None = None
    """Directory or hub id of the tokenizer; default: `path`."""
    revision: str | None = None
    """Hub revision (branch, tag or commit) of `path`."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Floating-point type of the weights in trainer and engines."""

    _json = field_validator("config")(_check_json)
    _home = field_validator("path", "tokenizer")(_expand_home)

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if (self.path is None) == (self.config is None):
            raise ValueError("give exactly one of `path` and `config`")
        if self.path is None and self.tokenizer is None:
            raise ValueError("`tokenizer` is required when the model comes from `config`")
        return self

    @property
    def tokenizer_source(self) -> str:
        """Where the tokenizer is loaded from."""
        source = self.tokenizer or self.path
        assert source is not None  # _one_source
        return source


class OptimizerSpec(_Section):
    """AdamW and its schedule."""

    lr: float = Field(default=1e-5, gt=0)
    """Peak learning rate."""
    betas: tuple[float, float] = (0.9, 0.95)
    """Decay of the first and second moment."""
    eps: float = Field(default=1e-8, gt=0)
    """Added to the root of the second moment."""
    weight_decay: float = Field(default=0.0, ge=0)
    """Decoupled weight decay."""
    max_grad_norm: float = Field(default=1.0, gt=0)
    """Gradients are scaled down to this global L2 norm."""
    warmup_steps: int = Field(default=0, ge=0)
    """Steps over which the learning rate rises linearly from zero."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """How the learning rate falls after warm-up, over the job's steps, to `final_lr_fraction`."""
    final_lr_fraction: float = Field(default=0.1, ge=0, le=1)
    """Fraction of `lr` left at the last step of a falling schedule."""


class EngineSpec(_Section):
    """What serves a policy during rollout."""

    kind: Literal["embedded", "sglang"] = "embedded"
    """`embedded`: transformers inside the rollout process; `sglang`: an SGLang server."""
    replicas: int = Field(default=1, ge=1, le=1024)
    """Engines of this policy per rollout worker."""
    max_running: int = Field(default=64, ge=1, le=4096)
    """Turns that one engine generates at once; more wait in the router."""
    max_context: int = Field(default=2048, ge=16)
    """Tokens of prompt and response together that the engine keeps room for."""
    urls: list[str] = []
    """`sglang`: attach to these servers instead of launching some."""
    launch: list[str] = []
    """`sglang`: extra arguments of the launched server, as on its command line."""
    python: str | None = None
    """`sglang`: Python interpreter of the environment that holds SGLang; default: our own."""
    start_timeout_seconds: float = Field(default=600, gt=0)
    """How long an engine may take until it is ready."""

    @field_validator("urls")
    @classmethod
    def _are_urls(cls, urls: list[str]) -> list[str]:
        for url in urls:
            if not _URL.match(url):
                raise ValueError(f"'{url}' is not of the form http://HOST:PORT")
        return urls


class PolicySpec(_Section):
    """Trainable weights with a version."""

    model: ModelSpec
    """Architecture, first weights, tokenizer."""
    trainable: bool = True
    """False: a frozen policy; it is served, never trained."""
    optimizer: OptimizerSpec = OptimizerSpec()
    """How its weights are stepped."""
    engine: EngineSpec = EngineSpec()
    """What serves it."""


class SamplingSpec(_Section):
    """How an agent's tokens are drawn."""

    temperature: float = Field(default=1.0, ge=0)
    """0: greedy."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Nucleus: the smallest set of tokens with at least this probability."""
    top_k: int = Field(default=-1, ge=-1)
    """The k most likely tokens; -1: all."""
    max_new_tokens: int = Field(default=256, ge=1)
    """Longest response, in tokens."""
    stop: list[str] = []
    """Strings, each one token of the vocabulary, that end a response besides end-of-sequence."""


class AgentSpec(_Section):
    """A role in the workflow."""

    policy: str
    """Name of the policy that plays it; several agents may share one."""
    sampling: SamplingSpec = SamplingSpec()
    """How its tokens are drawn."""
    system_prompt: str | None = None
    """Put before every conversation of this agent that has no system message of its own."""


class FunctionSpec(_Section):
    """A reward or tool that the reward service runs in a worker process."""

    entrypoint: str
    """`package.module:attribute`, importable where the reward service runs."""
    version: str = "1"
    """Changes whenever the function's behaviour does."""
    timeout_seconds: float = Field(default=30, gt=0)
    """Longest run of one call; then it is killed and the call fails with a timeout."""
    memory_mib: int = Field(default=512, ge=0)
    """Memory that a call may take in its worker process; 0: unlimited."""
    max_concurrency: int = Field(default=0, ge=0)
    """Calls at once; 0: as many as there are worker processes."""

    _entrypoint = field_validator("entrypoint")(_check_entrypoint)


class TasksSpec(_Section):
    """Where queries come from."""

    source: str
    """`package.module:attribute`: called with `split=` ("train" or "held_out") and `args`;
    returns an object with `__len__` and `__getitem__(index) -> dict` (JSON values)."""
    args: dict[str, Any] = {}
    """Keyword arguments of `source`."""

    _source = field_validator("source")(_check_entrypoint)
    _json = field_validator("args")(_check_json)


class AlgorithmSpec(_Section):
    """How rewards become gradients."""

    name: Literal["grpo"] = "grpo"
    """Group-relative policy optimization (Shao et al. 2024, section 4.1)."""
    scale_by_std: bool = True
    """Divide advantages by the group's standard deviation; false: Dr. GRPO."""
    group_by: Literal["agent", "turn"] = "agent"
    """Samples of one query that share a baseline: those of one agent, or of one agent's turn."""
    clip_low: float = Field(default=0.2, gt=0, lt=1)
    """Lower clip range of the importance ratio."""
    clip_high: float = Field(default=0.2, gt=0)
    """Upper clip range of the importance ratio (DAPO's clip-higher when larger)."""
    normalize: Literal["token", "sequence"] = "token"
    """Average the loss over all tokens of the global batch, or over sequences."""
    kl_coefficient: float = Field(default=0.0, ge=0)
    """Weight of the k3 estimate of KL(policy || first version) in the loss."""
    entropy_coefficient: float = Field(default=0.0, ge=0)
    """Weight of the entropy bonus."""


class PipelineSpec(_Section):
    """How rollout and training take turns."""

    mode: Literal["serial", "sync", "micro_batch"] = "micro_batch"
    """See docs/architecture.md, pipeline modes."""
    steps: int = Field(ge=1)
    """Optimizer steps per trained policy."""
    queries_per_step: int = Field(ge=1)
    """Queries in a global batch."""
    group_size: int = Field(default=8, ge=1, le=4096)
    """Trajectories per query. They start together, on one rollout worker."""
    micro_batch_samples: int = Field(default=32, ge=1)
    """Samples whose gradient is computed at once."""
    micro_batch_tokens: int = Field(default=0, ge=0)
    """Upper bound of tokens in a micro-batch; 0: none."""


class EvaluationSpec(_Section):
    """Held-out evaluation before, during and after training."""

    queries: int = Field(default=0, ge=0)
    """Held-out queries per evaluation; 0: no evaluation."""
    every: int = Field(default=0, ge=0)
    """Steps between evaluations; 0: only before the first and after the last step."""
    temperature: float | None = Field(default=None, ge=0)
    """Overrides the agents' temperature; default: as in training."""


class CheckpointSpec(_Section):
    """Checkpoints that `transformers` loads."""

    every: int = Field(default=0, ge=0)
    """Steps between checkpoints; 0: only after the last step."""
    keep: int = Field(default=2, ge=1)
    """Newest checkpoints kept per policy."""


class LimitsSpec(_Section):
    """Deadlines and bounds. Every wait ends."""

    turn_seconds: float = Field(default=120, gt=0)
    """Longest generation of one turn, queueing included."""
    trajectory_seconds: float = Field(default=600, gt=0)
    """Longest run of one trajectory."""
    step_seconds: float = Field(default=7200, gt=0)
    """Longest step, rollout and training together."""
    max_failed_fraction: float = Field(default=0.5, ge=0, le=1)
    """The job fails when more than this fraction of a step's trajectories fail."""
    max_concurrent_trajectories: int = Field(default=1024, ge=1)
    """Trajectories in flight at once."""


class LoggingSpec(_Section):
    """Where metrics go besides `metrics.jsonl`."""

    tensorboard: bool = True
    """Write TensorBoard events."""
    wandb_project: str | None = None
    """Weights & Biases project; needs `pip install wandb`."""


class JobSpec(_Section):
    """One training job: agents, policies, the workflow they play, the algorithm."""

    name: str = Field(pattern=NAME)
    """Short name: lower-case letters, digits, '-' and '_'."""
    seed: int = 0
    """Root of all randomness of the job."""
    workflow: str
    """`package.module:attribute`: an async function of (query, agents, tools)."""
    tasks: TasksSpec
    """Where queries come from."""
    agents: dict[str, AgentSpec] = Field(min_length=1)
    """The roles of the workflow by name."""
    policies: dict[str, PolicySpec] = Field(min_length=1)
    """The policies by name."""
    tools: dict[str, FunctionSpec] = {}
    """Functions that the workflow may call: `await tools.call(name, ...)`."""
    rewards: dict[str, FunctionSpec] = {}
    """Functions called with each finished trajectory; each returns rewards per agent, which add up
    with those that the workflow returns."""
    algorithm: AlgorithmSpec = AlgorithmSpec()
    """How rewards become gradients."""
    pipeline: PipelineSpec
    """How rollout and training take turns."""
    evaluation: EvaluationSpec = EvaluationSpec()
    """Held-out evaluation."""
    checkpoint: CheckpointSpec = CheckpointSpec()
    """Checkpoints."""
    limits: LimitsSpec = LimitsSpec()
    """Deadlines and bounds."""
    logging: LoggingSpec = LoggingSpec()
    """Where metrics go."""

    _workflow = field_validator("workflow")(_check_entrypoint)

    @model_validator(mode="after")
    def _references(self) -> Self:
        for agent, spec in self.agents.items():
            if spec.policy not in self.policies:
                known = ", ".join(sorted(self.policies))
                raise ValueError(
                    f"agents.{agent}.policy: '{spec.policy}' is not a policy; known: {known}"
                )
        unused = sorted(set(self.policies) - {a.policy for a in self.agents.values()})
        if unused:
            raise ValueError(f"policies.{unused[0]}: no agent plays it; remove it or name it")
        if not self.trained_policies:
            raise ValueError("policies: none is trainable; set `trainable: true` on at least one")
        for section in (self.agents, self.policies, self.tools, self.rewards):
            for name in section:
                if not re.match(NAME, name):
                    raise ValueError(f"'{name}': names are lower-case letters, digits, '-' and '_'")
        return self

    @property
    def trained_policies(self) -> list[str]:
        """Names of the policies that are trained, sorted."""
        return sorted(name for name, policy in self.policies.items() if policy.trainable)
