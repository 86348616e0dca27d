"""Arrived bytes are noticed while the rest still arrives, and never more than have arrived."""

from __future__ import annotations

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from troupe.transfer.blob import ChecksumSpan, Chunk
from troupe.transfer.checksum import bytes_checksum
from troupe.transfer.remote import reading
from troupe.transfer.remote.reading import ReceiveWatermark

STEP = 4096


@given(st.integers(0, 5 * STEP), st.lists(st.floats(0, 1), max_size=8))
def test_a_watermark_sees_every_whole_step_and_nothing_that_has_not_come(
    nbytes: int, stops: list[float]
) -> None:
    came, memory = os.urandom(nbytes), bytearray(nbytes)
    seen = ReceiveWatermark(memoryview(memory), STEP)
    done = 0
    for stop in sorted(int(part * nbytes) // 8 * 8 for part in stops):
        before = seen.upto()
        memory[done:stop] = came[done:stop]
        done = max(done, stop)
        assert seen.passed == (done // STEP * STEP > before)
        assert seen.upto() == done // STEP * STEP
        assert not seen.passed


def test_words_that_look_like_marks_are_seen_later() -> None:
    memory = bytearray(3 * STEP)
    seen = ReceiveWatermark(memoryview(memory), STEP)
    like = bytes(memory[STEP - 8 : STEP])
    memory[:STEP] = bytes(STEP - 8) + like
    assert seen.upto() == 0


class _Part:
    def __init__(self, data: bytearray, *spans: ChecksumSpan) -> None:
        self.data = memoryview(data)
        self.chunks = (Chunk(0, len(data), spans),)


@pytest.mark.parametrize("damaged", [False, True])
def test_a_span_checked_before_it_arrived_is_checked_again(damaged: bool) -> None:
    came = os.urandom(2 * STEP)
    memory = bytearray(2 * STEP)
    part = _Part(memory, ChecksumSpan(0, len(came), bytes_checksum(came), "w"))
    checks = reading._Checks(part, None)  # type: ignore[arg-type]
    checks.upto(0, STEP)
    memory[:] = came
    memory[1] ^= damaged
    checks.upto(0, 2 * STEP)
    assert list(checks.over()) == [(0, "w" if damaged else "")]
