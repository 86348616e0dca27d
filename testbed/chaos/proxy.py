"""TCP proxies on loopback that disturb the connections between services.

Disturbances of a connection:

- `hold`: nothing passes, connections stay (packets are lost, as behind a firewall that drops them);
- `hold(forth=True, back=False)`: the callee's messages arrive, the caller's pile up until its
  buffers are full (a queue that is not read);
- `sever`: connections break and new ones are refused (a lost host);
- `delay`: everything arrives late, in order.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from contextlib import suppress
from types import TracebackType
from typing import Final, Self

from troupe.cluster.layout import ANYBODY, Routes
from troupe.rpc.addresses import split_address

_CHUNK: Final = 64 * 1024
_CONNECT_SECONDS: Final = 5.0


class Link:
    """A forwarder of TCP connections from `address` to `target`. Used from one event loop."""

    def __init__(self, target: str, name: str = "") -> None:
        """`target` is "host:port" and may be changed between connections."""
        self.target = target
        self.name = name
        # Delay in seconds of all data in either direction.
        self.delay = 0.0
        # Bytes forwarded in both directions.
        self.passed = 0
        self._server: asyncio.Server | None = None
        self._port = 0
        self._severed = False
        self._forth, self._back = asyncio.Event(), asyncio.Event()
        self._forth.set()
        self._back.set()
        self._connections: set[asyncio.Task[None]] = set()
        self._writers: set[asyncio.StreamWriter] = set()

    @property
    def address(self) -> str:
        """The proxy's "host:port"."""
        assert self._port, "open() first"
        return f"127.0.0.1:{self._port}"

    async def open(self) -> None:
        """Start listening on a free port."""
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0, limit=_CHUNK)
        self._port = int(self._server.sockets[0].getsockname()[1])

    async def close(self) -> None:
        """Stop listening and break every connection."""
        if self._server is not None:
            self._server.close()
        for task in list(self._connections):
            task.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)
        self._server = None

    def hold(self, *, forth: bool = True, back: bool = True) -> None:
        """Hold data from caller to callee (`forth`), from callee to caller (`back`)."""
        if forth:
            self._forth.clear()
        if back:
            self._back.clear()

    def sever(self) -> None:
        """Break every connection and refuse new ones."""
        self._severed = True
        for writer in self._writers:
            writer.transport.abort()

    def heal(self) -> None:
        """End `hold`, `sever` and `delay`; data that was held is forwarded."""
        self._severed = False
        self.delay = 0.0
        self._forth.set()
        self._back.set()

    async def __aenter__(self) -> Self:
        await self.open()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        try:
            await self._serve(reader, writer)
        except asyncio.CancelledError:
            pass  # close(); asyncio's server would log it as an error
        finally:
            writer.transport.abort()
            self._connections.discard(task)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        # No connection is made through a held link either.
        await self._forth.wait()
        if self._severed:
            return
        host, port = split_address(self.target)
        try:
            async with asyncio.timeout(_CONNECT_SECONDS):
                far_reader, far_writer = await asyncio.open_connection(
                    host, int(port), limit=_CHUNK
                )
        except (OSError, TimeoutError):
            return
        self._writers |= {writer, far_writer}
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._pass_on(reader, far_writer, self._forth))
                group.create_task(self._pass_on(far_reader, writer, self._back))
        except* (OSError, EOFError):
            pass  # one side broke off: the abort below tells the other one
        finally:
            self._writers -= {writer, far_writer}
            far_writer.transport.abort()

    async def _pass_on(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, gate: asyncio.Event
    ) -> None:
        while piece := await reader.read(_CHUNK):
            if self.delay:
                await asyncio.sleep(self.delay)
            # While held, nothing more is read: the sender's buffers fill, then it must wait.
            await gate.wait()
            writer.write(piece)
            await writer.drain()
            self.passed += len(piece)
        await gate.wait()
        with suppress(OSError, NotImplementedError):
            writer.write_eof()


# (caller, callee), as `troupe.cluster.layout.links` names them.
Pair = tuple[str, str]


class ProxiedNetwork:
    """A proxy per pair of services that call each other; survives the cluster's power cuts."""

    def __init__(self, pairs: Iterable[Pair]) -> None:
        """`pairs` are (caller, callee)."""
        self._links = {pair: Link("", wire(pair)) for pair in pairs}
        self._opened = False

    async def route(self, addresses: Mapping[str, str]) -> Routes:
        """Return the `router` of an `EmbeddedCluster`: the proxies' addresses, which lead to
        `addresses`.

        A cluster that starts again has new addresses; the proxies keep theirs.
        """
        if not self._opened:
            await asyncio.gather(*(link.open() for link in self._links.values()))
            self._opened = True
        for (_, callee), link in self._links.items():
            link.target = addresses[callee]
            link.heal()
        return {pair: link.address for pair, link in self._links.items()}

    def link(self, pair: Pair) -> Link:
        """Return the proxy between two services."""
        return self._links[pair]

    def heal(self) -> None:
        """End the disturbances of every proxy."""
        for link in self._links.values():
            link.heal()

    async def close(self) -> None:
        """Close all proxies. Services that still run lose their connections."""
        await asyncio.gather(*(link.close() for link in self._links.values()))


def wire(pair: Pair) -> str:
    """Return the name of a pair of services, for messages."""
    caller, callee = pair
    return f"{'others' if caller == ANYBODY else caller} > {callee}"
