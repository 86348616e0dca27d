"""Sections of a policy: its model, its optimizer, what serves it.

The docstring under a field is its documentation: `troupe job schema`, the job reference
and editors show it.
"""

from __future__ import annotations

import re
from collections import Counter
from typing import Annotated, Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from troupe.job.network import NetworkSpec
from troupe.job.section import (
    MAX_COEFFICIENT,
    MAX_TOKENS,
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
from troupe.job.sections import PoolSpec


class LoraSpec(Section):
    """Low-rank adaptation (Hu et al. 2021, section 4.1): a frozen linear layer W gets a trained
    update, `W + alpha / rank * B @ A` with B [out, rank] and A [rank, in]. Policies with the same
    base share its weights in a trainer worker, and only adapters are stepped, stored and sent."""

    rank: int = Field(default=16, ge=1, le=1024)
    """Rank of the update of each layer; not above the model's hidden size."""
    alpha: float = Field(default=32.0, gt=0, le=MAX_COEFFICIENT)
    """The update is scaled by `alpha / rank`."""
    dropout: float = Field(default=0.0, ge=0, lt=1)
    """Fraction of the adapters' inputs that is dropped while gradients are computed. What is
    trained then differs a little from what sampled; not with `pipeline.deterministic`."""
    target_modules: Literal["all-linear"] | Annotated[list[str], Field(max_length=1024)] = (
        "all-linear"
    )
    """Which linear layers are adapted, by the last part of their names (`q_proj`, `down_proj`);
    `all-linear`: every one but the output layer."""

    path: str | None = None
    """Adapter to begin with: a directory as PEFT and `troupe export` write it, made for the same
    base, rank, alpha and layers. Default: a random A and B = 0, which changes nothing."""

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


class TrainerSpec(Section):
    """How a policy's gradients are computed."""

    activation_checkpointing: bool = False
    """Keep only what goes into each layer for the backward pass and compute the rest again:
    roughly a third more computation, for activations of one layer instead of all."""
    compile: Literal["auto", "on", "off"] = "auto"
    """Whether torch.compile fuses what lies between matrix products. `on` is refused by a worker
    without a compiler, and with `pipeline.deterministic`. `auto`: where it was measured to pay,
    which is nowhere yet: 5 % on a CPU after half a minute of compiling, no GPU measured."""
    kernels: Literal["auto", "off"] = "auto"
    """Whether RMSNorm and rotary embedding are computed by functions of the trainer's own. `auto`:
    where that was measured to pay, on a CPU, and in models where they are tried out to give what
    the model's own give, value and gradient, within 1e-5 in float32. `off`: never."""
    forward_tokens: Tokens | None = None
    """Tokens of one forward pass, which a micro-batch is cut into; a longer sequence is a pass of
    its own. Default: what suits the device (1024 on a CPU, 16384 on a GPU)."""
    gang: int = Field(default=1, ge=1, le=4096)
    """Devices that share the policy's weights, gradients and optimizer (FSDP2), each computing its
    part of every micro-batch. 1: one device holds all of it. Sums of several devices round in
    another order: not with `pipeline.deterministic`. A resumed job may have another size."""
    quantum_seconds: SecondsOrNone = 1.0
    """Where policies outnumber the trainers' slots: a policy with work keeps its device so long
    before one with older work may take its place. Larger: fewer swaps, longer waits."""
    idle_seconds: Seconds = 600
    """A policy that has no step to train for so long gives its device and memory back, so that
    trainers can be scaled to zero; the next step loads it again."""


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
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Floating-point type of the weights in trainer and engines."""
    tool_parser: Literal["hermes", "qwen_coder", "llama", "mistral"] = "hermes"
    """How the model writes calls of tools. `hermes`: JSON between `<tool_call>` tags (Hermes,
    Qwen2.5, Qwen3); `qwen_coder`: `<function=...>` between them; `llama`: JSON alone (Llama 3.1);
    `mistral`: a list behind `[TOOL_CALLS]`."""

    _json = field_validator("config")(check_json)
    _home = field_validator("path", "tokenizer")(expand_home)

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


Beta = Annotated[float, Field(ge=0, lt=1)]


class OptimizerSpec(Section):
    """AdamW and its schedule."""

    lr: float = Field(default=1e-5, gt=0, le=1000)
    """Peak learning rate."""
    betas: tuple[Beta, Beta] = (0.9, 0.95)
    """Decay of the first and second moment."""
    eps: float = Field(default=1e-8, ge=1e-30, le=1)
    """Added to the root of the second moment; what single precision would take for zero is refused,
    since a weight without a gradient would become NaN."""
    weight_decay: float = Field(default=0.0, ge=0, le=1000)
    """Decoupled weight decay."""
    max_grad_norm: Norm = 1.0
    """Gradients are scaled down to this global L2 norm."""
    warmup_steps: StepsOrNone = 0
    """Steps over which the learning rate rises linearly from zero."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """How the learning rate falls after warm-up, over the job's steps, to `final_lr_fraction`."""
    final_lr_fraction: float = Field(default=0.1, ge=0, le=1)
    """Fraction of `lr` left at the last step of a falling schedule."""


class SimulatedClassSpec(Section):
    """How engines of one device class differ from the cost model."""

    prefill_tokens_per_second: Rate | None = None
    """Prompt tokens that one engine reads per second."""
    decode_seconds: SecondsOrNone | None = None
    """Seconds of one decoding step of an engine."""
    decode_seconds_per_turn: SecondsOrNone | None = None
    """Seconds that every running turn adds to a decoding step."""


class SimulatedSpec(Section):
    """Hardware that is not there: engine and trainer answer after the time that this cost model
    gives, and learn nothing. For measuring pipelines and schedulers (docs/benchmarks.md)."""

    prefill_tokens_per_second: Rate = 20_000
    """Prompt tokens that one engine reads per second."""
    decode_seconds: SecondsOrNone = 0.02
    """Seconds of one decoding step of an engine, whatever runs."""
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
    """Bytes of training state that leave the trainer's device, and come back, with the policy."""
    load_seconds: SecondsOrNone = 0.1
    """Seconds in which an engine loads new weights and serves nothing."""
    classes: dict[str, SimulatedClassSpec] = Field(default={}, max_length=64)
    """What is different for the engines of a device class (`engine.pools`)."""

    def of_class(self, device_class: str) -> SimulatedSpec:
        """The cost model of an engine of this device class."""
        own = self.classes.get(device_class)
        return self.model_copy(update=own.model_dump(exclude_none=True)) if own else self


class EngineSpec(Section):
    """What serves a policy during rollout."""

    kind: Literal["embedded", "sglang"] = "embedded"
    """`embedded`: transformers inside the rollout process; `sglang`: an SGLang server."""
    replicas: int = Field(default=1, ge=1, le=1024)
    """Engines of this policy per rollout worker."""
    pools: list[PoolSpec] = Field(default=[], max_length=64)
    """Instead of `replicas`: engines by device class. Attached servers (`urls`) belong to the pools
    in their order."""
    max_running: int = Field(default=64, ge=1, le=4096)
    """Turns that one engine generates at once; more wait in the router."""
    max_context: int = Field(default=2048, ge=16, le=MAX_TOKENS)
    """Tokens of prompt and response together that the engine keeps room for."""
    urls: list[str] = Field(default=[], max_length=1024)
    """`sglang`: attach to these servers instead of launching some."""
    launch: list[str] = Field(default=[], max_length=1024)
    """`sglang`: extra arguments of the launched server, as on its command line."""
    python: str | None = None
    """`sglang`: Python interpreter of the environment that holds SGLang; default: our own."""
    update: Literal["auto", "tensor", "disk"] = "auto"
    """`sglang`: how new weights reach a server. `disk`: as files that it sees too; `tensor`: as
    tensors, by shared memory into a launched server and by value over HTTP into an attached one.
    `auto`: tensors into a launched server, files into an attached one on this host that sees ours,
    else tensors; what a release does not offer is not chosen."""
    in_flight: Literal["keep", "restart"] = "keep"
    """Turns that are being generated when new weights come. `keep`: retracted and continued, their
    keys and values computed anew; each token carries its version. `restart`: aborted and asked for
    again, so that every turn is of one version."""
    own_process: bool = False
    """`embedded`: whether each engine's model is computed by a process of its own. Engines in the
    rollout process wait for its interpreter lock, and it for theirs. Worth it for small models that
    draw many turns at once, or with several engines; costs the memory of another interpreter
    (0.4 GB) and seconds at the start. Engines of deterministic jobs, and those whose turns do not
    fit into memory at full length, stay where they are."""
    start_timeout_seconds: Seconds = 600
    """How long an engine may take until it is ready."""

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
        if self.urls and self.kind != "sglang":
            raise ValueError(
                f"urls: servers are attached with kind `sglang`, not `{self.kind}`; use that, or "
                "leave them out"
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
    """What two spellings of one server's address have in common."""
    scheme, _, rest = url.rstrip("/").partition("://")
    return f"{scheme.lower()}://{rest.lower()}"


class PolicySpec(Section):
    """Trainable weights with a version."""

    model: ModelSpec | None = None
    """A language model: architecture, first weights, tokenizer. Exactly one of model and
    network."""
    network: NetworkSpec | None = None
    """A small network, which plays `environment`."""
    trainable: bool = True
    """False: a frozen policy; it is served, never trained."""
    lora: LoraSpec | None = None
    """Train an adapter on the model's weights, which stay as they are; default: all weights."""
    optimizer: OptimizerSpec = OptimizerSpec()
    """How its weights are stepped."""
    trainer: TrainerSpec = TrainerSpec()
    """How its gradients are computed."""
    engine: EngineSpec = EngineSpec()
    """What serves it."""
    alpha: int | None = Field(default=None, ge=1, le=64)
    """`async`: this policy's staleness bound, instead of `pipeline.alpha`."""
    simulated: SimulatedSpec | None = None
    """Stand-ins instead of engine and trainer, for benchmarks: nothing is learned."""

    @property
    def language_model(self) -> ModelSpec:
        """The model of a policy that is a language model."""
        assert self.model is not None, "this policy is a network"
        return self.model

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
            ("simulated", self.simulated is not None, "only a `model` can be simulated"),
            ("engine", self.engine != EngineSpec(), served),
            ("optimizer", self.optimizer != OptimizerSpec(), trained),
            ("trainer", self.trainer != own, f"{trained} on one device"),
        ):
            if given:
                raise ValueError(f"{field}: {why}; remove it")
        return self
