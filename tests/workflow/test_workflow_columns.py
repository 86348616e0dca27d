"""Columns that a workflow sets on a reply."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from troupe.outcomes import JSON_BYTES
from troupe.workflow import InvalidColumnError, Reply


@pytest.fixture
def reply() -> Reply:
    return Reply("solver", 2, "abc", (1, 2), (3, 4, 5), (-0.1, -0.2, -0.3), "stop")


@pytest.mark.parametrize(
    "value", ["text", 3, 2.5, True, None, [1, {"a": [None, "b"]}], {"nested": {"deep": 1}}]
)
def test_json_values_stay_as_they_are(reply: Reply, value: Any) -> None:
    reply.columns["note"] = value
    assert reply.columns["note"] == value
    assert dict(reply.columns) == {"note": value}


@pytest.mark.parametrize(
    "dtype", [np.bool_, np.uint8, np.int32, np.int64, np.float16, np.float32, np.float64]
)
def test_arrays_are_copied(reply: Reply, dtype: Any) -> None:
    array = np.arange(6).reshape(2, 3).astype(dtype)
    reply.columns["weights"] = array.T  # strides do not matter
    before = array.T.copy()
    array[:] = 0
    assert reply.columns["weights"].dtype == dtype
    np.testing.assert_array_equal(reply.columns["weights"], before)


def test_tensors_are_copied_and_detached(reply: Reply) -> None:
    tensor = torch.ones(3, dtype=torch.bfloat16, requires_grad=True)
    reply.columns["hidden"] = tensor
    kept = reply.columns["hidden"]
    assert (kept.dtype, kept.requires_grad) == (torch.bfloat16, False)
    with torch.no_grad():
        tensor.zero_()
    assert torch.equal(kept.float(), torch.ones(3))


def test_numpy_scalars_are_numbers(reply: Reply) -> None:
    reply.columns["score"] = np.float32(0.5)
    assert reply.columns["score"] == 0.5
    assert isinstance(reply.columns["score"], float)


@pytest.mark.parametrize("name", ["", "reward", "9lives", "a b", "a/b", "..", "x" * 65, 3])
def test_names_are_checked(reply: Reply, name: Any) -> None:
    with pytest.raises(InvalidColumnError, match="cannot name a column") as error:
        reply.columns[name] = 1
    assert error.value.field == "solver[2].columns"
    assert error.value.remedy


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (object(), "neither an array nor JSON"),
        (math.nan, "neither an array nor JSON"),
        ({1, 2}, "neither an array nor JSON"),
        (b"bytes", "neither an array nor JSON"),
        (np.zeros(2, np.complex64), "arrays of complex64"),
        (np.array(["a"]), "arrays of <U1"),
        (np.zeros(2, np.uint16), "arrays of uint16"),
        (torch.zeros(2, dtype=torch.complex64), "arrays of complex64"),
        ("x" * JSON_BYTES, "bytes of JSON"),
    ],
)
def test_values_are_checked(reply: Reply, value: Any, message: str) -> None:
    with pytest.raises(InvalidColumnError, match=message) as error:
        reply.columns["note"] = value
    assert error.value.field == "solver[2].columns['note']"
    assert error.value.remedy
    assert not reply.columns


@pytest.mark.parametrize(
    "value", [[-1, -2.5, -3], np.array([-1, -2.5, -3]), torch.tensor([-1, -2.5, -3])]
)
def test_columns_of_the_trainer_become_one_number_per_token(reply: Reply, value: Any) -> None:
    reply.columns["reference_logprobs"] = value
    kept = reply.columns["reference_logprobs"]
    assert kept.dtype == np.float32
    assert kept.tolist() == [-1, -2.5, -3]


@pytest.mark.parametrize("value", [[1.0], "abc", np.zeros((3, 1)), [1, 2, math.inf], None])
def test_columns_that_the_trainer_cannot_read_are_refused(reply: Reply, value: Any) -> None:
    with pytest.raises(InvalidColumnError):
        reply.columns["reference_logprobs"] = value


def test_a_column_can_be_taken_back(reply: Reply) -> None:
    reply.columns["note"] = 1
    del reply.columns["note"]
    assert len(reply.columns) == 0
