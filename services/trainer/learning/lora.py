"""The LoRA adapter of one policy: PEFT's layers in a model over a frozen base (frozen_base.py)."""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import structlog
import torch
from torch.distributed.tensor import DTensor, distribute_tensor

from services.trainer.learning.frozen_base import AdaptedBase, FrozenBase
from troupe.checkpoints.adapters import (
    PREFIX,
    AdapterContent,
    Tensors,
    linear_layers,
    output_layer,
    targets_of_experts,
    unknown_targets,
)
from troupe.checkpoints.reading import StoredTensors
from troupe.checkpoints.tensors import TensorsDoNotFit, shape_difference
from troupe.checkpoints.verifying import Lineage, verify
from troupe.job import LoraSpec
from troupe.rpc import DataLoss, InvalidArgument

log = structlog.get_logger("troupe.trainer")
# PEFT's name of the only adapter in a model.
_NAME = "default"
_INFIX = f".{_NAME}.weight"
# Fields of PEFT's configuration whose features are not supported.
_UNSUPPORTED = ("use_dora", "use_rslora", "modules_to_save", "rank_pattern", "alpha_pattern")


class Adapter:
    """The trained weights of an adapted model: A and B of every adapted layer, in float32."""

    def __init__(self, module: Any, base: AdaptedBase, content: AdapterContent) -> None:
        """`content`: rank, scale and layers; its tensors are the module's parameters."""
        self.base = base
        self._about = replace(content, base=base.checksum)
        # A and B of all layers by PEFT's names, in the model's order.
        self.named: dict[str, torch.nn.Parameter] = {
            f"{PREFIX}{name.removesuffix(_INFIX)}.weight": parameter
            for name, parameter in module.named_parameters()
            if ".lora_" in name
        }

    def weights(self) -> Tensors:
        """Return A and B by PEFT's names; not copies."""
        return {name: p.detach() for name, p in self.named.items()}

    def content(self, dtype: torch.dtype) -> AdapterContent:
        """Return the adapter as published, its tensors in `dtype`."""
        return replace(self._about, tensors={n: t.to(dtype) for n, t in self.weights().items()})

    def load(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Copy `weights` into the adapter. Raises ValueError when they are another adapter's."""
        found, own = ({n: t.shape for n, t in one.items()} for one in (weights, self.named))
        if wrong := shape_difference(found, own):
            raise TensorsDoNotFit(f"the weights are not this adapter's: {wrong}")
        with torch.no_grad():
            for name, parameter in self.named.items():
                given = weights[name]
                if isinstance(parameter, DTensor) and not isinstance(given, DTensor):
                    mesh = parameter.device_mesh
                    there = given.to(mesh.device_type, parameter.dtype)
                    given = distribute_tensor(there, mesh, parameter.placements)
                parameter.copy_(given)

    def frozen(self, weights: Mapping[str, torch.Tensor]) -> Any:
        """Return a module with the adapter `weights`, without gradients, over the same base
        tensors.

        An adapter that changes nothing (B = 0) is left out.
        """
        assert isinstance(self.base, FrozenBase), "a gang has its own way"
        module = self.base.twin()
        if any(bool(t.any()) for name, t in weights.items() if ".lora_B." in name):
            inject(module, self._about, 0.0)
            Adapter(module, self.base, self._about).load(weights)
        return module.requires_grad_(False)


class _Dropout(torch.nn.Module):
    """Dropout that is active while gradients are computed, since models stay in evaluation mode."""

    def __init__(self, fraction: float) -> None:
        super().__init__()
        self.fraction = fraction

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.dropout(inputs, self.fraction, torch.is_grad_enabled())


def adapted_model(policy: str, lora: LoraSpec, base: FrozenBase, seed: int) -> Any:
    """Return a model over `base` with an `Adapter` in its attribute `troupe_adapter`: random A, B =
    0.

    Raises InvalidArgument of kind "lora_invalid", naming the field.
    """
    module = base.twin()
    about = described_adapter(policy, lora, module)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        inject(module, about, lora.dropout)
    module.troupe_adapter = Adapter(module, base, about)
    return module


def described_adapter(policy: str, lora: LoraSpec, module: Any) -> AdapterContent:
    """Rank, scale and layers of a job's adapter in `module`, without tensors and base.

    Raises InvalidArgument of kind "lora_invalid", naming the field.
    """
    shapes, unknown = linear_layers(module, lora.target_modules)
    if unknown or not shapes:
        raise _unknown_layers(policy, module, unknown)
    width = int(module.config.get_text_config().hidden_size)
    if lora.rank > width:
        raise InvalidArgument(
            f"the model's hidden size is {width}",
            kind="lora_invalid",
            field=f"policies.{policy}.lora.rank",
            value=lora.rank,
            remedy=f"Choose a rank up to {width}; 8 to 64 is usual.",
        )
    if skipped := _unadapted_experts(module, lora):
        log.warning(
            "experts are not adapted",
            policy=policy,
            target_modules=skipped,
            remedy="These names are adapted only in dense layers and shared experts; routed "
            "experts keep the base's weights.",
        )
    return AdapterContent(
        "",
        lora.rank,
        lora.alpha,
        tuple(sorted({name.rpartition(".")[2] for name in shapes})),
        any(type(module.get_submodule(name)).__name__ == "Conv1D" for name in shapes),
    )


def adapter_of(module: Any) -> Adapter | None:
    """Return the adapter of a model that `adapted_model` made; None for other models."""
    found: Adapter | None = getattr(module, "troupe_adapter", None)
    return found


def inject(module: Any, about: AdapterContent, dropout: float) -> None:
    """Put PEFT's layers of an adapter into `module`: A from torch's generator, B = 0."""
    from peft import LoraConfig, inject_adapter_in_model

    config = LoraConfig(
        r=about.rank,
        lora_alpha=about.alpha,
        target_modules=list(about.target_modules),
        # Excluded, as the output layer may have the name of an adapted layer.
        exclude_modules=[output_layer(module)],
        fan_in_fan_out=about.transposed,
        bias="none",
    )
    with warnings.catch_warnings():  # about options that are not used here
        warnings.simplefilter("ignore")
        inject_adapter_in_model(config, module, adapter_name=_NAME)
    for layer in module.modules():
        if hasattr(layer, "lora_A"):
            # In float32: in the base's dtype small updates would be rounded away.
            layer.lora_A[_NAME].float()
            layer.lora_B[_NAME].float()
            if dropout:
                layer.lora_dropout[_NAME] = _Dropout(dropout)
    module.eval()


def _unknown_layers(policy: str, module: Any, unknown: list[str]) -> InvalidArgument:
    reason, remedy = unknown_targets(module, unknown)
    return InvalidArgument(
        reason,
        kind="lora_invalid",
        field=f"policies.{policy}.lora.target_modules",
        value=", ".join(unknown) or "all-linear",
        remedy=remedy,
    )


def _unadapted_experts(module: Any, lora: LoraSpec) -> list[str]:
    """Return targets named by the job that routed experts also have, where they are not adapted."""
    named = lora.target_modules
    return [] if isinstance(named, str) else targets_of_experts(module, named)


def begin_with(policy: str, lora: LoraSpec, model: Any) -> None:
    """Load the adapter at `lora.path` into `model`, which has an adapter of that shape.

    Raises InvalidArgument of kind "adapter_unusable", naming the field at fault.
    """
    adapter = adapter_of(model)
    assert adapter is not None  # adapted_model made it
    assert lora.path is not None  # checked by the caller
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
    """Raise InvalidArgument unless the adapter in `folder` fits the job and the base."""
    path = f"{field}.path"
    try:
        config = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))
        found = (config["peft_type"], int(config["r"]), float(config["lora_alpha"]))
        kind, rank, alpha = found
    except (OSError, ValueError, KeyError, TypeError, OverflowError) as error:  # r: Infinity
        missing = "there is no adapter_config.json that can be read"
        remedy = "Give a directory that PEFT's save_pretrained or `troupe export --adapter` wrote."
        raise _unusable(missing, path, folder, remedy) from error
    if kind != "LORA" or any(config.get(name) for name in _UNSUPPORTED):
        feature = kind if kind != "LORA" else next(n for n in _UNSUPPORTED if config.get(n))
        remedy = "Only plain LoRA adapters can be trained further."
        raise _unusable(f"it is not plain LoRA ({feature})", path, folder, remedy)
    for name, ours, theirs in (("rank", lora.rank, rank), ("alpha", lora.alpha, alpha)):
        if ours != theirs:
            raise _unusable(
                f"the adapter at {folder} has {name} {theirs:g}",
                f"{field}.{name}",
                ours,
                f"Set it to {theirs:g}.",
            )
    lineage = Lineage.read(folder)
    trained_on = lineage.base_checksum if lineage is not None else ""
    if trained_on and trained_on != adapter.base.checksum:
        raise _unusable(
            f"it was trained on a base with checksum {trained_on}; this one has "
            f"{adapter.base.checksum}",
            path,
            folder,
            "Give the model (and `dtype`) on which the adapter was trained.",
        )


def _tensors(folder: Path, field: str) -> dict[str, torch.Tensor]:
    try:
        verify(folder, ".safetensors")
        tensors = dict(StoredTensors([folder / "adapter_model.safetensors"]))
    except (OSError, ValueError, DataLoss) as error:
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
