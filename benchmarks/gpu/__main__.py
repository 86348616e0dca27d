"""Benchmarks that need a GPU, part by part; each part reports when it ends.

    python -m benchmarks.gpu acceptance [--minutes 12] [--json]
    python -m benchmarks.gpu figures [--minutes 120] [--json] [--only PART ...]

`acceptance`: whether Troupe works on this machine, in order of worth, within the given time.
`figures`: all that is compared on a GPU: updates with and without torch.compile, liger-kernel and
moments in host memory; copies against the link; ways of weights; `benchmarks.swap` and
`benchmarks.transfer`. docs/benchmarks/gpu.md says what each part proves.

Each part is a process of its own with a deadline that fits what is left of the time; one that fails
or hangs ends with everything it has started, and the next one begins. After each part comes a table
of all parts so far and a line of JSON about this one; the last line has them all. The exit status
is 1 if a part failed. Without a GPU the parts take the CPU and tiny models: that tries the command
out, and measures nothing.
"""

from __future__ import annotations

import argparse
import json
import math
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from textwrap import shorten
from typing import Any, Final

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from benchmarks.command import finish, run_program
from benchmarks.gpu.parts import Outcome, Part, Status, run_all
from troupe.devices import find_devices

_UPDATE: Final = "benchmarks.gpu.update"
_WEIGHTS: Final = ("benchmarks.gpu.weights", "--way")
_JOB: Final = ("benchmarks.gpu.readme_job", "--devices")
_SWAP: Final = ("benchmarks.swap", "--json")
_LARGE: Final = ("--model", "Qwen3-4B")
_OFFLOAD: Final = ("--offload", "optimizer")
_OF_UPDATES: Final = ("mfu", "tokens_per_second", "used_gib", "predicted_gib")
_OF_WEIGHTS: Final = ("engine", "gigabytes", "seconds", "paused_seconds", "mismatch")
_OF_JOBS: Final = ("engines", "devices_used", "step_seconds", "mismatch")


def _update(seconds: float, what: str, *options: str) -> Part:
    return Part((_UPDATE, *options), seconds, f"an update of {what} and its memory", _OF_UPDATES)


def no_server(device: str) -> str:
    """Return why no SGLang server can be launched on this machine; "" if one can."""
    named = any(os.environ.get(name) for name in ("TROUPE_SGLANG_PYTHON", "TROUPE_SGLANG_CPU_DIR"))
    return "" if named else "no SGLang here: set TROUPE_SGLANG_PYTHON"


def no_group(device: str) -> str:
    """Return why trainer and server cannot form a group; "" if they can."""
    if device == "cuda" and len(find_devices()) < 2:
        return no_server(device) or "one GPU: NCCL has one rank per GPU"
    return no_server(device)


PARTS: Final[Mapping[str, Part]] = {
    "doctor": Part(("benchmarks.gpu.doctor",), 20, "what `troupe doctor` finds", ("good",)),
    "weights_in_place": Part(
        (*_WEIGHTS, "in_place"), 90, "an engine starts, serves, takes versions", _OF_WEIGHTS
    ),
    "weights_ipc": Part((*_WEIGHTS, "ipc"), 75, "versions by CUDA IPC", _OF_WEIGHTS, no_server),
    "weights_broadcast": Part(
        (*_WEIGHTS, "broadcast"), 75, "versions by NCCL", _OF_WEIGHTS, no_group
    ),
    "job_colocated": Part(
        (*_JOB, "colocated"), 100, "README's job, taking turns on the devices", _OF_JOBS
    ),
    "job_split": Part((*_JOB, "split"), 100, "README's job, engines and trainers apart", _OF_JOBS),
    "update": _update(45, "Qwen3-0.6B"),
    "update_4b": _update(75, "Qwen3-4B", *_LARGE),
    "suspension": Part(
        (*_SWAP, "--only", "bandwidth"),
        45,
        "a policy leaves its device and comes back",
        ("gigabytes", "suspend_seconds", "resume_seconds", "suspend_gb_s", "resume_gb_s"),
    ),
    "killed_server": Part(
        (*_JOB, "split", "--kill"), 120, "README's job outlives a server", ("recovery_seconds",)
    ),
    "update_plain": _update(60, "Qwen3-0.6B without liger-kernel", "--plain"),
    "update_compiled": _update(150, "Qwen3-0.6B, compiled", "--compile"),
    "update_offloaded": _update(60, "Qwen3-0.6B, moments on the host", *_OFFLOAD),
    "update_4b_compiled": _update(200, "Qwen3-4B, compiled", *_LARGE, "--compile"),
    "update_4b_offloaded": _update(100, "Qwen3-4B, moments on the host", *_LARGE, *_OFFLOAD),
    "copies": Part(("benchmarks.gpu.copies",), 30, "state to the host and back", ("of_link",)),
    "swap": Part(_SWAP, 200, "policies that share devices", ("memcpy_ratio", "utilization")),
    "transfer": Part(
        ("benchmarks.transfer", "--json"), 200, "state between processes, against CUDA IPC"
    ),
}
PLANS: Final[Mapping[str, tuple[str, ...]]] = {
    "acceptance": (
        "doctor",
        "weights_in_place",
        "weights_ipc",
        "weights_broadcast",
        "job_colocated",
        "job_split",
        "update",
        "update_4b",
        "suspension",
        "killed_server",
    ),
    "figures": (
        "update",
        "update_plain",
        "update_compiled",
        "update_offloaded",
        "update_4b",
        "update_4b_compiled",
        "update_4b_offloaded",
        "copies",
        "weights_in_place",
        "weights_ipc",
        "weights_broadcast",
        "swap",
        "transfer",
    ),
}
# Characters of a reason in the table; the JSON has all of it.
_REASON: Final = 300
_MINUTES: Final = {"acceptance": 12.0, "figures": 120.0}
_COLOURS: Final = {Status.PASSED: "green", Status.FAILED: "bold red", Status.SKIPPED: "yellow"}


