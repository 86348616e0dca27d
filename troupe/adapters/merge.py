"""Merging a LoRA adapter into its base's weights, and the layers of a model that can have one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from troupe.adapters.content import AdapterContent


def output_layer(model: Any) -> str:
    """The name of the output layer; empty when there is none."""
    head = model.get_output_embeddings()
    return next((name for name, module in model.named_modules() if module is head), "")


def linear_layers(
    model: Any, wanted: Sequence[str] | str
) -> tuple[dict[str, tuple[int, int]], list[str]]:
    """The linear layers that `wanted` selects, with (in, out) features, and names without one.

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


Tensors = dict[str, torch.Tensor]


def distinct_tensors(module: Any) -> Tensors:
    """Parameters and persistent buffers, tied ones once under their first name; not copies."""
    named: Tensors = {name: p.detach() for name, p in module.named_parameters()}
    known = {t.data_ptr() for t in named.values()}
    for name, tensor in module.state_dict().items():
        if name not in named and tensor.data_ptr() not in known:
            named[name] = tensor.detach()
    return named


class MergeMismatch(ValueError):
    """The adapter was made for another model."""


def merged(base: Mapping[str, torch.Tensor], adapter: AdapterContent) -> dict[str, torch.Tensor]:
    """`base` with W + alpha / rank * B @ A in place of each adapted W, in W's dtype.

    The sum is taken in float32 and rounded once. Tensors that are not adapted are those of `base`,
    not copies. Raises MergeMismatch.
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
