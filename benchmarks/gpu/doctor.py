"""The checks of `troupe doctor` on this host.

A problem there fails here: `python -m benchmarks.gpu.doctor`.
"""

from __future__ import annotations

import argparse
import asyncio

from benchmarks.command import finish, progress, run_program
from troupe.devices import find_devices
from troupe.doctor.examination import examine
from troupe.doctor.findings import Verdict


def main() -> None:
    """Examine the host, and print one line of JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--quick", action="store_true", help="changes nothing here")
    options = parser.parse_args()
    findings = asyncio.run(examine())
    found: dict[str, list[str]] = {"good": [], "note": []}
    problems: dict[str, str] = {}
    for one in findings:
        progress(f"{one.verdict}: {one.subject}: {one.text}")
        if one.verdict is Verdict.PROBLEM:
            problems[one.subject] = " ".join(
                filter(None, (problems.get(one.subject), one.text, one.remedy))
            )
        else:
            found[one.verdict].append(f"{one.subject}: {one.text}")
    if options.device == "cuda" and not find_devices():
        problems.setdefault("devices", "NVIDIA's driver reports none")
    finish({**found, "problems": problems}, quiet=True)


if __name__ == "__main__":
    run_program(main)
