"""Everything that a GPU is needed for, in one command and one JSON object.

    python -m benchmarks.gpu [--device cuda] [--quick] [--json] [--only PART ...]

`update*`: model FLOP/s utilization and memory of the trainer's update of Qwen3-0.6B and Qwen3-4B,
with and without torch.compile, liger-kernel and moments in host memory. `copies`: device to pinned
host memory and back, against the link. `weights`: from a trainer's device into an SGLang server
(`TROUPE_SGLANG_PYTHON`), by CUDA IPC and NCCL beside host memory. `swap`, `transfer`: those
benchmarks on the device, the latter beside CUDA IPC. Each part is a process of its own; one that
fails is null, and the reason is among `problems`. Without a GPU the parts take the CPU and tiny
models: that tries the command out, and measures nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

import torch
from rich.console import Console

from benchmarks.command import finish

_ROOT: Final = Path(__file__).resolve().parents[2]
# The longest that one part may take: torch.compile of a large model, first of all.
_SECONDS: Final = 900.0
# Name: module and its arguments.
_UPDATE: Final = "benchmarks.gpu.update"
_LARGE: Final = ("--model", "Qwen3-4B")
OWN: Final = {
    "update": [_UPDATE],
    "update_plain": [_UPDATE, "--plain"],
    "update_compiled": [_UPDATE, "--compile"],
    "update_offloaded": [_UPDATE, "--offload", "optimizer"],
    "update_4b": [_UPDATE, *_LARGE],
    "update_4b_compiled": [_UPDATE, *_LARGE, "--compile"],
    "update_4b_offloaded": [_UPDATE, *_LARGE, "--offload", "optimizer"],
    "copies": ["benchmarks.gpu.copies"],
    "weights": ["benchmarks.gpu.weights"],
}
# Benchmarks that run without a GPU too, and have more to say with one.
OTHERS: Final = ("swap", "transfer")


class Failed(Exception):
    """A part has no result; says why."""


def run(arguments: list[str]) -> dict[str, Any]:
    """The last line that a module prints. Raises `Failed`."""
    try:
        done = subprocess.run(
            [sys.executable, "-m", *arguments],
            capture_output=True,
            text=True,
            timeout=_SECONDS,
            check=False,
            cwd=_ROOT,
            env={"OMP_NUM_THREADS": "1", **os.environ},
        )
    except subprocess.TimeoutExpired as error:
        raise Failed(f"took over {_SECONDS:.0f} s") from error
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
        raise Failed(lines[-1])
    try:
        found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    except (IndexError, json.JSONDecodeError) as error:
        raise Failed("its last line is not JSON") from error
    return found


def takes_device(module: str) -> bool:
    """Whether a benchmark has the option."""
    done = subprocess.run(
        [sys.executable, "-m", module, "--help"],
        capture_output=True,
        text=True,
        timeout=_SECONDS,
        check=False,
        cwd=_ROOT,
    )
    return done.returncode == 0 and "--device" in done.stdout


def parts(device: str, quick: bool) -> dict[str, list[str]]:
    """What to run, by name; nothing of `OTHERS` that has no way to a device."""
    common = ["--device", device, *(["--quick"] if quick else [])]
    found = {name: [*arguments, *common] for name, arguments in OWN.items()}
    for name in OTHERS:
        if takes_device(module := f"benchmarks.{name}"):
            found[name] = [module, *common, "--json"]
    return found


def main() -> None:
    """Run all parts, and end with one line of JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", choices=["cuda", "cpu"], default=None)
    parser.add_argument("--quick", action="store_true", help="a smoke run, not a measurement")
    parser.add_argument("--json", action="store_true", help="print the JSON object only")
    parser.add_argument("--only", nargs="+", choices=(*OWN, *OTHERS), help="parts of it")
    options = parser.parse_args()
    console = Console(stderr=True, quiet=options.json)
    device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    name = torch.cuda.get_device_name() if device == "cuda" else "CPU: nothing is measured"
    found: dict[str, Any] = {"device": name}
    problems: dict[str, str] = {}
    chosen = parts(device, options.quick or device == "cpu")
    for part in options.only or (*OWN, *OTHERS):
        found[part] = None
        if part not in chosen:
            problems[part] = "it has no --device"
            continue
        console.print(f"{part} ...")
        try:
            found[part] = run(chosen[part])
        except Failed as error:
            problems[part] = str(error)
        console.print(found[part] or problems[part])
    finish({**found, "problems": problems}, quiet=options.json)


if __name__ == "__main__":
    main()
