"""Set and get of weights and training state, independent of their location.

Keys: `{job}/{policy}/weights@{version}` and `{job}/{policy}/state@{version}`.
"""

from troupe.transfer.blob import Manifest as Manifest
from troupe.transfer.checksum import checksum_of as checksum_of
from troupe.transfer.counters import Choice as Choice
from troupe.transfer.counters import TransferCounters as TransferCounters
from troupe.transfer.deferred import DeferredTensors as DeferredTensors
from troupe.transfer.deferred import TensorGroup as TensorGroup
from troupe.transfer.errors import Corrupt as Corrupt
from troupe.transfer.errors import InvalidKey as InvalidKey
from troupe.transfer.errors import KeyNotFound as KeyNotFound
from troupe.transfer.errors import StorageFull as StorageFull
from troupe.transfer.errors import TransferTimeout as TransferTimeout
from troupe.transfer.errors import UnknownCodec as UnknownCodec
from troupe.transfer.staging import brought as brought
from troupe.transfer.store import Transfer as Transfer
