"""Location-agnostic set and get of weights and training state.

Keys: `{job}/{policy}/weights@{version}` and `{job}/{policy}/state@{version}`.
"""

from troupe.transfer.blob import Manifest
from troupe.transfer.checksum import checksum_of
from troupe.transfer.counters import Choice, TransferCounters
from troupe.transfer.deferred import DeferredTensors, TensorGroup
from troupe.transfer.errors import Corrupt, InvalidKey, KeyNotFound, StorageFull, TransferTimeout
from troupe.transfer.staging import brought
from troupe.transfer.store import Transfer

__all__ = [
    "Choice",
    "Corrupt",
    "DeferredTensors",
    "InvalidKey",
    "KeyNotFound",
    "Manifest",
    "StorageFull",
    "TensorGroup",
    "Transfer",
    "TransferCounters",
    "TransferTimeout",
    "brought",
    "checksum_of",
]
