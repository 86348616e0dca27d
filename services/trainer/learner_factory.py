"""Factory of learners: the class that trains a policy, its defaults, and its memory.

learning/interface.py is the interface that every learner implements.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch

from services.trainer.compute import gpu_memory, memory_of
from services.trainer.gang.gang import ALONE, GangHosts, Gangs, Loaded
from services.trainer.gang.learner import GangLearner
from services.trainer.learning.interface import PolicyLearner
from services.trainer.learning.learner import Learner
from services.trainer.learning.model import (
    check_tokenizer,
    load_adapted,
    load_config,
    load_model,
    load_tokenizer,
    outline,
    shape_of_model,
    with_dtype,
)
from services.trainer.settings import TrainerSettings
from troupe.contracts import kinds
from troupe.job import JobSpec
from troupe.job.sizing import setup_of, shape_of_config
from troupe.rpc import FailedPrecondition
from troupe.scheduling.defaults import defaults_of, described_device
from troupe.scheduling.memory import (
    TOO_LARGE_REMEDY,
    ModelShape,
    RankMemory,
    TrainingSetup,
    rank_memory,
)
from troupe.v1 import common_pb2 as common_pb


def make_learner(
    job_id: str,
    policy: str,
    spec: JobSpec,
    settings: TrainerSettings,
    device: torch.device,
    gangs: Gangs | None,
    hosts: GangHosts = ALONE,
    submitted: str = "",
    loaded: Loaded = lambda done, total: None,
) -> tuple[PolicyLearner[Any], Any]:
    """Make a learner with the policy's first weights, and its tokenizer (None for a network).
    `hosts`: the other hosts of its gang; `submitted`: the specification that they read; `loaded` is
    called with the loaded and total bytes of a gang's model.

    Blocking. Raises InvalidArgument for a model or tokenizer that cannot be used,
    FailedPrecondition of kind "gang_too_large" or "gang_uneven".
    """
    spec = with_dtype(policy, spec)
    source = spec.policies[policy]
    if source.network is not None:
        return _network_learner(spec, policy), None
    simulated = source.simulated is not None
    gang = source.trainable and not simulated and source.trainer.ranks > 1
    model: Any
    if simulated:
        # Imported by name, since the testbed is not part of the product.
        testbed = importlib.import_module("testbed.simulated_learner")
        model = testbed.stand_in(policy, spec)
    elif gang:
        model = outline(policy, source)
    elif source.lora is not None:
        model = load_adapted(policy, source, spec.seed, device)
    else:
        model = load_model(policy, source, spec.seed)
    tokenizer = load_tokenizer(policy, source)
    check_tokenizer(policy, source, tokenizer, model)
    if simulated:
        where = settings.simulated_trace_dir
        return testbed.SimulatedLearner(model, spec, policy, settings.worker_id, where), tokenizer
    options: dict[str, Any] = {
        "forward_tokens": settings.trainer_forward_tokens,
        "share_prefixes": settings.trainer_share_prefixes,
        "skip_zero_advantages": settings.trainer_skip_zero_advantages,
    }
    if gang:
        assert gangs is not None, "a worker has them"
        key = f"{job_id}/{policy}"
        shape = shape_of_config(model.config.to_dict()) or shape_of_model(model)
        learner = GangLearner(
            gangs,
            key,
            spec,
            policy,
            options,
            hosts,
            submitted,
            loaded,
            lambda count: _setup(policy, spec, settings, device, shape, count).replicas,
        )
        return learner, tokenizer
    return Learner(model, spec, policy, device=device, **options), tokenizer


def resolved_settings(
    policy: str, spec: JobSpec, settings: TrainerSettings, device: torch.device
) -> list[common_pb.ResolvedSetting]:
    """Return the resolved settings of a policy that the job may leave open: the value on this
    device, and its source. Blocking; reads the model's configuration."""
    source = spec.policies[policy]
    if source.model is None or source.simulated is not None:
        return []
    memory = gpu_memory(device)
    own, at = defaults_of(memory), described_device(memory)
    model = with_dtype(policy, spec).policies[policy].language_model
    decided = "checkpoint" if source.model.dtype == "auto" else "given"
    found = [("model.dtype", model.weight_dtype, decided if source.model.dtype else "default")]
    if source.trainable:
        given, worker = source.trainer.forward_tokens, settings.trainer_forward_tokens
        by = "given" if given else "TROUPE_TRAINER_FORWARD_TOKENS" if worker else at
        hidden = getattr(load_config(policy, source), "hidden_size", 0)
        tokens = given or worker or own.tokens_of(hidden)
        found.append(("trainer.forward_tokens", str(tokens), by))
        wish = source.trainer.activation_checkpointing
        on = own.activation_checkpointing if wish == "auto" else wish
        by = at if wish == "auto" else "given"
        found.append(("trainer.activation_checkpointing", str(on).lower(), by))
    return [
        common_pb.ResolvedSetting(field=f"policies.{policy}.{field}", value=value, source=by)
        for field, value, by in found
    ]


