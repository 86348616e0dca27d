"""`HostOwner`: has the owner process of this host fetch what the host lacks."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from troupe.rpc.channel import connect_sync
from troupe.rpc.errors import DataLoss, DeadlineExceeded, NotFound, ResourceExhausted, Unavailable
from troupe.rpc.retry import NO_RETRY
from troupe.rpc.settings import ClientSettings
from troupe.transfer.counters import Choice, TransferCounters
from troupe.transfer.errors import Corrupt, KeyNotFound, StorageFull, TransferTimeout
from troupe.transfer.places import Wanted
from troupe.v1 import transfer_pb2 as pb
from troupe.v1 import transfer_pb2_grpc as rpc

log = logging.getLogger(__name__)

# Owners that may have a key (of this content), the likely ones first. May raise Unavailable.
Locate = Callable[[str, str | None], Sequence[str]]

# An owner that died is back within this, or stays away.
_PATIENCE_SECONDS: Final = 20.0
_NAP_SECONDS: Final = 0.2


@dataclass(frozen=True)
class Brought:
    """A state that lies on this host now, all of its bytes verified."""

    path: Path
    choice: Choice


class HostOwner:
    """A `Source`: the owner process at `address`, on this host. Safe to use from several threads.

    UCX stays out of the caller's process; if the owner crashes, the fetch goes on when it is back.
    """

    def __init__(
        self,
        address: str,
        settings: ClientSettings | None = None,
        *,
        locate: Locate,
        deadline_seconds: float = 600.0,
    ) -> None:
        """`locate` is asked before every attempt who may have the key."""
        self.address = address
        self.deadline_seconds = deadline_seconds
        self._locate = locate
        # Repeated here, with the owners that `locate` names then.
        settings = (settings or ClientSettings()).model_copy(update={"retry": NO_RETRY})
        self._channel = connect_sync(address, settings)
        self._stub = rpc.TransferOwnerStub(self._channel)

    def close(self) -> None:
        """End the connection."""
        self._channel.close()

    def fetch(self, wanted: Wanted, roots: Sequence[Path], counters: TransferCounters) -> Brought:
        """See `places.Source.fetch`."""
        key = wanted.key
        patience = time.monotonic() + _PATIENCE_SECONDS
        while True:
            request = pb.FetchStateRequest(
                key=key,
                checksum=wanted.expected or "",
                cast=wanted.cast or "",
                base=wanted.base or "",
                owners=self._locate(key, wanted.expected),
            )
            left = wanted.deadline - time.monotonic()
            if left <= 0:
                raise TransferTimeout(key, f"the owner at {self.address} did not bring it in time")
            try:
                answer = self._stub.FetchState(request, timeout=left)
                break
            except NotFound as error:
                raise KeyNotFound(key, error.message) from error
            except DataLoss as error:
                raise Corrupt(key, error.message) from error
            except DeadlineExceeded as error:
                raise TransferTimeout(key, error.message) from error
            except ResourceExhausted as error:
                if error.kind == StorageFull.default_kind:
                    raise StorageFull(key, error.message) from error
                failure: ResourceExhausted | Unavailable = error.with_traceback(None)
            except Unavailable as error:
                # This host's owner, or all others that may have it.
                failure = error.with_traceback(None)
            if time.monotonic() > patience:
                try:
                    raise failure
                finally:
                    del failure  # a circle otherwise, with the frames of whoever called
            counters.retried("owner_away")
            time.sleep(_NAP_SECONDS)
        for cause, count in answer.retries.items():
            for _ in range(count):
                counters.retried(cause)
        for root in roots:
            if (path := root / answer.key).is_file():
                return Brought(path, Choice("get", answer.transport, answer.reason))
        raise KeyNotFound(key, f"the owner at {self.address} keeps states elsewhere")
