"""Specifications as a trainer reads them."""

from __future__ import annotations

import pytest

from services.trainer.specifications import spec_with
from troupe.rpc import InvalidArgument
from troupe.yaml_input import MAX_BYTES


def test_a_specification_larger_than_any_job_is_refused_before_it_is_parsed() -> None:
    with pytest.raises(InvalidArgument, match="more than 1,048,576") as caught:
        spec_with("solver", '{"name": [' + "{}," * (MAX_BYTES // 3) + "{}]}")
    assert caught.value.kind == "invalid_spec"
    assert caught.value.field == "spec_json"
