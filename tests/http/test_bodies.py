"""Bodies of HTTP requests: complete, refused or abandoned; their memory is released."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.waiting import PATIENCE
from troupe.http import bodies
from troupe.http.bodies import BodyReader, BodyTooLarge, BodyTooSlow, ClientGone


def sent(*chunks: bytes, gone: bool = False) -> Callable[[], Awaitable[dict[str, Any]]]:
    """`receive` of a request whose body comes in `chunks`; `gone`: its client leaves then."""
    left = [{"type": "http.request", "body": chunk, "more_body": True} for chunk in chunks]
    if gone or not left:
        left.append({"type": "http.disconnect"} if gone else {"type": "http.request"})
    else:
        left[-1]["more_body"] = False

    async def receive() -> dict[str, Any]:
        await asyncio.sleep(0)
        return left.pop(0)

    return receive


def declared(size: int | None) -> list[tuple[bytes, bytes]]:
    """The headers that tell of a body's size; None: it comes in chunks."""
    if size is None:
        return [(b"transfer-encoding", b"chunked")]
    return [(b"content-length", str(size).encode())]


@given(st.lists(st.lists(st.binary(max_size=40), max_size=4), max_size=8), st.data())
def test_many_at_once_are_whole_or_refused_and_nothing_stays_held(
    requests: list[list[bytes]], data: st.DataObject
) -> None:
    chunked = [data.draw(st.booleans()) for _ in requests]
    gone = [data.draw(st.booleans()) for _ in requests]

    async def play() -> None:
        reader = BodyReader(50, total=60)

        async def one(number: int) -> None:
            whole = b"".join(requests[number])
            receive = sent(*requests[number], gone=gone[number])
            headers = declared(None if chunked[number] else len(whole))
            try:
                async with reader.read(headers, receive) as body:
                    assert body == whole
                    assert len(whole) <= 50
                    assert reader._held <= 60
                    await asyncio.sleep(0)
            except BodyTooLarge:
                assert len(whole) > 50
            except ClientGone:
                assert gone[number]

        await asyncio.wait_for(asyncio.gather(*map(one, range(len(requests)))), PATIENCE)
        assert reader._held == 0
        assert not reader._held_by

    asyncio.run(play())


async def test_a_body_that_waits_for_room_times_out_without_trace(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(bodies, "ROOM_SECONDS", 0.1)
    reader = BodyReader(10, total=10)

    async def wait() -> None:
        async with reader.read(declared(5), sent(b"54321")):
            raise AssertionError("there is no room")

    async with reader.read(declared(8), sent(b"12345678")):
        with pytest.raises(BodyTooSlow):
            await wait()
        cancelled = asyncio.create_task(wait())
        await asyncio.sleep(0)
        cancelled.cancel()
        await asyncio.gather(cancelled, return_exceptions=True)
    async with reader.read(declared(None), sent(b"1234567890")) as body:
        assert len(body) == 10


def hangs(*chunks: bytes) -> Callable[[], Awaitable[dict[str, Any]]]:
    """`receive` of a request that sends `chunks` of its body and nothing more."""
    left = list(chunks)

    async def receive() -> dict[str, Any]:
        if not left:
            await asyncio.Event().wait()
        return {"type": "http.request", "body": left.pop(0), "more_body": True}

    return receive


@pytest.mark.parametrize("size", [None, 1000])
@pytest.mark.parametrize("first", [b"", b"x", b"x" * 900])
async def test_half_sent_bodies_of_one_client_leave_the_others_their_memory(
    size: int | None, first: bytes
) -> None:
    reader = BodyReader(1000)

    async def half() -> None:
        async with reader.read(declared(size), hangs(first), "attacker"):
            pass

    halves = [asyncio.create_task(half()) for _ in range(40)]
    for _ in range(5):
        await asyncio.sleep(0)
    for client in range(20):
        whole = b"y" * 1000
        async with (
            asyncio.timeout(PATIENCE),
            reader.read(declared(None), sent(whole), client) as one,
            reader.read(declared(1000), sent(whole), client) as other,
        ):
            assert one == other == whole
    for task in halves:
        task.cancel()
    await asyncio.gather(*halves, return_exceptions=True)
    assert reader._held == 0


async def test_bodies_that_have_arrived_in_part_do_not_wait_for_one_another() -> None:
    reader = BodyReader(100, total=250, share=120)

    async def one(number: int) -> int:
        receive = sent(b"x" * 60, b"x" * 40)
        async with reader.read(declared(None), receive, number % 2) as body:
            return len(body)

    async with asyncio.timeout(PATIENCE):
        assert await asyncio.gather(*map(one, range(6))) == [100] * 6
    assert reader._held == 0


async def test_a_body_has_the_time_that_its_size_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bodies, "BODY_SECONDS", 0.05)
    monkeypatch.setattr(bodies, "_BYTES_PER_SECOND", 10)
    left = [b"x" * 1000, b"y"]  # the first part gives the body 100 seconds more

    async def receive() -> dict[str, Any]:
        if len(left) == 1:
            await asyncio.sleep(0.2)
        return {"type": "http.request", "body": left.pop(0), "more_body": bool(left)}

    async with BodyReader(2000).read(declared(None), receive) as body:
        assert len(body) == 1001
    with pytest.raises(BodyTooSlow):
        async with BodyReader(2000).read(declared(None), hangs()):
            raise AssertionError("nothing was sent")
