"""Errors keep their meaning over the wire and name a remedy."""

from __future__ import annotations

import pickle
from typing import Any
from urllib.parse import quote

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from troupe.rpc import errors
from troupe.rpc.errors import TroupeError, from_rpc_error, to_status

CLASSES = [c for c in vars(errors).values() if isinstance(c, type) and issubclass(c, TroupeError)]
CLASSES.remove(TroupeError)
text = st.text(max_size=40)


class Failed(grpc.RpcError):
    """A call that failed as gRPC would report it."""

    def __init__(
        self, code: grpc.StatusCode, details: str, trailing: tuple[tuple[str, bytes], ...] = ()
    ) -> None:
        self._parts = code, details, trailing

    def code(self) -> grpc.StatusCode:
        return self._parts[0]

    def details(self) -> str:
        return self._parts[1]

    def trailing_metadata(self) -> Any:
        return self._parts[2]


@given(
    st.sampled_from(CLASSES),
    text,
    st.none() | text,
    st.none() | text,
    st.none() | text,
    st.none() | st.integers(0, 10**6),
)
def test_the_same_error_arrives(
    cls: type[TroupeError],
    message: str,
    field: str | None,
    value: str | None,
    remedy: str | None,
    retry_after_ms: int | None,
) -> None:
    sent = cls(message, field=field, value=value, remedy=remedy, retry_after_ms=retry_after_ms)
    status = to_status(sent)
    failed = Failed(cls.code, status.message, ((errors.DETAILS_KEY, status.SerializeToString()),))
    for got in (from_rpc_error(failed), pickle.loads(pickle.dumps(sent))):
        assert type(got) is cls
        assert vars(got) == vars(sent)


def test_text_names_field_value_and_remedy() -> None:
    error = errors.InvalidArgument("too small", field="a.b", value=3, remedy="Use 4.")
    assert str(error) == "a.b = 3: too small. Use 4."


def test_a_long_error_fits_into_the_headers() -> None:
    error = errors.Internal("x" * 10**6, value="y" * 10**6, remedy="z" * 10**6)
    assert len(to_status(error).SerializeToString()) < 6000


@given(
    st.text(alphabet=st.characters(exclude_categories=()), min_size=1).map(lambda one: one * 2000),
    st.sampled_from(CLASSES),
)
def test_a_long_error_of_any_alphabet_fits_into_the_headers(
    much: str, cls: type[TroupeError]
) -> None:
    """Halves of surrogate pairs too. `grpc-message` is percent-encoded, the other in base64."""
    status = to_status(cls(much, field=much, value=much, remedy=much))
    encoded = (
        len(quote(status.message, safe=errors._PRINTABLE)) + len(status.SerializeToString()) * 4 / 3
    )
    assert encoded < 7800
    assert status.message


def test_message_over_the_limit_is_typed_and_names_the_limit() -> None:
    failed = Failed(
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        "SERVER: Received message larger than max (2097152 vs. 1048576)",
    )
    error = from_rpc_error(failed, target="Reward/Invoke at here:1")
    assert error.kind == "message_too_large"
    assert "request of 2,097,152 bytes" in str(error)
    assert "TROUPE_MAX_MESSAGE_MIB" in str(error)
    assert error.value == "1"
    assert error.retry_after_ms is None


@pytest.mark.parametrize(
    ("code", "cls"),
    [
        (grpc.StatusCode.UNAVAILABLE, errors.Unavailable),
        (grpc.StatusCode.CANCELLED, errors.Unavailable),
        (grpc.StatusCode.DEADLINE_EXCEEDED, errors.DeadlineExceeded),
        (grpc.StatusCode.UNKNOWN, TroupeError),
    ],
)
def test_errors_of_grpc_itself_name_the_call(code: grpc.StatusCode, cls: type[TroupeError]) -> None:
    error = from_rpc_error(Failed(code, "why"), target="Reward/Invoke at here:1", timeout=3)
    assert type(error) is cls
    assert "here:1" in str(error)


def test_damaged_details_do_not_hide_the_error() -> None:
    failed = Failed(grpc.StatusCode.NOT_FOUND, "gone", ((errors.DETAILS_KEY, b"\xff\xff"),))
    assert type(from_rpc_error(failed)) is errors.NotFound
