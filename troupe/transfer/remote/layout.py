"""How a state is cut into chunks on its way."""

from __future__ import annotations

from typing import Final

from troupe.transfer.manifest import Manifest

# What is verified, and sent again, at once. Through UCX: large against the cost of a request,
# small against a state. Through gRPC: small, since every chunk is copied several times.
LANE_CHUNK_BYTES: Final = 16 << 20
MESSAGE_CHUNK_BYTES: Final = 2 << 20
MAX_CHUNK_BYTES: Final = 1 << 30
MAX_MESSAGE_CHUNK_BYTES: Final = 32 << 20


def num_chunks(manifest: Manifest, chunk_bytes: int) -> int:
    """Chunks of the data section; the last one may be shorter."""
    return -(-manifest.end // chunk_bytes)
