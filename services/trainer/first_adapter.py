"""The adapter that a policy begins with (`policies.X.lora.path`), read from a PEFT directory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from services.trainer.adapters import Adapter, adapter_of
from troupe.checkpoints.lineage import Lineage
from troupe.checkpoints.verifying import verify
from troupe.job import LoraSpec
from troupe.rpc import DataLoss, InvalidArgument

# What our adapters never are, by the field of PEFT that says so.
_FOREIGN = ("use_dora", "use_rslora", "modules_to_save", "rank_pattern", "alpha_pattern")


def begin_with(policy: str, lora: LoraSpec, model: Any) -> None:
    """Load the adapter at `lora.path` into `model`, which has one of that shape.

    Raises InvalidArgument of kind "adapter_unusable", naming the field at fault.
    """
    adapter = adapter_of(model)
    assert adapter is not None  # adapted_model made it
    assert lora.path is not None  # the caller looked
    folder = Path(lora.path)
    field = f"policies.{policy}.lora"
    _compare(lora, folder, adapter, field)
    tensors = _tensors(folder, field)
    try:
        adapter.load({name: t.to(torch.float32) for name, t in tensors.items()})
    except ValueError as error:
        raise _unusable(
            f"it was made for another model: {error}",
            f"{field}.path",
            lora.path,
            f"Give its base as policies.{policy}.model.path.",
        ) from error


def _compare(lora: LoraSpec, folder: Path, adapter: Adapter, field: str) -> None:
    """Is it what the job says, and of this base?"""
    path = f"{field}.path"
    try:
        config = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))
        found = (config["peft_type"], int(config["r"]), float(config["lora_alpha"]))
        kind, rank, alpha = found
    except (OSError, ValueError, KeyError, TypeError) as error:
        missing = "there is no adapter_config.json that can be read"
        remedy = "Give a directory that PEFT's save_pretrained or `troupe export --adapter` wrote."
        raise _unusable(missing, path, folder, remedy) from error
    if kind != "LORA" or any(config.get(name) for name in _FOREIGN):
        told = kind if kind != "LORA" else next(n for n in _FOREIGN if config.get(n))
        remedy = "Only plain LoRA adapters can be trained on."
        raise _unusable(f"it is not plain LoRA ({told})", path, folder, remedy)
    for name, ours, theirs in (("rank", lora.rank, rank), ("alpha", lora.alpha, alpha)):
        if ours != theirs:
            raise _unusable(
                f"the adapter at {folder} has {name} {theirs:g}",
                f"{field}.{name}",
                ours,
                f"Set it to {theirs:g}.",
            )
    lineage = Lineage.read(folder)
    told = lineage.base_checksum if lineage is not None else ""
    if told and told != adapter.base.checksum:
        raise _unusable(
            f"it was trained on a base with checksum {told}; this one has {adapter.base.checksum}",
            path,
            folder,
            "Give the model (and `dtype`) that the adapter was trained on.",
        )


def _tensors(folder: Path, field: str) -> dict[str, torch.Tensor]:
    try:
        verify(folder, ".safetensors")
        tensors: dict[str, torch.Tensor] = load_file(folder / "adapter_model.safetensors")
    except (OSError, SafetensorError, DataLoss) as error:
        raise _unusable(
            f"adapter_model.safetensors cannot be read: {error}",
            f"{field}.path",
            folder,
            "Save the adapter again.",
        ) from error
    return tensors


def _unusable(message: str, field: str, value: object, remedy: str) -> InvalidArgument:
    return InvalidArgument(
        message, kind="adapter_unusable", field=field, value=value, remedy=remedy
    )
