"""Sections of a policy: its model, its optimizer, what serves it.

The docstring under a field is its documentation: `troupe job schema`, the job reference
and editors show it.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from typing import Annotated, Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from troupe.chat_templates import RESERVED_ARGUMENTS
from troupe.job.engines import KINDS, KindName, server_kinds
from troupe.job.section import (
    MAX_COEFFICIENT,
    MAX_ENGINES,
    MAX_TOKENS,
    NAME,
    Norm,
    Rate,
    Seconds,
    SecondsOrNone,
    Section,
    StepsOrNone,
    Tokens,
    check_json,
    expand_home,
)
from troupe.job.sections.agents import PoolSpec
from troupe.job.sections.network import NetworkSpec
from troupe.replies.formats import ParserName, ReasoningName
from troupe.sampling import MAX_INT
from troupe.scheduling.defaults import CPU, floating_type


class LoraSpec(Section):
    """Low-rank adaptation (Hu et al. 2021, section 4.1): a frozen linear layer W gets a trained
    update, `W + alpha / rank * B @ A` with B [out, rank] and A [rank, in]. Policies with the same
    base share its weights in a trainer worker, and only adapters are stepped, stored and sent."""

    rank: int = Field(default=16, ge=1, le=1024)
    """Rank of the update of each layer; not above the model's hidden size."""
    alpha: float = Field(default=32.0, gt=0, le=MAX_COEFFICIENT)
    """The update is scaled by `alpha / rank`."""
    dropout: float = Field(default=0.0, ge=0, lt=1)
    """Dropout of the adapters' inputs in training. The trained policy then differs slightly from
    the sampling one. Not with `pipeline.deterministic`."""
    target_modules: Literal["all-linear"] | Annotated[list[str], Field(max_length=1024)] = (
        "all-linear"
    )
    """Linear layers that are adapted, by the last part of their names (`q_proj`, `down_proj`);
    `all-linear`: all but the output layer."""

    path: str | None = None
    """First adapter: a directory in PEFT's format (also written by `troupe export`), with the same
    base, rank, alpha and layers. Default: random A and B = 0, which is no update."""

    _home = field_validator("path")(expand_home)

    @field_validator("target_modules")
    @classmethod
    def _are_names(cls, value: str | list[str]) -> str | list[str]:
        if isinstance(value, str):
            return value
        if not value:
            raise ValueError("no layer is named; name some, or leave it out for all linear layers")
        for name in value:
            if not name.isidentifier():
                raise ValueError(f"'{name}' is not the name of a layer, such as `q_proj`")
        return sorted(set(value))


Offload = Literal["none", "optimizer", "all"]
Layers = Annotated[int, Field(ge=1, le=4096)]


