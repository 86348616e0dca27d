"""The embedded cluster: all services of Troupe as child processes of one supervisor."""

from troupe.cluster.daemon import run_until_signal, start_detached, stop_running
from troupe.cluster.embedded import EmbeddedCluster, Router
from troupe.cluster.errors import (
    ChildFailed,
    ChildNotReady,
    ClusterNotStarted,
    ClusterRunning,
    NoCluster,
    NotPrivate,
    NotWritable,
    PortInUse,
    RedisMissing,
    RedisUnavailable,
    StateUnreadable,
    TransferDirNotWritable,
)
from troupe.cluster.settings import DEFAULT_DATA_DIR, ClusterSettings
from troupe.cluster.state import ClusterState, ServiceRecord, read_state, running_state

__all__ = [
    "DEFAULT_DATA_DIR",
    "ChildFailed",
    "ChildNotReady",
    "ClusterNotStarted",
    "ClusterRunning",
    "ClusterSettings",
    "ClusterState",
    "EmbeddedCluster",
    "NoCluster",
    "NotPrivate",
    "NotWritable",
    "PortInUse",
    "RedisMissing",
    "RedisUnavailable",
    "Router",
    "ServiceRecord",
    "StateUnreadable",
    "TransferDirNotWritable",
    "read_state",
    "run_until_signal",
    "running_state",
    "start_detached",
    "stop_running",
]
