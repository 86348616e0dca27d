"""Frames: every written frame is read, by each of the readers."""

from __future__ import annotations

import asyncio
import io

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.reward import worker
from troupe.processes.frames import FrameTooLarge, frame, read_frame, read_frame_from


@given(st.lists(st.binary(max_size=300)))
def test_frames_in_a_row_are_read_one_by_one(bodies: list[bytes]) -> None:
    written = b"".join(map(frame, bodies))
    file = io.BytesIO(written)
    assert [read_frame_from(file) for _ in bodies] == bodies
    assert read_frame_from(file) is None

    async def read() -> list[bytes]:
        stream = asyncio.StreamReader()
        stream.feed_data(written)
        stream.feed_eof()
        found = [await read_frame(stream, 300) for _ in bodies]
        with pytest.raises(EOFError):
            await read_frame(stream, 300)
        return found

    assert asyncio.run(read()) == bodies


@given(st.lists(st.binary(max_size=300)), st.data())
def test_a_worker_writes_the_same_frames_and_takes_them_from_any_pieces(
    bodies: list[bytes], data: st.DataObject
) -> None:
    written = b"".join(map(frame, bodies))
    assert written == b"".join(map(worker.frame, bodies))
    buffer, found = bytearray(), []
    while written:
        size = data.draw(st.integers(1, len(written)))
        buffer += written[:size]
        written = written[size:]
        while (body := worker.take_frame(buffer)) is not None:
            found.append(body)
    assert found == bodies
    assert not buffer


async def test_a_frame_larger_than_its_reader_accepts_is_refused_before_it_is_read() -> None:
    stream = asyncio.StreamReader()
    stream.feed_data((2**31).to_bytes(4, "big"))
    with pytest.raises(FrameTooLarge, match=r"2,147,483,648 bytes; 10 at most"):
        await read_frame(stream, 10)