class TrainerSpec(Section):
    """How a policy's gradients are computed."""

    activation_checkpointing: bool | Layers | Literal["auto"] = "auto"
    """Keep only the inputs of layers for the backward pass and recompute the rest: about a third
    more computation, but activations of one layer instead of all. A number: of the first so many
    layers, where memory has room for the activations of the others. `auto`: on a GPU where
    the step does not fit otherwise, or where that is unknown (docs/training.md); off on a CPU."""
    compile: Literal["auto", "on", "off"] = "auto"
    """Whether torch.compile fuses the operations between matrix products. A worker without a
    compiler refuses `on`; so does `pipeline.deterministic`. Experts of a mixture are left out.
    `auto`: off; measured gain 5 % on a CPU after half a minute of compilation, none on an H100."""
    kernels: Literal["auto", "off"] = "auto"
    """Whether the trainer replaces functions by faster ones. `auto`: RMSNorm and rotary embedding
    by its own on CPUs, and on GPUs by Liger Kernel's; attention on Hopper and Blackwell by
    FlashAttention 3 or 4 (`flash_attn_interface`, `flash_attn.cute`); what is installed, and only
    if values and gradients agree with those before in a trial on the device. `off`: never, and
    weights are cast to bfloat16 by autocast."""
    forward_tokens: Tokens | None = None
    """Tokens per forward pass; micro-batches are split accordingly. A longer sequence is cut into
    pieces, whose keys and values stay until it is differentiated. Default: 1024 on a CPU (512 for
    hidden sizes of 512 and more), 4096 to 16384 on a GPU, by its memory
    (docs/training.md)."""
    gang: Annotated[int, Field(ge=1, le=4096)] | Literal["auto"] | None = None
    """Devices over which weights, gradients and optimizer state are sharded (FSDP2); each computes
    its part of every micro-batch. 1: not sharded. Sharded sums round differently: not with
    `pipeline.deterministic`. `auto`: decided when the job starts, so that the gangs of its policies
    use all training devices of the cluster (docs/gpus.md). Default: `auto` with a server as engine,
    else 1. May change when a job is resumed."""
    shard: Literal["auto", "gang", "host"] = "auto"
    """Devices of a gang over several hosts that weights, gradients and optimizer state are sharded
    over. `gang`: all of them. `host`: each host's, so that every host has the whole state;
    weights never cross between hosts, and gradients once per update (hybrid sharding, HSDP).
    `auto`: `host` on GPUs that have room for it by the memory model, together with the job's other
    policies, unless engines share them (`pipeline.colocate`). May change when a job is resumed."""
    offload: Offload = "none"
    """State that is kept in host memory, pinned on a GPU. `optimizer`: AdamW's moments, half of the
    training state, which a step brings to the device in parts while it computes others. `all`: the
    weights, too, between steps. Each rank of a `gang` does so with its shards. The results are the
    same."""
    context_parallel: int = Field(default=1, ge=1, le=4096)
    """Devices of the gang that divide the tokens of each forward pass, for sequences whose
    activations one does not hold; divides `gang`. A pass has `forward_tokens` on each of them."""
    expert_parallel: Literal["auto"] | Annotated[int, Field(ge=1, le=4096)] = 1
    """Devices of the gang over which the experts of a mixture are divided, and between which tokens
    travel to their experts; divides `gang` and the number of experts. 1: each device gathers a
    layer's experts, for every pass. `auto`: the largest such number up to 8, the devices of a host;
    1 where the model has no experts that can be divided."""
    quantum_seconds: SecondsOrNone = 1.0
    """With more policies than trainer slots: minimum time for which a policy with work keeps its
    device before a policy with older work replaces it, and at least twice the cost of its last
    suspension and resumption. Larger: fewer swaps, longer waits."""
    idle_seconds: Seconds = 600
    """Time without a step to train after which a policy releases its device and memory, so that
    trainers can scale to zero; the next step loads it again."""

    @property
    def ranks(self) -> int:
        """`gang` as a number: 1 until `auto` is decided."""
        return self.gang if isinstance(self.gang, int) else 1

    @property
    def gang_multiple(self) -> int:
        """The number whose multiple `gang` must be."""
        experts = 1 if self.expert_parallel == "auto" else self.expert_parallel
        return math.lcm(self.context_parallel, experts)

    @model_validator(mode="after")
    def _divides(self) -> Self:
        if isinstance(self.gang, int) and self.gang % self.context_parallel:
            raise ValueError(
                f"context_parallel is {self.context_parallel}, which does not divide the "
                f"{self.gang} devices of `gang`; choose a divisor"
            )
        parallel = 1 if self.expert_parallel == "auto" else self.expert_parallel
        if isinstance(self.gang, int) and self.gang % parallel:
            raise ValueError(
                f"expert_parallel is {self.expert_parallel}, which does not divide the "
                f"{self.gang} devices of `gang`; choose a divisor, or `auto`"
            )
        return self


_URL = re.compile(r"https?://[^/\s]+(/\S*)?")


