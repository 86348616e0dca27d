"""Shared parts of the benchmarks' commands: options, machine, quantiles, ends."""

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
    """Return `quick` and `json` from `arguments` or the command line; `doc`: the module's
    docstring.

    With `parts`, which can be run alone, `only` is the requested part, or None. `flags`: names of
    further options, with their help.
    """
    parser = argparse.ArgumentParser(description=(doc or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a smoke run, not a measurement")
    parser.add_argument("--json", action="store_true", help="print the JSON object only")
    if parts:
        parser.add_argument("--only", choices=parts, help="run only this part")
    for name, said in (flags or {}).items():
        parser.add_argument(f"--{name}", action="store_true", help=said)
    return parser.parse_args(arguments)


def run_program(main: Callable[[], None]) -> NoReturn:
    """Run a benchmark's `main` as this process's program, and exit with 0 when it returns.

    SIGTERM and SIGHUP interrupt it like Ctrl-C, so that the services and the Redis that it started
    end with it.
    """
    received: list[int] = []

    def interrupt(number: int, _: FrameType | None) -> None:
        for one in _ENDING:  # another signal would interrupt the cleanup
            signal.signal(one, signal.SIG_IGN)
        received.append(number)
        # A running event loop cancels its main task instead: an exception raised here might come
        # between its callbacks, and a task that awaits the interrupted one would wait forever.
        signal.raise_signal(signal.SIGINT)

    # A shell's background job ignores SIGINT.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for one in _ENDING:
        if signal.getsignal(one) != signal.SIG_IGN:  # ignored under nohup
            signal.signal(one, interrupt)
    try:
        main()
    except KeyboardInterrupt:
        raise SystemExit(128 + (received or [signal.SIGINT])[0]) from None
    raise SystemExit(0)


def progress(text: str) -> None:
    """Print a progress line, separate from the benchmark's results."""
    print(text, file=sys.stderr, flush=True)


def machine() -> dict[str, str]:
    """Return cores, CPU, and the instruction sets of torch's own kernels and of oneDNN: the same
    code is several times slower, and rounds differently, with another one."""
    from torch.backends.cpu import get_cpu_capability

    return {
        "machine": f"{os.cpu_count()} cores, {platform.machine()}, {_cpu_name()}",
        # As named by ATEN_CPU_CAPABILITY, which may be below the CPU's capability.
        "cpu_capability": get_cpu_capability(),
        "onednn_max_cpu_isa": os.environ.get("ONEDNN_MAX_CPU_ISA", "default"),
    }


def finish(found: Mapping[str, Any], *, quiet: bool) -> None:
    """End a benchmark: a line about the machine below its tables, unless `quiet`, and one JSON
    object with the same information and `found`."""
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
    """Return a directory in memory if there is one, else on disk; remove the directories of killed
    benchmarks.

    A job writes its state and rows to the disk, and a peer in a comparison writes nothing: other
    programs' disk load would count against Troupe.
    """
    return Scratch("troupe-bench-")


def quantile(values: Sequence[float], q: float) -> float:
    """Return the value below which the fraction `q` of `values` lies, at most the largest."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(q * len(ordered)))]


def end(process: subprocess.Popen[Any]) -> None:
    """Stop a process that the benchmark has started."""
    stop_process(process, _END_SECONDS)
