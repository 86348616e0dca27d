"""`Describer`: asks an owner what it has under a key."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Final

from troupe.rpc.errors import DataLoss, DeadlineExceeded, NotFound, Unavailable
from troupe.transfer.cast import CAST_OF, cast_key
from troupe.transfer.errors import Corrupt, KeyNotFound, TransferTimeout
from troupe.transfer.manifest import Manifest
from troupe.transfer.remote.reading import LaneRead
from troupe.v1 import transfer_pb2 as pb
from troupe.v1 import transfer_pb2_grpc as rpc

_DESCRIBE_SECONDS: Final = 20.0
# The owner casts it first, or waits for another process that does.
_CAST_SECONDS: Final = 300.0


class Describer:
    """For who reads from the owner at `address`, and hands on what it gets at `serves_at`."""

    def __init__(self, address: str, stub: rpc.TransferOwnerStub, serves_at: str) -> None:
        self._address, self._stub, self._serves_at = address, stub, serves_at

    def request(
        self, key: str, expected: str | None, cast: str | None, failed: Sequence[str] = ()
    ) -> pb.DescribeStateRequest:
        """What to ask. `failed`: sources that did not answer."""
        return pb.DescribeStateRequest(
            key=key, checksum=expected or "", cast=cast or "", reader=self._serves_at, failed=failed
        )

    def ask(
        self,
        key: str,
        deadline: float,
        expected: str | None,
        cast: str | None,
        failed: Sequence[str] = (),
        begun: LaneRead | None = None,
    ) -> tuple[Manifest, pb.DescribeStateResponse]:
        """What is under `key` there (with the checksum `expected`; in the dtype `cast`), until
        `deadline` of the monotonic clock. `begun`: a read that asks it itself.

        Raises KeyNotFound, Corrupt, TransferTimeout, Unavailable, and whatever else the owner says.
        """
        try:
            most = _CAST_SECONDS if cast else _DESCRIBE_SECONDS
            left = within(deadline, most)
            answer = None if begun is None else begun.described(left)
            if answer is None:
                request = self.request(key, expected, cast, failed)
                answer = self._stub.DescribeState(request, timeout=left)
        except NotFound as error:
            raise KeyNotFound(key, f"not at {self._address}: {error.message}") from error
        except DeadlineExceeded as error:
            if time.monotonic() >= deadline:
                raise TransferTimeout(key, f"{self._address} did not say what it is") from error
            # Others may have it.
            raise Unavailable(
                f"{self._address} did not describe {key} within {most:g} s: {error.message}",
                kind="transfer_owner_away",
                field="owner",
                value=self._address,
            ) from error
        except DataLoss as error:
            raise Corrupt(key, f"at {self._address}: {error.message}") from error
        try:
            manifest = Manifest.from_json(answer.manifest)
        except ValueError as error:
            raise Corrupt(key, f"{self._address} describes it wrongly: {error}") from error
        if manifest.key != cast_key(key, cast):
            raise Corrupt(key, f"{self._address} describes '{manifest.key}' instead")
        content = manifest.metadata.get(CAST_OF) if cast else manifest.checksum
        if expected and content != expected:
            raise KeyNotFound(key, f"{self._address} holds another content")
        return manifest, answer


def within(deadline: float, most: float = _DESCRIBE_SECONDS) -> float:
    """Seconds that a call may take, never more than `most`, until `deadline`."""
    return min(most, max(deadline - time.monotonic(), 0.001))
