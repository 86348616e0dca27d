"""`python -m benchmarks.transfer [--quick] [--json] [--mib N]... [--device cpu|cuda]`

States of several sizes within a process, through shared memory, and between two processes and two
network namespaces (as root) through UCX and gRPC, against memcpy and bare UCX in the same run; the
cost of four readers, and the exposed part of an engine's update. The last line of stdout is the
JSON object. UCX needs `pip install 'troupe-rl[ucx]'`. With `--device` only the way from one
process's device to another's is measured (device.py).
"""

from __future__ import annotations

import argparse
import logging
import os
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.command import finish, run_program, scratch
from benchmarks.transfer import device, networks, swap
from benchmarks.transfer.measure import TCP_BYTES, Pair, Row, measure
from troupe.transfer.remote import lane

MIB = 2**20
QUICK = {16 * MIB: 2}
FULL = (64 * MIB, 1024 * MIB, 4096 * MIB)
# Bytes for four other hosts, and width and depth of the model whose engine is updated.
QUICK_TREE, FULL_TREE = 32 * MIB, 192 * MIB
QUICK_MODEL, FULL_MODEL = (128, 2), (512, 8)


@dataclass(frozen=True)
class Rest:
    """Measurements for one size only; None if one failed, with the reason in `missing`."""

    # By number of bytes.
    networks: dict[int, Pair]
    readers: tuple[float, float] | None
    # Seconds exposed, seconds of transfer, bytes.
    swap: tuple[float, float, int]
    missing: str

    @property
    def network(self) -> Pair | None:
        """The measurement of the largest state between namespaces."""
        return self.networks[max(self.networks)] if self.networks else None


