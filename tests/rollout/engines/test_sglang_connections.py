"""What comes over a connection to a server, in whatever pieces, is read as the server meant it."""

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
import uvloop

from services.rollout.engines.sglang import connections
from services.rollout.engines.sglang.connections import Connections, HttpError

Answer = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
BODY = bytes(range(256)) * 40


class Server:
    """Answers each request on its connections by `answer(request head, body)`: the pieces of bytes
    to send, one after another; None at the end closes the connection."""

    def __init__(self, answer: Callable[[str, bytes], list[bytes | None]]) -> None:
        self._answer = answer
        self.heads: list[str] = []
        self.connections = 0
        self.asked, self.lost = asyncio.Event(), asyncio.Event()

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                self.heads.append(head)
                self.asked.set()
                length = [line for line in head.split("\r\n") if line.startswith("Content-Length")]
                body = await reader.readexactly(int(length[0].split(":")[1])) if length else b""
                for piece in self._answer(head, body):
                    if piece is None:
                        return
                    writer.write(piece)
                    await writer.drain()
                    await asyncio.sleep(0)
        except (asyncio.IncompleteReadError, ConnectionError):
            self.lost.set()
        finally:
            writer.close()


@asynccontextmanager
async def serving(server: Server, path: str = "") -> AsyncIterator[Connections]:
    async with await asyncio.start_server(server, "127.0.0.1", 0) as listening:
        port = listening.sockets[0].getsockname()[1]
        opened = Connections(f"http://127.0.0.1:{port}{path}")
        yield opened
        opened.close()
        await asyncio.sleep(0)


def _in_pieces(data: bytes, seed: int) -> list[bytes]:
    draw, pieces = random.Random(seed), []
    while data:
        size = draw.choice((1, 2, 3, 50, 5000))
        pieces.append(data[:size])
        data = data[size:]
    return pieces


def _chunked(body: bytes, seed: int) -> bytes:
    draw, sent = random.Random(seed), b""
    while body:
        size = draw.randint(1, 3000)
        sent += f"{len(body[:size]):x};note=1\r\n".encode() + body[:size] + b"\r\n"
        body = body[size:]
    return sent + b"0\r\nTrailer: x\r\n\r\n"


ANSWERS = {
    "length": b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(BODY) + BODY,
    "chunks": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + _chunked(BODY, 1),
    "interim": b"HTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\n"
    b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok",
    "nothing": b"HTTP/1.1 204 No Content\r\n\r\n",
    "empty": b"HTTP/1.1 200\r\nContent-Length: 0\r\n\r\n",
    "refused": b"HTTP/1.1 400 Bad Request\r\nContent-Length: 3\r\n\r\nbad",
}
MEANT = {
    "length": (200, BODY),
    "chunks": (200, BODY),
    "interim": (200, b"ok"),
    "nothing": (204, b""),
    "empty": (200, b""),
    "refused": (400, b"bad"),
}


@pytest.mark.parametrize("kind", ANSWERS)
@pytest.mark.parametrize("run", [asyncio.run, uvloop.run])
def test_answers_are_read_in_any_pieces_over_one_connection(run: Any, kind: str) -> None:
    async def ask() -> None:
        async with asyncio.timeout(60), serving(server) as opened:
            for _ in range(20):
                assert await opened.request("GET", "/health", None) == MEANT[kind]

    server = Server(lambda head, body: _in_pieces(ANSWERS[kind], len(server.heads)))  # type: ignore
    run(ask())
    assert server.connections == 1


@pytest.mark.parametrize(
    "sent",
    [
        b"HTTP/1.1 200 OK\r\n\r\n" + BODY,
        b"HTTP/1.0 200 OK\r\nContent-Length: %d\r\n\r\n" % len(BODY) + BODY,
        b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: %d\r\n\r\n" % len(BODY) + BODY,
    ],
)
async def test_a_connection_that_the_server_ends_is_not_used_again(sent: bytes) -> None:
    server = Server(lambda head, body: [*_in_pieces(sent, 3), None])
    async with serving(server) as opened:
        for _ in range(3):
            assert await opened.request("GET", "/", None) == (200, BODY)
    assert server.connections == 3


