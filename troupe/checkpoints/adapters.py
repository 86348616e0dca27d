"""LoRA adapters: their published form, their layers, and merging into the base's weights.

The published form consists of the tensors and a description of base, rank and scale. The
description is sent as another tensor, the bytes of a JSON object, so that the checksum of a version
covers it.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import save_file

from troupe.checkpoints.format import CheckpointFormat
from troupe.transfer.deferred import DeferredTensors, TensorGroup

# In PEFT, no parameter can have this name.
CONFIG: Final = "adapter.json"
# PEFT's prefix of the names of a model's modules.
PREFIX: Final = "base_model.model."


class NotAnAdapter(ValueError):
    """Tensors, or a description, that are not an adapter."""


@dataclass(frozen=True)
class AdapterContent:
    """An adapter W + alpha / rank * B @ A on the named linear layers.

    `tensors` by PEFT's names: `base_model.model.{module}.lora_A.weight` [rank, in] and
    `...lora_B.weight` [out, rank]. `base` is the checksum of the weights that engines load for the
    base (`troupe.transfer`). `transposed`: the base stores these weights as [in, out] (GPT-2).
    """

    base: str
    rank: int
    alpha: float
    target_modules: tuple[str, ...]
    transposed: bool = False
    tensors: Mapping[str, torch.Tensor] = field(default_factory=dict)

    @property
    def scale(self) -> float:
        """The factor of B @ A: alpha / rank."""
        return self.alpha / self.rank

    @property
    def modules(self) -> list[str]:
        """Names of the adapted modules in the model, sorted."""
        ends = ".lora_A.weight"
        return sorted(
            name.removeprefix(PREFIX).removesuffix(ends)
            for name in self.tensors
            if name.endswith(ends)
        )

    def pair(self, module: str) -> tuple[torch.Tensor, torch.Tensor]:
        """Return A [rank, in] and B [out, rank] of a module."""
        stem = f"{PREFIX}{module}"
        return self.tensors[f"{stem}.lora_A.weight"], self.tensors[f"{stem}.lora_B.weight"]

    def only(self, module: str) -> AdapterContent:
        """Return the adapter of one module alone."""
        names = [f"{PREFIX}{module}.lora_{side}.weight" for side in ("A", "B")]
        return replace(self, tensors={name: self.tensors[name] for name in names})

    def to_tensors(self) -> dict[str, torch.Tensor]:
        """Return the tensors as published, with the description."""
        about = {
            "base": self.base,
            "rank": self.rank,
            "alpha": self.alpha,
            "target_modules": list(self.target_modules),
            "transposed": self.transposed,
        }
        text = json.dumps(about, sort_keys=True).encode()
        return {**self.tensors, CONFIG: torch.frombuffer(bytearray(text), dtype=torch.uint8)}

    @classmethod
    def of(cls, tensors: Mapping[str, torch.Tensor]) -> AdapterContent:
        """Restore an adapter from the result of `to_tensors`. Raises NotAnAdapter."""
        described = tensors.get(CONFIG)
        if described is None:
            raise NotAnAdapter(f"it has no tensor '{CONFIG}'")
        try:
            about = json.loads(bytes(described.cpu().numpy()))
            about["target_modules"] = tuple(about["target_modules"])
            own = {name: t for name, t in tensors.items() if name != CONFIG}
            content = cls(**about, tensors=own)
        except (TypeError, ValueError, KeyError) as error:
            raise NotAnAdapter(f"its description cannot be read: {error}") from error
        content._check()
        return content

    def peft_config(self, base_model: str | None = None) -> dict[str, Any]:
        """Return the contents of PEFT's `adapter_config.json`, which SGLang reads too."""
        return {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": base_model,
            "inference_mode": True,
            "r": self.rank,
            "lora_alpha": int(self.alpha) if self.alpha == int(self.alpha) else self.alpha,
            "lora_dropout": 0.0,
            "target_modules": list(self.target_modules),
            "fan_in_fan_out": self.transposed,
            "bias": "none",
            "use_rslora": False,
            "use_dora": False,
            "modules_to_save": None,
        }

    def save(self, folder: Path, base_model: str | None = None) -> None:
        """Write the files of PEFT's `save_pretrained` into `folder`. Raises OSError."""
        about = json.dumps(self.peft_config(base_model), indent=2)
        (folder / "adapter_config.json").write_text(about + "\n")
        tensors = {name: tensor.contiguous() for name, tensor in self.tensors.items()}
        save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})

    def _check(self) -> None:
        modules = self.modules
        expected = {
            f"{PREFIX}{module}.lora_{side}.weight" for module in modules for side in ("A", "B")
        }
        if not modules or set(self.tensors) != expected:
            odd = sorted(set(self.tensors) ^ expected)
            raise NotAnAdapter(f"its tensors are not pairs of A and B: {odd[:3]}")
        for module in modules:
            a, b = self.pair(module)
            if a.ndim != 2 or b.ndim != 2 or a.shape[0] != self.rank or b.shape[1] != self.rank:
                raise NotAnAdapter(
                    f"'{module}' has A {list(a.shape)} and B {list(b.shape)}, its rank is "
                    f"{self.rank}"
                )


def is_adapter(names: Mapping[str, Any]) -> bool:
    """Return whether tensors (or a layout of them) are a published adapter."""
    return CONFIG in names


