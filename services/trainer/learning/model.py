"""Loading of a policy's model and tokenizer from a directory, a hub id or a configuration."""

from __future__ import annotations

import contextlib
import hashlib
import importlib
from pathlib import Path
from typing import Any

import torch

from services.trainer.learning.frozen_base import frozen_base
from services.trainer.learning.lora import adapted_model, begin_with
from troupe.checkpoints.adapters import linear_layers
from troupe.checkpoints.configuration import (
    BadConfiguration,
    check_configuration,
    check_listed_counts,
)
from troupe.checkpoints.format import ModelArrangement, cast
from troupe.checkpoints.reading import StoredTensors, checkpoint_folder
from troupe.checkpoints.tensors import TensorsDoNotFit, load_causal_lm
from troupe.checkpoints.verifying import verify
from troupe.job import JobSpec, PolicySpec, no_directory
from troupe.job.hub import first_line, hub_problem
from troupe.job.sizing import QUANTIZED_REMEDY, quantization_of
from troupe.rpc import InvalidArgument
from troupe.scheduling.memory import ModelShape

# Used in place of a policy's name to seed random weights that several policies share.
_BASE = "base"
_HUB_REMEDY = (
    "Give an existing directory with config.json and weights, or a hub id ('owner/name') "
    "that this machine can reach or has in its cache. Relative paths start where the services run."
)


def import_transformers() -> None:
    """Import transformers, which takes seconds, before the first policy is bound."""
    importlib.import_module("troupe.checkpoints.model_classes")


def load_model(policy: str, spec: PolicySpec, seed: int) -> Any:
    """Load the first weights of `policy`'s model: float32, evaluation mode, on the CPU.

    Random weights depend only on `seed` and the policy's name. Raises InvalidArgument of
    kind "model_not_found", "model_unreadable", "model_mismatch" (a tensor is missing, superfluous
    or of another shape), "model_quantized", "model_is_adapter" or "model_config_invalid", naming
    the field.
    """
    return _load(policy, spec, policy_seed(seed, policy))


def load_teacher(name: str, spec: JobSpec, vocabulary: int) -> Any:
    """Return the frozen model of policy `name`, for students with `vocabulary` tokens, on the CPU.

    In bfloat16 if that is the policy's type. Raises as `load_model`, and InvalidArgument of kind
    "teacher_vocabulary".
    """
    spec = with_dtype(name, spec)
    model = load_model(name, spec.policies[name], spec.seed).requires_grad_(False)
    check_teacher(name, model, vocabulary)
    half = spec.policies[name].language_model.weight_dtype == "bfloat16"
    return cast(model, torch.bfloat16) if half else model


def check_teacher(name: str, model: Any, vocabulary: int) -> None:
    """Raise InvalidArgument of kind "teacher_vocabulary" unless `model` knows every token of a
    student with `vocabulary` tokens."""
    found = int(model.get_input_embeddings().weight.shape[0])
    if found < vocabulary:
        raise InvalidArgument(
            f"teacher '{name}' has {found:,} token embeddings, its student {vocabulary:,}",
            kind="teacher_vocabulary",
            field=f"policies.{name}.model",
            value=found,
            remedy="Choose a teacher with at least the student's vocabulary, or "
            "`distillation.divergence: sampled`.",
        )


def load_adapted(policy: str, spec: PolicySpec, seed: int, device: torch.device) -> Any:
    """Load the model of a policy that trains an adapter: evaluation mode, on `device`.

    Policies of this process share the frozen base.

    A base with random weights depends only on `seed` and its configuration, the adapter on `seed`
    and the policy's name. Raises as `load_model`, and InvalidArgument of kind "lora_invalid" or
    "adapter_unusable".
    """
    assert spec.lora is not None  # checked by the caller
    base = frozen_base(spec.language_model, seed, device, lambda: load_base(policy, spec, seed))
    model = adapted_model(policy, spec.lora, base, policy_seed(seed, policy))
    if spec.lora.path is not None:
        begin_with(policy, spec.lora, model)
    return model


def load_base(policy: str, spec: PolicySpec, seed: int) -> Any:
    """Load the model under an adapter, in float32 on the CPU. Raises the errors of `load_model`."""
    return _load(policy, spec, policy_seed(seed, _BASE))


def _load(policy: str, spec: PolicySpec, seed: int) -> Any:
    from transformers.utils import logging

    logging.disable_progress_bar()  # standard error carries structured logs
    source = spec.language_model
    load_config(policy, spec)  # refuses untrainable models before the weights are read
    if source.config is not None:
        model = _from_config(policy, source.config, seed)
    else:
        _refuse_adapter(policy, source.path)
        assert source.path is not None  # spec: exactly one of path and config
        try:
            verify(Path(source.path), ".safetensors")
            model = load_causal_lm(source.path, revision=source.revision, dtype=torch.float32)
        except Exception as error:
            raise load_problem(policy, source.path, error, source.revision) from error
    model.eval()  # with dropout every token would be off-policy
    return model