@pytest.mark.parametrize(
    "sent",
    [
        [None],
        [b"HTTP/1.1 200 OK\r\nContent-Le", None],
        [b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nonly", None],
        [b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nonl", None],
        [b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nnumber\r\n\r\n"],
        [b"HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n"],
        [b"SSH-2.0-OpenSSH\r\n\r\n"],
        [b"HTTP/1.1 \r\n\r\n"],
        [b"x" * (1 << 17)],
    ],
)
async def test_what_is_no_answer_is_an_error(sent: list[bytes | None]) -> None:
    async with serving(Server(lambda head, body: sent)) as opened:
        for _ in range(2):
            with pytest.raises(HttpError):
                await asyncio.wait_for(opened.request("GET", "/", None), 20)


@pytest.mark.parametrize("size", [0, 10, 1 << 20])
async def test_bodies_arrive_whole_with_path_and_password(size: int) -> None:
    got: list[bytes] = []

    def answer(head: str, body: bytes) -> list[bytes | None]:
        got.append(body)
        return [ANSWERS["empty"]]

    server = Server(answer)
    async with await asyncio.start_server(server, "127.0.0.1", 0) as listening:
        port = listening.sockets[0].getsockname()[1]
        opened = Connections(f"http://me:p%40ss@127.0.0.1:{port}/behind/")
        assert (await opened.request("POST", "/generate", b"j" * size))[0] == 200
        opened.close()
    assert got == [b"j" * size]
    assert server.heads[0].startswith("POST /behind/generate HTTP/1.1\r\n")
    assert f"Host: 127.0.0.1:{port}\r\n" in server.heads[0]
    assert "Authorization: Basic bWU6cEBzcw==\r\n" in server.heads[0]


async def test_a_cancelled_request_ends_its_connection_and_no_other_answer_is_mixed_up() -> None:
    def answer(head: str, body: bytes) -> list[bytes | None]:
        return [] if body == b"wait" else [ANSWERS["interim"]]

    server = Server(answer)
    async with serving(server) as opened:
        waiting = asyncio.create_task(opened.request("POST", "/", b"wait"))
        await asyncio.wait_for(server.asked.wait(), 20)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        await asyncio.wait_for(server.lost.wait(), 20)
        assert await opened.request("POST", "/", b"") == (200, b"ok")
    assert server.connections == 2


async def test_connections_that_idle_too_long_or_are_closed_meanwhile_are_not_used(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    server = Server(lambda head, body: [ANSWERS["length"]])
    async with serving(server) as opened:
        await asyncio.gather(*(opened.request("GET", "/", None) for _ in range(4)))
        assert server.connections == 4
        await asyncio.gather(*(opened.request("GET", "/", None) for _ in range(4)))
        assert server.connections == 4
        monkeypatch.setattr(connections, "_IDLE_SECONDS", 0.0)
        await opened.request("GET", "/", None)
        assert server.connections == 5
        under_way = asyncio.create_task(opened.request("GET", "/", None))
        await asyncio.sleep(0)
        opened.close()
        for call in (under_way, opened.request("GET", "/", None)):
            with pytest.raises(HttpError):
                await call


async def test_nobody_listening_is_an_error() -> None:
    async with await asyncio.start_server(lambda reader, writer: None, "127.0.0.1", 0) as gone:
        port = gone.sockets[0].getsockname()[1]
    with pytest.raises(ConnectionRefusedError):
        await Connections(f"http://127.0.0.1:{port}").request("GET", "/", None)
    with pytest.raises(ValueError, match="no URL"):
        Connections("ftp://somewhere")
