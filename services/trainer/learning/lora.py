"""The LoRA adapter of one policy: PEFT's layers in a model over a frozen base. Policies share
bases: a process holds each content only once."""

from __future__ import annotations

import copy
import itertools
import json
import threading
import warnings
import weakref
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, Protocol

import structlog
import torch
from torch.distributed.tensor import DTensor, distribute_tensor

from troupe.checkpoints.adapters import (
    PREFIX,
    AdapterContent,
    Tensors,
    distinct_tensors,
    linear_layers,
    output_layer,
    targets_of_experts,
    unknown_targets,
)
from troupe.checkpoints.format import CheckpointFormat, cast
from troupe.checkpoints.reading import StoredTensors
from troupe.checkpoints.tensors import TensorsDoNotFit, shape_difference
from troupe.checkpoints.verifying import Lineage, verify
from troupe.job import LoraSpec, ModelSpec
from troupe.rpc import DataLoss, InvalidArgument
from troupe.transfer import DeferredTensors, checksum_of

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
        self._parameters: dict[str, torch.nn.Parameter] = {
            f"{PREFIX}{name.removesuffix(_INFIX)}.weight": parameter
            for name, parameter in module.named_parameters()
            if ".lora_" in name
        }

    @property
    def parameters(self) -> list[torch.nn.Parameter]:
        """A and B of all layers, in the model's order."""
        return list(self._parameters.values())

    def weights(self) -> Tensors:
        """Return A and B by PEFT's names; not copies."""
        return {name: p.detach() for name, p in self._parameters.items()}

    def content(self, dtype: torch.dtype) -> AdapterContent:
        """Return the adapter as published, its tensors in `dtype`."""
        return replace(self._about, tensors={n: t.to(dtype) for n, t in self.weights().items()})

    def load(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Copy `weights` into the adapter. Raises ValueError when they are another adapter's."""
        found, own = ({n: t.shape for n, t in one.items()} for one in (weights, self._parameters))
        if wrong := shape_difference(found, own):
            raise TensorsDoNotFit(f"the weights are not this adapter's: {wrong}")
        with torch.no_grad():
            for name, parameter in self._parameters.items():
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


Source = tuple[str, ...]
_LOCK: Final = threading.Lock()
# The bases in use; weak, so that unused ones are freed.
_BY_SOURCE: Final = weakref.WeakValueDictionary[Source, "FrozenBase"]()
_BY_CONTENT: Final = weakref.WeakValueDictionary[Source, "FrozenBase"]()


class AdaptedBase(Protocol):
    """The frozen weights under an adapter, on this device or elsewhere."""

    @property
    def module(self) -> Any:
        """Their model, which may be on the meta device."""

    @property
    def checksum(self) -> str:
        """Checksum of `weights`."""

    def weights(self) -> DeferredTensors:
        """Return the tensors that engines load, in checkpoint format."""

    def rounded(self) -> DeferredTensors:
        """Return the same values by the names of the model."""


class FrozenBase:
    """A model that is never trained, in the published dtype, on one device."""

    def __init__(self, module: Any) -> None:
        self.module = module
        self._format = CheckpointFormat(module, next(module.parameters()).dtype)
        # Cache of `weights()`.
        self.checksum = checksum_of(self.weights())

    def weights(self) -> DeferredTensors:
        """Return the tensors that engines load, in checkpoint format; converted when they are
        read."""
        return self._format.of(distinct_tensors(self.module))

    def rounded(self) -> DeferredTensors:
        """Return the same values by the names of the model."""
        return self._format.rounded(distinct_tensors(self.module))

    def twin(self) -> Any:
        """Return a module over the same tensors; layers put into it do not change other twins."""
        tensors = itertools.chain(self.module.parameters(), self.module.buffers())
        return copy.deepcopy(self.module, {id(tensor): tensor for tensor in tensors})


def frozen_base(
    model: ModelSpec, seed: int, device: torch.device, load: Callable[[], Any]
) -> FrozenBase:
    """Return the base of `model` on `device`, made by `load` if no policy uses it yet.

    `seed` matters only for random weights. Raises the errors of `load`.
    """
    source = base_source(model, seed, str(device))
    with _LOCK:
        known = _BY_SOURCE.get(source)
        if known is None:
            fresh = FrozenBase(
                cast(load(), getattr(torch, model.weight_dtype), device).requires_grad_(False)
            )
            # Two paths may have the same weights, so also look up the content.
            content = (fresh.checksum, _architecture(fresh.module), str(device))
            known = _BY_SOURCE[source] = _BY_CONTENT.setdefault(content, fresh)
        return known


def base_source(model: ModelSpec, seed: int, device: str) -> Source:
    """Return the unique key of the base of `model` on a device."""
    kept = model.weight_dtype, device
    if model.path is not None:
        return "path", model.path, model.revision or "", *_files(Path(model.path)), *kept
    return "config", json.dumps(model.config, sort_keys=True), str(seed), *kept


def _files(directory: Path) -> list[str]:
    """Return the names, sizes and times of a directory's files, to notice a change; empty for a hub
    id."""
    if not directory.is_dir():
        return []
    found = sorted((file.name, file.stat()) for file in directory.iterdir() if file.is_file())
    return [f"{name} {stat.st_size} {stat.st_mtime_ns}" for name, stat in found]


def _architecture(module: Any) -> str:
    """Return the configuration without private fields, such as the path it came from."""
    config = {n: v for n, v in module.config.to_dict().items() if not n.startswith("_")}
    return json.dumps(config, sort_keys=True, default=str)
