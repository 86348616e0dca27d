"""Location-agnostic set and get of weights and training state.

Keys: `{job}/{policy}/weights@{version}` and `{job}/{policy}/state@{version}`.
"""

from troupe.transfer.blob import Manifest, TensorEntry
from troupe.transfer.checksum import checksum_of
from troupe.transfer.counters import Choice, TransferCounters
from troupe.transfer.deferred import DeferredTensors, TensorGroup
from troupe.transfer.errors import (
    Corrupt,
    InvalidKey,
    KeyNotFound,
    StorageFull,
    TransferError,
    TransferTimeout,
)
from troupe.transfer.sources import default_root
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
    "TensorEntry",
    "TensorGroup",
    "Transfer",
    "TransferCounters",
    "TransferError",
    "TransferTimeout",
    "brought",
    "checksum_of",
    "default_root",
]
