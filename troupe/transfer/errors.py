"""Errors of the transfer layer, each with its key."""

from __future__ import annotations

from troupe.rpc.errors import (
    DataLoss,
    DeadlineExceeded,
    FailedPrecondition,
    InvalidArgument,
    NotFound,
    ResourceExhausted,
    TroupeError,
)


class TransferError(TroupeError):
    """Base of all transfer errors."""

    default_kind = "transfer_failed"
    default_field = "key"
    default_remedy = "Repeat the call."

    def __init__(self, key: str, message: str) -> None:
        super().__init__(message, value=key)

    @property
    def key(self) -> str:
        """The key of the state."""
        return self.value or ""


class InvalidKey(TransferError, InvalidArgument):
    """The key is not a relative path of plain segments."""

    default_kind = "invalid_key"
    default_remedy = "Use letters, digits and . _ @ = - in segments separated by '/'."


class KeyNotFound(TransferError, NotFound):
    """Nothing is stored under the key."""

    default_kind = "transfer_key_not_found"
    default_remedy = "Publish the version again, or ask for one that is still kept."


class Corrupt(TransferError, DataLoss):
    """The stored bytes differ from the original ones; they were refused, and nothing was
    applied."""

    default_kind = "transfer_corrupt"
    default_remedy = "Publish the version again."


class UnknownCodec(TransferError, FailedPrecondition):
    """A tensor is stored in a form that this release cannot read; nothing was applied."""

    default_kind = "transfer_unknown_codec"
    default_remedy = "Run the same release of Troupe on all hosts."


class StorageFull(TransferError, ResourceExhausted):
    """There is no room for the state; earlier contents are intact."""

    default_kind = "storage_full"
    default_remedy = "Free space, or set TROUPE_TRANSFER_DIR to a directory with more room."


class TransferTimeout(TransferError, DeadlineExceeded):
    """The deadline passed before the key appeared or its bytes were verified."""

    default_kind = "transfer_timeout"
    default_remedy = "Check that the writer is alive, or allow more time."
