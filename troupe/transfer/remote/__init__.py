"""State that other hosts hold: an `Owner` serves it, a `Peer` fetches it.

Requests and checksums go over gRPC with the cluster's token, the bytes through UCX; where one of
the two has no UCX they go over gRPC too, with a warning.
"""

from troupe.transfer.remote.owner import Owner
from troupe.transfer.remote.peer import Peer

__all__ = ["Owner", "Peer"]
