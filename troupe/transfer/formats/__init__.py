"""Formats in which inference servers take tensors from a trainer's devices, by name.

A format is a module with a subclass of `BucketFormat` and a line in `FORMATS`. The rollout
service's kind of server names it (`InferenceServer.bucket_format`), and the trainer sends in it.
"""

from __future__ import annotations

import pkgutil
from typing import Final

from troupe.transfer.flat_buckets import BucketFormat

FORMATS: Final[dict[str, str]] = {
    "sglang": "troupe.transfer.formats.sglang:SglangFormat",
    "vllm": "troupe.transfer.formats.vllm:VllmFormat",
}
"""Import paths: a trainer loads the formats that its servers ask for."""


def format_of(name: str) -> BucketFormat:
    """The format of that name, which must be in `FORMATS`."""
    found: type[BucketFormat] = pkgutil.resolve_name(FORMATS[name])
    return found()