def load_config(policy: str, spec: PolicySpec) -> Any:
    """Return the transformers configuration of `policy`, without any weights. Raises the errors of
    `load_model`."""
    from transformers import AutoConfig

    source = spec.language_model
    try:
        check_listed_counts(source.config, source.path, source.revision)
    except BadConfiguration as error:
        raise error.of_job(f"policies.{policy}.model", source.path) from error
    if source.config is not None:
        config = _config_of(policy, source.config)
    else:
        _refuse_adapter(policy, source.path)
        assert source.path is not None  # spec: exactly one of path and config
        try:
            config = AutoConfig.from_pretrained(source.path, revision=source.revision)
        except Exception as error:
            raise load_problem(policy, source.path, error, source.revision) from error
    try:
        check_configuration(config)
    except BadConfiguration as error:
        raise error.of_job(f"policies.{policy}.model", source.path) from error
    if method := quantization_of(config.to_dict()):
        raise InvalidArgument(
            f"its weights are quantized ({method})",
            kind="model_quantized",
            field=f"policies.{policy}.model.{'path' if source.path else 'config'}",
            value=source.path or method,
            remedy=QUANTIZED_REMEDY,
        )
    return config


def with_dtype(policy: str, spec: JobSpec) -> JobSpec:
    """Return the job with the `model.dtype` of `policy` decided. Blocking. Raises the errors of
    `load_model`."""
    source = spec.policies[policy]
    if source.model is None or source.model.dtype != "auto":
        return spec
    model = source.model.resolved(load_config(policy, source))
    decided = source.model_copy(update={"model": model})
    return spec.model_copy(update={"policies": {**spec.policies, policy: decided}})


def outline(policy: str, spec: PolicySpec) -> Any:
    """Return the model of `policy` on the meta device: names, shapes and types without memory.

    Raises the errors of `load_model`.
    """
    from transformers import AutoModelForCausalLM

    config, path = load_config(policy, spec), spec.language_model.path
    try:
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    except Exception as error:
        if path is not None:
            raise load_problem(policy, path, error) from error
        raise _no_model(policy, config.model_type, error) from error


def outline_to_save(policy: str, spec: PolicySpec) -> Any:
    """Return the `outline` with the data that a checkpoint takes from a loaded model in addition to
    its weights: the generation configuration, and the conversions of the files' tensors to the
    model's.

    Raises the errors of `load_model`.
    """
    from transformers import GenerationConfig

    model, source = outline(policy, spec), spec.language_model
    if source.path is None:
        return model
    # If files have disappeared since the policy was loaded, use the model's defaults.
    with contextlib.suppress(OSError, ValueError):
        own = GenerationConfig.from_pretrained(source.path, revision=source.revision)
        model.generation_config = own
    with contextlib.suppress(OSError, ValueError):
        folder = checkpoint_folder(source.path, source.revision)
        ModelArrangement(model, StoredTensors.of_checkpoint(folder).layout).note_in(model)
    return model


