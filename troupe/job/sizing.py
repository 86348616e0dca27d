"""Estimates of the trainer memory of a job's policies, from their models' configurations.

It reads a transformers configuration (`config.json` of a directory, `model.config` of the job, or
the hub's cache) without torch and transformers, since a job's author may have neither. For
architectures that are not listed here, the trainer that loads them does the estimate.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from troupe.job.engines.sharing import same_base
from troupe.job.hub import known_config
from troupe.job.sections.policy import ModelSpec, PolicySpec
from troupe.job.spec import JobSpec
from troupe.scheduling.defaults import (
    CPU_UNCUT,
    EMBEDDED_CONTEXT,
    LONGEST_CONTEXT,
    context_of,
    defaults_of,
    expert_ranks,
)
from troupe.scheduling.memory import (
    SHORT_ROW,
    SLEEPING_SERVER_BYTES,
    ModelShape,
    TrainingSetup,
    rank_memory,
)

# Defaults of transformers' configurations, which files may leave out: vocabulary, hidden size,
# intermediate size, layers, heads, key-value heads (0: as many as heads), head size (0: hidden size
# by heads), intermediate size of an expert, experts, experts per token.
_FIELDS: Final = (
    ("vocab_size",),
    ("hidden_size",),
    ("intermediate_size",),
    ("num_hidden_layers",),
    ("num_attention_heads",),
    ("num_key_value_heads",),
    ("head_dim",),
    ("moe_intermediate_size",),
    ("num_experts", "num_local_experts"),
    ("num_experts_per_tok",),
)
_DEFAULTS: Final = {
    "llama": (32000, 4096, 11008, 32, 32, 0, 0, 0, 0, 0),
    "mistral": (32000, 4096, 14336, 32, 32, 8, 0, 0, 0, 0),
    "qwen2": (151936, 4096, 22016, 32, 32, 32, 0, 0, 0, 0),
    "qwen3": (151936, 4096, 22016, 32, 32, 32, 128, 0, 0, 0),
    "mixtral": (32000, 4096, 14336, 32, 32, 8, 0, 0, 8, 2),
    "qwen3_moe": (151936, 2048, 6144, 24, 32, 4, 0, 768, 128, 8),
}
# Usable fraction of a GPU's nominal memory: 79.2 of 80 GB (H100), 23.6 of 24.
SOLD: Final = 0.985
# Fraction of a device's memory within which more is kept than a step needs
# (`activation_checkpointing: auto`, `shard: auto`): drivers reported up to 1.1 times the memory
# model's value (docs/training.md).
_ROOM: Final = 0.9


def shape_of_config(config: Mapping[str, Any]) -> ModelShape | None:
    """Return the shape of the causal language model of a transformers configuration.

    None: another architecture, or values that are not numbers.
    """
    kind = str(config.get("model_type", ""))
    if kind not in _DEFAULTS:
        return None
    values = []
    for names, default in zip(_FIELDS, _DEFAULTS[kind], strict=True):
        found = next((config[n] for n in names if config.get(n) is not None), default)
        if not isinstance(found, int) or isinstance(found, bool) or found < 0:
            return None
        values.append(found)
    vocabulary, d, wide, layers, heads, groups, size, narrow, experts, active = values
    if not heads or not d:
        return None
    groups, size = groups or heads, size or d // heads
    queries, keys = heads * size, groups * size
    positions = config.get("max_position_embeddings")
    linears = {"q_proj": (d, queries), "k_proj": (d, keys), "v_proj": (d, keys)}
    linears["o_proj"] = (queries, d)
    own_bias = bool(config.get("attention_bias")) and kind not in ("qwen2", "mistral", "mixtral")
    biased = (
        {"q_proj", "k_proj", "v_proj"} if kind == "qwen2" else set(linears) if own_bias else set()
    )
    norms = kind in ("qwen3", "qwen3_moe")
    attention = _parameters(linears, biased) + 2 * d + (2 * size if norms else 0)
    mlp = {"gate_proj": (d, wide), "up_proj": (d, wide), "down_proj": (wide, d)}
    mlp_biased = set(mlp) if kind == "llama" and config.get("mlp_bias") else set()
    dense = attention + _parameters(mlp, mlp_biased)
    expert_width = narrow if kind == "qwen3_moe" else wide
    sparse = attention + experts * (d + 3 * d * expert_width)
    mixed = _sparse_layers(config, layers) if experts else 0
    body = mixed * sparse + (layers - mixed) * dense
    embedding = vocabulary * d
    tied = bool(config.get("tie_word_embeddings", False))
    adapted = {name: layers * (a + b) for name, (a, b) in linears.items()}
    if mixed < layers:
        adapted |= {name: (layers - mixed) * (a + b) for name, (a, b) in mlp.items()}
    return ModelShape(
        parameters=embedding * (1 if tied else 2) + body + d,
        embedding=embedding,
        output=0 if tied else embedding,
        layers=layers,
        layer=max(sparse if mixed else 0, dense if mixed < layers else 0),
        hidden=d,
        intermediate=expert_width if mixed else wide,
        vocabulary=vocabulary,
        heads=heads,
        kv_heads=groups,
        head_dim=size,
        experts=experts if mixed else 0,
        active_experts=active if mixed else 0,
        head_norms=norms,
        positions=positions if isinstance(positions, int) else 0,
        linears=tuple(adapted.items()),
    )


def _parameters(linears: Mapping[str, tuple[int, int]], biased: set[str]) -> int:
    return sum(a * b + (b if name in biased else 0) for name, (a, b) in linears.items())


def _sparse_layers(config: Mapping[str, Any], layers: int) -> int:
    """Return the number of layers with experts (Qwen3-MoE may mix them with dense ones)."""
    every, plain = config.get("decoder_sparse_step", 1), config.get("mlp_only_layers") or []
    return sum(i not in plain and (i + 1) % max(1, every) == 0 for i in range(layers))


def read_config(model: ModelSpec) -> Mapping[str, Any] | None:
    """Return the transformers configuration of a job's model; None if this machine does not have
    it."""
    if model.config is not None:
        return model.config
    assert model.path is not None  # exactly one of path and config
    folder = Path(model.path)
    if not folder.is_dir():
        cached = _cached(model.path, model.revision)
        if cached is None:
            return None
        folder = cached
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return config if isinstance(config, dict) else None


def quantization_of(config: Mapping[str, Any]) -> str:
    """Return the quantization method of a checkpoint (fp8, mxfp4, gptq, awq, ...) from its
    configuration; empty if it is not quantized."""
    found = config.get("quantization_config")
    if not found:
        return ""
    return str(found.get("quant_method") or "unknown") if isinstance(found, Mapping) else "unknown"


QUANTIZED_REMEDY: Final = (
    "Train unquantized weights: give the bfloat16 checkpoint from which it was made, or write one "
    "(transformers: `from_pretrained` with the method's configuration and `dequantize=True`, then "
    "`save_pretrained` without `quantization_config`)."
)
"""The remedy for a quantized checkpoint."""


def read_shape(model: ModelSpec) -> ModelShape | None:
    """Return the shape of a job's model, from its configuration or, where this machine does not
    have it, from its name; None if neither tells."""
    config = read_config(model) or known_config(model.path or "")
    return None if config is None else shape_of_config(config)


def shapes_of(spec: JobSpec) -> dict[str, ModelShape | None]:
    """Return the shapes of a job's language models by policy; None where this machine cannot
    tell. Blocking."""
    return {
        name: read_shape(one.model)
        for name, one in spec.policies.items()
        if one.model is not None and one.simulated is None
    }


def _cached(repository: str, revision: str | None) -> Path | None:
    """Return the snapshot of a repository in the hub's cache (huggingface_hub's layout)."""
    home = os.environ.get("HF_HOME") or "~/.cache/huggingface"
    cache = Path(os.environ.get("HF_HUB_CACHE") or f"{home}/hub").expanduser()
    folder = cache / f"models--{repository.replace('/', '--')}"
    try:
        commit = (folder / "refs" / (revision or "main")).read_text(encoding="utf-8").strip()
    except (OSError, ValueError):
        commit = revision or ""
    snapshot = folder / "snapshots" / commit
    return snapshot if commit and snapshot.is_dir() else None


def _frozen_bytes(model: ModelSpec) -> int:
    """Return the bytes of a model's weights in its own type; 0 if this machine cannot tell."""
    shape, half = read_shape(model), model.dtype in ("auto", "bfloat16")
    return 0 if shape is None else shape.parameters * (2 if half else 4)


