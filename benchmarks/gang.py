"""Copies and memory of a gang: load, publication and checkpoint of a model of 500M parameters.

Ranks are gloo processes on this machine; the model has random weights in safetensors files in
float32. *Load*: the growth of a rank's peak memory over its peak with a tiny model, as a fraction
of the model's bytes; seconds, compared with one process that reads the files once into its memory,
with and without the page cache; and the seconds that do not depend on the bytes, measured with a
model of as many tensors with short rows. *Publication*: bytes written per published byte, by ranks
and transfer. *Checkpoint*: the growth of the peak memory of the process that writes it from the
ranks' saved state.
"""

from __future__ import annotations

import mmap
import os
import shutil
import statistics
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks import command
from benchmarks.workloads.one_policy import job_of_one, tied_qwen3
from services.trainer.gang.gang import Gangs
from services.trainer.gang.learner import GangLearner
from services.trainer.settings import TrainerSettings
from services.trainer.state.checkpoint import save_checkpoint
from services.trainer.state.training_state import StateStore, TrainingState
from troupe.job import JobSpec
from troupe.transfer import Transfer

RANKS = (2, 4)
_SAMPLE_SECONDS = 0.005
_BLOCK_BYTES = 16 << 20
# Number of loads; the fastest one counts.
_LOADS = 3
# Unit of `st_blocks`.
_DISK_BLOCK_BYTES = 512


def config_of(hidden: int, layers: int) -> dict[str, Any]:
    """Return the configuration of a Qwen3 with tied embeddings."""
    return tied_qwen3(hidden, layers, 32 * hidden) | {"max_position_embeddings": 1024}


def written(folder: Path, config: dict[str, Any]) -> int:
    """Write a model with these dimensions to `folder`; return the bytes of its weights."""
    values = dict(config)
    about = AutoConfig.for_model(values.pop("model_type"), **values)
    model = AutoModelForCausalLM.from_config(about, dtype=torch.float32)
    model.save_pretrained(folder, max_shard_size="500MB")
    return sum(p.nbytes for p in model.parameters())


def spec_of(folder: Path, ranks: int) -> JobSpec:
    """Return a job that trains the model in `folder` with a gang."""
    model = {"path": str(folder), "tokenizer": "none"}
    policy = {"model": model, "trainer": {"gang": ranks}}
    return job_of_one("gang", policy, pipeline={"queries_per_step": 1, "steps": 1})


def peak_bytes(pid: int) -> int:
    """Return the peak memory of a process since `forget_peak`."""
    text = Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
    return 1024 * int(text.partition("VmHWM:")[2].split()[0])


def forget_peak(pid: int) -> int:
    """Reset a process's peak memory to its current memory; return it."""
    Path(f"/proc/{pid}/clear_refs").write_text("5", encoding="utf-8")
    return peak_bytes(pid)


def rank_pids() -> list[int]:
    """Return the ids of the ranks below this process."""
    found = []
    for process in psutil.Process().children(recursive=True):
        line = process.cmdline()
        if line[-1:] == ["services.trainer.gang.rank"] and "services.trainer.gang.gang" not in line:
            found.append(process.pid)
    return found


@contextmanager
def largest(*folders: Path) -> Iterator[list[int]]:
    """Yield a list that gets the sum of the folders' largest sizes during the context."""
    found, peaks, over = [0], [0] * len(folders), threading.Event()

    def watch() -> None:
        while not over.wait(_SAMPLE_SECONDS):
            for i, folder in enumerate(folders):
                peaks[i] = max(peaks[i], size_of(folder))

    before = sum(map(size_of, folders))
    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield found
    finally:
        over.set()
        thread.join()
        found[0] = sum(peaks) - before


def size_of(folder: Path) -> int:
    """Return the bytes of the files below `folder`, without files deleted meanwhile."""
    sizes: dict[int, int] = {}
    for file in folder.rglob("*"):
        try:
            found = file.stat()
        except FileNotFoundError:
            continue
        if file.is_file():
            sizes[found.st_ino] = found.st_blocks * _DISK_BLOCK_BYTES
    return sum(sizes.values())