def shape_of_model(model: Any) -> ModelShape:
    """Return the shape of a model of any architecture, which may be on the meta device.

    Parameters are counted; values that configurations name differently are taken from the layers.
    """
    config = model.config.get_text_config()
    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings()
    tied = head is None or head.weight is embedding
    kinds = set(getattr(model, "_no_split_modules", None) or ())
    sizes = [_count(part) for part in model.modules() if type(part).__name__ in kinds]
    linears: dict[str, int] = {}
    for name, (inputs, outputs) in linear_layers(model, "all-linear")[0].items():
        leaf = name.rpartition(".")[2]
        linears[leaf] = linears.get(leaf, 0) + inputs + outputs

    def given(default: int, *names: str) -> int:
        found = (getattr(config, name, None) for name in names)
        return next((one for one in found if isinstance(one, int) and one), default)

    hidden = int(embedding.shape[1])
    heads = given(1, "num_attention_heads")
    experts = given(0, "num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
    widths = ("moe_intermediate_size",) if experts else ()
    return ModelShape(
        parameters=_count(model),
        embedding=embedding.numel(),
        output=0 if tied else head.weight.numel(),
        layers=given(max(1, len(sizes)), "num_hidden_layers"),
        layer=max(sizes, default=_count(model) - embedding.numel()),
        hidden=hidden,
        intermediate=given(4 * hidden, *widths, "intermediate_size"),
        vocabulary=int(embedding.shape[0]),
        heads=heads,
        kv_heads=given(heads, "num_key_value_heads"),
        head_dim=given(max(1, hidden // heads), "head_dim", "v_head_dim"),
        experts=experts,
        active_experts=given(1, "num_experts_per_tok", "moe_k", "moe_topk") if experts else 0,
        head_norms=True,
        positions=positions_of(model),
        linears=tuple(linears.items()),
    )


def _count(module: Any) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def load_tokenizer(policy: str, spec: PolicySpec) -> Any:
    """Load the tokenizer of `policy`. Raises InvalidArgument of kind "tokenizer_not_found"."""
    from transformers import AutoTokenizer

    source = spec.language_model.tokenizer_source
    # The revision is the model's.
    revision = None if spec.language_model.tokenizer is not None else spec.language_model.revision
    try:
        tokenizer = AutoTokenizer.from_pretrained(source, revision=revision)
    except Exception as error:
        found = f"no tokenizer could be loaded: {first_line(error)}"
        if no_directory(source):
            found = "there is no such directory"
        raise _no_tokenizer(policy, spec, found) from error
    # Without any file transformers silently makes a tokenizer with special tokens only.
    if set(tokenizer.get_vocab().values()) <= set(tokenizer.all_special_ids):
        raise _no_tokenizer(policy, spec, "it has a model but no tokenizer")
    return tokenizer


def _no_tokenizer(policy: str, spec: PolicySpec, message: str) -> InvalidArgument:
    return InvalidArgument(
        message,
        kind="tokenizer_not_found",
        field=_tokenizer_field(policy, spec),
        value=spec.language_model.tokenizer_source,
        remedy="Give a directory with tokenizer.json, or a hub id that can be reached.",
    )


def check_tokenizer(policy: str, spec: PolicySpec, tokenizer: Any, model: Any) -> None:
    """Raise InvalidArgument of kind "tokenizer_mismatch" unless the model knows every token.

    A model may have more tokens than its tokenizer (padded vocabularies do).
    """
    rows = model.get_input_embeddings().weight.shape[0]
    highest = max(tokenizer.get_vocab().values(), default=-1)
    if highest >= rows:
        raise InvalidArgument(
            f"the tokenizer has token ids up to {highest}, the model has {rows} embeddings",
            kind="tokenizer_mismatch",
            field=_tokenizer_field(policy, spec),
            value=spec.language_model.tokenizer_source,
            remedy=f"Use the model's own tokenizer, or a model with vocab_size > {highest}.",
        )


def positions_of(model: Any) -> int:
    """Return the longest sequence of `model` in tokens (position embeddings); 0 if its config has
    none."""
    config = getattr(model, "config", None)
    text = getattr(config, "get_text_config", lambda: config)()
    found = getattr(text, "max_position_embeddings", 0)
    return found if isinstance(found, int) else 0


def policy_seed(seed: int, policy: str) -> int:
    """Return the seed of one policy of a job."""
    digest = hashlib.sha256(f"{seed}/{policy}".encode()).digest()
    return int.from_bytes(digest[:7], "little")


def _from_config(policy: str, values: dict[str, Any], seed: int) -> Any:
    from transformers import AutoModelForCausalLM

    config = _config_of(policy, values)
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    except Exception as error:
        raise _no_model(policy, config.model_type, error) from error


def _config_of(policy: str, values: dict[str, Any]) -> Any:
    from transformers import AutoConfig

    settings = dict(values)
    model_type = settings.pop("model_type", None)
    if not model_type:
        raise InvalidArgument(
            "the configuration has no `model_type`",
            kind="model_config_invalid",
            field=f"policies.{policy}.model.config",
            remedy="Add for example `model_type: qwen3`.",
        )
    try:
        return AutoConfig.for_model(model_type, **settings)
    except Exception as error:
        raise _no_model(policy, model_type, error) from error


def _refuse_adapter(policy: str, path: str | None) -> None:
    """Raise InvalidArgument if `path` is an adapter: transformers would load its base instead."""
    folder = Path(path or "")
    if not (folder / "adapter_config.json").is_file() or (folder / "config.json").is_file():
        return
    raise InvalidArgument(
        "this is an adapter without its base model",
        kind="model_is_adapter",
        field=f"policies.{policy}.model.path",
        value=path,
        remedy=f"Give the base model here and this directory as policies.{policy}.lora.path, or "
        "export the adapter merged (`troupe export --merged`).",
    )


def _no_model(policy: str, model_type: str, error: Exception) -> InvalidArgument:
    return InvalidArgument(
        f"no model can be made from it: {first_line(error)}",
        kind="model_config_invalid",
        field=f"policies.{policy}.model.config",
        value=model_type,
        remedy="See the transformers documentation of this model type's configuration.",
    )


def load_problem(
    policy: str, path: str, error: Exception, revision: str | None = None
) -> InvalidArgument:
    kind, remedy = "model_not_found", _HUB_REMEDY
    field, value = "path", path
    message = f"no model could be loaded: {first_line(error)}"
    if (problem := hub_problem(path, revision, error)) is not None:
        field, message, remedy = problem.field, problem.message, problem.remedy
        value = path if field == "path" else str(revision)
    elif no_directory(path):
        message = "there is no such directory"
    elif isinstance(error, TensorsDoNotFit):
        kind, message = "model_mismatch", f"the checkpoint is not of its model: {error}"
        remedy = error.remedy
    elif not isinstance(error, OSError):
        kind, message = "model_unreadable", f"the model cannot be read: {first_line(error)}"
    return InvalidArgument(
        message, kind=kind, field=f"policies.{policy}.model.{field}", value=value, remedy=remedy
    )


def _tokenizer_field(policy: str, spec: PolicySpec) -> str:
    leaf = "tokenizer" if spec.language_model.tokenizer is not None else "path"
    return f"policies.{policy}.model.{leaf}"
