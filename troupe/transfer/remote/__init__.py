"""State that other hosts hold: an `TransferOwner` serves it, a `Peer` fetches it.

Requests and checksums go over gRPC with the cluster's token, the bytes through UCX; where one of
the two has no UCX they go over gRPC too, with a warning. A service has both run in an
`OwnerProcess`, one per host, and asks that one through a `HostOwner`.
"""

from troupe.transfer.remote.owner import TransferOwner
from troupe.transfer.remote.peer import Peer
from troupe.transfer.remote.process import HostOwner, OwnerProcess

__all__ = ["HostOwner", "OwnerProcess", "Peer", "TransferOwner"]
