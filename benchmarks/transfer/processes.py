"""The other processes of the benchmark: `python -m benchmarks.transfer.processes WHAT ARGS...`.

Each prints one line when it is ready and one per result, and ends with its stdin.
"""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch

from troupe.transfer import Transfer
from troupe.transfer.remote import Owner, lane

KEY = "benchmark/policy/weights@1"
CHUNK = 16 << 20
TAG = 1
IDLE = 60.0


def state(num_bytes: int) -> dict[str, torch.Tensor]:
    """Eight matrices, `num_bytes` together."""
    each = num_bytes // 8 // 4
    return {f"layer{i}": torch.full((each,), i, dtype=torch.float32) for i in range(8)}


def anonymous_bytes() -> int:
    """Memory of this process that is no file: where copies would be."""
    rollup = Path("/proc/self/smaps_rollup").read_text()
    found = re.search(r"^Anonymous:\s+(\d+) kB", rollup, re.M)
    return int(found[1]) << 10 if found else 0


def serve(root: str, num_bytes: str, use_ucx: str) -> None:
    """An owner of one state."""
    transfer = Transfer(Path(root))
    transfer.set(KEY, state(int(num_bytes)))
    owner = Owner(transfer, use_ucx=use_ucx == "1")
    print(owner.address, flush=True)
    sys.stdin.read()
    owner.stop(0)


def read(root: str) -> None:
    """For each line of stdin, get the state and print seconds and bytes of memory it took."""
    transfer = Transfer(Path(root))
    print("ready", flush=True)
    for line in sys.stdin:
        before, begin = anonymous_bytes(), time.perf_counter()
        tensors, _ = transfer.get(KEY, verify=line.strip() == "verify")
        seconds = time.perf_counter() - begin
        sum(float(t.sum()) for t in tensors.values())  # every page is looked at
        print(seconds, anonymous_bytes() - before, flush=True)
        del tensors


def send_raw(num_bytes: str, address: str) -> None:
    """Send the bytes once per line of stdin: nothing is checked, nobody is asked."""
    data = memoryview(bytearray(int(num_bytes)))
    with lane.Lane() as sender:
        sender.connect(bytes.fromhex(address))
        print("ready", flush=True)
        for _ in sys.stdin:
            parts = range(0, len(data), CHUNK)
            sent = [sender.send(data[i : i + CHUNK], TAG + n) for n, i in enumerate(parts)]
            sender.wait(partial(_all_done, sent), idle=IDLE)


def _all_done(requests: list[Any]) -> bool:
    return all(request.completed for request in requests)


@contextmanager
def other(what: str, *args: object) -> Iterator[subprocess.Popen[str]]:
    """Another process that does `what`; killed at the end."""
    command = [sys.executable, "-m", "benchmarks.transfer.processes", what, *map(str, args)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def line(process: subprocess.Popen[str]) -> str:
    """Its next line. Raises RuntimeError when it died."""
    assert process.stdout is not None
    if not (text := process.stdout.readline()):
        raise RuntimeError(f"a process of the benchmark died with status {process.wait()}")
    return text.strip()


def tell(process: subprocess.Popen[str], text: str) -> None:
    """Give it a line."""
    assert process.stdin is not None
    process.stdin.write(text + "\n")
    process.stdin.flush()


if __name__ == "__main__":
    torch.set_num_threads(1)
    acts: dict[str, Callable[..., None]] = {"serve": serve, "read": read, "send_raw": send_raw}
    acts[sys.argv[1]](*sys.argv[2:])
