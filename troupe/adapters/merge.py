"""An adapter added into its base's weights."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from troupe.adapters.content import AdapterContent


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
