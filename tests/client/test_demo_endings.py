"""The demo ends early in one line: by a signal, or where nothing can be written."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from examples.reasoning_team.endings import ending_in_a_line


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_in_a_line(
    number: signal.Signals, capsys: pytest.CaptureFixture[str]
) -> None:
    before = signal.getsignal(number)
    with pytest.raises(SystemExit) as ended, ending_in_a_line():
        signal.raise_signal(number)
    assert ended.value.code == 128 + number
    assert capsys.readouterr().err == "interrupted: the warm-start begins anew next time\n"
    assert signal.getsignal(number) is before


def test_a_directory_that_cannot_be_written_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(SystemExit) as ended, ending_in_a_line():
        (tmp_path / "file" / "models").mkdir(parents=True)
    assert ended.value.code == 1
    said = capsys.readouterr().err
    assert f"error: {tmp_path}/file/models cannot be written: Not a directory." in said


def test_an_error_that_is_not_of_files_stays_what_it_is() -> None:
    with pytest.raises(OSError, match="no such model"), ending_in_a_line():
        raise OSError("no such model")
