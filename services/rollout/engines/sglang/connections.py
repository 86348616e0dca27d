"""HTTP/1.1 to one server, over connections that are kept open.

A turn is one request and one answer of a few kilobytes. What general clients do beside that
(cookies, redirects, proxies, content codings, tracing) takes about 0.2 ms of CPU per turn
(docs/benchmarks/rollout.md), and towards an engine none of it is needed.
"""

from __future__ import annotations

import asyncio
import base64
import socket
import ssl
from collections import deque
from typing import Final, cast
from urllib.parse import unquote, urlsplit

# A server that is alive accepts within milliseconds; one that loads weights may take a minute.
CONNECT_SECONDS: Final = 5.0
# Shorter than the five seconds after which servers close idle connections: one that they are
# closing would cost a turn.
_IDLE_SECONDS: Final = 3.0
# Bytes of status line and headers; more is no HTTP.
_MOST_HEAD: Final = 1 << 16
# Bodies up to so many bytes are sent in one piece with their headers.
_ONE_PIECE: Final = 1 << 16
_END: Final = b"\r\n\r\n"
_NO_BODY: Final = frozenset((204, 304))


class HttpError(OSError):
    """A connection broke, or what came over it is no HTTP."""


class Connections:
    """The connections to one server: as many as there are requests at once."""

    def __init__(self, url: str) -> None:
        """`url`: http or https, with an optional user, password and path that all paths follow.

        Raises ValueError for anything else.
        """
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"'{url}' is no URL of a server")
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        self._host = parts.hostname
        self._port = parts.port or (80 if self._tls is None else 443)
        self._prefix = parts.path.rstrip("/")
        head = f" HTTP/1.1\r\nHost: {parts.netloc.rpartition('@')[2]}\r\nAccept: */*\r\n"
        if parts.username is not None:
            user = f"{unquote(parts.username)}:{unquote(parts.password or '')}".encode()
            head += f"Authorization: Basic {base64.b64encode(user).decode()}\r\n"
        self._head = head
        # The latest used at the right; those at the left are closed when they have idled too long.
        self._idle: deque[_HttpConnection] = deque()
        self._open: set[_HttpConnection] = set()
        self._closed = False

    def close(self) -> None:
        """Drop all connections; requests under way fail."""
        self._closed = True
        for connection in list(self._open):
            connection.abort()

    async def request(self, method: str, path: str, body: bytes | None) -> tuple[int, bytes]:
        """Status and body of the answer; a `body` is JSON. No time limit but for connecting.

        Raises OSError (`HttpError`, `TimeoutError` and TLS's errors are).
        """
        if self._closed:
            raise HttpError("the client is closed")
        head = f"{method} {self._prefix}{path}{self._head}"
        if body is None:
            sent = [f"{head}\r\n".encode()]
        else:
            head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
            first = head.encode()
            sent = [first + body] if len(body) <= _ONE_PIECE else [first, body]
        connection = self._kept() or await self._connect()
        answer = await connection.ask(sent)
        if connection.is_open:
            connection.idle_since = asyncio.get_running_loop().time()
            self._idle.append(connection)
        return answer

    def _kept(self) -> _HttpConnection | None:
        """An idle connection that the server has not closed, and is not about to close."""
        idle = self._idle
        if not idle:
            return None
        since = asyncio.get_running_loop().time() - _IDLE_SECONDS
        while idle and idle[0].idle_since < since:
            idle.popleft().abort()
        while idle:
            connection = idle.pop()
            if connection.is_open:
                return connection
        return None

    async def _connect(self) -> _HttpConnection:
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(CONNECT_SECONDS):
            transport, connection = await loop.create_connection(
                lambda: _HttpConnection(self._open), self._host, self._port, ssl=self._tls
            )
        if (raw := transport.get_extra_info("socket")) is not None:
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        if self._closed:  # meanwhile
            connection.abort()
            raise HttpError("the client is closed")
        return connection


