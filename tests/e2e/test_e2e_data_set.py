"""A job without code of its own: rows of a file, a ready workflow and reward, named evaluations."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from rich.console import Console

from examples.data_set import tiny
from tests.e2e.conftest import House
from tests.support.waiting import PATIENCE
from troupe.checkpoints.retention import versions_of_all
from troupe.client import Notice
from troupe.client.cli.display import print_summary
from troupe.client.cli.jobs.evaluate import only_evaluated

JOB = Path(tiny.__file__).with_name("job.yaml")


@pytest.mark.slow
async def test_a_data_set_is_learned_evaluated_and_the_best_checkpoint_kept(
    house: House, tmp_path: Path
) -> None:
    spec = yaml.safe_load(JOB.read_text())
    spec["tasks"]["dataset"] = str(JOB.with_name("larger.jsonl"))
    spec["policies"]["solver"]["model"]["path"] = str(tiny.make(tmp_path / "model"))
    spec["logging"] = {"tensorboard": False}

    handle = await house.client.submit(yaml.safe_dump(spec))
    record = await handle.wait(timeout=540)

    assert record.state == "succeeded", record
    audit = await handle.audit()
    assert not audit.violations, audit
    before, after = record.before, record.after
    assert after["held-out/pass@1"] > before["held-out/pass@1"] + 0.2
    for scores in (before, after):
        passes = [scores[f"held-out/pass@{k}"] for k in (1, 2, 4, 8)]
        assert passes == sorted(passes)
        assert passes[0] <= scores["held-out/maj@8"] + 0.2
    notes = [event.text async for event in handle.watch() if isinstance(event, Notice)]
    assert any("90 of 90 rows; 72 of them are for training" in text for text in notes), notes

    # The best checkpoint is there, and evaluates as it did.
    best = json.loads((Path(record.directory) / "best" / "best.json").read_text())
    checkpoint = (
        Path(record.directory) / "best" / "solver" / f"v{best['policies']['solver']['version']}"
    )
    assert (checkpoint / "config.json").is_file()
    assert versions_of_all(Path(record.directory))["solver"]
    again = only_evaluated(spec, ["held-out"], {"solver": checkpoint})
    handle = await house.client.submit(yaml.safe_dump(again))
    record = await handle.wait(timeout=PATIENCE)
    assert (record.state, record.step, record.total_steps) == ("succeeded", 0, 0)
    assert record.before["held-out/pass@1"] == pytest.approx(best["value"])
    console = Console(width=100)
    with console.capture() as printed:
        print_summary(console, record, [])
    assert "95 % confidence intervals" in printed.get()
