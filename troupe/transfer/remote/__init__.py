"""State that other hosts hold: an `Owner` serves it, a `Peer` fetches it.

Requests and checksums go over gRPC with the cluster's token, the bytes through UCX; where one of
the two has no UCX they go over gRPC too, with a warning. A service has both run in an
`OwnerProcess`, one per host, and asks that one through a `HostOwner`.
"""

from troupe.transfer.remote.host_owner import HostOwner
from troupe.transfer.remote.owner import Owner
from troupe.transfer.remote.peer import Peer
from troupe.transfer.remote.process import OwnerProcess

__all__ = ["HostOwner", "Owner", "OwnerProcess", "Peer"]
