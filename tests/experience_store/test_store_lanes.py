"""Shared connections: every caller gets its own reply, whatever happens to others."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from redis import exceptions
from redis.asyncio import Connection, ConnectionPool

from services.experience_store.pipelining import PipelinedConnections
from tests.support.redis_server import RedisServer


@pytest.fixture
async def lanes(redis_url: str) -> AsyncIterator[PipelinedConnections]:
    lanes = PipelinedConnections(ConnectionPool.from_url(redis_url, protocol=2).make_connection, 5)
    yield lanes
    await lanes.close()


async def echo(lanes: PipelinedConnections, number: int) -> None:
    size = 100_000 if number % 7 == 0 else 1
    texts = [f"{number}-{part}".encode() * size for part in range(1 + number % 3)]
    assert await lanes.send([("ECHO", text) for text in texts]) == texts


async def test_replies_reach_those_who_asked(lanes: PipelinedConnections) -> None:
    await asyncio.gather(*(echo(lanes, number) for number in range(200)))


async def test_who_leaves_takes_no_reply_of_others(lanes: PipelinedConnections) -> None:
    calls = [asyncio.create_task(echo(lanes, number)) for number in range(60)]
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    for call in calls[::3]:
        call.cancel()
    results = await asyncio.gather(*calls, return_exceptions=True)
    assert all(result is None for number, result in enumerate(results) if number % 3)
    await echo(lanes, 1)


async def test_an_error_is_the_reply_of_one_command(lanes: PipelinedConnections) -> None:
    replies = await lanes.send([("ECHO", "a"), ("NOSUCH",), ("ECHO", "b")])
    assert (replies[0], replies[2]) == (b"a", b"b")
    assert isinstance(replies[1], exceptions.ResponseError)


async def test_all_who_wait_learn_that_the_server_died(tmp_path: Path) -> None:
    server = RedisServer(tmp_path)
    server.start()
    lanes = PipelinedConnections(ConnectionPool.from_url(server.url, protocol=2).make_connection, 5)
    try:
        await echo(lanes, 1)
        server.pause()
        calls = [asyncio.create_task(echo(lanes, number)) for number in range(20)]
        await asyncio.sleep(0.1)
        server.kill()
        results = await asyncio.gather(*calls, return_exceptions=True)
        assert all(isinstance(result, exceptions.ConnectionError) for result in results)
        server.start()
        await asyncio.gather(*(echo(lanes, number) for number in range(20)))
    finally:
        await lanes.close()
        server.stop()


async def test_a_server_that_does_not_answer_is_given_up(tmp_path: Path) -> None:
    server = RedisServer(tmp_path)
    server.start()
    lanes = PipelinedConnections(
        ConnectionPool.from_url(server.url, protocol=2).make_connection, 0.3
    )
    try:
        await echo(lanes, 1)
        server.pause()
        with pytest.raises((OSError, exceptions.RedisError)):
            await lanes.send([("ECHO", "lost")])
        server.resume()
        assert await lanes.send([("ECHO", "found")]) == [b"found"]
    finally:
        await lanes.close()
        server.stop()


@pytest.mark.parametrize("answer", [b"$x\r\n", b"+first\r\n+second\r\n"])
async def test_after_what_is_no_answer_the_lane_begins_anew(answer: bytes) -> None:
    """Which reply would be whose is not known any more."""
    connections = 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections
        connections += 1
        with contextlib.suppress(OSError):
            while b"ECHO" not in (line := await reader.readline()):
                if reader.at_eof():
                    return
                if b"CLIENT" in line:  # redis-py names itself
                    writer.write(b"+OK\r\n")
            writer.write(answer if connections == 1 else b"+found\r\n")
            await reader.read()
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1")
    port = server.sockets[0].getsockname()[1]

    def connect() -> Connection:
        return Connection(port=port, protocol=2)

    lanes = PipelinedConnections(connect, 60)
    try:
        with contextlib.suppress(exceptions.InvalidResponse):
            assert await lanes.send([("ECHO", "lost")]) == [b"first"]
        assert await lanes.send([("ECHO", "again")]) == [b"found"]
    finally:
        await lanes.close()
        server.close()
