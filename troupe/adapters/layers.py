"""Which layers of a Hugging Face causal LM an adapter can sit on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch


def output_layer(model: Any) -> str:
    """The name of the module that makes logits; empty when there is none."""
    head = model.get_output_embeddings()
    return next((name for name, module in model.named_modules() if module is head), "")


def linear_layers(
    model: Any, wanted: Sequence[str] | str
) -> tuple[dict[str, tuple[int, int]], list[str]]:
    """Modules that `wanted` means, with (in, out) features, and the names that mean none.

    `wanted`: last parts of names, or "all-linear" for every linear layer. The output layer is never
    among them: its weights may be those of the embedding.
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


def _features(module: torch.nn.Module) -> tuple[int, int] | None:
    if isinstance(module, torch.nn.Linear):
        return module.in_features, module.out_features
    if type(module).__name__ == "Conv1D":  # GPT-2's linear layer, whose weight is [in, out]
        weight = module.weight
        assert isinstance(weight, torch.Tensor)
        return int(weight.shape[0]), int(weight.shape[1])
    return None
