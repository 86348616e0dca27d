"""The published form of a LoRA adapter: its tensors, and a description of base, rank and scale.

The description travels as one more tensor, the bytes of a JSON object, so that the checksum of a
version covers it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final

import torch

# Not a name that a parameter can have in PEFT.
CONFIG: Final = "adapter.json"
# What PEFT puts before the names of a model's modules.
PREFIX: Final = "base_model.model."


class NotAnAdapter(ValueError):
    """Tensors, or a description, that are not an adapter."""


@dataclass(frozen=True)
class AdapterContent:
    """An adapter W + alpha / rank * B @ A on the linear layers that it names.

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
        """A [rank, in] and B [out, rank] of a module."""
        stem = f"{PREFIX}{module}"
        return self.tensors[f"{stem}.lora_A.weight"], self.tensors[f"{stem}.lora_B.weight"]

    def only(self, module: str) -> AdapterContent:
        """The adapter of one module alone."""
        names = [f"{PREFIX}{module}.lora_{side}.weight" for side in ("A", "B")]
        return replace(self, tensors={name: self.tensors[name] for name in names})

    def to_tensors(self) -> dict[str, torch.Tensor]:
        """The tensors as published, with the description."""
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
        """Inverse of `to_tensors`. Raises NotAnAdapter."""
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
        """The contents of PEFT's `adapter_config.json`, which SGLang reads too."""
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

    def _check(self) -> None:
        modules = self.modules
        expected = {
            f"{PREFIX}{module}.lora_{side}.weight" for module in modules for side in ("A", "B")
        }
        if not modules or set(self.tensors) != expected:
            odd = sorted(set(self.tensors) ^ expected)
            raise NotAnAdapter(f"its tensors are no pairs of A and B: {odd[:3]}")
        for module in modules:
            a, b = self.pair(module)
            if a.ndim != 2 or b.ndim != 2 or a.shape[0] != self.rank or b.shape[1] != self.rank:
                raise NotAnAdapter(
                    f"'{module}' has A {list(a.shape)} and B {list(b.shape)}, its rank is "
                    f"{self.rank}"
                )


def is_adapter(names: Mapping[str, Any]) -> bool:
    """Whether tensors (or a layout of them) are a published adapter."""
    return CONFIG in names


def base_key(job_id: str, checksum: str) -> str:
    """The transfer key of a job's base; policies' names have no dot."""
    return f"{job_id}/base.{checksum}/weights@0"
