"""Suspension and resumption of one real policy, compared with copying its bytes."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.workloads.one_policy import job_of_one, tied_qwen3
from benchmarks.workloads.tokenizer import save_tokenizer
from services.chassis.telemetry import Telemetry
from services.chassis.transfer import HostTransfer
from services.trainer.learning.learner import Learner
from services.trainer.learning.model import load_model
from services.trainer.learning.samples import Row
from services.trainer.settings import TrainerSettings
from services.trainer.state.suspension import ParameterPool, SuspendedTensors, Suspension

POLICY = "player"


@dataclass(frozen=True)
class Bandwidth:
    """Median seconds of a run; `num_bytes` are moved off the device, and back."""

    num_bytes: int
    copy_seconds: float
    suspend_seconds: float
    resume_seconds: float

    @property
    def ratio(self) -> float:
        """Time of both copies alone over the time of suspension and resumption."""
        return 2 * self.copy_seconds / (self.suspend_seconds + self.resume_seconds)


def measure(hidden: int, layers: int, rounds: int, device: torch.device, where: Path) -> Bandwidth:
    """Move a policy of this size in the middle of a step off the device and back `rounds` times,
    and copy its bytes in between, so that other load on the machine affects both.

    The first two rounds are warm-up, in which memory is used for the first time.
    """
    learner = _policy(hidden, layers, device, where)
    settings = TrainerSettings(transfer_dir=where / "transfer", data_dir=where / "runs")
    pool = ParameterPool(device)
    suspension = Suspension(HostTransfer(settings, Telemetry()), pool, "swap", POLICY)
    size = sum(t.nbytes for t in learner.suspended()[0].values())
    copy = _copies(size, device)
    taken: list[tuple[float, float, float]] = []
    for number in range(rounds + 2):
        copied = _seconds(copy, device)
        began = time.perf_counter()
        tensors, values = learner.suspended()
        state = suspension.store(number, SuspendedTensors(tensors, {"learner": values}), None, 30.0)
        del tensors
        pool.give_back(learner.release())
        suspended = time.perf_counter() - began
        began = time.perf_counter()
        fetched = suspension.fetch(state)
        suspension.take(state)
        learner.adopt(fetched.tensors, fetched.document["learner"])
        del fetched
        _wait(device)
        if number > 1:
            taken.append((copied, suspended, time.perf_counter() - began))
    medians = [statistics.median(column) for column in zip(*taken, strict=True)]
    return Bandwidth(size, *medians)


def _policy(hidden: int, layers: int, device: torch.device, where: Path) -> Learner:
    """Return a policy with moments from one step, and gradients of the next one."""
    vocabulary = save_tokenizer(where / "tokenizer")
    config = tied_qwen3(hidden, layers, vocabulary)
    model_section = {"config": config, "tokenizer": str(where / "tokenizer")}
    pipeline = {"steps": 10, "queries_per_step": 2}
    spec = job_of_one("swap", {"model": model_section}, solver=POLICY, pipeline=pipeline)
    model = load_model(POLICY, spec.policies[POLICY], 0)
    learner = Learner(model, spec, POLICY, device=device)
    learner.accumulate(_rows(vocabulary))
    learner.apply(0)
    learner.accumulate(_rows(vocabulary))
    return learner


def _rows(vocabulary: int) -> list[Row]:
    rng = np.random.default_rng(0)
    return [
        Row(
            sample_id=f"q_{number}",
            ids=rng.integers(vocabulary, size=12),
            prompt_length=8,
            behaviour=np.full(4, -2.0, np.float32),
            reward=float(number),
            group_rewards=(0.0, 1.0),
            version=0,
            group="q",
        )
        for number in range(2)
    ]


def _copies(size: int, device: torch.device) -> Callable[[], None]:
    """Return a function that copies `size` bytes in memory that was used before; on a GPU half over
    its link to the host, and half back."""
    count = size // 4
    host = torch.ones(count, pin_memory=device.type == "cuda")
    if device.type == "cpu":
        other = torch.zeros(count)
        return lambda: _nothing(other.copy_(host))
    half = count // 2
    there = torch.zeros(count, device=device)

    def both() -> None:
        there[:half].copy_(host[:half], non_blocking=True)
        host[half:].copy_(there[half:], non_blocking=True)

    return both


def _nothing(_: Any) -> None:
    return


def _seconds(call: Callable[[], None], device: torch.device) -> float:
    _wait(device)
    began = time.perf_counter()
    call()
    _wait(device)
    return time.perf_counter() - began


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
