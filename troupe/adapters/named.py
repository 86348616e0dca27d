"""The tensors of a model by name, each once."""

from __future__ import annotations

from typing import Any

import torch

Tensors = dict[str, torch.Tensor]


def distinct_tensors(module: Any) -> Tensors:
    """Parameters and persistent buffers; what is tied under its first name. Not copies."""
    named: Tensors = {name: p.detach() for name, p in module.named_parameters()}
    known = {t.data_ptr() for t in named.values()}
    for name, tensor in module.state_dict().items():
        if name not in named and tensor.data_ptr() not in known:
            named[name] = tensor.detach()
    return named
