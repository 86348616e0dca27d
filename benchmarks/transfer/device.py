"""A state from one process's device to another's: `python -m benchmarks.transfer --device cuda`.

One process sets tensors on its device, another gets them into tensors on its own. For comparison in
the same run: the link's rate to pinned memory and from it, and the same tensors over CUDA IPC,
which copies from device to device between processes of one machine, as long as the owner keeps them
unchanged. On a CPU the link is memory, and IPC a shared mapping.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from multiprocessing.connection import Connection
from pathlib import Path

import torch
import torch.multiprocessing as mp

from benchmarks.gpu.update import seconds_of
from benchmarks.transfer.processes import STEM, state
from troupe.transfer import Transfer, brought

# Time limit of a process for one turn, in seconds.
_ANSWER_SECONDS = 300.0


def measure(
    device: torch.device, num_bytes: int, rounds: int, directory: Path
) -> dict[str, float | str]:
    """Return GiB/s of each way, the best of `rounds`, and the lower fraction of the link's rate.
    Raises `RuntimeError` if the reader does not answer.
    """
    tensors = {name: tensor.to(device) for name, tensor in state(num_bytes).items()}
    gib = sum(tensor.nbytes for tensor in tensors.values()) / 2**30
    out, back = _link(device, num_bytes)
    seconds: dict[str, list[float]] = {"set": [], "get": [], "ipc": []}
    context = mp.get_context("spawn")
    ours, theirs = context.Pipe()
    reader = context.Process(target=_read, args=(theirs, directory, num_bytes, str(device)))
    reader.start()
    theirs.close()
    writer = Transfer(directory)
    try:
        _answer(ours)
        for version in range(rounds + 1):
            writer.delete(f"{STEM}@{version - 1}")
            for tensor in tensors.values():
                tensor.add_(1)
            _done(device)
            began = time.perf_counter()
            writer.set(f"{STEM}@{version}", tensors)
            seconds["set"].append(time.perf_counter() - began)
            ours.send(version)
            seconds["get"].append(_answer(ours))
            ours.send("ipc")
            ours.send(tensors)
            seconds["ipc"].append(_answer(ours))
        ours.send(None)
        reader.join(_ANSWER_SECONDS)
    finally:
        if reader.is_alive():
            reader.kill()
        writer.close()
    # The first of each is warm-up: files, pinned memory, handles.
    best = {name: gib / min(found[1:]) for name, found in seconds.items()}
    return {
        "device": str(device),
        "gib": gib,
        **{f"{name}_gib_s": speed for name, speed in best.items()},
        "link_out_gib_s": gib / out,
        "link_in_gib_s": gib / back,
        "of_link": min(best["set"] * out, best["get"] * back) / gib,
    }


def _link(device: torch.device, num_bytes: int) -> tuple[float, float]:
    """Return the seconds of one copy of `num_bytes` to pinned memory, and of one back."""
    here = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
    there = torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=device.type == "cuda")
    return (
        seconds_of(lambda: there.copy_(here, non_blocking=True), device, 3),
        seconds_of(lambda: here.copy_(there, non_blocking=True), device, 3),
    )


def _read(turns: Connection, directory: Path, num_bytes: int, name: str) -> None:
    """Run the other process, which answers each turn with its seconds. Raises `RuntimeError` if it
    received other data than was sent."""
    torch.set_num_threads(1)
    device = torch.device(name)
    targets = {key: tensor.to(device) for key, tensor in state(num_bytes).items()}
    transfer = Transfer(directory)
    turns.send(0.0)
    while (turn := turns.recv()) is not None:
        began = time.perf_counter()
        if turn == "ipc":
            _copy(targets, turns.recv())
        else:
            tensors, _ = transfer.get(f"{STEM}@{turn}", lasting=True)
            if device.type == "cuda":
                targets = brought(tensors, device)
            else:
                targets = {key: tensor.clone() for key, tensor in tensors.items()}
        _done(device)
        seconds = time.perf_counter() - began
        # state() fills its tensors with their numbers; each turn adds one.
        rounds = {float(t[-1]) - number for number, t in enumerate(targets.values())}
        if len(rounds) != 1 or (turn != "ipc" and rounds != {turn + 1.0}):
            raise RuntimeError(f"turn {turn} brought {sorted(rounds)}")
        turns.send(seconds)
    transfer.close()


def _copy(targets: Mapping[str, torch.Tensor], sources: Mapping[str, torch.Tensor]) -> None:
    for name, target in targets.items():
        target.copy_(sources[name], non_blocking=True)


def _done(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _answer(turns: Connection) -> float:
    try:
        if turns.poll(_ANSWER_SECONDS):
            return float(turns.recv())
    except EOFError:
        pass
    raise RuntimeError(f"the reader did not answer within {_ANSWER_SECONDS:.0f} s, or died")
