"""Chunks of a state: verification on arrival."""

from __future__ import annotations

import hypothesis.strategies as st
import torch
from hypothesis import given

from troupe.transfer.blob import ChecksumSpan, Chunk, Verification, messages_of
from troupe.transfer.checksum import bytes_checksum

_ALIGNMENT = 64


def chunk_of(sizes: list[int], begin: int) -> tuple[Chunk, bytearray]:
    """Return tensors of `sizes` bytes one after another, with gaps between them, and all bytes."""
    spans, at = [], begin
    data = bytearray(torch.randint(0, 256, (begin + 2 * sum(sizes) + 4096,)).tolist())
    for number, size in enumerate(sizes):
        checksum = bytes_checksum(memoryview(data)[at : at + size])
        spans.append(ChecksumSpan(at, size, checksum, f"tensor{number}"))
        at += -(-size // _ALIGNMENT) * _ALIGNMENT
    last = spans[-1]
    return Chunk(begin, last.offset + last.nbytes - begin, tuple(spans)), data


@given(
    sizes=st.lists(st.integers(1, 300), min_size=1, max_size=6),
    begin=st.sampled_from([0, 128]),
    message_bytes=st.integers(0, 400),
    spoil=st.none() | st.integers(0, 10_000),
)
def test_a_chunk_is_verified_alike_in_whatever_messages_it_comes(
    sizes: list[int], begin: int, message_bytes: int, spoil: int | None
) -> None:
    chunk, sent = chunk_of(sizes, begin)
    expected = ""
    if spoil is not None:
        at = begin + spoil % chunk.nbytes
        sent[at] ^= 1
        hit = [s.name for s in chunk.spans if s.offset <= at < s.offset + s.nbytes]
        expected = hit[0] if hit else ""  # bytes between tensors belong to none
    came = bytearray(len(sent))
    check = Verification(chunk, memoryview(came))
    end = 0
    for start, stop in messages_of(chunk.nbytes, message_bytes):
        assert start == end
        came[begin + start : begin + stop] = sent[begin + start : begin + stop]
        check.upto(stop)
        end = stop
    assert end == chunk.nbytes
    assert check.damaged == expected == chunk.damaged(memoryview(sent))
