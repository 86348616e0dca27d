"""Where metrics go: JSON lines always, TensorBoard and Weights & Biases when asked.

Redis holds the rows; a sink is a copy that people's tools read. Sinks run in one thread, so that
a slow disk holds up no job; their faults are reported and never end one.
"""

from __future__ import annotations

import asyncio
import importlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import structlog
import yaml

from troupe.job import JobSpec
from troupe.rpc import FailedPrecondition
from troupe.v1 import orchestrator_pb2 as orch

_log = structlog.get_logger(__name__)


async def make_directory(directory: Path, spec: JobSpec) -> None:
    """Make a job's directory, with its specification. Raises `FailedPrecondition`."""

    def write() -> None:
        directory.mkdir(parents=True, exist_ok=True)
        text = yaml.safe_dump(spec.model_dump(mode="json"), sort_keys=False)
        (directory / "job.yaml").write_text(text, encoding="utf-8")

    try:
        await asyncio.to_thread(write)
    except OSError as error:
        raise FailedPrecondition(
            f"the job's directory cannot be written: {error.strerror}",
            kind="directory_unwritable",
            field="data_dir",
            value=directory,
            remedy="Free space or mend its permissions, or set TROUPE_DATA_DIR elsewhere.",
        ) from error


class Sink(Protocol):
    """Takes rows in order. Methods block; errors are OSError or what the tool raises."""

    def write(self, rows: Sequence[orch.MetricsLogged]) -> None:
        """Take rows in."""

    def close(self) -> None:
        """Flush and close."""


class JsonLines:
    """`metrics.jsonl`: one object per row, `step` first."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def write(self, rows: Sequence[orch.MetricsLogged]) -> None:
        """Append whole lines."""
        lines = [json.dumps({"step": row.step, **dict(sorted(row.values.items()))}) for row in rows]
        with self._path.open("a", encoding="utf-8") as file:
            file.write("".join(f"{line}\n" for line in lines))

    def count(self) -> int:
        """Whole rows in the file; half a row, left by a crash, is cut off."""
        if not self._path.exists():
            return 0
        data = self._path.read_bytes()
        whole = data.rfind(b"\n") + 1
        if whole < len(data):
            with self._path.open("r+b") as file:
                file.truncate(whole)
        return data.count(b"\n")

    def close(self) -> None:
        """Nothing is held open."""


class TensorBoard:
    """TensorBoard events, without TensorFlow."""

    def __init__(self, directory: Path) -> None:
        from tensorboard.summary import Writer  # a third of a second; only jobs that want it

        directory.mkdir(parents=True, exist_ok=True)
        self._writer: Any = Writer(str(directory))

    def write(self, rows: Sequence[orch.MetricsLogged]) -> None:
        """One scalar per value."""
        for row in rows:
            for name, value in row.values.items():
                self._writer.add_scalar(name, value, row.step)
        self._writer.flush()

    def close(self) -> None:
        """Close the event file."""
        self._writer.close()


class Wandb:
    """Weights & Biases; a resumed job goes on in the same run."""

    def __init__(self, project: str, job_id: str, directory: Path, config: dict[str, Any]) -> None:
        wandb = importlib.import_module("wandb")
        self._run: Any = wandb.init(
            project=project, id=job_id, name=job_id, resume="allow", dir=directory, config=config
        )

    def write(self, rows: Sequence[orch.MetricsLogged]) -> None:
        """One call per row."""
        for row in rows:
            self._run.log(dict(row.values), step=row.step)

    def close(self) -> None:
        """Finish the run."""
        self._run.finish()


class Sinks:
    """All sinks of one job."""

    def __init__(self, spec: JobSpec, job_id: str, directory: Path) -> None:
        self._spec = spec
        self._job_id = job_id
        self._directory = directory
        self._lines = JsonLines(directory / "metrics.jsonl")
        self._others: list[Sink] = []
        self._lock = asyncio.Lock()

    async def open(self, rows: Sequence[orch.MetricsLogged]) -> list[str]:
        """Open the sinks and bring them up to `rows`, all that the job has logged.

        Returns what could not be opened, for people.
        """
        return await asyncio.to_thread(self._open, rows)

    async def write(self, row: orch.MetricsLogged) -> list[str]:
        """Append a row everywhere. Returns what went wrong, for people."""
        async with self._lock:
            return await asyncio.to_thread(self._write, [row])

    async def close(self) -> None:
        """Close all of them."""
        async with self._lock:
            await asyncio.to_thread(self._close)

    def _open(self, rows: Sequence[orch.MetricsLogged]) -> list[str]:
        troubles = []
        logging = self._spec.logging
        try:
            if logging.tensorboard:
                self._others.append(TensorBoard(self._directory / "tensorboard"))
        except Exception as error:
            troubles.append(f"no TensorBoard events: {error}. `pip install tensorboard`.")
        try:
            if logging.wandb_project is not None:
                config = self._spec.model_dump(mode="json")
                self._others.append(
                    Wandb(logging.wandb_project, self._job_id, self._directory, config)
                )
        except ImportError:
            troubles.append("no Weights & Biases: it is not installed. `pip install wandb`.")
        except Exception as error:
            troubles.append(f"no Weights & Biases: {error}")
        try:
            # What was logged just before a crash may be missing.
            missing = rows[self._lines.count() :]
        except OSError as error:
            return [*troubles, f"metrics.jsonl: {error}"]
        return troubles + (self._write(missing) if missing else [])

    def _write(self, rows: Sequence[orch.MetricsLogged]) -> list[str]:
        troubles = []
        for sink in (self._lines, *self._others):
            try:
                sink.write(rows)
            except Exception as error:
                troubles.append(f"{type(sink).__name__}: {error}")
        return troubles

    def _close(self) -> None:
        for sink in self._others:
            try:
                sink.close()
            except Exception as error:
                _log.warning("sink not closed", sink=type(sink).__name__, error=str(error))
        self._others.clear()
