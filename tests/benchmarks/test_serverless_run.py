"""The serverless benchmark from its command line to its object, on real services."""

from __future__ import annotations

import json

import pytest

from benchmarks.serverless.__main__ import main


@pytest.mark.slow
def test_it_runs(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--quick", "--json"]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert {
        *("utilization", "dedicated_utilization", "overhead_p50_ms"),
        *("batched_overhead_p50_ms", "cold_start_p50_ms"),
    } <= found.keys()
    assert all(value > 0 for value in found.values()), found
    assert max(found["utilization"], found["dedicated_utilization"]) <= 1
