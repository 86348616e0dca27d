"""Ranks gather a model that one of them writes slowly: none runs ahead or gives up too early."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors import safe_open

from services.trainer.learning.model import load_model
from tests.trainer.gang.slow_writer import ENDED_BY_WATCHDOG, LARGE, TIMEOUT
from tests.trainer.gang.test_gang import gang_spec
from tests.trainer.gang.test_gang_memory import ends_of_ranks

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.mark.parametrize(("case", "least"), [("bucket", TIMEOUT), ("large", LARGE)])
def test_a_gather_longer_than_the_gang_s_timeout_is_completed(
    tokenizer: Path, tmp_path: Path, case: str, least: float
) -> None:
    spec = gang_spec(tokenizer)
    path = tmp_path / "spec.json"
    path.write_text(spec.model_dump_json())
    statuses, output = ends_of_ranks(2, "slow_writer", path, tmp_path, case)
    assert statuses == [0, 0]
    assert float(output.split()[-1]) > least
    with safe_open(tmp_path / "file", framework="pt") as written:
        names = set(written.keys())
    model = load_model("solver", spec.policies["solver"], spec.seed)
    assert names == set(model.state_dict()) - {"lm_head.weight"}


def test_without_meetings_the_watchdog_ends_a_rank_that_is_ahead(
    tokenizer: Path, tmp_path: Path
) -> None:
    """This shows that the test above can fail."""
    path = tmp_path / "spec.json"
    path.write_text(gang_spec(tokenizer).model_dump_json())
    statuses, _ = ends_of_ranks(2, "slow_writer", path, tmp_path, "ahead")
    assert statuses[1] == ENDED_BY_WATCHDOG
    assert statuses[0] != 0
