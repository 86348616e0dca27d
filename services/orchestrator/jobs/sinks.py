"""Metric sinks of a job: JSON lines always; TensorBoard, W&B, Trackio and MLflow if configured.

Redis holds the rows; a sink is a copy for other tools. Sinks run in their own threads, and the job
waits for them only briefly, so a slow disk or an unreachable service does not delay it. Their
errors become notices in the job's log and never fail the job.
"""

from __future__ import annotations

import asyncio
import contextvars
import importlib
import json
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final, Protocol, TypeAlias

import yaml

from troupe.job import JobSpec
from troupe.job.loading import SPEC_FILE
from troupe.outcomes import described
from troupe.rpc import FailedPrecondition
from troupe.user_code import UserCodeTimeout, call_in_thread
from troupe.v1 import orchestrator_pb2 as orchestrator_pb

# How long a job waits for its sinks before it continues.
SINK_WAIT_SECONDS = 10.0
# A sink that has not returned from a call by then is abandoned.
GIVE_UP_SECONDS = 300.0
_TROUBLE_CHARS = 500
# Characters that MLflow rejects in names; maximum metrics and parameters per batch.
_MLFLOW_REFUSES: Final = re.compile(r"[^\w\-. :/]")
_MLFLOW_BATCH: Final = 1000
_MLFLOW_PARAMS: Final = 100
# Maximum characters of an MLflow parameter.
_PARAM_CHARS: Final = 500


async def make_directory(directory: Path, spec: JobSpec) -> None:
    """Create a job's directory with its `job.yaml`. Raises `FailedPrecondition`."""

    def write() -> None:
        directory.mkdir(parents=True, exist_ok=True)
        text = yaml.safe_dump(spec.model_dump(mode="json"), sort_keys=False)
        (directory / SPEC_FILE).write_text(text, encoding="utf-8")

    try:
        await asyncio.to_thread(write)
    except OSError as error:
        raise FailedPrecondition(
            f"the job's directory cannot be written: {error.strerror}",
            kind="directory_unwritable",
            field="data_dir",
            value=directory,
            remedy="Free space, fix its permissions, or set TROUPE_DATA_DIR to another directory.",
        ) from error


class Sink(Protocol):
    """A destination of rows, in order. Methods block and may raise anything."""

    def write(self, rows: Sequence[orchestrator_pb.MetricsLogged]) -> None:
        """Write rows of metrics."""

    def close(self) -> None:
        """Flush and close."""


