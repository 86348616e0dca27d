"""Calling services: channels, typed errors, retries, request ids."""

from troupe.rpc.channel import connect, connect_sync
from troupe.rpc.errors import (
    Aborted,
    AlreadyExists,
    DataLoss,
    DeadlineExceeded,
    FailedPrecondition,
    Internal,
    InvalidArgument,
    NotFound,
    ResourceExhausted,
    TroupeError,
    Unauthenticated,
    Unavailable,
    Unimplemented,
    from_status,
    to_status,
)
from troupe.rpc.ids import new_id
from troupe.rpc.retry import NO_RETRY, Attempts, RetryPolicy
from troupe.rpc.settings import ClientSettings

__all__ = [
    "NO_RETRY",
    "Aborted",
    "AlreadyExists",
    "Attempts",
    "ClientSettings",
    "DataLoss",
    "DeadlineExceeded",
    "FailedPrecondition",
    "Internal",
    "InvalidArgument",
    "NotFound",
    "ResourceExhausted",
    "RetryPolicy",
    "TroupeError",
    "Unauthenticated",
    "Unavailable",
    "Unimplemented",
    "connect",
    "connect_sync",
    "from_status",
    "new_id",
    "to_status",
]
