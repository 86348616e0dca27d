"""What a server has to be for a policy that trains an adapter."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from services.rollout.engines.base import EngineStartFailed
from troupe.adapters import linear_layers
from troupe.job import PolicySpec

# Adapters of one batch: the version that serves, those that end their turns, none (the base).
PER_BATCH: Final = 4


def target_names(spec: PolicySpec, model: Any) -> list[str]:
    """Last parts of the names of the adapted layers; empty without an adapter."""
    if spec.lora is None:
        return []
    layers, _ = linear_layers(model, spec.lora.target_modules)
    return sorted({name.rpartition(".")[2] for name in layers})


def check_server(
    info: Mapping[str, Any], spec: PolicySpec, policy: str, targets: Sequence[str]
) -> None:
    """Raise `EngineStartFailed` unless the server was started for this policy's adapters."""
    lora = spec.lora
    if lora is None:
        return
    problem = ""
    if not info.get("enable_lora"):
        problem = "it was started without LoRA"
    elif (rank := info.get("max_lora_rank")) is not None and int(rank) < lora.rank:
        problem = f"it takes adapters up to rank {rank}, the policy's have {lora.rank}"
    elif theirs := info.get("lora_target_modules"):
        lacking = [] if "all" in theirs else sorted(set(targets) - set(theirs))
        problem = f"it adapts no {', '.join(lacking)}" if lacking else ""
    if problem:
        raise EngineStartFailed(
            f"the policy trains an adapter, and the server cannot serve it: {problem}",
            field=f"policies.{policy}.engine.{'urls' if spec.engine.urls else 'launch'}",
            value=", ".join(spec.engine.urls or spec.engine.launch) or None,
            remedy=f"Start it with {' '.join(arguments(spec, targets))}.",
        )


def arguments(spec: PolicySpec, targets: Sequence[str]) -> list[str]:
    """What a server has to be started with for a policy's adapters."""
    if spec.lora is None:
        return []
    return [
        "--enable-lora",
        *("--max-lora-rank", str(spec.lora.rank)),
        *("--lora-target-modules", *targets),
        *("--max-loras-per-batch", str(PER_BATCH)),
    ]