class JsonLines:
    """`metrics.jsonl`: one object per row, `step` first."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def write(self, rows: Sequence[orchestrator_pb.MetricsLogged]) -> None:
        """Append a line per row."""
        lines = [json.dumps({"step": row.step, **dict(sorted(row.values.items()))}) for row in rows]
        with self._path.open("a", encoding="utf-8") as file:
            file.write("".join(f"{line}\n" for line in lines))

    def count(self) -> int:
        """Return the number of rows in the file, after removing a partial row left by a crash."""
        if not self._path.exists():
            return 0
        data = self._path.read_bytes()
        whole = data.rfind(b"\n") + 1
        if whole < len(data):
            with self._path.open("r+b") as file:
                file.truncate(whole)
        return data.count(b"\n")

    def close(self) -> None:
        """Do nothing, since the file is opened for every write."""


class TensorBoard:
    """A TensorBoard event file, written without TensorFlow."""

    def __init__(self, directory: Path) -> None:
        from tensorboard.summary import Writer  # slow to import, and needed by few jobs

        directory.mkdir(parents=True, exist_ok=True)
        self._writer: Any = Writer(str(directory))

    def write(self, rows: Sequence[orchestrator_pb.MetricsLogged]) -> None:
        """Write one scalar per value."""
        for row in rows:
            for name, value in row.values.items():
                self._writer.add_scalar(name, value, row.step)
        self._writer.flush()

    def close(self) -> None:
        """Close the event file."""
        self._writer.close()


class Wandb:
    """A run of Weights & Biases, which a resumed job continues."""

    def __init__(self, project: str, job_id: str, directory: Path, config: dict[str, Any]) -> None:
        wandb = importlib.import_module("wandb")
        # "create_new": otherwise a second job of this process would get the first one's run.
        self._run: Any = wandb.init(
            project=project,
            id=job_id,
            name=job_id,
            resume="allow",
            reinit="create_new",
            dir=directory,
            config=config,
        )

    def write(self, rows: Sequence[orchestrator_pb.MetricsLogged]) -> None:
        """Log one row per call."""
        for row in rows:
            self._run.log(dict(row.values), step=row.step)

    def close(self) -> None:
        """Finish the run."""
        self._run.finish()


class Trackio:
    """A run of Trackio in its local database (`TRACKIO_DIR`), or where its variables point, which a
    resumed job continues."""

    def __init__(self, project: str, job_id: str, directory: Path, config: dict[str, Any]) -> None:
        trackio = importlib.import_module("trackio")
        # In its own context: otherwise it would finish the run of another job.
        self._run: Any = contextvars.Context().run(
            trackio.init,
            project=project,
            name=job_id,
            resume="allow",
            config=config,
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )

    def write(self, rows: Sequence[orchestrator_pb.MetricsLogged]) -> None:
        """Log one row per call."""
        for row in rows:
            self._run.log(dict(row.values), step=row.step)

    def close(self) -> None:
        """Finish the run: waits until its rows are written."""
        self._run.finish()


class MlFlow:
    """A run of MLflow at `MLFLOW_TRACKING_URI`. A resumed job finds it by its tag."""

    def __init__(
        self, experiment: str, job_id: str, directory: Path, config: dict[str, Any]
    ) -> None:
        tracking = importlib.import_module("mlflow.tracking")
        self._metric: Any = importlib.import_module("mlflow.entities").Metric
        # A client rather than `mlflow.start_run`, which has one run per process.
        self._client: Any = tracking.MlflowClient()
        known = self._client.get_experiment_by_name(experiment)
        place = known.experiment_id if known else self._client.create_experiment(experiment)
        tag = "troupe.job_id"
        found = self._client.search_runs([place], f"tags.`{tag}` = '{job_id}'", max_results=1)
        if found:
            self._id = found[0].info.run_id
            self._client.update_run(self._id, status="RUNNING")
        else:
            run = self._client.create_run(place, tags={tag: job_id}, run_name=job_id)
            self._id = run.info.run_id
            param = importlib.import_module("mlflow.entities").Param
            params = [param(name, text) for name, text in _flat(config)]
            for start in range(0, len(params), _MLFLOW_PARAMS):
                self._client.log_batch(self._id, params=params[start : start + _MLFLOW_PARAMS])

    def write(self, rows: Sequence[orchestrator_pb.MetricsLogged]) -> None:
        """Log one batch per row, under names that MLflow accepts: `pass@8` becomes `pass_8`."""
        now = round(time.time() * 1000)
        for row in rows:
            metrics = [
                self._metric(_MLFLOW_REFUSES.sub("_", name), value, now, row.step)
                for name, value in row.values.items()
            ]
            for start in range(0, len(metrics), _MLFLOW_BATCH):
                self._client.log_batch(self._id, metrics=metrics[start : start + _MLFLOW_BATCH])

    def close(self) -> None:
        """Mark the run as finished."""
        self._client.set_terminated(self._id)


def _flat(value: Any, path: str = "") -> Iterator[tuple[str, str]]:
    """Return a specification's set fields as parameters of MLflow, such as `pipeline.steps`."""
    if isinstance(value, dict):
        for name, one in value.items():
            yield from _flat(one, f"{path}.{name}" if path else str(name))
    elif value not in (None, [], ""):
        yield _MLFLOW_REFUSES.sub("_", path), str(value)[:_PARAM_CHARS]


# Experiment trackers: the field of `logging` that requests one, its name, its sink, a remedy.
_TRACKERS: Final = (
    ("wandb_project", "Weights & Biases", Wandb, "`pip install wandb`."),
    ("trackio_project", "Trackio", Trackio, "`pip install trackio`."),
    (
        "mlflow_experiment",
        "MLflow",
        MlFlow,
        "`pip install mlflow-skinny`, and set MLFLOW_TRACKING_URI where the orchestrator runs.",
    ),
)

# The event loop keeps only weak references to tasks.
_feeding: set[asyncio.Task[None]] = set()


# Rows for a sink, or None to close it; the future is done once the sink has taken them.
_Entry: TypeAlias = tuple[Sequence[orchestrator_pb.MetricsLogged] | None, asyncio.Future[None]]


