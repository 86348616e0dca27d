"""Serves OpenAI's API on a port of the rollout worker, one address per trajectory and agent."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import socket
from collections.abc import Callable, Iterator
from contextvars import Context
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import structlog

from troupe.rpc.addresses import bypass_proxy
from troupe.rpc.errors import port_error
from troupe.workflow.agent import Agent
from troupe.workflow.backend import ENDPOINT_OPTIONS, Endpoint, EndpointOptions

if TYPE_CHECKING:
    import uvicorn

log = structlog.get_logger(__name__)

# 192 bits: an address is as good as a password, and lives as long as a trajectory.
_TOKEN_BYTES: Final = 24
_BACKLOG: Final = 2048
_STOP_SECONDS: Final = 3.0
_CLIENTS: Final = ("httpx", "httpx2", "openai")


@dataclass(frozen=True)
class Doorway:
    """One agent of one trajectory, and what its clients may decide."""

    agent: Agent
    options: EndpointOptions


class Doors:
    """The addresses of one trajectory's agents, until it ends."""

    def __init__(self, server: EndpointServer) -> None:
        self._server = server
        self._open: dict[tuple[str, EndpointOptions], tuple[str, Endpoint]] = {}

    def open(self, agent: Agent, options: EndpointOptions) -> Endpoint:
        """The address for `agent`, always the same for the same options. Raises `TroupeError`."""
        key = agent.name, options
        if key not in self._open:
            self._open[key] = self._server.open(agent, options)
        return self._open[key][1]

    def close(self) -> None:
        """End them all. Repeatable."""
        while self._open:
            _, (token, _) = self._open.popitem()
            self._server.close(token)


class EndpointServer:
    """Listens from the first endpoint on (with a fixed port: from `listen`) until `stop`."""

    def __init__(
        self,
        host: str = "127.0.0.1",
        port: int = 0,
        *,
        url: str | None = None,
        max_body: int = 16 << 20,
        keep_alive: float = 5.0,
        count: Callable[[str, int], None] = lambda call, status: None,
    ) -> None:
        """`url`: how clients reach this server, where it is not `http://host:port`; `max_body`: in
        bytes; `keep_alive`: seconds after which a stream says that its turn is still generated;
        `count(call, status)` is told of every answer."""
        self._host, self._port, self._url = host, port, url
        self._max_body, self._keep_alive = max_body, keep_alive
        self._count = count
        self._doors: dict[str, Doorway] = {}
        self._server: uvicorn.Server | None = None
        self._serving: asyncio.Task[None] | None = None

    def __len__(self) -> int:
        return len(self._doors)

    def listen(self) -> None:
        """Take the port. Repeatable. Raises `TroupeError` when it cannot be had."""
        if self._serving is not None:
            return
        family = socket.AF_INET6 if ":" in self._host else socket.AF_INET
        try:
            listener = socket.create_server(
                (self._host, self._port), family=family, backlog=_BACKLOG
            )
        except OSError as error:
            raise port_error(self._host, self._port, "TROUPE_ENDPOINT_PORT", error) from error
        self._port = listener.getsockname()[1]
        # Agents' clients run in this process, or in one that it starts.
        bypass_proxy([self.address])
        for client in _CLIENTS:  # they would write the addresses, which are secrets, into the log
            logging.getLogger(client).setLevel(logging.WARNING)
        # Clients may connect from now on, and wait until it serves. In no context: that of the
        # workflow that asked first is not the one of all who come.
        self._serving = asyncio.get_running_loop().create_task(
            self._serve(listener), name="endpoint", context=Context()
        )

    def open(
        self, agent: Agent, options: EndpointOptions = ENDPOINT_OPTIONS
    ) -> tuple[str, Endpoint]:
        """An address for `agent`, and the key that closes it. Raises `TroupeError`."""
        self.listen()
        token = secrets.token_urlsafe(_TOKEN_BYTES)
        self._doors[token] = Doorway(agent, options)
        return token, Endpoint(f"{self.address}/t/{token}/{agent.name}/v1", "troupe", agent.name)

    def close(self, token: str) -> None:
        """Whoever uses this address from now on is told that there is nothing. Repeatable."""
        self._doors.pop(token, None)

    @property
    def address(self) -> str:
        """`http://host:port`, as clients reach it."""
        if self._url:
            return self._url.rstrip("/")
        host = "127.0.0.1" if self._host in ("0.0.0.0", "::") else self._host
        return f"http://[{host}]:{self._port}" if ":" in host else f"http://{host}:{self._port}"

    async def stop(self) -> None:
        """End all connections. Repeatable."""
        self._doors.clear()
        serving = self._serving
        if serving is None:
            return
        if self._server is not None:
            self._server.should_exit = True
            await asyncio.wait({serving}, timeout=_STOP_SECONDS)
        serving.cancel()
        await asyncio.wait({serving}, timeout=_STOP_SECONDS)

    def _find(self, token: str, agent: str) -> Doorway | None:
        door = self._doors.get(token)
        return door if door is not None and door.agent.name == agent else None

    async def _serve(self, listener: socket.socket) -> None:
        try:
            # Most workers never serve this: the libraries are imported when one does.
            self._server = await asyncio.to_thread(self._make_server)
            await self._server.serve(sockets=[listener])
        except Exception:
            log.exception("the endpoint cannot be served")
        finally:
            listener.close()

    def _make_server(self) -> uvicorn.Server:
        import uvicorn

        from troupe.endpoint.app import create_app

        class Server(uvicorn.Server):
            @contextlib.contextmanager
            def capture_signals(self) -> Iterator[None]:
                yield  # the chassis has them

        app = create_app(
            self._find, self._count, max_body=self._max_body, keep_alive=self._keep_alive
        )
        config = uvicorn.Config(
            app,
            http="h11",
            ws="none",
            loop="none",
            lifespan="off",
            log_config=None,
            log_level="warning",
            access_log=False,  # addresses are secrets
            server_header=False,
            timeout_keep_alive=60,
            timeout_graceful_shutdown=1,
        )
        return Server(config)