class ModelSpec(Section):
    """Where a policy's architecture, first weights and tokenizer come from."""

    path: str | None = None
    """Local directory or hub id of a Hugging Face causal LM. Exactly one of path and config."""
    config: dict[str, Any] | None = None
    """A transformers configuration (with `model_type`) for random first weights."""
    tokenizer: str | None = None
    """Directory or hub id of the tokenizer; default: `path`."""
    revision: str | None = None
    """Hub revision (branch, tag or commit) of `path`."""
    dtype: Literal["auto", "float32", "bfloat16"] | None = None
    """Floating-point type of the weights in trainer and engines. `auto`: the checkpoint's type
    (float16 becomes bfloat16), float32 if it names none. Default: `auto` with a server
    and `path`; else float32, since the embedded engine serves CPUs, where bfloat16 may be slow."""
    tool_parser: ParserName = "hermes"
    """Syntax of the model's tool calls. `hermes`: JSON between `<tool_call>` tags (Hermes, Qwen2.5,
    Qwen3); `qwen_coder`: `<function=...>` between them; `llama`: JSON alone (Llama 3.1); `mistral`:
    a list behind `[TOOL_CALLS]`."""

    reasoning_parser: ReasoningName | None = None
    """Tags around the model's thoughts, which do not belong to a reply's content. `think`:
    `<think>` and `</think>`; `mistral`: also `[THINK]` and `[/THINK]`; `none`: tags are text.
    Default: `mistral` with that `tool_parser`, else `think`."""
    chat_template_kwargs: dict[str, Any] = {}
    """Arguments of the chat template in every prompt, such as `{enable_thinking: false}` (Qwen3). A
    workflow's call or a request to the endpoint may override them."""

    _json = field_validator("config", "chat_template_kwargs")(check_json)
    _home = field_validator("path", "tokenizer")(expand_home)

    @field_validator("chat_template_kwargs")
    @classmethod
    def _template(cls, given: dict[str, Any]) -> dict[str, Any]:
        if reserved := sorted(RESERVED_ARGUMENTS & given.keys()):
            raise ValueError(f"cannot set `{reserved[0]}`, which Troupe sets itself; leave it out")
        return given

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if (self.path is None) == (self.config is None):
            raise ValueError("give exactly one of `path` and `config`")
        if self.path is None and self.tokenizer is None:
            raise ValueError("`tokenizer` is required when the model comes from `config`")
        return self

    @property
    def weight_dtype(self) -> str:
        """`dtype`, of a model that is `resolved` or names it."""
        assert self.dtype != "auto", "the worker resolves it when it has loaded the configuration"
        return self.dtype or "float32"

    def resolved(self, config: Any) -> ModelSpec:
        """The same with `dtype` decided. `config`: the model's transformers configuration, as it
        was loaded."""
        if self.dtype != "auto":
            return self
        own = getattr(config, "dtype", None) or getattr(config.get_text_config(), "dtype", None)
        return self.model_copy(update={"dtype": floating_type(str(own))})

    @property
    def tokenizer_source(self) -> str:
        """Where the tokenizer is loaded from."""
        source = self.tokenizer or self.path
        assert source is not None  # _one_source
        return source


Beta = Annotated[float, Field(ge=0, lt=1)]


class OptimizerSpec(Section):
    """AdamW and its learning-rate schedule."""

    lr: float = Field(default=1e-5, gt=0, le=1000)
    """Peak learning rate."""
    betas: tuple[Beta, Beta] = (0.9, 0.95)
    """Decay of the first and second moment."""
    eps: float = Field(default=1e-8, ge=1e-30, le=1)
    """Added to the root of the second moment. Values that are zero in single precision are refused:
    weights without a gradient would become NaN."""
    weight_decay: float = Field(default=0.0, ge=0, le=1000)
    """Decoupled weight decay."""
    max_grad_norm: Norm = 1.0
    """Maximum global L2 norm of the gradients."""
    warmup_steps: StepsOrNone = 0
    """Steps over which the learning rate rises linearly from zero."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """How the learning rate falls after warm-up, over the job's steps, to `final_lr_fraction`."""
    final_lr_fraction: float = Field(default=0.1, ge=0, le=1)
    """Fraction of `lr` left at the last step of a falling schedule."""


