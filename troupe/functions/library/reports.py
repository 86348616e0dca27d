"""What pytest reports of a run, as numbers and reasons."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final, TypedDict
from xml.etree import ElementTree

_MOST_FAILURES: Final = 20
_MOST_TEXT: Final = 2000
_MOST_BYTES: Final = 16 << 20


class Report(TypedDict):
    """Tests by how they ended; `failures` are {test, message} of the first that did not pass."""

    passed: int
    failed: int
    errors: int
    skipped: int
    failures: list[dict[str, str]]


def read_report(path: Path) -> Report:
    """A JUnit XML file of pytest; all zero where there is none, or none that can be read."""
    report: Report = {"passed": 0, "failed": 0, "errors": 0, "skipped": 0, "failures": []}
    try:
        if path.stat().st_size > _MOST_BYTES:
            return report
        root = ElementTree.parse(path).getroot()
    except (OSError, ElementTree.ParseError):
        return report
    for case in root.iter("testcase"):
        name = f"{case.get('classname', '')}::{case.get('name', '')}"
        outcomes = {child.tag: child for child in case}
        if (bad := outcomes.get("failure")) is not None:
            report["failed"] += 1
        elif (bad := outcomes.get("error")) is not None:
            report["errors"] += 1
        elif "skipped" in outcomes:
            report["skipped"] += 1
        else:
            report["passed"] += 1
        if bad is not None:
            text = (bad.text or bad.get("message") or "")[-_MOST_TEXT:]
            report["failures"].append({"test": name, "message": text})
    del report["failures"][_MOST_FAILURES:]
    return report


def merged(reports: Sequence[Report]) -> Report:
    """The sum of several."""
    return {
        "passed": sum(one["passed"] for one in reports),
        "failed": sum(one["failed"] for one in reports),
        "errors": sum(one["errors"] for one in reports),
        "skipped": sum(one["skipped"] for one in reports),
        "failures": [f for one in reports for f in one["failures"]][:_MOST_FAILURES],
    }