def read_seconds(folder: Path) -> float:
    """Return the seconds in which one process reads the files once into fresh memory."""
    began = time.perf_counter()
    for path in sorted(folder.glob("*.safetensors")):
        size, done = path.stat().st_size, 0
        with (
            path.open("rb", buffering=0) as file,
            mmap.mmap(-1, size) as room,
            memoryview(room) as left,
        ):
            while count := file.readinto(left[done : done + _BLOCK_BYTES]):
                done += count
    return time.perf_counter() - began


def forget_pages(folder: Path) -> None:
    """Drop the files from the page cache."""
    for path in folder.glob("*.safetensors"):
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def measured(root: Path, size: int, nbytes: int) -> dict[str, float]:
    """Return the figures of a gang of `size` ranks for the model in `root`/large."""
    settings = TrainerSettings(trainer_device="cpu", gang_ranks=size, data_dir=root / "data")
    gangs = Gangs(settings)
    try:
        tiny = GangLearner(gangs, "job/tiny", spec_of(root / "tiny", size), "solver", {})
        tiny.release()
        before = {pid: forget_peak(pid) for pid in rank_pids()}
        large, spec = root / "large", spec_of(root / "large", size)

        def loaded(spec: JobSpec) -> tuple[GangLearner, float]:
            began = time.perf_counter()
            found = GangLearner(gangs, "job/large", spec, "solver", {})
            return found, time.perf_counter() - began

        forget_pages(large)
        cold_read = read_seconds(large)
        once = read_seconds(large)
        fixed, seconds = [], []
        for _ in range(_LOADS):
            gang, took = loaded(spec_of(root / "narrow", size))
            fixed.append(took)
            gang.release()
        forget_pages(large)
        gang, cold = loaded(spec)
        for _ in range(_LOADS):
            gang.release()
            gang, took = loaded(spec)
            seconds.append(took)
        grown = [peak_bytes(pid) - now for pid, now in before.items()]

        transfer = Transfer(root / "transfer")
        place = gangs.of(size, "job/large").directory
        with largest(place, root / "transfer") as copied:
            manifest = transfer.set("weights", gang.published())
        published = manifest.num_bytes

        store = StateStore(root / "data", "job", "solver", sync=False)
        store.save(TrainingState(1, "a" * 32, gang.snapshot()))
        model, pid = gang.model, psutil.Process().pid
        now = forget_peak(pid)
        path = root / "checkpoint"
        save_checkpoint(path, model, store.stored(1).tensors, None, keep=None, dtype=torch.float32)
        writer = peak_bytes(pid) - now
        gang.release()
        for folder in (path, root / "data", root / "transfer"):
            shutil.rmtree(folder, ignore_errors=True)
    finally:
        gangs.close()
    return {
        "load_rss_ratio": max(grown) / nbytes,
        "load_over_read": min(seconds) / once,
        "cold_load_over_read": cold / cold_read,
        "load_seconds": min(seconds),
        "fixed_seconds": min(fixed),
        "read_seconds": once,
        "cold_load_seconds": cold,
        "cold_read_seconds": cold_read,
        "publish_copies": copied[0] / published,
        "checkpoint_rss_ratio": writer / nbytes,
    }


def main() -> None:
    """Print the table and its JSON object."""
    options = command.options_of(__doc__, None)
    hidden, layers = (256, 4) if options.quick else (1024, 28)
    with command.scratch() as root:
        written(root / "tiny", config_of(64, 1))
        written(root / "narrow", config_of(64, layers))
        nbytes = written(root / "large", config_of(hidden, layers))
        found = {size: measured(root, size, nbytes) for size in RANKS}
    if not options.json:
        print(f"model: {nbytes / 1e9:.2f} GB in float32")
        for size, figures in found.items():
            print(f"{size} ranks: " + ", ".join(f"{n} {v:.2f}" for n, v in figures.items()))
    worst = {
        # A rank's share is 1 / ranks; this is the excess.
        "load_rss_ratio": {
            str(size): round(one["load_rss_ratio"], 3) for size, one in found.items()
        },
        "publish_copies": round(max(one["publish_copies"] for one in found.values()), 2),
        "checkpoint_rss_ratio": round(max(o["checkpoint_rss_ratio"] for o in found.values()), 3),
        **{
            name: round(statistics.mean(one[name] for one in found.values()), 2)
            for name in ("load_over_read", "cold_load_over_read")
        },
    }
    command.finish(worst, quiet=options.json)


if __name__ == "__main__":
    command.run_program(main)
