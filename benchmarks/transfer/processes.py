"""The other processes of the benchmark: `python -m benchmarks.transfer.processes WHAT ARGS...`.

Each prints one line when it is ready and one per result, and ends with its stdin.
"""

from __future__ import annotations

import mmap
import os
import re
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from troupe.transfer import Transfer
from troupe.transfer.blob import Verification
from troupe.transfer.checksum import PIECE_BYTES
from troupe.transfer.remote import HostOwner, Peer, TransferOwner, lane

STEM = "benchmark/policy/weights"
CHUNK = PIECE_BYTES
TAG = 1
IDLE = 60.0
# Chunks that bare UCX has in flight at once.
RAW_WINDOW = 32
# Field of copies that the reader of a mapping makes: there should be none. (Pages of the file that
# no other process currently maps also count as private, but not in this field.)
_PRIVATE = re.compile(r"^(Anonymous):\s+(\d+) kB", re.M)


def state(num_bytes: int, version: int = 0) -> dict[str, torch.Tensor]:
    """Return eight matrices of `num_bytes` in total."""
    each = num_bytes // 8 // 4
    return {f"layer{i}": torch.full((each,), i + version / 7) for i in range(8)}


def serve(root: str, num_bytes: str, use_ucx: str, host: str = "127.0.0.1") -> None:
    """Run an owner; for each version on stdin, set a new version of the state in place of the
    previous one."""
    transfer = Transfer(Path(root))
    owner = TransferOwner(transfer, host=host, use_ucx=use_ucx == "1")
    tensors = state(int(num_bytes))
    print(owner.address, flush=True)
    for line in sys.stdin:
        version = int(line)
        # First, so that its file is reused: two of the largest states are too much for a small
        # machine.
        transfer.delete(f"{STEM}@{version - 1}")
        for number, tensor in enumerate(tensors.values()):
            tensor.fill_(number + version / 7)
        transfer.set(f"{STEM}@{version}", tensors)
        print("stored", flush=True)
    owner.stop(0)


def publish(root: str, hidden: str, layers: str, use_ucx: str) -> None:
    """Run `serve` for a model, and print each version's checksum."""
    from benchmarks.transfer.swap import POLICY, model

    transfer = Transfer(Path(root))
    owner = TransferOwner(transfer, use_ucx=use_ucx == "1")
    print(owner.address, flush=True)
    for line in sys.stdin:
        version, prefix = int(line), f"benchmark/{POLICY}/weights@"
        tensors = model(int(hidden), int(layers), version)
        print(transfer.set(f"{prefix}{version}", tensors).checksum, flush=True)
        transfer.delete(f"{prefix}{version - 1}")
    owner.stop(0)


def fetch(root: str, address: str, use_ucx: str, verify: str = "1") -> None:
    """Get each version on stdin from the owner at `address`; print the seconds and the way."""
    if verify != "1":
        # For the cost of checksums: this reader does not verify.
        Verification.upto = lambda self, nbytes: None  # type: ignore[method-assign]
    transfer = Transfer(Path(root), peers=[Peer(address, use_ucx=use_ucx == "1")])
    print("ready", flush=True)
    for line in sys.stdin:
        print(*_get(transfer, int(line)), flush=True)


def host(root: str, address: str, here: str) -> None:
    """Run `fetch` on a separate host, whose owner serves what it receives."""
    owner = TransferOwner(Transfer(Path(root)), host="0.0.0.0", advertise=here, use_ucx=False)
    near = f"127.0.0.1:{owner.port}"
    source = HostOwner(near, locate=lambda key, expected: [address])
    transfer = Transfer(Path(root), peers=[source])
    print("ready", flush=True)
    for line in sys.stdin:
        print(*_get(transfer, int(line)), flush=True)


def _get(transfer: Transfer, version: int) -> tuple[float, str]:
    transfer.delete(f"{STEM}@{version - 1}")
    begin = time.perf_counter()
    got = transfer.get(f"{STEM}@{version}")
    seconds = time.perf_counter() - begin
    del got
    return seconds, transfer.last_transport


def read(root: str) -> None:
    """For each line of stdin ("verify" or not, version): get the state; print the seconds, and the
    bytes of the tensors' mapping that are private to this process."""
    transfer = Transfer(Path(root))
    print("ready", flush=True)
    for line in sys.stdin:
        how, version = line.split()
        key = f"{STEM}@{version}"
        begin = time.perf_counter()
        tensors, _ = transfer.get(key, verify=how == "verify")
        seconds = time.perf_counter() - begin
        sum(float(t.sum()) for t in tensors.values())  # touches every page
        print(seconds, copied(tensors, Path(root) / key), flush=True)
        del tensors