class SimulatedClassSpec(Section):
    """Cost model of engines of one device class, where it differs."""

    prefill_tokens_per_second: Rate | None = None
    """Prompt tokens that one engine reads per second."""
    decode_seconds: SecondsOrNone | None = None
    """Seconds of one decoding step of an engine."""
    decode_seconds_per_turn: SecondsOrNone | None = None
    """Seconds that every running turn adds to a decoding step."""


class SimulatedSpec(Section):
    """Cost model of a simulated policy: engine and trainer wait for the time that it gives, and
    nothing is learned. For measurements of pipelines and schedulers (docs/benchmarks.md)."""

    prefill_tokens_per_second: Rate = 20_000
    """Prompt tokens that one engine reads per second."""
    decode_seconds: SecondsOrNone = 0.02
    """Seconds of one decoding step of an engine, independent of the running turns."""
    decode_seconds_per_turn: SecondsOrNone = 0.0005
    """Seconds that every running turn adds to a decoding step."""
    response_tokens_mean: float = Field(default=200, gt=0, le=MAX_TOKENS)
    """Mean of the lognormal length of responses; `max_new_tokens` cuts it."""
    response_tokens_sigma: float = Field(default=0.8, ge=0, le=20)
    """Sigma of the lognormal length of responses."""
    backward_tokens_per_second: Rate = 20_000
    """Tokens per second of forward and backward in the trainer."""
    step_seconds: SecondsOrNone = 0.2
    """Seconds of an optimizer step, saving state included."""
    state_bytes: int = Field(default=0, ge=0, le=1 << 50)
    """Bytes of training state that are moved off and onto the trainer's device at a swap."""
    load_seconds: SecondsOrNone = 0.1
    """Seconds that an engine needs to load new weights; it serves nothing meanwhile."""
    classes: dict[str, SimulatedClassSpec] = Field(default={}, max_length=64)
    """Overrides by device class (`engine.pools`)."""

    def of_class(self, device_class: str) -> SimulatedSpec:
        """The cost model of an engine of this device class."""
        own = self.classes.get(device_class)
        return self.model_copy(update=own.model_dump(exclude_none=True)) if own else self


