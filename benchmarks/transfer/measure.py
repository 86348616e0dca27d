"""One size of state at a time: seconds of each way to move it, the best of a few rounds."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.transfer.processes import (
    CHUNK,
    IDLE,
    KEY,
    TAG,
    line,
    other,
    state,
    tell,
)
from troupe.transfer import Transfer, checksum_of
from troupe.transfer.remote import Peer, lane


@dataclass(frozen=True)
class Row:
    """Seconds for `num_bytes`; None where UCX is not installed."""

    num_bytes: int
    memcpy: float
    checksum: float
    set: float
    get_in_process: float
    get_shared: float
    get_shared_verified: float
    # Memory that a reader in shared memory took besides, over the size of the state.
    copied_fraction: float
    one_reader: float
    four_readers: float
    grpc: float
    ucx: float | None
    raw_ucx: float | None

    def speed(self, seconds: float | None) -> float | None:
        """GiB/s."""
        return None if seconds is None else self.num_bytes / seconds / 2**30


def measure(num_bytes: int, rounds: int, directory: Path) -> Row:
    """Everything for one size; files lie under `directory`."""
    tensors = state(num_bytes)
    transfer = Transfer(directory / "writer")

    memcpy = _memcpy(tensors, rounds)
    checksum = _best(rounds, lambda: checksum_of(tensors))
    set_ = _best(rounds, lambda: transfer.set(KEY, tensors))
    in_process = _best(rounds, lambda: transfer.get(KEY, verify=False))
    with ExitStack() as stack:
        readers = [stack.enter_context(other("read", directory / "writer")) for _ in range(4)]
        for reader in readers:
            line(reader)
        plain = [_read(readers[:1], "plain") for _ in range(rounds)]
        one = [_read(readers[:1], "verify") for _ in range(rounds)]
        four = [_read(readers, "verify") for _ in range(rounds)]
    transfer.delete(KEY)
    has_ucx = not lane.missing()
    return Row(
        num_bytes=num_bytes,
        memcpy=memcpy,
        checksum=checksum,
        set=set_,
        get_in_process=in_process,
        get_shared=min(seconds for seconds, _ in plain),
        get_shared_verified=min(seconds for seconds, _ in one),
        copied_fraction=max(taken for _, taken in plain) / num_bytes,
        one_reader=min(seconds for seconds, _ in one),
        four_readers=min(seconds for seconds, _ in four),
        grpc=_remote(num_bytes, rounds, directory, use_ucx=False),
        ucx=_remote(num_bytes, rounds, directory, use_ucx=True) if has_ucx else None,
        raw_ucx=_raw(num_bytes, rounds) if has_ucx else None,
    )


def _memcpy(tensors: dict[str, torch.Tensor], rounds: int) -> float:
    targets = {name: tensor.clone() for name, tensor in tensors.items()}

    def copy() -> None:
        for name, target in targets.items():
            target.copy_(tensors[name])

    return _best(rounds, copy)


def _best(rounds: int, act: Callable[[], object]) -> float:
    seconds = []
    for _ in range(rounds + 1):  # the first one only warms up
        begin = time.perf_counter()
        act()
        seconds.append(time.perf_counter() - begin)
    return min(seconds[1:])


def _read(readers: list[subprocess.Popen[str]], how: str) -> tuple[float, int]:
    """All at once: seconds of the slowest, most memory that one of them took."""
    for reader in readers:
        tell(reader, how)
    answers = [line(reader).split() for reader in readers]
    return max(float(s) for s, _ in answers), max(int(taken) for _, taken in answers)


def _remote(num_bytes: int, rounds: int, directory: Path, *, use_ucx: bool) -> float:
    """From another process's owner, into this one's shared memory, verified."""
    with other("serve", directory / "owner", num_bytes, int(use_ucx)) as process:
        source = Peer(line(process))
        here = Transfer(directory / "reader", peers=[source])

        def fetch() -> None:
            here.delete(KEY)
            here.get(KEY)

        seconds = _best(rounds, fetch)
        transports = {choice.transport for choice in here.counters.moves()}
        assert transports == {"ucx" if use_ucx else "grpc"}, transports
        here.delete(KEY)
        source.close()
    Transfer(directory / "owner").delete(KEY)
    return seconds


def _raw(num_bytes: int, rounds: int) -> float:
    """The same chunks through two bare UCX workers."""
    data = memoryview(bytearray(num_bytes))
    with lane.Lane() as receiver, other("send_raw", num_bytes, receiver.address.hex()) as sender:
        line(sender)

        def receive() -> None:
            tell(sender, "go")
            parts = range(0, num_bytes, CHUNK)
            got = [receiver.receive(data[i : i + CHUNK], TAG + n) for n, i in enumerate(parts)]
            receiver.wait(lambda: all(r.completed for r in got), idle=IDLE)

        return _best(rounds, receive)
