"""Measurements of one size of state: the seconds of each way to move it, the best of a few
rounds."""

from __future__ import annotations

import os
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median

import torch

from benchmarks.transfer.processes import STEM, cores_of, line, other, state, tell
from troupe.transfer import Transfer, checksum_of
from troupe.transfer.remote import lane

# Larger states through TCP and gRPC take minutes and show the same.
TCP_BYTES = 1 << 30
# Between hosts there is no shared memory, so UCX is measured there with TCP only.
TCP = {**os.environ, "UCX_TLS": "tcp,self"}


@dataclass(frozen=True)
class Pair:
    """Medians of alternating turns: seconds by `Transfer`, verified, and by two bare UCX workers,
    and their ratio within a turn."""

    ours: float
    bare: float
    ratio: float
    """Ratio to bare UCX's speed, within turns: on a busy machine speed varies from second to
    second, and only within one turn both sides see the same conditions."""
    ratios: tuple[float, ...]
    """The ratio of each turn."""
    unverified: float | None = None
    """The ratio of a reader that does not verify: the rest is the cost of checksums."""

    @classmethod
    def of(
        cls, ours: Sequence[float], bare: Sequence[float], unverified: Sequence[float] = ()
    ) -> Pair:
        """Return the figures of turns, in order."""
        ratios = _ratios(bare, ours)
        believing = median(_ratios(bare, unverified)) if unverified else None
        return cls(median(ours), median(bare), median(ratios), ratios, believing)


def _ratios(bare: Sequence[float], ours: Sequence[float]) -> tuple[float, ...]:
    return tuple(theirs / mine for theirs, mine in zip(bare, ours, strict=True))


@dataclass(frozen=True)
class Row:
    """Seconds for `num_bytes`; None if UCX is missing or a state is too large for the way."""

    num_bytes: int
    memcpy: float
    checksum: float
    set_fresh: float
    set: float
    get_in_process: float
    get_shared: float
    get_shared_verified: float
    # Bytes of a reader in shared memory that are not the file's own pages, over the state's bytes.
    copied_fraction: float
    one_reader: float
    four_readers: float
    # None beyond `TCP_BYTES`.
    grpc: float | None
    near: Pair | None
    tcp: Pair | None

    def speed(self, seconds: float | None) -> float | None:
        """Return GiB/s."""
        return None if seconds is None else self.num_bytes / seconds / 2**30