class EngineSpec(Section):
    """The inference engines of a policy."""

    kind: KindName = "embedded"
    """`embedded`: transformers inside the rollout process; `sglang`, `vllm`: a server of that kind
    per engine (docs/engines.md)."""
    replicas: Annotated[int, Field(ge=1, le=MAX_ENGINES)] | Literal["auto"] | None = None
    """Engines of this policy per rollout worker. `auto`: decided when the job starts, so that the
    launched servers of its policies use all devices of a rollout worker (docs/gpus.md). Default:
    `auto` for launched servers, else 1."""
    pools: list[PoolSpec] = Field(default=[], max_length=64)
    """Engines by device class, instead of `replicas`. Attached servers (`urls`) are assigned to the
    pools in order."""
    tensor_parallel: int = Field(default=1, ge=1, le=64)
    """Servers: devices over which each launched server spreads the model. Replicas take
    `replicas` times as many devices of a rollout worker."""
    max_running: int | None = Field(default=None, ge=1, le=4096)
    """Turns that one engine generates concurrently; further ones wait in the router. Default: 64 on
    a CPU, 64 to 512 on a GPU, by its memory (docs/training.md)."""
    max_context: int | None = Field(default=None, ge=16, le=MAX_TOKENS)
    """Context length in tokens, prompt and response together; not above the model's positions.
    Default: all of them, at most 32768; with `embedded` as many as its cache has room for, at least
    2048 (docs/engines.md)."""
    urls: list[str] = Field(default=[], max_length=1024)
    """Servers: attach to these instead of launching some."""
    launch: list[str] = Field(default=[], max_length=1024)
    """Servers: extra arguments of the launched one, as on its command line; `{replica}` is
    replaced by the number of the replica, `{port}` by its port."""
    python: str | None = None
    """Servers: Python interpreter of the environment that has SGLang or vLLM, on the hosts of the
    rollout workers; `~` is their home directory. Default: TROUPE_SGLANG_PYTHON or
    TROUPE_VLLM_PYTHON of the worker, or its own Python."""
    update: Literal["auto", "tensor", "disk", "ipc", "broadcast"] = "auto"
    """Servers: how new weights are sent to one. From the trainer's devices, `ipc`: by handles
    of their memory, on one host; `broadcast`: in a process group (NCCL, on a CPU gloo). From host
    memory, `disk`: as files on a shared file system; `tensor`: through shared memory to a launched
    server, over HTTP to an attached one. `auto`: from GPU to GPU `ipc` to a server that sees the
    trainer's GPU and `broadcast` to others; else, and where that fails, `disk` to a server of this
    host, which reads the published file in place, or `tensor`; only what the server
    supports (vLLM: no `tensor`)."""
    in_flight: Literal["keep", "restart"] = "keep"
    """Turns that are running when new weights arrive. `keep`: continue; each token records its
    version. `restart`: abort and repeat, so that every turn has one version."""
    cache: Literal["recompute", "keep"] = "recompute"
    """Keys and values of turns that continue. `recompute`: with the new weights. `keep`: continue
    at once with the keys and values of the old weights; later turns read their prompts with the new
    ones. Only in mode `async`, whose correction accounts for the weights that the engine sampled
    with (docs/engines.md)."""
    share: str = Field(default="auto", pattern=NAME)
    """Whether engines serve further policies over the same base, which they then load once
    (docs/engines.md). `auto`: with all policies that have the same `model` and `engine`, and that
    have `lora` or are frozen; none with `balancing.inter: true`. `never`: with none. Another word:
    with the policies that give the same word; an error where these cannot share engines."""
    start_timeout_seconds: Seconds = 600
    """Time limit of the start of an engine."""

    @property
    def is_server(self) -> bool:
        """See `EngineKind`."""
        return KINDS[self.kind].is_server

    @property
    def running_limit(self) -> int:
        """`max_running`; a rollout worker fills in its default before engines start."""
        return self.max_running or CPU.max_running

    @model_validator(mode="before")
    @classmethod
    def _in_the_worker(cls, raw: Any) -> Any:
        if not isinstance(raw, dict) or "own_process" not in raw:
            return raw
        # Stored jobs of earlier releases say `false`.
        if raw["own_process"] is not False:
            raise ValueError(
                f"own_process = {str(raw['own_process']).lower()}: embedded engines run in their "
                "rollout worker only; leave it out, and start several rollout workers (`troupe up "
                "--rollouts N`) to use more processes"
            )
        return {name: value for name, value in raw.items() if name != "own_process"}

    @field_validator("urls")
    @classmethod
    def _are_urls(cls, urls: list[str]) -> list[str]:
        for url in urls:
            if not _URL.fullmatch(url):
                raise ValueError(f"'{url}' is not of the form http://HOST:PORT")
        count = Counter(server_of(url) for url in urls)
        if twice := sorted(url for url in urls if count[server_of(url)] > 1):
            raise ValueError(f"{twice[0]} is given twice; a server is one engine")
        return urls

    @model_validator(mode="after")
    def _attaches(self) -> Self:
        if self.urls and not self.is_server:
            raise ValueError(
                f"urls: servers are attached with kind {server_kinds()}, not `{self.kind}`; use "
                "that, or leave them out"
            )
        return self

    @model_validator(mode="after")
    def _keeps_what_goes_on(self) -> Self:
        if self.cache == "keep" and self.in_flight == "restart":
            raise ValueError(
                "cache: `keep` is for turns that go on, and `in_flight: restart` aborts them; use "
                "`in_flight: keep`, or `recompute`"
            )
        return self

    @model_validator(mode="after")
    def _is_spread(self) -> Self:
        if self.tensor_parallel > 1 and (not self.is_server or self.urls):
            raise ValueError(
                f"tensor_parallel: {self.tensor_parallel} devices are of a launched server of kind "
                f"{server_kinds()}; an attached one says itself how it is spread"
            )
        spread = KINDS[self.kind].spread_arguments
        given = {part.partition("=")[0] for part in self.launch} & spread
        if given:
            raise ValueError(
                f"launch: {min(given)} is `tensor_parallel`, by which the server gets its devices"
            )
        return self

    @model_validator(mode="after")
    def _pools_match(self) -> Self:
        pooled = sum(pool.replicas for pool in self.pools)
        if self.pools and self.urls and pooled != len(self.urls):
            raise ValueError(
                f"pools: they have {pooled} replicas, but `urls` names {len(self.urls)} servers"
            )
        for pool in self.pools:
            if bool(pool.prefill_tokens_per_second) != bool(pool.decode_tokens_per_second):
                raise ValueError(
                    f"pools: '{pool.device_class}' has one rate; give both rates or none"
                )
        return self