def table_of(outcomes: Sequence[Outcome]) -> Table:
    """Return what is known so far, for people."""
    table = Table("part", "", "s", "what it shows")
    for one in outcomes:
        shown = {name: one.figures.get(name) for name in PARTS[one.name].shown}
        text = ", ".join(f"{name} {_short(value)}" for name, value in shown.items() if value)
        status = f"[{_COLOURS[one.status]}]{one.status.value}[/]"
        said = (shorten(one.reason, _REASON), text)
        table.add_row(
            one.name, status, f"{one.seconds:.0f}", escape(" | ".join(filter(None, said)))
        )
    return table


def _short(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.3g}" if abs(value) < 1000 else f"{value:,.0f}"
    if isinstance(value, list):
        return str(len(value)) if value and isinstance(value[0], str) else str(value)
    return str(value)


def summary(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Return what the last line says: numbers of parts by status, and all parts."""
    counts = Counter(one.status for one in outcomes)
    return {
        **{status.value: counts[status] for status in Status},
        "parts": {one.name: one.as_json() for one in outcomes},
    }


def main() -> None:
    """Run a plan."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu",
        description=__doc__,
        formatter_class=argparse.RawTextHelpFormatter,
    )
    parser.add_argument("plan", choices=PLANS)
    parser.add_argument("--minutes", type=float, help="for all parts together")
    parser.add_argument("--device", choices=["cuda", "cpu"], default=None)
    parser.add_argument("--quick", action="store_true", help="a smoke run, not a measurement")
    parser.add_argument("--json", action="store_true", help="print lines of JSON only")
    parser.add_argument("--only", nargs="+", choices=PARTS, help="parts, in this order")
    options = parser.parse_args()
    minutes = _MINUTES[options.plan] if options.minutes is None else options.minutes
    if not (math.isfinite(minutes) and minutes > 0):
        parser.error(f"--minutes is {minutes}; give a number above 0")
    devices = find_devices()
    device = options.device or ("cuda" if devices else "cpu")
    names = [one.device_class for one in devices] if device == "cuda" else []
    progress = Console(stderr=True, quiet=options.json)
    shown = Console(quiet=options.json, width=160)
    outcomes: list[Outcome] = []
    parts = {name: PARTS[name] for name in options.only or PLANS[options.plan]}
    common = ("--device", device, *(["--quick"] if options.quick or device == "cpu" else []))
    for outcome in run_all(parts, 60 * minutes, progress, device, common):
        outcomes.append(outcome)
        shown.print(table_of(outcomes))
        print(json.dumps(outcome.as_json()), flush=True)
    about = {"plan": options.plan, "minutes": minutes, "device": device, "devices": names}
    finish(about | summary(outcomes), quiet=options.json)
    if any(one.status is Status.FAILED for one in outcomes):
        raise SystemExit(1)


if __name__ == "__main__":
    run_program(main)
