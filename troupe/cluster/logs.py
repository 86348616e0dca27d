"""The log files of the cluster's processes: `data_dir/logs/<service>.log`.

Each process appends to its own log. The supervisor rotates the file meanwhile: it copies the
content to `<service>.log.1` and truncates the file, so that no process fills the disk.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterable
from contextlib import suppress
from datetime import UTC, datetime
from io import FileIO
from pathlib import Path
from typing import BinaryIO

# A longer file is rotated; `.log.1` keeps this many bytes of its end, at most twice as many.
ROTATE_BYTES = 16 * 2**20
CHECK_SECONDS = 0.2
SUPERVISOR_LOG = "supervisor.log"
_COPY_BYTES = 1 << 20
# How many times lines that arrive during the copy are copied as well, at most.
_CATCH_UPS = 20
_TAIL_BYTES = 8192


def open_log(path: Path, title: str) -> FileIO:
    """Open `path` for appending, after a header line with `title` and the time."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    rotate(path)
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
    file = FileIO(os.open(path, flags, 0o600), "ab")
    now = datetime.now(UTC).isoformat(timespec="seconds")
    with suppress(OSError):  # a full disk costs the line, not the service
        file.write(f"--- {title} at {now} ---\n".encode())
    return file


def rotate_all(paths: Iterable[Path]) -> None:
    """Call `rotate` for every path, also after an error. Raises the first `OSError`."""
    failed: OSError | None = None
    for path in paths:
        try:
            rotate(path)
        except OSError as error:
            failed = failed or error
    if failed is not None:
        raise failed


def rotate(path: Path) -> None:
    """Truncate the log `path` when it exceeds `ROTATE_BYTES`, while its process keeps writing.

    The end is copied to `.log.1`; lines in both files say how much was cut. On a full disk the log
    is truncated without a copy.
    """
    try:
        with path.open("r+b") as file:
            size = file.seek(0, os.SEEK_END)
            if size <= ROTATE_BYTES:
                return
            older = path.with_suffix(".log.1")
            try:
                copied, lost = _move_end(file, size, older)
            except OSError:  # the disk is full: deleting the old copy makes room
                older.with_suffix(".tmp").unlink(missing_ok=True)
                older.unlink(missing_ok=True)
                copied, lost = 0, file.seek(0, os.SEEK_END)
                file.truncate(0)
    except FileNotFoundError:
        return
    now = datetime.now(UTC).isoformat(timespec="seconds")
    cut = f"; {lost:,} bytes between were cut" if copied else f"; {lost:,} bytes were cut"
    with suppress(OSError), path.open("ab", buffering=0) as log:
        where = f"earlier lines are in {older.name}" if copied else "the log restarts here"
        log.write(f"--- {where}{cut if lost else ''} ({now}) ---\n".encode())


def _move_end(file: BinaryIO, size: int, older: Path) -> tuple[int, int]:
    """Copy the end of `file`, which has `size` bytes and grows, to `older` (`ROTATE_BYTES` and the
    lines that arrive meanwhile); then truncate the file. Return the position up to which it was
    copied, and the number of bytes after it that were lost."""
    scratch = older.with_suffix(".tmp")
    position, end = 0, size
    with scratch.open("wb") as copy:
        os.fchmod(copy.fileno(), stat.S_IMODE(os.fstat(file.fileno()).st_mode))
        for number in range(_CATCH_UPS):
            if not number or copy.tell() + end - position > 2 * ROTATE_BYTES:
                # Start over: the newest lines matter most, because they say why a process ended.
                copy.seek(0)
                copy.truncate()
                position = file.seek(end - ROTATE_BYTES)
                if position:
                    position += len(file.readline(_COPY_BYTES))
                    copy.write(f"--- {position:,} bytes before this were cut ---\n".encode())
            while position < end:
                part = file.read(min(_COPY_BYTES, end - position))
                if not part:
                    break
                copy.write(part)
                position += len(part)
            copy.flush()
            end = os.fstat(file.fileno()).st_size
            if end <= position:
                break
        # Immediately: lines written since the last read are lost.
        file.truncate(0)
    scratch.replace(older)
    return position, max(0, end - position)


def last_line(path: Path, limit: int = 300) -> str:
    """Return a log's last message as one line of at most `limit` characters; "" if it is empty."""
    for file in (path, path.with_suffix(".log.1")):
        lines = [line for line in _tail(file) if line.strip() and not line.startswith("---")]
        if lines:
            break
    return _readable(lines[-1])[:limit] if lines else ""


def _tail(path: Path) -> list[str]:
    try:
        with path.open("rb") as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(0, file.tell() - _TAIL_BYTES))
            return file.read().decode(errors="replace").splitlines()
    except OSError:
        return []


def _readable(line: str) -> str:
    """Return the message of a structured (JSON) log line; other lines unchanged."""
    try:
        record = json.loads(line)
    except ValueError:
        return line.strip()
    if not isinstance(record, dict):
        return line.strip()
    parts = [str(record[key]) for key in ("event", "error", "message") if record.get(key)]
    if trace := str(record.get("exception") or "").strip():
        parts.append(trace.splitlines()[-1])
    return ": ".join(parts) or line.strip()