def server_of(url: str) -> str:
    """Normal form of a server's address: lower case, without a trailing slash."""
    scheme, _, rest = url.rstrip("/").partition("://")
    return f"{scheme.lower()}://{rest.lower()}"


class InitFromSpec(Section):
    """The origin of a policy's weights: a policy of another job, or a checkpoint."""

    job: str | None = Field(default=None, min_length=1)
    """Id of a job of this cluster. Exactly one of job and path."""
    policy: str | None = None
    """Name of the policy in that job. Default: this policy's."""
    version: int | None = Field(default=None, ge=0, le=MAX_INT)
    """Version whose checkpoint that job has kept. Default: its newest checkpoint."""
    path: str | None = None
    """Directory of a checkpoint on the orchestrator's host, or a URL that fsspec knows
    (`s3://BUCKET/FOLDER`), which is fetched when the job starts."""
    optimizer: bool = False
    """Whether the optimizer's state comes along, with weights in full precision. Trainers keep it
    of a job's last versions; checkpoints do not have it."""

    _home = field_validator("path")(expand_home)

    @model_validator(mode="before")
    @classmethod
    def _short(cls, raw: Any) -> Any:
        """Read `JOB`, `JOB@VERSION`, and a path or URL."""
        if not isinstance(raw, str):
            return raw
        if "/" in raw or raw.startswith((".", "~")):
            return {"path": raw}
        job, at, version = raw.partition("@")
        return {"job": job, "version": version} if at else {"job": job}

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if (self.job is None) == (self.path is None):
            raise ValueError("give exactly one of `job` and `path`")
        for name in ("policy", "version"):
            if self.path is not None and getattr(self, name) is not None:
                raise ValueError(f"{name}: belongs to a `job`; a path is one checkpoint; remove it")
        if self.path is not None and self.optimizer:
            raise ValueError(
                "optimizer: checkpoints have no optimizer state; name the `job` that has it, or "
                "set it to false"
            )
        return self


