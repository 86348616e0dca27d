"""`python -m benchmarks.transfer [--quick] [--json]`

States of several sizes within a process, through shared memory, and between two processes through
UCX and gRPC, against memcpy and bare UCX in the same run. The last line of stdout is the JSON
object. UCX needs `pip install 'troupe[ucx]'`.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import platform
import tempfile
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil
import torch
from rich.console import Console
from rich.table import Table

from benchmarks.transfer.measure import Row, measure
from troupe.transfer.places import default_root

MIB = 2**20
QUICK = ([16 * MIB], 2)
FULL = ([64 * MIB, 1024 * MIB, 4096 * MIB], 3)
NOT_MEASURED = (
    "Not measured: between two network namespaces; several readers of another host (there is no "
    "tree yet); the exposed part of an engine's swap (engines do not use peers yet)."
)


def main() -> None:
    """Run it all."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.transfer", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one small state")
    parser.add_argument("--max-mib", type=int, default=4096, help="leave larger states out")
    parser.add_argument("--json", action="store_true", help="print nothing but the JSON object")
    args = parser.parse_args()
    console = Console(stderr=args.json, width=None if args.json else 120)
    torch.set_num_threads(1)
    # Through gRPC on purpose: its warnings would fill the screen.
    logging.getLogger("troupe.transfer").setLevel(logging.ERROR)
    sizes, rounds = QUICK if args.quick else FULL
    sizes = [size for size in sizes if size <= args.max_mib * MIB]
    # Beside the place of real states: in shared memory where there is some.
    with tempfile.TemporaryDirectory(prefix="troupe-bench-", dir=default_root().parent) as where:
        rows = [measure(size, rounds, Path(where)) for size in sizes]
    console.print(_table(rows))
    console.print(NOT_MEASURED)
    print(json.dumps(as_json(rows) | {"quick": args.quick} | _machine()))


def as_json(rows: list[Row]) -> dict[str, Any]:
    """The keys that the largest state decides; null for what was not measured."""
    last = rows[-1]
    ratio = last.raw_ucx / last.ucx if last.ucx and last.raw_ucx else None
    return {
        "ucx_ratio": _rounded(ratio),
        "shm_zero_copy": last.copied_fraction < 0.05,
        "four_readers_ratio": _rounded(last.four_readers / last.one_reader),
        "exposed_fraction": None,
        "checksum_gib_s": _rounded(last.speed(last.checksum)),
        "memcpy_gib_s": _rounded(last.speed(last.memcpy)),
        "ucx_gib_s": _rounded(last.speed(last.ucx)),
        "raw_ucx_gib_s": _rounded(last.speed(last.raw_ucx)),
        "grpc_gib_s": _rounded(last.speed(last.grpc)),
    }


def _table(rows: list[Row]) -> Table:
    table = Table(title="GiB/s (best of the rounds); a get without a copy takes microseconds")
    table.add_column("")
    for row in rows:
        table.add_column(f"{row.num_bytes // MIB} MiB", justify="right")
    speeds = {
        "memcpy": [r.speed(r.memcpy) for r in rows],
        "checksum (xxh3-128)": [r.speed(r.checksum) for r in rows],
        "set (checksum and copy)": [r.speed(r.set) for r in rows],
        "get, shared memory, verified": [r.speed(r.get_shared_verified) for r in rows],
        "get, two processes, UCX, verified": [r.speed(r.ucx) for r in rows],
        "bare UCX, nothing verified": [r.speed(r.raw_ucx) for r in rows],
        "get, two processes, gRPC, verified": [r.speed(r.grpc) for r in rows],
    }
    for name, values in speeds.items():
        table.add_row(name, *("not installed" if v is None else f"{v:.2f}" for v in values))
    table.add_row("get in process, ms", *(f"{r.get_in_process * 1e3:.2f}" for r in rows))
    table.add_row("get shared, not verified, ms", *(f"{r.get_shared * 1e3:.2f}" for r in rows))
    table.add_row("reader's copies / state", *(f"{r.copied_fraction:.4f}" for r in rows))
    table.add_row(
        "four readers of shared memory / one",
        *(f"{r.four_readers / r.one_reader:.2f}" for r in rows),
    )
    return table


def _machine() -> dict[str, Any]:
    return {
        "machine": f"{psutil.cpu_count()} cores, {platform.machine()}",
        "load": round(os.getloadavg()[0], 1),
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
    }


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 3)


if __name__ == "__main__":
    main()