def measure(num_bytes: int, rounds: int, directory: Path) -> Row:
    """Measure everything for one size, with files under `directory`. `rounds`: rounds for ratios of
    turns; measurements that are the best of their rounds take a third as many, at most 5."""
    tensors = state(num_bytes)
    pair_rounds, rounds = rounds, min((rounds + 1) // 3, 5)
    memcpy = _memcpy(tensors, rounds)
    checksum = _best(rounds, partial(checksum_of, tensors))
    has_ucx, usual = not lane.missing(), num_bytes <= TCP_BYTES
    writer = Transfer(directory / "writer")
    fresh, warm = _sets(writer, tensors, rounds + 1)
    last = f"{STEM}@{rounds + 1}"
    in_process = _best(rounds, lambda: writer.get(last))
    plain, one, four = _readers(writer, tensors, rounds)
    writer.close()
    del tensors
    return Row(
        num_bytes=num_bytes,
        memcpy=memcpy,
        checksum=checksum,
        set_fresh=fresh,
        set=warm,
        get_in_process=in_process,
        get_shared=plain[0],
        get_shared_verified=one,
        copied_fraction=plain[1] / num_bytes,
        one_reader=one,
        four_readers=four,
        grpc=_by_grpc(num_bytes, directory) if usual else None,
        near=_pair(num_bytes, pair_rounds, directory, near=True) if has_ucx else None,
        tcp=_pair(num_bytes, pair_rounds, directory, near=False) if has_ucx and usual else None,
    )


def _memcpy(tensors: dict[str, torch.Tensor], rounds: int) -> float:
    targets = {name: tensor.clone() for name, tensor in tensors.items()}

    def copy() -> None:
        for name, target in targets.items():
            target.copy_(tensors[name])

    return _best(rounds, copy)


def _best(rounds: int, act: Callable[[], object]) -> float:
    seconds = []
    for _ in range(rounds + 1):  # the first one is warm-up
        begin = time.perf_counter()
        act()
        seconds.append(time.perf_counter() - begin)
    return min(seconds[1:])


def _sets(writer: Transfer, tensors: dict[str, torch.Tensor], rounds: int) -> tuple[float, float]:
    """Return the seconds of the first version, and of versions that reuse earlier files."""
    seconds = []
    for version in range(rounds + 1):
        writer.delete(f"{STEM}@{version - 1}")
        begin = time.perf_counter()
        writer.set(f"{STEM}@{version}", tensors)
        seconds.append(time.perf_counter() - begin)
    return seconds[0], min(seconds[1:])


def _readers(
    writer: Transfer, tensors: dict[str, torch.Tensor], rounds: int
) -> tuple[tuple[float, int], float, float]:
    """Measure processes of one host: (seconds, bytes copied) of one that does not verify; seconds
    until one, and until all of four, have a version that was not verified before."""
    version = 100
    with ExitStack() as stack:
        readers = [stack.enter_context(other("read", writer.roots[0])) for _ in range(4)]
        for reader in readers:
            line(reader)
        seconds: dict[tuple[int, str], list[tuple[float, int]]] = {}
        for _ in range(rounds):
            for count, how in ((1, "plain"), (1, "verify"), (4, "verify")):
                version += 1
                writer.set(f"{STEM}@{version}", tensors)
                writer.delete(f"{STEM}@{version - 1}")
                seconds.setdefault((count, how), []).append(
                    _read(readers[:count], f"{how} {version}")
                )
    writer.delete(f"{STEM}@{version}")
    plain = seconds[1, "plain"]
    return (
        (min(s for s, _ in plain), max(taken for _, taken in plain)),
        min(s for s, _ in seconds[1, "verify"]),
        min(s for s, _ in seconds[4, "verify"]),
    )


def _read(readers: list[subprocess.Popen[str]], how: str) -> tuple[float, int]:
    """Run all readers at once; return the seconds of the slowest, and the most memory of one."""
    for reader in readers:
        tell(reader, how)
    answers = [line(reader).split() for reader in readers]
    return max(float(s) for s, _ in answers), max(int(taken) for _, taken in answers)


def _pair(num_bytes: int, rounds: int, directory: Path, *, near: bool) -> Pair:
    with tempfile.TemporaryDirectory(dir=directory) as own, ExitStack() as stack:

        def on(host: int, what: str, *arguments: object) -> subprocess.Popen[str]:
            env, cores = (None, []) if near else (TCP, cores_of(host))
            return stack.enter_context(other(what, *arguments, env=env, cores=cores))

        receiver = on(1, "receive_raw", own, num_bytes, int(near))
        owner = on(0, "serve", root := Path(own) / "owner", num_bytes, 1)
        sender = on(0, "send_raw", root, num_bytes, line(receiver), int(near))
        reader = on(1, "fetch", Path(own) / "reader", line(owner), 1)
        return in_turns(sender, receiver, owner, [reader], rounds)


def in_turns(
    sender: subprocess.Popen[str],
    receiver: subprocess.Popen[str],
    owner: subprocess.Popen[str],
    readers: Sequence[subprocess.Popen[str]],
    rounds: int,
) -> Pair:
    """Measure `rounds` rounds each, alternately and in alternating order, since a machine's load
    changes.

    The first of `readers` verifies, a second one does not.
    """
    for process in (sender, *readers):
        line(process)

    def bare() -> float:
        tell(receiver, "go")
        line(receiver)
        tell(sender, "go")
        return float(line(receiver))

    def reads(reader: subprocess.Popen[str], version: int) -> float:
        return _read_by(reader, version, "ucx")

    seconds: list[list[float]] = [[] for _ in range(1 + len(readers))]
    for version in range(rounds + 2):
        tell(owner, version)
        line(owner)
        tell(sender, f"map {version}")
        line(sender)
        turns: list[Callable[[], float]] = [bare]
        turns += [partial(reads, reader, version) for reader in readers]
        for place in range(len(turns)):
            who = (place + version) % len(turns)
            seconds[who].append(turns[who]())
    # Warm-up, so that files exist for reuse.
    return Pair.of(seconds[1][2:], seconds[0][2:], seconds[2][2:] if len(readers) > 1 else ())


def _by_grpc(num_bytes: int, directory: Path) -> float:
    with (
        tempfile.TemporaryDirectory(dir=directory) as own,
        other("serve", Path(own) / "owner", num_bytes, 0) as owner,
        other("fetch", Path(own) / "reader", line(owner), 0) as reader,
    ):
        line(reader)
        return min([_version(owner, reader, version, "grpc") for version in range(3)][1:])


def _version(
    owner: subprocess.Popen[str], reader: subprocess.Popen[str], version: int, transport: str
) -> float:
    tell(owner, version)
    line(owner)
    return _read_by(reader, version, transport)


def _read_by(reader: subprocess.Popen[str], version: int, transport: str) -> float:
    tell(reader, version)
    taken, by = line(reader).split()
    assert by == transport, by
    return float(taken)
