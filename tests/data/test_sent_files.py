"""Data sets in files that a job sends with its code."""

from __future__ import annotations

from pathlib import Path

import pytest

from troupe.data.tables import DataError
from troupe.data.tasks import open_tasks
from troupe.functions import shipped
from troupe.job.sections.data import TasksSpec


def test_a_job_reads_the_files_that_it_sends_and_no_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "sent[1]"  # not a pattern
    folder.mkdir()
    for number in range(2):
        (folder / f"rows-{number}.jsonl").write_text(f'{{"n": {number}}}\n')
    code = shipped.open_shipped("a" * 64, folder)
    one, several = TasksSpec(dataset="rows-1.jsonl"), TasksSpec(dataset="rows-*.jsonl")
    with shipped.using(code):
        assert [open_tasks(one, "train", 0)[0]] == [{"n": 1}]
        assert len(open_tasks(several, "train", 0)) == 2
    with pytest.raises(DataError, match="no such file"):
        open_tasks(one, "train", 0)
