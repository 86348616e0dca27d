"""The client SDK: submit jobs, watch them, use what they trained. Blocking and asyncio."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from troupe.client.aio import AsyncClient
from troupe.client.comparison import Comparison
from troupe.client.functions import AsyncFunctions
from troupe.client.handle import AsyncJobHandle
from troupe.client.records.cluster import Binding, Cluster, Engine, Service, Worker
from troupe.client.records.events import Activity, Event, MetricsLogged, Notice, StateChanged
from troupe.client.records.functions import (
    Function,
    Invocation,
    InvocationFailed,
    InvocationProgress,
    LogLine,
)
from troupe.client.records.jobs import (
    Checkpoint,
    Generation,
    Job,
    JobCancelled,
    JobFailed,
    JobState,
    MetricsRow,
    Result,
    Trajectory,
    Turn,
    Version,
)
from troupe.client.records.populations import (
    Match,
    Member,
    MemberRating,
    MetaStrategy,
    PayoffCell,
    Pool,
    Population,
    Slot,
)
from troupe.client.records.samples import Audit, PolicyAudit, Sample, Tables, TableSummary
from troupe.client.sync import Client, Functions, JobHandle
from troupe.installation import refuse_other_troupe

if TYPE_CHECKING:
    from troupe.client.sdk import *  # noqa: F403

# Also here: the other project's `troupe/__init__.py` replaces ours if it is installed later.
refuse_other_troupe()


def __getattr__(name: str) -> Any:
    # Commands that call no cluster, such as `troupe up`, start in half the time without the client.
    if name == "__all__" or not name.startswith("_"):
        sdk = import_module(f"{__name__}.sdk")
        if name == "__all__" or name in sdk.__all__:
            return getattr(sdk, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__getattr__("__all__")})
