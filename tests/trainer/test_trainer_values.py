"""Values by reference: lost or only unreachable ones, and how long the trainer waits for them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from services.trainer.claims import Values
from services.trainer.learning.samples import Load
from troupe.rpc import Unavailable
from troupe.transfer.errors import Corrupt, KeyNotFound, TransferTimeout
from troupe.v1 import experience_store_pb2 as store_pb


def claimed(*keys: str) -> list[store_pb.ClaimedSample]:
    columns = [{"picture": store_pb.Column(ref=key)} for key in keys]
    samples = [
        store_pb.Sample(sample_id=f"s{number}", columns=column)
        for number, column in enumerate(columns)
    ]
    return [store_pb.ClaimedSample(sample=sample) for sample in samples]


def read(items: Sequence[store_pb.ClaimedSample], load: Load) -> list[Any]:
    return [load(item.sample.columns["picture"].ref).tolist() for item in items]


class Host:
    """The answers of a transfer layer, and the times that it was asked to wait."""

    def __init__(self, **errors: Exception) -> None:
        self.errors = errors
        self.waits: list[tuple[str, float]] = []

    def fetch(self, key: str, patience: float) -> Any:
        self.waits.append((key, patience))
        if key in self.errors:
            raise self.errors[key]
        return np.array([len(self.waits)])


def timed_out(key: str, cause: Exception) -> TransferTimeout:
    error = TransferTimeout(key, "did not appear within 30 s")
    error.__cause__ = cause
    return error


def test_only_the_first_missing_value_is_waited_for() -> None:
    host = Host(
        b=timed_out("b", KeyNotFound("b", "nobody has it")),
        c=KeyNotFound("c", "nobody has it"),
        d=Corrupt("d", "its checksum is another"),
    )
    values = Values(host.fetch, 30.0)
    rows, gone = values.read(claimed("a", "b", "c", "d", "e"), read)
    assert [sample.sample_id for sample in gone] == ["s1", "s2", "s3"]
    assert len(rows) == 2
    assert host.waits[:2] == [("a", 30.0), ("b", 30.0)]
    assert {patience for _, patience in host.waits[2:]} == {0.0}
    # Loaded values are not loaded again.
    assert [key for key, _ in host.waits].count("a") == 1


def test_each_claim_waits_once() -> None:
    """Claims may be hours apart, and another host may be away for seconds."""
    host = Host(**{key: KeyNotFound(key, "nobody has it") for key in "abcd"})
    values = Values(host.fetch, 30.0)
    for keys in ("ab", "cd"):
        host.waits.clear()
        assert len(values.read(claimed(*keys), read)[1]) == 2
        assert host.waits[0] == (keys[0], 30.0)
        assert {patience for _, patience in host.waits[1:]} == {0.0}


@pytest.mark.parametrize(
    "error",
    [
        timed_out("b", Unavailable("its host does not answer")),
        timed_out("b", TimeoutError()),
        Unavailable("nobody says who has it"),
    ],
)
def test_a_value_of_an_unreachable_host_does_not_count_as_gone(error: Exception) -> None:
    values = Values(Host(b=error).fetch, 30.0)
    with pytest.raises(type(error)):
        values.read(claimed("a", "b"), read)
