"""Replies of Redis are parsed however their bytes are cut."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from redis import exceptions
from redis._parsers import BaseParser

from services.experience_store.pipelining import RedisReplyParser

_replies = st.recursive(
    st.one_of(
        st.none(),
        st.integers(),
        st.binary(max_size=20),
        st.just(b"$4\r\n" * 500),
        st.sampled_from(["ERR no", "NOSCRIPT No matching script.", "LOADING wait"]),
    ),
    lambda inner: st.lists(inner, max_size=4),
    max_leaves=12,
)


@given(st.lists(_replies, max_size=6), st.data())
def test_replies_are_read_however_they_are_cut(replies: list[Any], data: st.DataObject) -> None:
    text = b"".join(map(_written, replies))
    reader, found, at = RedisReplyParser(BaseParser.parse_error), [], 0
    while at < len(text):
        end = at + data.draw(st.integers(1, max(1, len(text) // 3)))
        found += reader.feed(text[at:end])
        at = end
    assert [_shown(reply) for reply in found] == [_shown(reply) for reply in replies]


@pytest.mark.parametrize(
    "text", [b"HTTP/1.1 400 Bad Request\r\n", b"$x\r\n", b"*\r\n", b":1.5\r\n"]
)
def test_what_is_no_reply_is_refused(text: bytes) -> None:
    with pytest.raises(exceptions.InvalidResponse):
        RedisReplyParser(BaseParser.parse_error).feed(text)


def _written(reply: Any) -> bytes:
    match reply:
        case None:
            return b"$-1\r\n"
        case int():
            return b":%d\r\n" % reply
        case bytes():
            return b"$%d\r\n%b\r\n" % (len(reply), reply)
        case str():
            return b"-%b\r\n" % reply.encode()
        case _:
            return b"*%d\r\n" % len(reply) + b"".join(map(_written, reply))


def _shown(reply: Any) -> Any:
    """Exceptions are compared by class and text."""
    match reply:
        case str():
            return _shown(BaseParser.parse_error(reply))
        case Exception():
            return (type(reply), str(reply))
        case list():
            return [_shown(one) for one in reply]
        case _:
            return reply