class _Feed:
    """A sink with its queue of rows, which threads write in order.

    A sink is third-party code: it may raise anything, exit, or hang. Its errors are reported; a
    call that has not returned after `GIVE_UP_SECONDS` ends the feed.
    """

    def __init__(self, name: str, make: Callable[[], Sink], remedy: str = "") -> None:
        """`remedy` is part of the notice for a sink that cannot be opened."""
        self.name = name
        self.troubles: list[str] = []
        """Errors of the sink not yet in the job's log."""
        self.late = False
        """Whether the job's log says that the sink does not answer."""
        self._make, self._remedy = make, remedy
        self._queue: asyncio.Queue[_Entry] = asyncio.Queue()
        self._task: asyncio.Task[None] | None = None

    def take(self, rows: Sequence[orchestrator_pb.MetricsLogged] | None) -> asyncio.Future[None]:
        """Queue rows, or None to close the sink. The future is done once that has happened."""
        done = asyncio.get_running_loop().create_future()
        if self._task is None:
            self._task = asyncio.create_task(self._run())
            _feeding.add(self._task)
            self._task.add_done_callback(_feeding.discard)
        if self._task.done():
            done.set_result(None)
        else:
            self._queue.put_nowait((rows, done))
        return done

    async def _run(self) -> None:
        try:
            sink = await call_in_thread(self._make, seconds=GIVE_UP_SECONDS)
            while await self._serve(sink):
                self.late = False
        except UserCodeTimeout as error:
            self.troubles.append(f"{self.name} is given up: it {error}")
        except Exception as error:
            text = described(error, _TROUBLE_CHARS)
            self.troubles.append(f"no {self.name}: {text}. {self._remedy}".rstrip())
        finally:
            while not self._queue.empty():
                self._queue.get_nowait()[1].set_result(None)

    async def _serve(self, sink: Sink) -> bool:
        """Handle one entry; return whether another may follow. Raises `UserCodeTimeout`."""
        rows, done = await self._queue.get()
        try:
            if rows is None:
                await call_in_thread(sink.close, seconds=GIVE_UP_SECONDS)
            else:
                await call_in_thread(sink.write, rows, seconds=GIVE_UP_SECONDS)
        except UserCodeTimeout:
            raise
        except Exception as error:
            self.troubles.append(f"{self.name}: {described(error, _TROUBLE_CHARS)}")
        finally:
            done.set_result(None)
        return rows is not None


class Sinks:
    """All sinks of one job."""

    def __init__(self, spec: JobSpec, job_id: str, directory: Path) -> None:
        self._spec = spec
        self._job_id = job_id
        self._directory = directory
        self._lines = JsonLines(directory / "metrics.jsonl")
        self._feeds = [_Feed("JsonLines", lambda: self._lines)]

    async def open(self, rows: Sequence[orchestrator_pb.MetricsLogged]) -> list[str]:
        """Open the sinks and bring them up to date with `rows`, all rows that the job has logged.

        Returns a text for every sink that could not be opened.
        """
        logging, troubles, missing = self._spec.logging, [], rows[:0]
        if logging.tensorboard:
            directory = self._directory / "tensorboard"
            remedy = "`pip install tensorboard`."
            self._feeds.append(_Feed("TensorBoard", partial(TensorBoard, directory), remedy))
        for field, name, tracker, remedy in _TRACKERS:
            if (project := getattr(logging, field)) is not None:
                config = self._spec.model_dump(mode="json")
                make = partial(tracker, project, self._job_id, self._directory, config)
                self._feeds.append(_Feed(name, make, remedy))
        try:
            # Rows logged just before a crash may be missing.
            missing = rows[await call_in_thread(self._lines.count, seconds=SINK_WAIT_SECONDS) :]
        except (OSError, UserCodeTimeout) as error:
            troubles.append(f"metrics.jsonl: {error}")
        return troubles + await self._hand_out(missing)

    async def write(self, row: orchestrator_pb.MetricsLogged) -> list[str]:
        """Write a row to all sinks. Returns descriptions of problems."""
        return await self._hand_out([row])

    async def close(self) -> list[str]:
        """Close all sinks. Late ones continue as long as this process does. Returns descriptions of
        problems."""
        troubles = await self._hand_out(None)
        self._feeds.clear()
        return troubles

    async def _wait(self, answers: Mapping[_Feed, asyncio.Future[None]]) -> None:
        """Wait for answers of sinks, briefly."""
        await asyncio.wait(answers.values(), timeout=SINK_WAIT_SECONDS)

    async def _hand_out(self, rows: Sequence[orchestrator_pb.MetricsLogged] | None) -> list[str]:
        """Give every sink its entry and wait briefly. Returns problems since the last call."""
        given = {feed: feed.take(rows) for feed in self._feeds}
        # Do not wait again for a late sink until it is closed: every step would wait for it.
        waits = {feed: done for feed, done in given.items() if rows is None or not feed.late}
        if waits:
            await self._wait(waits)
        troubles = []
        for feed, done in given.items():
            troubles += feed.troubles
            feed.troubles = []
            if feed in waits and not done.done() and not feed.late:
                feed.late = True
                troubles.append(
                    f"{feed.name} does not answer: the job continues, and its rows wait"
                )
        return troubles
