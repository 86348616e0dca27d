"""vLLM's packed tensors: a buffer of bytes by a handle of its memory, or by NCCL.

Read from release 0.32.0 (distributed/weight_transfer: ipc_engine.py, nccl_engine.py,
packed_tensor.py). A server takes one of the two, which it was started with
(`--weight-transfer-config`), and is told of each buffer by `/update_weights`.
"""

from __future__ import annotations

import base64
import pickle
from typing import Any, Final

import torch
from torch.multiprocessing.reductions import reduce_tensor

from troupe.transfer.flat_buckets import BucketFormat, FlatBucket, JoinedGroup, Meeting
from troupe.transfer.nccl import Nccl, NcclGroup
from troupe.v1 import trainer_pb2 as trainer_pb

# Servers cut what they are told of into buffers as soon as one is larger than this, and each is
# one broadcast: larger than any bucket of several tensors (a larger tensor is a bucket of its own).
BUFFER_BYTES: Final = 1 << 30


class VllmFormat(BucketFormat):
    """Flat buckets as vLLM's engines of weight transfer unpack them."""

    def handles(self, bucket: FlatBucket) -> bytes:
        """See `BucketFormat.handles`. A server looks for the UUID of its own GPU, so it takes
        weights only from a trainer on that one."""
        _, arguments = reduce_tensor(bucket.flat.view(torch.uint8))  # type: ignore[no-untyped-call]
        uuid = str(torch.cuda.get_device_properties(bucket.flat.device).uuid)
        return pickle.dumps({uuid: arguments})

    def unique_id(self) -> bytes:
        """See `BucketFormat.unique_id`: NCCL's."""
        return Nccl().unique_id()

    def join(self, meeting: Meeting) -> JoinedGroup:
        """See `BucketFormat.join`. Waits for the servers, which wait for each other."""
        return NcclGroup(
            Nccl(), meeting.unique_id, meeting.size, meeting.device, meeting.join_seconds
        )


def as_update(bucket: trainer_pb.WeightBucket) -> dict[str, Any]:
    """The `update_info` of a bucket: with handles if it has any, else of a broadcast."""
    shapes = [list(one.shape) for one in bucket.tensors]
    info: dict[str, Any] = {
        "names": [one.name for one in bucket.tensors],
        "dtype_names": [bucket.dtype] * len(shapes),
        "shapes": shapes,
    }
    if bucket.handles:
        size = getattr(torch, bucket.dtype).itemsize
        info["tensor_sizes"] = [size * torch.Size(shape).numel() for shape in shapes]
        info["ipc_handles_pickled"] = base64.b64encode(bucket.handles[0]).decode()
    return info