def adapter_parameters(policy: PolicySpec, shape: ModelShape) -> int:
    """Return the parameters of a policy's adapter; 0: it has none."""
    lora = policy.lora
    if lora is None:
        return 0
    names = None if lora.target_modules == "all-linear" else lora.target_modules
    return shape.adapter(lora.rank, names)


def setup_of(
    spec: JobSpec,
    policy: str,
    shape: ModelShape,
    *,
    device: str,
    memory: int = 0,
    forward_tokens: int = 0,
    ranks: int | None = None,
    hosts: int = 1,
) -> TrainingSetup:
    """Return how a device would train a policy of a job, and decide `activation_checkpointing:
    auto`, `shard: auto`, and whether copies of weights are kept in bfloat16.

    On a device of known memory, activations are kept if the step then fits together with the states
    of the job's other policies, assumed to be equally large except for a base that they share; and
    each host of a gang over several has all weights if that fits likewise. Otherwise the device's
    default applies, also if engines share the devices, since the remaining memory is unknown.

    `device`: its type, "cpu" or "cuda"; `memory`: its bytes, 0 if unknown; `forward_tokens`: the
    worker's setting; `ranks`: devices of the gang; default: as in the job; `hosts`: over which they
    are spread evenly.
    """
    own, algorithm = spec.policies[policy], spec.algorithm
    lora = own.lora
    gang = own.trainer.ranks if ranks is None else ranks
    given = defaults_of(None if device == "cpu" else memory)
    room = LONGEST_CONTEXT if own.engine.is_server else EMBEDDED_CONTEXT
    longest = context_of(own.engine.max_context, shape.positions, room) + algorithm.team_tokens
    longest = min(longest, shape.positions or longest)
    wanted = own.trainer.forward_tokens or forward_tokens
    slices = min(own.trainer.context_parallel, gang)
    parallel = own.trainer.expert_parallel
    divided = expert_ranks(parallel, gang, shape.experts) if shape.experts else 1
    tokens = wanted or given.tokens_of(shape.hidden)
    whole = tokens * slices * (CPU_UNCUT if device == "cpu" and not wanted else 1)
    # Longer sequences are cut into pieces, if the trainer can cut them.
    if (lora is not None and lora.dropout > 0) or algorithm.router_aux_loss > 0:
        whole = max(whole, longest)
    history = max(0, longest - whole)
    tokens = max(tokens, -(-min(longest, whole) // slices))
    teachers = spec.teachers_of(policy)
    adapter = adapter_parameters(own, shape)
    # Nearly all checkpoints without a given type are in half precision.
    half = own.language_model.dtype in ("auto", "bfloat16")
    # The trainer's own kernels take plain tensors on a CPU, in float32.
    fused = own.trainer.kernels == "auto" and own.trainer.compile != "on" and gang == 1
    wish = own.trainer.activation_checkpointing
    setup = TrainingSetup(
        device=device,
        ranks=gang if own.trainable else 1,
        half=half,
        tokens=tokens,
        slices=slices,
        expert_ranks=min(divided, gang),
        history=history,
        checkpointing=given.activation_checkpointing if wish == "auto" else wish is not False,
        # A number, not true: the layers that are recomputed.
        kept_layers=max(0, shape.layers - wish) if type(wish) is int else 0,
        trainable=own.trainable,
        adapter=adapter,
        reference=spec.needs_reference,
        teachers=sum(_frozen_bytes(spec.policies[one].language_model) for one in teachers),
        critic=algorithm.value_function is not None,
        exact=spec.pipeline.deterministic,
        offloaded=own.trainer.offload != "none",
        fused_norms=device == "cpu" and fused and not (half and adapter),
        short_rows=longest <= SHORT_ROW,
        other_bytes=SLEEPING_SERVER_BYTES
        if policy in spec.colocated and own.engine.is_server
        else 0,
    )
    others = [one for name, one in spec.policies.items() if name != policy and one.model]
    # Policies that train adapters over one base share it.
    over_base = sum(one.lora is not None and same_base(one, own) for one in others)

    def fits(found: TrainingSetup) -> bool:
        """Return whether the device has room for a step in addition to the states of other
        policies."""
        needed = rank_memory(shape, found)
        known = memory > 0 and not spec.pipeline.colocate
        added = len(others) * needed.state - over_base * needed.base
        return known and needed.total + added <= _ROOM * memory

    if wish == "auto" and setup.checkpointing and fits(kept := replace(setup, checkpointing=False)):
        setup = kept
    spread = hosts > 1 and own.trainable and gang % hosts == 0
    each = gang // hosts
    # Experts are divided among the ranks that have all weights between them.
    possible = not shape.experts or parallel == "auto" or each % parallel == 0
    if spread and own.trainer.shard != "gang":
        divided = expert_ranks(parallel, each, shape.experts) if shape.experts else 1
        within = replace(setup, ranks=each, replicas=hosts, expert_ranks=min(divided, each))
        if own.trainer.shard == "host" or (possible and fits(within)):
            setup = within
    kernels = own.trainer.kernels == "auto" and own.trainer.compile != "on"
    if device == "cuda" and half and kernels and own.trainable and not (adapter or setup.gang):
        kept = replace(setup, half_weights="kept")
        setup = kept if not memory or fits(kept) else replace(setup, half_weights="cast")
    return setup
