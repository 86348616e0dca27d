"""The HTTP server of endpoints on a rollout worker: one address per trajectory and agent."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import socket
from collections.abc import Callable, Iterator
from contextvars import Context
from typing import TYPE_CHECKING, Final

import structlog

from troupe.http.connections import bounded_protocol, most_idle
from troupe.rpc.addresses import bypass_proxy, http_url, listen, local_host
from troupe.rpc.errors import port_error
from troupe.workflow.agent import Agent
from troupe.workflow.backend import ENDPOINT_OPTIONS, Endpoint, EndpointOptions

if TYPE_CHECKING:
    import uvicorn

log = structlog.get_logger(__name__)

# 192 bits: an address serves as a password, valid as long as its trajectory.
_TOKEN_BYTES: Final = 24
_BACKLOG: Final = 2048
_STOP_SECONDS: Final = 3.0
_CLIENTS: Final = ("httpx", "httpx2", "openai", "anthropic")


class TrajectoryEndpoints:
    """The addresses of one trajectory's agents, until it ends."""

    def __init__(self, server: EndpointServer) -> None:
        self._server = server
        self._open: dict[tuple[str, EndpointOptions], tuple[str, Endpoint]] = {}

    def open(self, agent: Agent, options: EndpointOptions) -> Endpoint:
        """Return the address for `agent`, the same for the same options. Raises `TroupeError`."""
        key = agent.name, options
        if key not in self._open:
            self._open[key] = self._server.open(agent, options)
        return self._open[key][1]

    def close(self) -> None:
        """Close all addresses. Repeatable."""
        while self._open:
            _, (token, _) = self._open.popitem()
            self._server.close(token)


class EndpointServer:
    """A server that listens from the first endpoint (with a fixed port: from `listen`) until
    `stop`."""

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
        """`url`: the address at which clients reach this server; default: `http://host:port`;
        `max_body`: bytes; `keep_alive`: seconds between a stream's comments while its turn is
        generated; `count(call, status)` is called for every response."""
        self._host, self._port, self._url = host, port, url
        self._max_body, self._keep_alive = max_body, keep_alive
        self._count = count
        # By token: an agent of a running trajectory, and the options of its clients.
        self._open: dict[str, tuple[Agent, EndpointOptions]] = {}
        self._server: uvicorn.Server | None = None
        self._serving: asyncio.Task[None] | None = None

    def __len__(self) -> int:
        return len(self._open)

    def listen(self) -> None:
        """Bind the port. Repeatable. Raises `TroupeError` if it is not available."""
        if self._serving is not None:
            return
        try:
            listener = listen(self._host, self._port, backlog=_BACKLOG)
        except OSError as error:
            raise port_error(
                self._host, self._port, "TROUPE_ENDPOINT_PORT", error, "TROUPE_ENDPOINT_HOST"
            ) from error
        self._port = listener.getsockname()[1]
        # Clients run in this process or in a child process, and must not use a proxy.
        bypass_proxy([self.address])
        for client in _CLIENTS:  # they would log the addresses, which are secrets
            logging.getLogger(client).setLevel(logging.WARNING)
        # Clients that connect before it serves have to wait. The task has an empty context, instead
        # of inheriting the context of the first workflow.
        self._serving = asyncio.get_running_loop().create_task(
            self._serve(listener), name="endpoint", context=Context()
        )

    def open(
        self, agent: Agent, options: EndpointOptions = ENDPOINT_OPTIONS
    ) -> tuple[str, Endpoint]:
        """Return a new address for `agent`, and the token that closes it. Raises `TroupeError`."""
        self.listen()
        token = secrets.token_urlsafe(_TOKEN_BYTES)
        self._open[token] = (agent, options)
        return token, Endpoint(f"{self.address}/t/{token}/{agent.name}/v1", "troupe", agent.name)

    def close(self, token: str) -> None:
        """Answer requests to this address with 404 from now on. Repeatable."""
        self._open.pop(token, None)

    @property
    def address(self) -> str:
        """`http://host:port`, as seen by clients."""
        if self._url:
            return self._url.rstrip("/")
        return http_url(local_host(self._host), self._port)

    async def stop(self) -> None:
        """Close all connections. Repeatable."""
        self._open.clear()
        serving = self._serving
        if serving is None:
            return
        if self._server is not None:
            self._server.should_exit = True
            await asyncio.wait({serving}, timeout=_STOP_SECONDS)
        serving.cancel()
        await asyncio.wait({serving}, timeout=_STOP_SECONDS)

    def _find(self, token: str, agent: str) -> tuple[Agent, EndpointOptions] | None:
        found = self._open.get(token)
        return found if found is not None and found[0].name == agent else None

    async def _serve(self, listener: socket.socket) -> None:
        try:
            # In a thread, and only when needed: most workers never import these libraries.
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
                yield  # the chassis handles signals

        app = create_app(
            self._find, self._count, max_body=self._max_body, keep_alive=self._keep_alive
        )
        config = uvicorn.Config(
            app,
            http=bounded_protocol(most_idle()),
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
