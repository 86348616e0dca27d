"""Log files of the cluster's processes: `data_dir/logs/<service>.log`."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from datetime import UTC, datetime
from io import FileIO
from pathlib import Path

# The file of an earlier life is kept as `.1` once it is this long.
ROTATE_BYTES = 16 * 2**20
_TAIL_BYTES = 8192


def open_log(path: Path, title: str) -> FileIO:
    """Open `path` for appending, after a line that says what begins here."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    if path.exists() and path.stat().st_size > ROTATE_BYTES:
        path.replace(path.with_suffix(".log.1"))
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
    file = FileIO(os.open(path, flags, 0o600), "ab")
    now = datetime.now(UTC).isoformat(timespec="seconds")
    with suppress(OSError):  # a full disk costs the line, not the service
        file.write(f"--- {title} at {now} ---\n".encode())
    return file


def last_line(path: Path, limit: int = 300) -> str:
    """What the process said last, in one line of at most `limit` characters."""
    lines = [line for line in _tail(path) if line.strip() and not line.startswith("---")]
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
    """The message of a structured (JSON) log line; other lines as they are."""
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