class _HttpConnection(asyncio.Protocol):
    """One connection, for one request at a time."""

    def __init__(self, opened: set[_HttpConnection]) -> None:
        """`opened`: holds the connection while it is open."""
        self.idle_since = 0.0
        self._opened = opened
        self._transport: asyncio.Transport | None = None
        self._answer: asyncio.Future[tuple[int, bytes]] | None = None
        self._begin()

    def _begin(self) -> None:
        self._got = bytearray()
        self._status = 0
        # Where the body, or its next chunk, begins in `_got`.
        self._at = 0
        # Bytes of the body; None: chunks, or all until the server closes.
        self._length: int | None = None
        self._chunks: list[bytes] | None = None
        self._last = False

    @property
    def is_open(self) -> bool:
        """Whether a further request may be sent."""
        return self._transport is not None and not self._transport.is_closing()

    def abort(self) -> None:
        """Drop the connection; a request under way fails."""
        if self._transport is not None:
            self._transport.abort()

    async def ask(self, sent: list[bytes]) -> tuple[int, bytes]:
        """Status and body of the answer to one request. When it is cancelled, the connection is
        dropped: the server ends the request, and its answer must not meet another one."""
        answer: asyncio.Future[tuple[int, bytes]] = asyncio.get_running_loop().create_future()
        self._answer = answer
        try:
            if self._transport is None:
                raise HttpError("the connection was closed")
            for part in sent:
                self._transport.write(part)
            return await answer
        except BaseException:
            self.abort()
            raise
        finally:
            self._answer = None

    # What the transport calls.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's is no subclass
        self._opened.add(self)

    def data_received(self, data: bytes) -> None:
        if self._answer is None or self._answer.done():  # it speaks unasked
            self.abort()
            return
        self._got += data
        try:
            while not self._status and self._read_head():
                pass
            body = self._body() if self._status else None
        except (ValueError, IndexError):
            self._fail("it does not answer in HTTP")
            self.abort()
            return
        if body is not None:
            self._finish(body)

    def connection_lost(self, error: Exception | None) -> None:
        self._opened.discard(self)
        self._transport = None
        if self._answer is None or self._answer.done():
            return
        if error is None and self._status and self._length is None and self._chunks is None:
            self._finish(bytes(self._got[self._at :]))
        else:
            self._fail(f"the connection was closed{f': {error}' if error else ''}")

    def _finish(self, body: bytes) -> None:
        assert self._answer is not None
        status, last = self._status, self._last
        self._begin()
        if last:
            self.abort()
        self._answer.set_result((status, body))

    def _fail(self, reason: str) -> None:
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(HttpError(reason))

    def _read_head(self) -> bool:
        """Read status and headers, if all are there; whether to look for another head: interim
        answers (1xx) come before the answer. Raises ValueError for what is no HTTP."""
        end = self._got.find(_END)
        if end < 0:
            if len(self._got) > _MOST_HEAD:
                raise ValueError
            return False
        first, *lines = self._got[:end].decode("latin-1").split("\r\n")
        version, status, *_ = first.split(" ", 2)
        if not version.startswith("HTTP/1."):
            raise ValueError
        if 100 <= int(status) < 200:
            del self._got[: end + len(_END)]
            return True
        self._status, self._at = int(status), end + len(_END)
        self._last = version == "HTTP/1.0"
        length: int | None = 0 if self._status in _NO_BODY else None
        for line in lines:
            name, _, value = line.partition(":")
            name, value = name.lower(), value.strip()
            if name == "content-length":
                if not value.isdecimal():
                    raise ValueError
                length = int(value)
            elif name == "connection":
                self._last = "close" in value.lower() or (
                    self._last and "keep-alive" not in value.lower()
                )
            elif name == "transfer-encoding" and "chunked" in value.lower():
                self._chunks = []
        self._length = None if self._chunks is not None else length
        return False

    def _body(self) -> bytes | None:
        """The body, once all of it is there. Raises ValueError for chunks that are none."""
        if self._chunks is not None:
            return self._joined(self._chunks)
        if self._length is None or len(self._got) - self._at < self._length:
            return None
        if len(self._got) - self._at > self._length:  # an answer to nothing
            self._last = True
        return bytes(memoryview(self._got)[self._at : self._at + self._length])

    def _joined(self, chunks: list[bytes]) -> bytes | None:
        """Read chunks; all of them joined once the last, empty one is there, with its trailers."""
        got = self._got
        while (line := got.find(b"\r\n", self._at)) >= 0:
            size = int(got[self._at : line].split(b";")[0], 16)
            if size < 0:
                raise ValueError
            start = line + 2
            if size == 0:
                # Trailers end, as a head does, with an empty line; without any it is there at once.
                return b"".join(chunks) if got.find(_END, line) >= 0 else None
            if len(got) < start + size + 2:
                return None
            chunks.append(bytes(got[start : start + size]))
            self._at = start + size + 2
        return None
