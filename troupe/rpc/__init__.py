"""Calling services: channels, typed errors, retries, request ids."""

from troupe.rpc.channel import connect as connect
from troupe.rpc.channel import connect_sync as connect_sync
from troupe.rpc.errors import Aborted as Aborted
from troupe.rpc.errors import AlreadyExists as AlreadyExists
from troupe.rpc.errors import DataLoss as DataLoss
from troupe.rpc.errors import DeadlineExceeded as DeadlineExceeded
from troupe.rpc.errors import FailedPrecondition as FailedPrecondition
from troupe.rpc.errors import Internal as Internal
from troupe.rpc.errors import InvalidArgument as InvalidArgument
from troupe.rpc.errors import NotFound as NotFound
from troupe.rpc.errors import ResourceExhausted as ResourceExhausted
from troupe.rpc.errors import TroupeError as TroupeError
from troupe.rpc.errors import Unauthenticated as Unauthenticated
from troupe.rpc.errors import Unavailable as Unavailable
from troupe.rpc.errors import Unimplemented as Unimplemented
from troupe.rpc.errors import from_status as from_status
from troupe.rpc.errors import to_status as to_status
from troupe.rpc.ids import new_id as new_id
from troupe.rpc.retry import NO_RETRY as NO_RETRY
from troupe.rpc.retry import Attempts as Attempts
from troupe.rpc.retry import RetryPolicy as RetryPolicy
from troupe.rpc.settings import ClientSettings as ClientSettings
