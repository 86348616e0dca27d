"""How commands reach Redis: one server, or the nodes of a Redis Cluster.

redis-py's own retries are off: repeating is the business of `troupe.rpc.RetryPolicy`, and every
script is repeatable, so a call that broke may be sent again.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, Iterable, Sequence
from typing import Any, Final, Protocol, TypeAlias
from urllib.parse import urlsplit, urlunsplit

import redis.asyncio as aioredis
from redis import exceptions
from redis._parsers import BaseParser
from redis.asyncio.client import PubSub
from redis.asyncio.cluster import ClusterNode, RedisCluster
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from services.experience_store.lanes import Lanes
from services.experience_store.resp import Command, Replies

CLUSTER_SCHEMES: Final = {"redis-cluster": "redis", "rediss-cluster": "rediss"}
# A client of a cluster learns who serves a slot by being told that another node does.
_CLUSTER_TRIES: Final = 3
_NAME: Final = "troupe-experience-store"
_READ_BYTES: Final = 2**16
# A listening socket is silent while nothing happens.
_LISTEN_SECONDS: Final = 1.0

# Channel and message; None once, when the listening has begun.
Heard: TypeAlias = tuple[bytes, bytes] | None


class Connection(Protocol):
    """What `database.Database` needs of Redis."""

    async def send(self, commands: Sequence[Command]) -> list[Any]:
        """The replies, an exception where Redis answered with an error."""

    async def load(self, scripts: Iterable[str]) -> None:
        """Make every server know the scripts."""

    async def info(self) -> dict[str, str]:
        """What the servers say about themselves, by name."""

    def listen(self, pattern: str) -> AsyncGenerator[Heard, None]:
        """What is published on channels like `pattern`, for ever, on a connection of its own."""

    async def close(self) -> None:
        """Give all connections back."""


def connect_to(url: str, timeout: float) -> Connection:
    """The connection that `url` describes; nothing is sent yet. Raises `ValueError`."""
    if urlsplit(url).scheme in CLUSTER_SCHEMES:
        return ClusterConnection(url, timeout)
    return ServerConnection(url, timeout)


class ServerConnection:
    """One Redis server."""

    def __init__(self, url: str, timeout: float) -> None:
        self._pool = aioredis.ConnectionPool.from_url(
            url,
            # Bounded by the caller: redis-py's own way (asyncio.wait_for) swallows cancellation
            # on Python 3.11, and makes a task of every write.
            socket_timeout=None,
            socket_connect_timeout=timeout,
            retry=Retry(NoBackoff(), 0),
            protocol=2,
            client_name=_NAME,
        )
        self._redis: Any = aioredis.Redis(connection_pool=self._pool)
        self._lanes = Lanes(self._pool.make_connection, timeout)

    async def send(self, commands: Sequence[Command]) -> list[Any]:
        """See `Connection.send`."""
        replies = await self._lanes.send(commands)
        return [self._shaped(*pair) for pair in zip(commands, replies, strict=True)]

    def _shaped(self, command: Command, reply: Any) -> Any:
        """The reply as redis-py shapes that of this command: HGETALL as a dictionary, and so on."""
        shape = self._redis.response_callbacks.get(command[0])
        return reply if shape is None or isinstance(reply, Exception) else shape(reply)

    async def load(self, scripts: Iterable[str]) -> None:
        """See `Connection.load`."""
        for reply in await self.send([("SCRIPT", "LOAD", text) for text in scripts]):
            if isinstance(reply, Exception):
                raise reply

    async def info(self) -> dict[str, str]:
        """See `Connection.info`."""
        info = await self._redis.execute_command("INFO")
        return {str(name): str(value) for name, value in info.items()}

    async def listen(self, pattern: str) -> AsyncGenerator[Heard, None]:
        """See `Connection.listen`."""
        connection: Any = self._pool.make_connection()  # type: ignore[no-untyped-call]
        replies = Replies(BaseParser.parse_error)
        try:
            await connection.connect()
            await connection.send_command("PSUBSCRIBE", pattern)
            while True:
                data = await connection._reader.read(_READ_BYTES)
                if not data:
                    raise exceptions.ConnectionError("the server closed the connection")
                for reply in replies.feed(data):
                    if isinstance(reply, Exception):
                        raise reply
                    if reply[0] == b"pmessage":
                        yield reply[2], reply[3]
                    elif reply[0] == b"psubscribe":
                        yield None
        finally:
            await connection.disconnect(nowait=True)

    async def close(self) -> None:
        """See `Connection.close`."""
        await self._lanes.close()
        await self._redis.aclose()
        await self._pool.disconnect()


class ClusterConnection:
    """The nodes of a Redis Cluster, found through those that the URL names."""

    def __init__(self, url: str, timeout: float) -> None:
        parts = urlsplit(url)
        login, _, places = parts.netloc.rpartition("@")
        first, *others = places.split(",")
        netloc = f"{login}@{first}" if login else first
        scheme = CLUSTER_SCHEMES[parts.scheme]
        self._redis: Any = RedisCluster.from_url(
            urlunsplit((scheme, netloc, "", parts.query, "")),
            startup_nodes=[_node(place) for place in others] or None,
            socket_timeout=None,
            socket_connect_timeout=timeout,
            retry=Retry(NoBackoff(), _CLUSTER_TRIES),
            protocol=2,
            client_name=_NAME,
        )

    async def send(self, commands: Sequence[Command]) -> list[Any]:
        """See `Connection.send`; what belongs to one node travels together."""
        return await _send(self._redis, commands)

    async def load(self, scripts: Iterable[str]) -> None:
        """See `Connection.load`: every primary must know them."""
        for text in scripts:
            await self._redis.execute_command(
                "SCRIPT LOAD", text, target_nodes=RedisCluster.PRIMARIES
            )

    async def info(self) -> dict[str, str]:
        """See `Connection.info`: memory of all primaries together, the oldest version."""
        replies = await self._redis.execute_command("INFO", target_nodes=RedisCluster.PRIMARIES)
        infos = list(replies.values())
        found = {str(name): str(value) for name, value in infos[0].items()}
        for name in ("used_memory", "maxmemory"):
            found[name] = str(sum(int(info[name]) for info in infos))
        versions = [str(info["redis_version"]) for info in infos]
        found["redis_version"] = min(versions, key=lambda text: [*map(int, text.split("."))])
        return found

    async def listen(self, pattern: str) -> AsyncGenerator[Heard, None]:
        """See `Connection.listen`: what is published at one node is heard at every other."""
        pubsub: PubSub = self._redis.pubsub()
        try:
            await pubsub.psubscribe(pattern)
            while True:
                message = await pubsub.get_message(timeout=_LISTEN_SECONDS)
                if message is None:
                    continue
                if message["type"] == "pmessage":
                    yield message["channel"], message["data"]
                elif message["type"] == "psubscribe":
                    yield None
        finally:
            # The connection is in an unknown state after a cancelled read: never reuse it.
            with contextlib.suppress(exceptions.RedisError, OSError):
                await pubsub.aclose()  # type: ignore[no-untyped-call]

    async def close(self) -> None:
        """See `Connection.close`."""
        await self._redis.aclose()


async def _send(client: Any, commands: Sequence[Command]) -> list[Any]:
    if len(commands) == 1:
        try:
            return [await client.execute_command(*commands[0])]
        except exceptions.ResponseError as error:
            return [error]
    pipe = client.pipeline(transaction=False)
    async with pipe:
        for command in commands:
            pipe.execute_command(*command)
        return list(await pipe.execute(raise_on_error=False))


def _node(place: str) -> ClusterNode:
    host, _, port = place.rpartition(":")
    if not port.isdigit():
        raise ValueError(f"'{place}' is not HOST:PORT")
    return ClusterNode(host, int(port))
