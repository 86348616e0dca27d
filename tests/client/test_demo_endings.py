"""The demo ends early in one line: by a signal, or where nothing can be written."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest
from transformers import Qwen3Config, Qwen3ForCausalLM

from tests.support.training import tiny_config
from tests.trainer.stage import fill_up
from troupe.demo import ending_in_a_line
from troupe.demo.warm_start import Settings, WarmStart


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


def test_an_os_error_without_a_file_is_raised_unchanged() -> None:
    with pytest.raises(OSError, match="no such model"), ending_in_a_line():
        raise OSError("no such model")


def test_a_full_disk_leaves_nothing_and_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Weights and tokenizer are written by libraries that fail each in its own way."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(disk)]
    if os.geteuid() != 0 or subprocess.run(mounted, capture_output=True, check=False).returncode:
        pytest.skip("mounting is not allowed here")
    try:
        work = WarmStart(Settings(max_steps=0))
        config = tiny_config(vocab_size=len(work.tokenizer))
        config.pop("model_type")
        model = Qwen3ForCausalLM(Qwen3Config(**config))
        work.models = {"solver": model, "checker": model}
        work.save(disk / "models")
        old = (disk / "models" / "warm_start.json").read_bytes()
        saved = {0: False}
        (disk / ".models.killed" / "solver").mkdir(parents=True)  # as a death leaves it
        free = os.statvfs(disk).f_bavail * os.statvfs(disk).f_bsize
        for leave in range(8192, free, 8192):
            ballast = fill_up(disk, leave)
            try:
                with ending_in_a_line():
                    work.save(disk / "models")
                saved[leave] = True
            except SystemExit as error:
                saved[leave] = error.code != 1
            ballast.unlink()
            # Earlier files are unchanged, and nothing keeps the disk full.
            assert (disk / "models" / "warm_start.json").read_bytes() == old
            if saved[leave]:
                break
            assert sorted(path.name for path in disk.iterdir()) == [".models.killed", "models"]
        assert list(saved.values()) == [*[False] * (len(saved) - 1), True]
        assert [path.name for path in disk.iterdir()] == ["models"]
    finally:
        subprocess.run(["umount", "--lazy", str(disk)], check=True)
    told = set(capsys.readouterr().err.splitlines())
    room = "No space left on device. Make room, or choose another directory."
    assert told == {f"error: {disk}/models cannot be written: {room}"}