class PolicySpec(Section):
    """A policy: a model or network with versioned weights."""

    model: ModelSpec | None = None
    """A language model: architecture, first weights, tokenizer. Exactly one of model and
    network."""
    network: NetworkSpec | None = None
    """A small network that plays `environment`."""
    init_from: InitFromSpec | None = None
    """First weights, which replace the weights of `model`: `JOB`, `JOB@VERSION`, or the path or URL
    of a checkpoint; or the section (docs/going-on.md)."""
    trainable: bool = True
    """False: a frozen policy, which is served but not trained."""
    lora: LoraSpec | None = None
    """Train a LoRA adapter on frozen weights. Default: all weights are trained."""
    optimizer: OptimizerSpec = OptimizerSpec()
    """Optimizer."""
    trainer: TrainerSpec = TrainerSpec()
    """How its gradients are computed."""
    engine: EngineSpec = EngineSpec()
    """Inference engines."""
    alpha: int | None = Field(default=None, ge=1, le=64)
    """`async`: staleness bound of this policy. Default: `pipeline.alpha`."""
    colocate: bool | None = None
    """Whether its engines and its trainer take turns on the same devices. Default:
    `pipeline.colocate`."""
    simulated: SimulatedSpec | None = None
    """Simulate engine and trainer, for benchmarks: nothing is learned."""

    @property
    def language_model(self) -> ModelSpec:
        """The model of a policy that is a language model."""
        assert self.model is not None, "this policy is a network"
        return self.model

    @property
    def weight_dtype(self) -> str:
        """The dtype of its published weights: float32 for a network."""
        return "float32" if self.model is None else self.model.weight_dtype

    @property
    def paradigm(self) -> str:
        """How a network learns; empty for a language model, which learns by the job's
        `algorithm`."""
        return "" if self.network is None else self.network.learning.paradigm

    @model_validator(mode="after")
    def _dtype(self) -> Self:
        """Fill in the default of `model.dtype`, which must not change with `engine.kind` when a job
        is resumed."""
        if self.model is not None and self.model.dtype is None:
            own = self.engine.is_server and self.model.path and self.simulated is None
            changed = self.model.model_copy(update={"dtype": "auto" if own else "float32"})
            self.__dict__["model"] = changed  # frozen
        return self

    @model_validator(mode="after")
    def _whole_machine(self) -> Self:
        """Fill in the defaults `auto` of policies that launched servers serve on GPUs."""
        engine = self.engine
        if self.model is None or self.simulated is not None or not engine.is_server:
            return self
        if engine.replicas is None and not engine.urls and not engine.pools:
            self.__dict__["engine"] = engine.model_copy(update={"replicas": "auto"})  # frozen
        if self.trainer.gang is None and self.trainable:
            self.__dict__["trainer"] = self.trainer.model_copy(update={"gang": "auto"})
        return self

    @model_validator(mode="after")
    def _begins(self) -> Self:
        if self.init_from is None:
            return self
        if self.simulated is not None:
            raise ValueError("init_from: a simulated policy has no weights; remove it")
        if self.init_from.optimizer and not self.trainable:
            raise ValueError(
                "init_from.optimizer: the policy is frozen; set `trainable: true`, or remove it"
            )
        return self

    @model_validator(mode="after")
    def _slices(self) -> Self:
        trainer = self.trainer
        if trainer.gang is None and trainer.gang_multiple > 1:
            experts = trainer.context_parallel == 1
            field, what = ("expert", "the experts") if experts else ("context", "a pass")
            raise ValueError(
                f"trainer.{field}_parallel: {trainer.gang_multiple} devices divide {what}, but "
                "`gang` is 1; set it to `auto` or a multiple"
            )
        return self

    @model_validator(mode="after")
    def _one_kind(self) -> Self:
        if (self.model is None) == (self.network is None):
            raise ValueError("give exactly one of `model` and `network`")
        if self.network is None:
            return self
        served = "a network is played within the rollout process"
        trained = "a network is trained by its `network.learning`"
        own = TrainerSpec(
            quantum_seconds=self.trainer.quantum_seconds, idle_seconds=self.trainer.idle_seconds
        )
        for field, given, why in (
            ("lora", self.lora is not None, "a network has no adapter"),
            ("init_from", self.init_from is not None, "only a `model` begins with a checkpoint"),
            ("simulated", self.simulated is not None, "only a `model` can be simulated"),
            ("engine", self.engine != EngineSpec(), served),
            ("optimizer", self.optimizer != OptimizerSpec(), trained),
            ("trainer", self.trainer != own, f"{trained} on one device"),
        ):
            if given:
                raise ValueError(f"{field}: {why}; remove it")
        return self
