"""Tensors survive the wire bit by bit, and damage is noticed."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from troupe.rpc import InvalidArgument
from troupe.tensors import ChecksumError, from_proto, to_proto
from troupe.v1 import common_pb2 as pb

DTYPES = ["?", "u1", "<i4", "<i8", "<f2", "<f4", "<f8"]


@given(
    hnp.arrays(
        dtype=st.sampled_from([np.dtype(d) for d in DTYPES]),
        shape=hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4),
    )
)
@settings(max_examples=60, deadline=None)
def test_numpy_round_trip_is_bitwise(array: np.ndarray) -> None:
    wire = pb.Tensor.FromString(to_proto(array).SerializeToString())
    back = from_proto(wire)
    assert back.dtype == array.dtype
    assert back.shape == array.shape
    assert back.tobytes() == array.tobytes()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.int64])
def test_torch_round_trip(dtype: torch.dtype) -> None:
    tensor = (torch.arange(12).reshape(3, 4).t() / 3).to(dtype)  # not contiguous
    back = torch.from_numpy(from_proto(to_proto(tensor)).copy())
    assert torch.equal(back.view(dtype), tensor)


def test_big_endian_and_strided_arrays_are_normalised() -> None:
    array = np.arange(10, dtype=">i4")[::2]
    assert from_proto(to_proto(array)).tolist() == [0, 2, 4, 6, 8]


def test_damage_is_noticed() -> None:
    message = to_proto(np.arange(4, dtype=np.float32))
    message.data = message.data[:-1] + b"\xff"
    with pytest.raises(ChecksumError, match="recorded"):
        from_proto(message)


def test_wrong_shape_and_dtype_are_named() -> None:
    message = to_proto(np.arange(4, dtype=np.int32))
    message.shape[:] = [5]
    with pytest.raises(InvalidArgument) as caught:
        from_proto(message)
    assert caught.value.field == "shape"
    with pytest.raises(InvalidArgument, match="complex128"):
        to_proto(np.zeros(2, dtype=np.complex128))
    with pytest.raises(InvalidArgument):
        to_proto(torch.zeros(2, dtype=torch.complex64))
    with pytest.raises(InvalidArgument):
        from_proto(pb.Tensor())
