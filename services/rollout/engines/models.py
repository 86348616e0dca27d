"""From a job's model section to a configuration and a model without weights."""

from __future__ import annotations

import threading

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    GenerationConfig,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.initialization import no_init_weights

from services.rollout.engines.errors import EngineStartFailed
from troupe.checkpoints.format import in_float32, keep_float32
from troupe.job import ModelSpec, no_directory

# Building a model sets process-wide defaults of torch and transformers for a moment.
_BUILDING = threading.Lock()


def load_config(model: ModelSpec, policy: str) -> PretrainedConfig:
    """The transformers configuration of `model`. Raises `EngineStartFailed` naming the field."""
    if model.path is None:
        raw = dict(model.config or {})
        try:
            return AutoConfig.for_model(**raw)
        except (TypeError, ValueError, KeyError) as error:
            raise EngineStartFailed(
                f"not a transformers configuration: {error}",
                field=f"policies.{policy}.model.config",
                value=raw.get("model_type"),
                remedy="Give `model_type` and the fields of that configuration class.",
            ) from error
    if no_directory(model.path):
        raise EngineStartFailed(
            "there is no such directory",
            field=f"policies.{policy}.model.path",
            value=model.path,
            remedy="Give a directory with a Hugging Face model, or a hub id.",
        )
    try:
        return AutoConfig.from_pretrained(model.path, revision=model.revision)
    except (OSError, ValueError) as error:
        raise EngineStartFailed(
            f"no model configuration can be loaded: {error}",
            field=f"policies.{policy}.model.path",
            value=model.path,
            remedy="Give a directory with a config.json, or a hub id that can be reached.",
        ) from error


def skeleton(config: PretrainedConfig, dtype: str, policy: str) -> PreTrainedModel:
    """A causal LM of `config` whose weights are not set yet, in evaluation mode."""
    try:
        try:
            model = _build(config, dtype, "sdpa")
        except ValueError:  # some architectures know nothing faster
            model = _build(config, dtype, "eager")
    except (ValueError, TypeError) as error:
        raise EngineStartFailed(
            f"not a causal language model that can be served: {error}",
            field=f"policies.{policy}.model",
            value=config.model_type,
            remedy="Choose an architecture that AutoModelForCausalLM knows.",
        ) from error
    # Building without initial weights skips this too.
    model.tie_weights()
    # As trainers publish them.
    keep_float32(model, in_float32(model, getattr(torch, dtype)))
    model.eval().requires_grad_(False)
    return model


def _build(config: PretrainedConfig, dtype: str, attention: str) -> PreTrainedModel:
    with _BUILDING, no_init_weights():
        return AutoModelForCausalLM.from_config(
            config, dtype=getattr(torch, dtype), attn_implementation=attention
        )


def stop_ids(config: PretrainedConfig, path: str | None, revision: str | None) -> frozenset[int]:
    """End-of-sequence ids of the model: of its configuration and its generation settings."""
    sources = [config.get_text_config().eos_token_id]
    if path is not None:
        try:
            generation = GenerationConfig.from_pretrained(path, revision=revision)
            sources.append(generation.eos_token_id)
        except (OSError, ValueError):
            pass  # the file is optional
    ids: set[int] = set()
    for source in sources:
        if source is not None:
            ids.update([source] if isinstance(source, int) else source)
    return frozenset(ids)