def copied(tensors: dict[str, torch.Tensor], path: Path) -> int:
    """Return the bytes of `tensors` that are not pages of the file at `path`.

    Each tensor's address is looked up in the process's mappings: a tensor outside of the file's
    mapping is a copy, and so are the private pages of the mapping.
    """
    mappings = []
    for block in re.split(r"\n(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text()):
        head = block.splitlines()[0].split(maxsplit=5)
        if head[-1] == str(path.absolute()):
            begin, end = (int(place, 16) for place in head[0].split("-"))
            own = max(int(size) << 10 for _, size in _PRIVATE.findall(block))
            mappings.append((begin, end, own))
    outside = 0
    for tensor in tensors.values():
        at, size = tensor.data_ptr(), tensor.numel() * tensor.element_size()
        if not any(begin <= at and at + size <= end for begin, end, _ in mappings):
            outside += size
    return outside + sum(own for *_, own in mappings)


def send_raw(root: str, num_bytes: str, address: str, near: str) -> None:
    """Send a state's bytes to the worker at `address`, without checks or requests.

    They are the bytes that the owner at `root` sends, in a mapping like its own: "map VERSION" on
    stdin looks up the file of that version, any other line sends it.
    """
    mapped, memory = (0, 0), memoryview(b"")
    with lane.Lane(near=near == "1") as sender:
        sender.connect(bytes.fromhex(address))
        print("ready", flush=True)
        for line in sys.stdin:
            if not line.startswith("map "):
                _drive(sender, sender.send, _parts(memory, num_bytes))
                continue
            # Without its lock: the owner reuses the same file, whose mapping stays.
            with open(Path(root) / f"{STEM}@{line.split()[1]}", "rb") as file:
                status = os.fstat(file.fileno())
                if mapped != (found := (status.st_ino, status.st_size)):
                    memory = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY))
                    mapped = found
            print("mapped", flush=True)


def receive_raw(root: str, num_bytes: str, near: str) -> None:
    """Receive from `send_raw` into memory like a reader's, a file in `root` with present and mapped
    pages; print the address, and the seconds for each line of stdin."""
    with tempfile.TemporaryFile(dir=root) as file:
        os.posix_fallocate(file.fileno(), 0, int(num_bytes))
        memory = memoryview(mmap.mmap(file.fileno(), int(num_bytes)))
    for part in _parts(memory, num_bytes):
        part[:: mmap.PAGESIZE] = bytes(-(-len(part) // mmap.PAGESIZE))
    with lane.Lane(near=near == "1") as receiver:
        print(receiver.address.hex(), flush=True)
        for _ in sys.stdin:
            parts = _parts(memory, num_bytes)
            begin = time.perf_counter()
            _drive(receiver, receiver.receive, parts, lambda: print("waits", flush=True))
            print(time.perf_counter() - begin, flush=True)


def _parts(memory: memoryview, num_bytes: str) -> list[memoryview]:
    """Return the last `num_bytes` in chunks: all of a state's file except its header."""
    first = len(memory) - int(num_bytes)
    return [memory[start : start + CHUNK] for start in range(first, len(memory), CHUNK)]


def _drive(
    worker: lane.Lane,
    post: Callable[[memoryview, int], Any],
    parts: list[memoryview],
    posted: Callable[[], None] = lambda: None,
) -> None:
    """Run `post` for all `parts`, `RAW_WINDOW` at once; call `posted` once the first ones are
    posted.

    Nothing else is done: posting all of a large state at once takes as long.
    """
    flying: deque[Any] = deque()
    for number, part in enumerate(parts):
        flying.append(post(part, TAG + number))
        if number + 1 == min(RAW_WINDOW, len(parts)):
            posted()
        while len(flying) == RAW_WINDOW or (flying and number + 1 == len(parts)):
            worker.wait(lambda: bool(flying[0].completed), idle=IDLE)
            while flying and flying[0].completed:
                flying.popleft()


@contextmanager
def other(
    what: str,
    *args: object,
    env: dict[str, str] | None = None,
    within: Sequence[str] = (),
    cores: Collection[int] = (),
) -> Iterator[subprocess.Popen[str]]:
    """Run another process that does `what`, killed at the end. `within`: a prefix of its command.
    `cores`: the cores that it runs on; None: all."""
    command = [sys.executable, "-m", "benchmarks.transfer.processes", what, *map(str, args)]
    with subprocess.Popen(
        [*within, *command], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env
    ) as process:
        try:
            if cores:
                os.sched_setaffinity(process.pid, cores)
            yield process
        finally:
            process.kill()


def cores_of(host: int) -> list[int]:
    """Return the cores of one of two hosts on this machine, which do not share cores."""
    cores = sorted(os.sched_getaffinity(0))
    return cores[host::2] if len(cores) > 1 else cores


def line(process: subprocess.Popen[str]) -> str:
    """Return the process's next line. Raises RuntimeError if it died."""
    assert process.stdout is not None
    if not (text := process.stdout.readline()):
        raise RuntimeError(f"a process of the benchmark died with status {process.wait()}")
    return text.strip()


def tell(process: subprocess.Popen[str], text: object) -> None:
    """Send a line to the process."""
    assert process.stdin is not None
    process.stdin.write(f"{text}\n")
    process.stdin.flush()


if __name__ == "__main__":
    torch.set_num_threads(1)
    acts: dict[str, Callable[..., None]] = {
        "serve": serve,
        "publish": publish,
        "fetch": fetch,
        "host": host,
        "read": read,
        "send_raw": send_raw,
        "receive_raw": receive_raw,
    }
    acts[sys.argv[1]](*sys.argv[2:])