def base_key(job_id: str, checksum: str) -> str:
    """Return the transfer key of a job's base; policies' names have no dot."""
    return f"{job_id}/base.{checksum}/weights@0"


def output_layer(model: Any) -> str:
    """Return the name of the output layer; empty when there is none."""
    head = model.get_output_embeddings()
    return next((name for name, module in model.named_modules() if module is head), "")


def linear_layers(
    model: Any, wanted: Sequence[str] | str
) -> tuple[dict[str, tuple[int, int]], list[str]]:
    """Return the linear layers that `wanted` selects, with (in, out) features, and the names
    without a layer.

    `wanted`: last parts of names, or "all-linear" for every linear layer. The output layer is never
    among them: it may share its weights with the embedding.
    """
    head = output_layer(model)
    found: dict[str, tuple[int, int]] = {}
    for name, module in model.named_modules():
        leaf = name.rpartition(".")[2]
        shape = _features(module)
        if shape is None or name == head:
            continue
        if wanted == "all-linear" or leaf in wanted:
            found[name] = shape
    leaves = {name.rpartition(".")[2] for name in found}
    unknown = [] if wanted == "all-linear" else [name for name in wanted if name not in leaves]
    return found, unknown


def unknown_targets(model: Any, unknown: Sequence[str]) -> tuple[str, str]:
    """Return why a model has no linear layers of the names `unknown` (empty: none at all), and the
    remedy."""
    known, _ = linear_layers(model, "all-linear")
    leaves = sorted({name.rpartition(".")[2] for name in known})
    reason = "the model has no such linear layer" if unknown else "the model has no linear layer"
    if targets_of_experts(model, unknown):
        reason = (
            "these are projections of experts, which the model holds stacked in one tensor: only "
            "linear layers can have adapters"
        )
    return reason, f"Choose among: {', '.join(leaves) or 'none'}; the output layer is not adapted."


def targets_of_experts(model: Any, names: Sequence[str]) -> list[str]:
    """Return the names among `names` of projections of experts, in checkpoints or in the model."""
    stored = {*CheckpointFormat(model, torch.float32).layout, *model.state_dict()}
    projections = {
        name.removesuffix(".weight").rpartition(".")[2] for name in stored if ".experts." in name
    }
    return [name for name in names if name in projections]


def _features(module: torch.nn.Module) -> tuple[int, int] | None:
    if isinstance(module, torch.nn.Linear):
        return module.in_features, module.out_features
    if type(module).__name__ == "Conv1D":  # GPT-2's linear layer, whose weight is [in, out]
        weight = module.weight
        assert isinstance(weight, torch.Tensor)
        return int(weight.shape[0]), int(weight.shape[1])
    return None


Tensors = dict[str, torch.Tensor]


def distinct_tensors(module: Any) -> Tensors:
    """Return parameters and persistent buffers without copying them; tied ones appear once, under
    their first name."""
    named: Tensors = {name: p.detach() for name, p in module.named_parameters()}
    known = {t.data_ptr() for t in named.values()}
    for name, tensor in module.state_dict().items():
        if name not in named and tensor.data_ptr() not in known:
            named[name] = tensor.detach()
    return named


class MergeMismatch(ValueError):
    """The adapter was made for another model."""


def merged(base: Mapping[str, torch.Tensor], adapter: AdapterContent) -> dict[str, torch.Tensor]:
    """Return `base` with W + alpha / rank * B @ A in place of each adapted W, in W's dtype.

    The sum is taken in float32 and rounded once. Tensors that are not adapted are taken from `base`
    without copying. Raises MergeMismatch.
    """
    result = dict(base)
    for module in adapter.modules:
        name = f"{module}.weight"
        weight = base.get(name)
        if weight is None:
            raise MergeMismatch(f"the base has no '{name}'")
        a, b = adapter.pair(module)
        update = b.to(weight.device, torch.float32) @ a.to(weight.device, torch.float32)
        update = update.T if adapter.transposed else update
        if update.shape != weight.shape:
            raise MergeMismatch(
                f"'{name}' is {list(weight.shape)} in the base, the adapter's is "
                f"{list(update.shape)}"
            )
        exact = torch.promote_types(weight.dtype, torch.float32)
        result[name] = weight.to(exact).add(update, alpha=adapter.scale).to(weight.dtype)
    return result


def adapted(
    base: DeferredTensors, adapter: AdapterContent, *, exact: bool = True
) -> DeferredTensors:
    """Return a model's tensors by its names, with the adapter merged; made when they are read.

    `exact`: adapted weights become float32, and are not rounded again. Raises MergeMismatch.
    """
    weights = {f"{module}.weight": module for module in adapter.modules}
    if lacking := sorted(weights.keys() - base.layout.keys()):
        raise MergeMismatch(f"the base has no '{lacking[0]}'")

    def make(number: int) -> Mapping[str, torch.Tensor]:
        made = dict(base.made(number))
        for name in made.keys() & weights.keys():
            weight = made[name].float() if exact else made[name]
            made |= merged({name: weight}, adapter.only(weights[name]))
        return made

    groups = []
    for number, group in enumerate(base.groups):
        layout = {
            name: tensor.to(torch.float32) if exact and name in weights else tensor
            for name, tensor in group.layout.items()
        }
        made = layout.keys() & weights.keys()
        groups.append(TensorGroup(layout, functools.partial(make, number)) if made else group)
    return DeferredTensors(groups)
