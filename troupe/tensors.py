"""Tensors on the wire: dtype, shape, raw little-endian bytes and a checksum, never a pickle."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import xxhash

from troupe.rpc.errors import DataLoss, InvalidArgument
from troupe.v1 import common_pb2 as common_pb

if TYPE_CHECKING:
    import torch

Array = np.ndarray[Any, np.dtype[Any]]

_NUMPY: Final[dict[int, np.dtype[Any]]] = {
    common_pb.DTYPE_BOOL: np.dtype("?"),
    common_pb.DTYPE_UINT8: np.dtype("u1"),
    common_pb.DTYPE_INT16: np.dtype("<i2"),
    common_pb.DTYPE_INT32: np.dtype("<i4"),
    common_pb.DTYPE_INT64: np.dtype("<i8"),
    common_pb.DTYPE_FLOAT16: np.dtype("<f2"),
    # numpy has no bfloat16: its bits travel as uint16, and only torch interprets them.
    common_pb.DTYPE_BFLOAT16: np.dtype("<u2"),
    common_pb.DTYPE_FLOAT32: np.dtype("<f4"),
    common_pb.DTYPE_FLOAT64: np.dtype("<f8"),
}
_BY_NUMPY: Final = {
    dtype: number for number, dtype in _NUMPY.items() if number != common_pb.DTYPE_BFLOAT16
}
# Bytes of each int32 value that is not negative (`ids_to_proto`).
_PACKED: Final[dict[int, int]] = {common_pb.DTYPE_PACKED16: 2, common_pb.DTYPE_PACKED24: 3}
# Bytes of an element, by dtype.
ITEM_BYTES: Final = {number: dtype.itemsize for number, dtype in _NUMPY.items()} | _PACKED
# The dtypes of token ids on the wire.
ID_DTYPES: Final = (common_pb.DTYPE_INT32, common_pb.DTYPE_PACKED16, common_pb.DTYPE_PACKED24)


class ChecksumError(DataLoss):
    """A tensor's bytes differ from the bytes that its writer checksummed."""

    default_kind = "checksum_mismatch"


def to_proto(tensor: Array | torch.Tensor) -> common_pb.Tensor:
    """Return `tensor` (numpy or torch, any strides, any device) as a message.

    Raises `InvalidArgument` for a dtype that the contract lacks (`common_pb.Dtype` lists them).
    """
    if isinstance(tensor, np.ndarray):
        number = _BY_NUMPY.get(tensor.dtype.newbyteorder("<"))
        array = tensor
    else:
        number, array = _from_torch(tensor)
    if number is None:
        raise InvalidArgument(
            "this dtype cannot travel",
            field="dtype",
            value=tensor.dtype,
            remedy=f"Convert it to one of {', '.join(map(str, _NUMPY.values()))}.",
        )
    data = np.ascontiguousarray(array, dtype=_NUMPY[number]).tobytes()
    return _message(number, array, data)


def ids_to_proto(ids: Array) -> common_pb.Tensor:
    """Return token ids, int32 [n], as a message, in two or three bytes each if the largest fits."""
    ids = np.ascontiguousarray(ids, dtype="<i4")
    # A negative id is a large number without a sign.
    largest = int(ids.view("<u4").max(initial=0))
    for number, width in _PACKED.items():
        if largest < 256**width:
            return _message(number, ids, _bytes_between(ids, 4, width).tobytes())
    return _message(common_pb.DTYPE_INT32, ids, ids.tobytes())


def _message(number: int, array: Array, data: bytes) -> common_pb.Tensor:
    return common_pb.Tensor(
        dtype=common_pb.Dtype.ValueType(number),
        shape=array.shape,
        data=data,
        checksum=xxhash.xxh3_64_intdigest(data),
    )


def _bytes_between(items: Array, before: int, after: int) -> Array:
    """Return uint8 [n, after]: the lower bytes of items of `before` bytes each, then zeros."""
    given = items.view(np.uint8).reshape(-1, before)
    found = np.zeros((len(given), after), np.uint8)
    # By byte position: numpy copies a short last axis element by element, which takes three times
    # as long.
    for place in range(min(before, after)):
        found[:, place] = given[:, place]
    return found


def from_proto(message: common_pb.Tensor) -> Array:
    """Return the array of `message`, read-only. It shares the message's bytes, except that packed
    ids become int32. bfloat16 is returned as uint16 bits.

    Raises `ChecksumError` for bytes that changed in transit and `InvalidArgument` for a dtype or
    shape that does not describe them.
    """
    width = ITEM_BYTES.get(message.dtype)
    if width is None:
        raise InvalidArgument("is not a dtype of the contract", field="dtype", value=message.dtype)
    shape = tuple(message.shape)
    expected = math.prod(shape) * width
    if any(size < 0 for size in shape) or expected != len(message.data):
        raise InvalidArgument(
            f"does not describe {len(message.data)} bytes of {common_pb.Dtype.Name(message.dtype)}",
            field="shape",
            value=list(shape),
        )
    actual = xxhash.xxh3_64_intdigest(message.data)
    if actual != message.checksum:
        raise ChecksumError(
            f"tensor of shape {list(shape)} has checksum {actual:016x}, "
            f"its writer recorded {message.checksum:016x}",
            field="checksum",
            remedy="The bytes changed in transit; send the tensor again.",
        )
    if message.dtype in _PACKED:
        array = _bytes_between(np.frombuffer(message.data, np.uint8), width, 4).view("<i4")
        array.flags.writeable = False
        return array.reshape(shape)
    return np.frombuffer(message.data, dtype=_NUMPY[message.dtype]).reshape(shape)


def _from_torch(tensor: torch.Tensor) -> tuple[int | None, Array]:
    import torch

    host = tensor.detach().cpu()
    if host.dtype is torch.bfloat16:
        return common_pb.DTYPE_BFLOAT16, host.contiguous().view(torch.uint16).numpy()
    array: Array = host.numpy()
    return _BY_NUMPY.get(array.dtype), array
