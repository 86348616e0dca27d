"""States of other hosts: a `TransferOwner` serves a host's states, a `Peer` fetches from it.

Requests and checksums go over gRPC with the cluster's token, the bytes through UCX; where one of
the two hosts has no UCX they go over gRPC too, with a warning. Each host has one `OwnerProcess`,
which does both; the services of the host ask it through a `HostOwner`.
"""

from troupe.transfer.remote.owner import TransferOwner
from troupe.transfer.remote.peer import Peer
from troupe.transfer.remote.process import HostOwner, OwnerProcess

__all__ = ["HostOwner", "OwnerProcess", "Peer", "TransferOwner"]
