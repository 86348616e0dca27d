"""A Redis Cluster of three real servers on loopback, joined by hand."""

from __future__ import annotations

import socket
from functools import partial
from pathlib import Path

from redis import Redis

from tests.support.ports import free_port
from tests.support.redis_server import RedisServer
from tests.support.waiting import block_until

NODES = 3
SLOTS = 16384
# The nodes talk to one another on the port that is so much higher.
_BUS = 10_000


class RedisCluster:
    """Three primaries with a third of the slots each; no replicas."""

    def __init__(self, directory: Path) -> None:
        self.nodes = [self._node(directory, number) for number in range(NODES)]

    @property
    def url(self) -> str:
        """The value for TROUPE_STORE_REDIS_URL: one node is enough to find the others."""
        return f"redis-cluster://127.0.0.1:{self.nodes[0].port}"

    def start(self) -> None:
        """Start the nodes and join them; returns when every slot is served."""
        for node in self.nodes:
            node.start()
        for number, node in enumerate(self.nodes):
            first, last = (SLOTS * place // NODES for place in (number, number + 1))
            with node.client() as client:
                client.execute_command("CLUSTER ADDSLOTS", *range(first, last))
                for other in self.nodes[:number]:
                    client.execute_command("CLUSTER MEET", "127.0.0.1", other.port)
        self.wait_until_joined()

    def wait_until_joined(self) -> None:
        """Return when every node knows that all slots are served."""
        for node in self.nodes:
            with node.client() as client:
                block_until(partial(self._knows_all, client), pause=0.05)

    def stop(self) -> None:
        """End all nodes. Idempotent."""
        for node in self.nodes:
            node.stop()

    @staticmethod
    def _knows_all(client: Redis) -> bool:
        info: object = client.execute_command("CLUSTER INFO")
        text = str(info)
        if isinstance(info, dict):
            return info.get("cluster_state") == "ok" and info.get("cluster_known_nodes") == str(
                NODES
            )
        return "cluster_state:ok" in text and f"cluster_known_nodes:{NODES}" in text

    @staticmethod
    def _node(directory: Path, number: int) -> RedisServer:
        home = directory / f"node{number}"
        home.mkdir()
        extra = ("--cluster-enabled", "yes", "--cluster-node-timeout", "2000")
        node = RedisServer(home, durable=True, extra=extra)
        while not _bus_is_free(node.port):
            node.port = free_port()
        return node


def _bus_is_free(port: int) -> bool:
    if port + _BUS > 65535:
        return False
    with socket.socket() as sock:
        try:
            sock.bind(("127.0.0.1", port + _BUS))
        except OSError:
            return False
    return True