def main() -> None:
    """Run everything."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.transfer", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one small state")
    parser.add_argument(
        "--mib", type=int, action="append", help="a size of state, in place of the default sizes"
    )
    parser.add_argument("--json", action="store_true", help="print nothing but the JSON object")
    parser.add_argument(
        "--device", choices=("cpu", "cuda"), help="measure only between processes' devices"
    )
    args = parser.parse_args()
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("argument --device: no CUDA device is here; leave it out, or say cpu")
    console = Console(stderr=args.json, width=None if args.json else 120)
    torch.set_num_threads(1)
    # gRPC is used deliberately: its warnings would fill the screen.
    logging.getLogger("troupe.transfer").setLevel(logging.ERROR)
    began = time.monotonic()
    sizes = [mib * MIB for mib in args.mib] if args.mib else FULL
    rounds = QUICK if args.quick and not args.mib else {size: _rounds(size) for size in sizes}
    with scratch() as where:
        if args.device:
            _between_devices(args.device, rounds, where, console)
            return
        rows = []
        for size, count in rounds.items():
            rows.append(measure(size, count, where))
            # Each size separately: the largest take minutes.
            console.print(_table(rows[-1:]))
        rest = _rest(rounds, where, quick=args.quick)
    if len(rows) > 1:
        console.print(_table(rows))
    console.print(_rest_table(rest))
    taken = {"quick": args.quick, "seconds": round(time.monotonic() - began)}
    finish(as_json(rows, rest) | taken | _when(), quiet=args.json)


def _between_devices(name: str, rounds: dict[int, int], where: Path, console: Console) -> None:
    found = {}
    for size, count in rounds.items():
        # Each in its own directory, so that no file of another size is reused.
        (directory := where / str(size)).mkdir()
        found[size] = device.measure(torch.device(name), size, min(count, 5), directory)
        console.print(found[size])
    last = found[max(found)]
    by_mib = {str(size // MIB): row["of_link"] for size, row in found.items()}
    finish(last | {"of_link_by_mib": by_mib} | _when(), quiet=console.stderr)


def as_json(rows: list[Row], rest: Rest) -> dict[str, Any]:
    """Return the JSON object, with null for missing measurements. `ucx_ratio` is the worst of all
    sizes and ways, which `ucx_ratio_of` names; everything else, except values by MiB, is for the
    largest state of the way."""
    last = rows[-1]
    near, network = last.near, rest.network
    tcp = next((row.tcp for row in reversed(rows) if row.tcp is not None), None)
    grpc = next((row.speed(row.grpc) for row in reversed(rows) if row.grpc is not None), None)
    pairs = {"near": near, "tcp": tcp, "network": network}
    ratios = {name: round(pair.ratio, 3) for name, pair in pairs.items() if pair is not None}
    by_mib = _by_mib(rows, rest)
    every = [
        (ratio, f"{way}, {mib} MiB") for mib, of in by_mib.items() for way, ratio in of.items()
    ]
    worst, of_what = min(every) if every else (None, None)
    here = last.four_readers / last.one_reader
    hosts = rest.readers and rest.readers[1] / rest.readers[0]
    exposed, moved, _ = rest.swap
    return {
        # Not only for the largest: fixed costs dominate for small states.
        "ucx_ratio": worst,
        "ucx_ratio_of": of_what,
        "shm_zero_copy": last.copied_fraction == 0,
        "four_readers_ratio": _rounded(max(here, hosts or 0.0)),
        "exposed_fraction": _rounded(exposed / moved),
        "ucx_ratios": ratios,
        "ucx_ratios_by_mib": by_mib,
        "network_by_mib": {
            str(size // MIB): {
                "ratio": _rounded(pair.ratio),
                "unverified": _rounded(pair.unverified),
                "gib_s": _rounded(size / pair.ours / 2**30),
                "raw_gib_s": _rounded(size / pair.bare / 2**30),
            }
            for size, pair in rest.networks.items()
        },
        "four_readers_one_host": _rounded(here),
        "four_readers_four_hosts": _rounded(hosts),
        "checksum_gib_s": _rounded(last.speed(last.checksum)),
        "memcpy_gib_s": _rounded(last.speed(last.memcpy)),
        "set_over_memcpy": _rounded(last.memcpy / last.set),
        "ucx_gib_s": _rounded(last.speed(near.ours if near else None)),
        "raw_ucx_gib_s": _rounded(last.speed(near.bare if near else None)),
        "grpc_gib_s": _rounded(grpc),
    }


def _rounds(size: int) -> int:
    """Return the number of rounds: small states are fast and vary by a third; the largest take long
    and vary less. Odd, so that the median is a measured value."""
    return 101 if size <= 64 * MIB else 13 if size <= TCP_BYTES else 7


def _by_mib(rows: list[Row], rest: Rest) -> dict[str, dict[str, float]]:
    """Return the ratios to bare UCX's speed, by MiB and way, without missing measurements."""
    taken: list[tuple[int, str, Pair | None]]
    taken = [(row.num_bytes, "near", row.near) for row in rows]
    taken += [(row.num_bytes, "tcp", row.tcp) for row in rows]
    taken += [(size, "network", pair) for size, pair in rest.networks.items()]
    found: dict[str, dict[str, float]] = {}
    for size, way, pair in taken:
        if pair is not None:
            found.setdefault(str(size // MIB), {})[way] = round(pair.ratio, 3)
    return found


def _rest(rounds: dict[int, int], where: Path, *, quick: bool) -> Rest:
    why_not = networks.why_not()
    pairs: dict[int, Pair] = {}
    readers = None
    if not why_not:
        readers = networks.four_readers(QUICK_TREE if quick else FULL_TREE, 2, where)
        if not lane.missing():
            for size in sorted({min(size, TCP_BYTES) for size in rounds}):
                count = rounds.get(size, _rounds(size))
                pairs[size] = networks.between_two(size, count, where)
    hidden, layers = QUICK_MODEL if quick else FULL_MODEL
    swapped = swap.exposed(hidden, layers, 2 if quick else 5, where)
    missing = f"no network namespaces: {why_not}" if why_not else ""
    return Rest(pairs, readers, swapped, missing or lane.missing())


def _table(rows: list[Row]) -> Table:
    table = Table(title="GiB/s (of UCX and bare UCX medians, else the best of the rounds)")
    table.add_column("")
    for row in rows:
        table.add_column(f"{row.num_bytes // MIB} MiB", justify="right")
    speeds: dict[str, list[float | None]] = {
        "memcpy": [r.memcpy for r in rows],
        "checksum (xxh3-128)": [r.checksum for r in rows],
        "set (checksum and copy), first version": [r.set_fresh for r in rows],
        "set, later versions": [r.set for r in rows],
        "get, shared memory, verified by the reader": [r.get_shared_verified for r in rows],
        "get, two processes, UCX shared memory, verified": [
            r.near.ours if r.near else None for r in rows
        ],
        "bare UCX shared memory, nothing verified": [r.near.bare if r.near else None for r in rows],
        "get, two processes, UCX TCP, verified": [r.tcp.ours if r.tcp else None for r in rows],
        "bare UCX TCP, nothing verified": [r.tcp.bare if r.tcp else None for r in rows],
        "get, two processes, gRPC, verified": [r.grpc for r in rows],
    }
    for name, values in speeds.items():
        shown = [r.speed(v) for r, v in zip(rows, values, strict=True)]
        table.add_row(name, *("not measured" if v is None else f"{v:.2f}" for v in shown))
    for name, pairs in (("shared memory", [r.near for r in rows]), ("TCP", [r.tcp for r in rows])):
        turns = [_turns(pair) for pair in pairs]
        table.add_row(f"UCX {name} over bare UCX in one turn: median, least, most", *turns)
    table.add_row("get in process, ms", *(f"{r.get_in_process * 1e3:.2f}" for r in rows))
    table.add_row("get shared, not verified, ms", *(f"{r.get_shared * 1e3:.2f}" for r in rows))
    table.add_row("reader's copies / state", *(f"{r.copied_fraction:.4f}" for r in rows))
    table.add_row(
        "four readers of one host / one, each version new",
        *(f"{r.four_readers / r.one_reader:.2f}" for r in rows),
    )
    return table


def _turns(pair: Pair | None) -> str:
    if pair is None:
        return "not measured"
    return f"{pair.ratio:.2f} ({min(pair.ratios):.2f} to {max(pair.ratios):.2f})"


def _rest_table(rest: Rest) -> Table:
    table = Table(title=rest.missing or None)
    table.add_column("")
    table.add_column("", justify="right")
    for size, pair in rest.networks.items():
        table.add_row(f"two network namespaces over bare UCX, {size // MIB} MiB", _turns(pair))
        table.add_row("the same, not verified", f"{pair.unverified or 0:.2f}")
    if rest.readers is not None:
        one, four = rest.readers
        link = f"{networks.LINK_MBIT} Mbit/s links"
        table.add_row(f"one host, {link}, s", f"{one:.2f}")
        table.add_row(f"four hosts at once, {link}, s", f"{four:.2f}")
    exposed, moved, num_bytes = rest.swap
    table.add_row(
        f"engine's update of {num_bytes / MIB:.0f} MiB, exposed, ms", f"{exposed * 1e3:.1f}"
    )
    table.add_row("its transfer while the engine serves, ms", f"{moved * 1e3:.1f}")
    return table


def _when() -> dict[str, Any]:
    return {
        "load": round(os.getloadavg()[0], 1),
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
    }


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 3)


if __name__ == "__main__":
    run_program(main)
