"""What the benchmarks' commands share: options, the machine they ran on, quantiles, ends."""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, Final, NoReturn

from troupe.disks import Scratch
from troupe.processes.ending import stop_process

_END_SECONDS: Final = 20.0
_ENDING: Final = (signal.SIGTERM, signal.SIGHUP)


def options_of(
    doc: str | None,
    arguments: Sequence[str] | None,
    *,
    parts: Sequence[str] = (),
    flags: Mapping[str, str] | None = None,
) -> argparse.Namespace:
    """`quick` and `json`, as `arguments` or the command line say; `doc` is the module's.

    With `parts`, what can be run alone, `only` is the one that is asked for, or None. `flags`: what
    else can be asked for, by name, and its help.
    """
    parser = argparse.ArgumentParser(description=(doc or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a smoke run, not a measurement")
    parser.add_argument("--json", action="store_true", help="print the JSON object only")
    if parts:
        parser.add_argument("--only", choices=parts, help="a part of it")
    for name, said in (flags or {}).items():
        parser.add_argument(f"--{name}", action="store_true", help=said)
    return parser.parse_args(arguments)


def run_program(main: Callable[[], None]) -> NoReturn:
    """Run a benchmark's `main` as this process' program, and exit with 0 when it returns.

    SIGTERM and SIGHUP interrupt it as Ctrl-C does, so that the services and the Redis that it
    started end with it.
    """
    received: list[int] = []

    def interrupt(number: int, _: FrameType | None) -> None:
        for one in _ENDING:  # another would interrupt what this one ends
            signal.signal(one, signal.SIG_IGN)
        received.append(number)
        # An event loop that runs now cancels its main task: an exception that is raised here may
        # come between its callbacks, and what awaits the interrupted one would wait for ever.
        signal.raise_signal(signal.SIGINT)

    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
    for one in _ENDING:
        if signal.getsignal(one) != signal.SIG_IGN:  # as nohup has it
            signal.signal(one, interrupt)
    try:
        main()
    except KeyboardInterrupt:
        raise SystemExit(128 + (received or [signal.SIGINT])[0]) from None
    raise SystemExit(0)


def progress(text: str) -> None:
    """Print a line for users who wait, apart from the benchmark's results."""
    print(text, file=sys.stderr, flush=True)


def machine() -> dict[str, str]:
    """Cores and CPU, and the instruction sets that torch's own kernels and oneDNN's compute with:
    the same code is several times slower, and rounds otherwise, with another one."""
    from torch.backends.cpu import get_cpu_capability

    return {
        "machine": f"{os.cpu_count()} cores, {platform.machine()}, {_cpu_name()}",
        # As ATEN_CPU_CAPABILITY names it, which may ask for less than the CPU has.
        "cpu_capability": get_cpu_capability(),
        "onednn_max_cpu_isa": os.environ.get("ONEDNN_MAX_CPU_ISA", "default"),
    }


def finish(found: Mapping[str, Any], *, quiet: bool) -> None:
    """End a benchmark: a line about the machine below its tables, unless `quiet`, and one JSON
    object that says the same beside what was `found`."""
    about = machine()
    if not quiet:
        print(
            f"{about['machine']}; torch computes with {about['cpu_capability']}, "
            f"oneDNN up to {about['onednn_max_cpu_isa']}"
        )
    print(json.dumps({**found, **about}), flush=True)


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:  # not Linux
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or "unknown CPU")


def scratch() -> Scratch:
    """A directory in memory where there is one, else on disk; what killed benchmarks left of
    theirs goes now.

    A job writes its state and rows through to the disk, and a peer that it is measured against
    nothing: what other work does to the disk would be measured as ours.
    """
    return Scratch("troupe-bench-")


def quantile(values: Sequence[float], q: float) -> float:
    """The value below which the fraction `q` of `values` lies; never beyond the largest."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(q * len(ordered)))]


def end(process: subprocess.Popen[Any]) -> None:
    """Stop a process that the benchmark has started."""
    stop_process(process, _END_SECONDS)
