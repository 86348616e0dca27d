"""The model of one policy on the device that trains it."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch

Tensors = dict[str, torch.Tensor]


class TrainedModel:
    """A Hugging Face causal LM, the names of its tensors, and what engines get of them."""

    def __init__(self, module: Any, device: torch.device, published_type: torch.dtype) -> None:
        """Take `module` to `device`; it trains in the type of its parameters.

        `published_type`: of the floating-point tensors that engines load.
        """
        self.device = device
        self.module = module.to(device)
        self.parameters: list[torch.nn.Parameter] = list(self.module.parameters())
        self.dtype = self.parameters[0].dtype
        self.vocabulary = int(module.get_input_embeddings().weight.shape[0])
        self._published_type = published_type

    @property
    def num_parameters(self) -> int:
        """Distinct parameters."""
        return sum(p.numel() for p in self.module.parameters())

    def frozen_copy(self, weights: Mapping[str, torch.Tensor]) -> Any:
        """A second module with these weights, which no gradient reaches."""
        module = copy.deepcopy(self.module).requires_grad_(False)
        _copy_into(module, weights)
        return module

    def published(self) -> Tensors:
        """What engines load: distinct parameters and persistent buffers, in the published type.

        Tensors that have it already are the model's own: copy or store them before the next step.
        """
        dtype = self._published_type
        return {
            name: t.to(dtype) if t.is_floating_point() else t for name, t in self.weights().items()
        }

    def weights(self) -> Tensors:
        """Distinct parameters and persistent buffers in full precision; not a copy."""
        named: Tensors = {name: p.detach() for name, p in self.module.named_parameters()}
        known = {t.data_ptr() for t in named.values()}
        for name, tensor in self.module.state_dict().items():
            if name not in named and tensor.data_ptr() not in known:
                named[name] = tensor.detach()
        return named

    def load(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Copy what `weights` gave. Raises ValueError when the names are not the model's."""
        _copy_into(self.module, weights)


def _copy_into(model: torch.nn.Module, weights: Mapping[str, torch.Tensor]) -> None:
    result = model.load_state_dict(dict(weights), strict=False)
    named = {name for name, _ in model.named_parameters()}
    missing = sorted(named & set(result.missing_keys))
    if missing or result.unexpected_keys:
        raise ValueError(f"weights do not fit: missing {missing}, extra {result.unexpected_keys}")
