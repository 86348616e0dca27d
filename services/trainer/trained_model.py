"""The model of one policy on the device that trains it."""

from __future__ import annotations

import copy
import functools
from collections.abc import Mapping
from typing import Any

import torch

from services.trainer.adapters import adapter_of
from services.trainer.bases import Base
from services.trainer.named import Tensors, distinct_tensors
from troupe.checkpoints.format import CheckpointFormat
from troupe.checkpoints.tensors import TensorsDoNotFit, shape_difference


class TrainedModel:
    """A Hugging Face causal LM, what of it is trained, and what engines get of that.

    Of a model with an adapter (adapters.py) that is the adapter alone.
    """

    def __init__(self, module: Any, device: torch.device, published_type: torch.dtype) -> None:
        """Take `module` to `device`; it trains in the type of its parameters.

        `published_type`: of the floating-point tensors that engines load.
        """
        self.device = device
        self.module = module.to(device)
        self._adapter = adapter_of(module)
        self.parameters: list[torch.nn.Parameter] = (
            self._adapter.parameters if self._adapter else list(self.module.parameters())
        )
        self.dtype = self.parameters[0].dtype
        self.vocabulary = int(module.get_input_embeddings().weight.shape[0])
        self._published_type = published_type

    @property
    def num_parameters(self) -> int:
        """Distinct parameters."""
        return sum(p.numel() for p in self.module.parameters())

    @property
    def base(self) -> Base | None:
        """The frozen weights under an adapter; None where all weights are trained."""
        return self._adapter.base if self._adapter else None

    def frozen_copy(self, weights: Mapping[str, torch.Tensor]) -> Any:
        """A second module with these weights, which no gradient reaches.

        With an adapter it shares the base's tensors.
        """
        if self._adapter is not None:
            return self._adapter.frozen(weights)
        module = copy.deepcopy(self.module).requires_grad_(False)
        _copy_into(module, weights)
        return module

    @functools.cached_property
    def format(self) -> CheckpointFormat:
        """How what it consists of is named and shaped for engines, in the published type."""
        return CheckpointFormat(self.module, self._published_type)

    def published(self) -> Mapping[str, torch.Tensor]:
        """What engines load: distinct parameters and persistent buffers as a checkpoint has them,
        in the published type; or an adapter in that type (`AdapterContent`).

        A model's are made when they are read: copy or store them before the next step.
        """
        if self._adapter is not None:
            return self._adapter.content(self._published_type).to_tensors()
        return self.format.of(self.weights())

    def weights(self) -> Tensors:
        """What is trained, and persistent buffers, in full precision; not a copy."""
        if self._adapter is not None:
            return self._adapter.weights()
        return distinct_tensors(self.module)

    def load(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Copy what `weights` gave. Raises ValueError when the names are not the model's."""
        if self._adapter is not None:
            self._adapter.load(weights)
        else:
            _copy_into(self.module, weights)


def _copy_into(model: torch.nn.Module, weights: Mapping[str, torch.Tensor]) -> None:
    slots = model.state_dict()
    named = {name for name, _ in model.named_parameters()}
    # Buffers, and further names of a tied tensor, need not be there.
    expected = {n: slot.shape for n, slot in slots.items() if n in named or n in weights}
    if wrong := shape_difference({n: t.shape for n, t in weights.items()}, expected):
        raise TensorsDoNotFit(f"the weights are not the model's: {wrong}")
    model.load_state_dict(dict(weights), strict=False)
