"""States of other hosts: a `TransferOwner` serves a host's states, a `Peer` fetches from it.

Requests and checksums go over gRPC with the cluster's token, and the bytes through UCX; if one of
the two hosts has no UCX, the bytes also go over gRPC, with a warning. Each host has one
`OwnerProcess`, which does both; the services of the host use it through a `HostOwner`.
"""

from troupe.transfer.remote.owner import TransferOwner
from troupe.transfer.remote.peer import Peer
from troupe.transfer.remote.process import HostOwner, OwnerProcess

__all__ = ["HostOwner", "OwnerProcess", "Peer", "TransferOwner"]
