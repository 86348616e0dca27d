"""Tensors as handles that another process of this host opens: memory is shared, nothing is copied.

The form is that of torch.multiprocessing in SGLang's encoding, a pickle (never used for our own
messages). A reader of a handle gives back the reference that making it took: each reader needs a
handle of its own, and the maker keeps its tensor until all have read.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from multiprocessing.reduction import ForkingPickler
from typing import Any, Final

import torch
from torch.multiprocessing.reductions import reduce_tensor

# Where the number of the device is among the arguments that rebuild a tensor of a GPU.
_DEVICE: Final = 6


def handles(named: Any) -> bytes:
    """An encoding of tensors (by name, as pairs or in dicts) by handles, for one reader.

    A GPU is named by its UUID, as SGLang does: its number differs between processes that see
    different GPUs."""
    # The default strategy passes file descriptors, which crashes SGLang's scheduler.
    torch.multiprocessing.set_sharing_strategy("file_system")  # type: ignore[no-untyped-call]
    buffer = io.BytesIO()
    pickler: Any = ForkingPickler(buffer)
    pickler.dispatch_table[torch.Tensor] = _reduced
    pickler.dump(named)
    return buffer.getvalue()


def _reduced(tensor: torch.Tensor) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    rebuild, arguments = reduce_tensor(tensor)  # type: ignore[no-untyped-call]
    if tensor.is_cuda:
        uuid = str(torch.cuda.get_device_properties(tensor.device).uuid)
        arguments = (*arguments[:_DEVICE], uuid, *arguments[_DEVICE + 1 :])
    return rebuild, arguments