def _network_learner(spec: JobSpec, policy: str) -> PolicyLearner[Any]:
    try:  # lazily, as this imports TorchRL, which takes seconds
        from services.trainer.networks.learner import NetworkLearner
    except ModuleNotFoundError as error:
        raise FailedPrecondition(
            f"this trainer cannot train networks: {error}",
            kind="networks_not_installed",
            field=f"policies.{policy}.network",
            remedy='`pip install "troupe-rl[networks]"` where the trainer runs.',
        ) from error
    return NetworkLearner(spec, policy)


def _setup(
    policy: str,
    spec: JobSpec,
    settings: TrainerSettings,
    device: torch.device,
    shape: ModelShape,
    hosts: int,
) -> TrainingSetup:
    """Return how each device trains the policy, in a gang over so many `hosts`."""
    source, room = spec.policies[policy], memory_of(device, settings.trainer_memory_bytes)
    if source.trainer.activation_checkpointing == "auto":  # the binder did not turn it off
        default = defaults_of(None if device.type == "cpu" else room).activation_checkpointing
        trainer = source.trainer.model_copy(update={"activation_checkpointing": default})
        decided = source.model_copy(update={"trainer": trainer})
        spec = spec.model_copy(update={"policies": {**spec.policies, policy: decided}})
    return setup_of(
        spec,
        policy,
        shape,
        device=device.type,
        memory=room,
        forward_tokens=settings.trainer_forward_tokens,
        hosts=hosts,
    )


def memory_needed(
    policy: str,
    spec: JobSpec,
    settings: TrainerSettings,
    device: torch.device,
    hosts: int = 1,
) -> RankMemory | None:
    """Return the memory need of each device that trains the policy, in a gang over so many `hosts`;
    None for a network or a simulated policy.

    Blocking; reads the model's configuration. Raises InvalidArgument for one that cannot be used,
    FailedPrecondition of kind "policy_too_large" if this trainer's devices have less.
    """
    source = spec.policies[policy]
    if source.network is not None or source.simulated is not None:
        return None
    room = memory_of(device, settings.trainer_memory_bytes)
    shape = shape_of_config(load_config(policy, source).to_dict())
    shape = shape or shape_of_model(outline(policy, source))
    setup = _setup(policy, spec, settings, device, shape, hosts)
    needed = rank_memory(shape, setup)
    if room and needed.total > room:
        each = f" on each of {setup.ranks} devices" if setup.ranks > 1 else ""
        parts = ", ".join(f"{name.replace('_', ' ')} {n:,}" for name, n in needed.parts.items())
        raise FailedPrecondition(
            f"policy {policy} needs {needed.total:,} bytes{each} to be trained ({parts}); this "
            f"trainer has {room:,}",
            kind=kinds.POLICY_TOO_LARGE,
            field=f"policies.{policy}.model",
            value=needed.total,
            remedy=TOO_LARGE_REMEDY,
        )
    return needed
