"""The cost of moving a policy off its device and back, and the gain from sharing devices.

    python -m benchmarks.swap [--quick] [--json] [--device cpu|cuda] [--only bandwidth|sharing]

First a real policy in the middle of a step (weights, both moments, gradients) is suspended into the
transfer layer and resumed, compared with copying its bytes twice in the same run. Then six
**simulated** policies train through all services on two trainers that hold one policy each, and on
six dedicated ones a third as fast: the same total compute. The last line is one JSON object:

- `memcpy_ratio`: time of two copies of its bytes over the time of suspension and resumption, of the
  largest policy, as are `gigabytes`, `suspend_seconds`, `resume_seconds` and GB/s (`suspend_gb_s`,
  `resume_gb_s`);
- `utilization`: of the two trainers, computing time over elapsed time;
- `exposed_fraction`: fraction of the two trainers' time spent on suspensions and resumptions;
- `over_dedicated`: samples per second on two shared trainers over six dedicated ones.
"""

from __future__ import annotations

import argparse
import asyncio
import os
from collections.abc import Sequence
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.command import finish, run_program, scratch
from benchmarks.swap.bandwidth import Bandwidth, measure
from benchmarks.swap.sharing import SHARED, Scale, Sharing, run
from benchmarks.swap.six_players import AGENTS

# Hidden size and layers of the policies: 16, 257 and 1026 MiB of training state in a step.
SIZES = ((256, 1), (512, 4), (1024, 4))
# On a GPU also a 0.5B-class policy, without its vocabulary: 4.6 GiB.
LARGE = (896, 24)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print a table for people and one JSON object."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.swap", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a smoke run, not a measurement")
    parser.add_argument("--json", action="store_true", help="print the JSON object only")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--only", choices=("bandwidth", "sharing"))
    args = parser.parse_args(arguments)
    console = Console(stderr=args.json, width=None if args.json else 120)
    torch.set_num_threads(1)
    found: dict[str, Any] = {"memcpy_ratio": None, "utilization": None, "exposed_fraction": None}
    if args.only != "sharing":
        device = torch.device(args.device)
        sizes = SIZES[:1] if args.quick else (*SIZES, *([LARGE] if device.type == "cuda" else []))
        with scratch() as where:
            rows = [
                measure(*size, 2 if args.quick else 5, device, where / f"{size[0]}")
                for size in sizes
            ]
        console.print(_bandwidths(rows))
        largest = rows[-1]
        found |= {
            "memcpy_ratio": round(largest.ratio, 3),
            "gigabytes": round(largest.num_bytes / 1e9, 3),
            "suspend_seconds": round(largest.suspend_seconds, 4),
            "resume_seconds": round(largest.resume_seconds, 4),
            "suspend_gb_s": round(largest.num_bytes / 1e9 / largest.suspend_seconds, 2),
            "resume_gb_s": round(largest.num_bytes / 1e9 / largest.resume_seconds, 2),
        }
    if args.only != "bandwidth":
        shared, dedicated = asyncio.run(_share(args.quick))
        console.print(_sharing([shared, dedicated]))
        found["utilization"] = round(shared.utilization, 3)
        found["exposed_fraction"] = round(shared.exposed, 4)
        ratio = shared.samples_per_second / dedicated.samples_per_second
        found["over_dedicated"] = round(ratio, 3)
    load, *_ = os.getloadavg()
    how = {"quick": args.quick, "device": args.device, "cores": os.cpu_count()}
    finish(found | how | {"load": round(load, 1)}, quiet=args.json)


async def _share(quick: bool) -> tuple[Sharing, Sharing]:
    scale = (
        Scale(3, queries=4, seconds=0.1, step_seconds=0.05, state_bytes=1 << 20)
        if quick
        else Scale()
    )
    rows = []
    for label, trainers in (("shared, one slot each", SHARED), ("dedicated", len(AGENTS))):
        with scratch() as where:
            rows.append(await run(label, trainers, 1, scale, where))
    return rows[0], rows[1]


def _bandwidths(rows: Sequence[Bandwidth]) -> Table:
    table = Table(title="A policy is moved off its device in the middle of a step, and back")
    for name in ("state MiB", "copy s", "suspend s", "resume s", "of two copies"):
        table.add_column(name, justify="right")
    for row in rows:
        seconds = (row.copy_seconds, row.suspend_seconds, row.resume_seconds)
        cells = [f"{row.num_bytes / 2**20:.0f}", *(f"{one:.4f}" for one in seconds)]
        table.add_row(*cells, f"{row.ratio:.2f}")
    return table


def _sharing(rows: Sequence[Sharing]) -> Table:
    table = Table(title=f"{len(AGENTS)} policies, the same total compute")
    table.add_column("trainers")
    for name in ("n", "step s", "samples/s", "utilization", "exposed swaps", "swaps a step"):
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(
            row.label,
            str(row.trainers),
            f"{row.seconds:.2f}",
            f"{row.samples_per_second:.1f}",
            f"{row.utilization:.1%}",
            f"{row.exposed:.2%}",
            f"{row.swaps:.1f}",
        )
    return table


if __name__ == "__main__":
    run_program(main)
