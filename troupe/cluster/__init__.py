"""The embedded cluster: all services of Troupe as child processes of one supervisor."""

from troupe.cluster.embedded import EmbeddedCluster
from troupe.cluster.errors import NoCluster, NotWritable
from troupe.cluster.settings import ClusterSettings

__all__ = ["ClusterSettings", "EmbeddedCluster", "NoCluster", "NotWritable"]
