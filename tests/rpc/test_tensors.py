"""Tensors survive the wire bit by bit, and damage is noticed."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from troupe.rpc import InvalidArgument
from troupe.tensors import ID_DTYPES, ITEM_BYTES, ChecksumError, from_proto, ids_to_proto, to_proto
from troupe.v1 import common_pb2 as common_pb

DTYPES = ["?", "u1", "<i4", "<i8", "<f2", "<f4", "<f8"]


@given(
    hnp.arrays(
        dtype=st.sampled_from([np.dtype(d) for d in DTYPES]),
        shape=hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4),
    )
)
@settings(max_examples=60, deadline=None)
def test_numpy_round_trip_is_bitwise(array: np.ndarray) -> None:
    wire = common_pb.Tensor.FromString(to_proto(array).SerializeToString())
    back = from_proto(wire)
    assert back.dtype == array.dtype
    assert back.shape == array.shape
    assert back.tobytes() == array.tobytes()


@given(
    hnp.arrays(np.int32, st.integers(0, 50), elements=st.integers(0, 70_000)),
    st.sampled_from([None, 2**16 - 1, 2**16, 2**24 - 1, 2**24, 2**31 - 1, -1]),
    st.booleans(),
)
@settings(deadline=None)
def test_token_ids_are_packed_and_come_back(ids: np.ndarray, last: int | None, twice: bool) -> None:
    ids = np.array([*ids, *([] if last is None else [last])], np.int32)
    # With strides, too.
    message = ids_to_proto(np.repeat(ids, 2)[::2] if twice else ids)
    back = from_proto(common_pb.Tensor.FromString(message.SerializeToString()))
    assert (back.dtype, back.shape) == (np.int32, ids.shape)
    assert back.tolist() == ids.tolist()
    assert not back.flags.writeable
    top = int(ids.view(np.uint32).max(initial=0))
    width = 2 if top < 2**16 else 3 if top < 2**24 else 4
    assert message.dtype in ID_DTYPES
    assert ITEM_BYTES[message.dtype] == width
    assert len(message.data) == width * len(ids)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.int64])
def test_torch_round_trip(dtype: torch.dtype) -> None:
    tensor = (torch.arange(12).reshape(3, 4).t() / 3).to(dtype)  # not contiguous
    back = torch.from_numpy(from_proto(to_proto(tensor)).copy())
    assert torch.equal(back.view(dtype), tensor)


def test_big_endian_and_strided_arrays_are_normalised() -> None:
    array = np.arange(10, dtype=">i4")[::2]
    assert from_proto(to_proto(array)).tolist() == [0, 2, 4, 6, 8]


def test_damage_is_noticed() -> None:
    for message in (
        to_proto(np.arange(4, dtype=np.float32)),
        ids_to_proto(np.arange(4, dtype=np.int32)),
        ids_to_proto(np.arange(70_000, 70_004, dtype=np.int32)),
    ):
        whole = message.data
        message.data = whole[:-1] + b"\xff"
        with pytest.raises(ChecksumError, match="recorded"):
            from_proto(message)
        message.data = whole[:-1]
        with pytest.raises(InvalidArgument, match=common_pb.Dtype.Name(message.dtype)):
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
        from_proto(common_pb.Tensor())
