"""Origins of a job's policies (`init_from`): how they are found, compared and used."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from troupe.job.sections.policy import ModelSpec, PolicySpec
from troupe.job.sizing import read_config
from troupe.job.spec import JobSpec
from troupe.rpc.errors import InvalidArgument

# Keys of a configuration that shape a model's tensors.
_SHAPES: Final = (
    "model_type",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "intermediate_size",
    "moe_intermediate_size",
    "num_experts",
    "num_local_experts",
    "n_routed_experts",
    "vocab_size",
    "tie_word_embeddings",
)


@dataclass(frozen=True)
class Origin:
    """The origin of a policy, as found when its job was submitted."""

    # The directory of the checkpoint; a relative one is in the job's directory.
    path: str
    # The policy of another job, and its version; empty and -1 for a checkpoint of unknown origin.
    job: str = ""
    policy: str = ""
    version: int = -1
    # Where the checkpoint is fetched from when the job starts, without a password.
    url: str = ""
    # Whether the checkpoint is an adapter.
    adapter: bool = False
    # Whether the optimizer's state comes along.
    optimizer: bool = False


def with_origins(spec: JobSpec, origins: Mapping[str, Origin], directory: Path) -> JobSpec:
    """Return the job whose policies load their origins. `directory`: the job's."""
    if not origins:
        return spec
    policies = dict(spec.policies)
    for name, origin in origins.items():
        policies[name] = _beginning_with(policies[name], origin, str(directory / origin.path))
    # Validated, since slots of a population follow from their learners.
    return JobSpec.model_validate_json(
        spec.model_copy(update={"policies": policies}).model_dump_json()
    )


def _beginning_with(policy: PolicySpec, origin: Origin, path: str) -> PolicySpec:
    assert policy.init_from is not None, "it has an origin"
    changed: dict[str, Any] = {}
    if origin.job:
        given = {"job": origin.job, "policy": origin.policy, "version": origin.version}
        changed["init_from"] = policy.init_from.model_copy(update=given)
    if origin.adapter:
        assert policy.lora is not None, "checked when the origin was found"
        changed["lora"] = policy.lora.model_copy(update={"path": path})
    else:
        model = policy.language_model
        # The checkpoint has its tokenizer, in case the model's is of a certain revision.
        tokenizer = model.tokenizer or (None if model.revision else model.path)
        given = {"path": path, "config": None, "revision": None, "tokenizer": tokenizer}
        changed["model"] = model.model_copy(update=given)
    return policy.model_copy(update=changed)


def examine(field: str, policy: PolicySpec, folder: Path, value: str) -> bool:
    """Compare the checkpoint in `folder` with a policy; return whether it is an adapter. Blocking.

    `value`: the checkpoint as the user names it. Raises `InvalidArgument` of kind
    "checkpoint_not_found", or "init_from_mismatch" for one of another architecture.
    """
    own, adapter = folder / "config.json", folder / "adapter_config.json"
    if adapter.is_file() and not own.is_file():
        _examine_adapter(field, policy, adapter, value)
        return True
    found = read_config(ModelSpec(path=str(folder), tokenizer=str(folder)))
    if found is None:
        raise InvalidArgument(
            "is not a checkpoint: it has no config.json that can be read",
            kind="checkpoint_not_found",
            field=field,
            value=value,
            remedy="Name a job, or a directory that `troupe export` or transformers' "
            "save_pretrained wrote, on the orchestrator's host or at a URL.",
        )
    ours = read_config(policy.language_model)  # None: it is on other hosts only
    if ours is not None and (difference := difference_of(ours, found)):
        raise _mismatch(
            f"is of another architecture than the policy's model: {difference}",
            field,
            value,
            "Give the policy the checkpoint's `model`, or leave `init_from` out.",
        )
    return False


def difference_of(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> str:
    """Return the first key that shapes models differently in two transformers configurations, with
    both values; empty if there is none. Keys that one of them leaves to its defaults do not
    count."""
    ours, theirs = (one.get("text_config") or one for one in (ours, theirs))
    for key in _SHAPES:
        if key in ours and key in theirs and ours[key] != theirs[key]:
            return f"`{key}` is {theirs[key]} in the checkpoint and {ours[key]} in the model"
    return ""


def _examine_adapter(field: str, policy: PolicySpec, file: Path, value: str) -> None:
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
        rank, alpha = int(config["r"]), float(config["lora_alpha"])
    except (OSError, ValueError, KeyError, TypeError, OverflowError) as error:
        raise _mismatch(
            f"has an adapter_config.json that cannot be read: {error}",
            field,
            value,
            "Name an adapter that `troupe export --adapter` or PEFT's save_pretrained wrote.",
        ) from error
    if policy.lora is None:
        raise _mismatch(
            "is an adapter, and the policy trains all weights",
            field,
            value,
            f"Give the policy `lora: {{rank: {rank}, alpha: {alpha:g}}}`, or export the adapter "
            "merged (`troupe export --merged`) and name that directory.",
        )
    for name, mine, its in (("rank", policy.lora.rank, rank), ("alpha", policy.lora.alpha, alpha)):
        if mine != its:
            raise _mismatch(
                f"is an adapter of {name} {its:g}, and the policy's has {mine:g}",
                field,
                value,
                f"Set `lora.{name}` of the policy to {its:g}.",
            )


def _mismatch(message: str, field: str, value: str, remedy: str) -> InvalidArgument:
    return InvalidArgument(
        message, kind="init_from_mismatch", field=field, value=value, remedy=remedy
    )


def check_optimizers(field: str, policy: str, spec: JobSpec, source: JobSpec, theirs: str) -> None:
    """Raise `InvalidArgument` of kind "init_from_mismatch" unless the training state of policy
    `theirs` of the job `source` fits `policy` of `spec`."""
    ours, its = spec.policies[policy], source.policies[theirs]
    mine, other = (
        None if one.lora is None else (one.lora.rank, one.lora.target_modules)
        for one in (ours, its)
    )
    for name, one, two in (
        ("lora", mine, other),
        ("algorithm.advantage", spec.algorithm.advantage, source.algorithm.advantage),
        ("algorithm.critic", spec.algorithm.value_function, source.algorithm.value_function),
    ):
        if one != two:
            raise _mismatch(
                f"the optimizer's state comes with `{name}`, which differs between the jobs",
                field,
                "true",
                f"Set `{name}` as in that job, or begin with the weights only (`optimizer: "
                "false`).",
            )
