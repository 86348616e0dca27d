"""Everything that a GPU is needed for, in one command and one JSON object.

    python -m benchmarks.gpu [--device cuda] [--quick] [--json] [--only PART ...]

`update*`: model FLOP/s utilization and memory of the trainer's update of Qwen3-0.6B and Qwen3-4B,
with and without torch.compile, liger-kernel and moments in host memory. `copies`: device to pinned
host memory and back, against the link. `weights`: from a trainer's device into an SGLang server
(`TROUPE_SGLANG_PYTHON`), by CUDA IPC and NCCL beside host memory; without SGLang it is null.
`swap`, `transfer`: those benchmarks on the device, the latter beside CUDA IPC. Each part is a
process of its own with a deadline, whose progress is shown; one that fails is null, and the reason
is among `problems`. Without a GPU the parts take the CPU and tiny models: that tries the command
out, and measures nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import threading
import time
from collections import deque
from pathlib import Path
from typing import IO, Any, Final

import torch
from rich.console import Console

from benchmarks.command import end, finish, run_program, scratch

_ROOT: Final = Path(__file__).resolve().parents[2]
# The longest that one part may take: torch.compile of a large model, first of all. `weights` starts
# three servers, each of which may compile its kernels.
_SECONDS: Final = 900.0
_LONGER: Final = {"weights": 2400.0}
# A part that says nothing is said to run still, this often.
_REMINDER_SECONDS: Final = 60.0
_TAIL_LINES: Final = 5
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


def run(arguments: list[str], seconds: float, console: Console) -> dict[str, Any]:
    """The last line that a module prints; what it says on its way is passed on to `console`.

    Raises `Failed` when it fails or takes over `seconds`, after which it is ended.
    """
    tail: deque[str] = deque(maxlen=_TAIL_LINES)
    with scratch() as place:
        out = place / "out"
        with out.open("w") as target:
            process = subprocess.Popen(
                [sys.executable, "-u", "-m", *arguments],
                stdout=target,
                stderr=subprocess.PIPE,
                text=True,
                cwd=_ROOT,
                env={"OMP_NUM_THREADS": "1", **os.environ},
            )
        try:
            assert process.stderr is not None
            follower = threading.Thread(
                target=_follow, args=(process.stderr, tail, console), daemon=True
            )
            follower.start()
            status = _wait(process, seconds, console)
            # A process that it left behind may keep the pipe open.
            follower.join(_REMINDER_SECONDS / 6)
        finally:
            if process.poll() is None:
                end(process)
        if status is None:
            raise Failed(" | ".join((f"took over {seconds:.0f} s", *tail)))
        if status:
            raise Failed(" | ".join(tail) or f"exit status {status}")
        try:
            found: dict[str, Any] = json.loads(out.read_text().strip().splitlines()[-1])
        except (IndexError, json.JSONDecodeError) as error:
            raise Failed("its last line is not JSON") from error
    return found


def _follow(stream: IO[str], tail: deque[str], console: Console) -> None:
    for line in stream:
        if text := line.rstrip():
            tail.append(text)
            console.print(f"  {text}", markup=False, highlight=False, soft_wrap=True)


def _wait(process: subprocess.Popen[str], seconds: float, console: Console) -> int | None:
    """Its exit status; None when it still runs after `seconds`."""
    began = time.monotonic()
    while (passed := time.monotonic() - began) < seconds:
        try:
            return process.wait(min(_REMINDER_SECONDS, seconds - passed))
        except subprocess.TimeoutExpired:
            console.print(f"  runs for {time.monotonic() - began:.0f} s of at most {seconds:.0f}")
    return None


def parts(device: str, quick: bool) -> dict[str, list[str]]:
    """What to run, by name: modules and their arguments."""
    common = ["--device", device, *(["--quick"] if quick else [])]
    own = {name: [*arguments, *common] for name, arguments in OWN.items()}
    others = {name: [f"benchmarks.{name}", *common, "--json"] for name in OTHERS}
    return own | others


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
        console.print(f"{part} ...")
        try:
            found[part] = run(chosen[part], _LONGER.get(part, _SECONDS), console)
            # What a part could not measure of itself.
            ways: dict[str, str] = found[part].pop("problems", {})
            problems |= {f"{part}.{way}": reason for way, reason in ways.items()}
        except Failed as error:
            problems[part] = str(error)
        console.print(found[part] or problems[part])
    finish({**found, "problems": problems}, quiet=options.json)


if __name__ == "__main__":
    run_program(main)
