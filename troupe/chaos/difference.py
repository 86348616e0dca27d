"""Where two runs of one job part: `python -m troupe.chaos.difference A.json B.json`."""

from __future__ import annotations

import sys
from itertools import zip_longest
from pathlib import Path

from troupe.chaos.transcript import StepRecord, Transcript

# Metrics that tell how long something took differ between any two runs.
_TIMES = ("seconds", "tokens_per_second", "staleness_seconds", "_ms", "utilization")
_SHOWN = 5


def differences(a: Transcript, b: Transcript) -> list[str]:
    """For every policy the first step at which the runs part, and in what; empty when in none."""
    found: list[str] = []
    for policy in sorted({*a.policies, *b.policies}):
        pairs = zip_longest(a.policies.get(policy, []), b.policies.get(policy, []))
        for one, other in pairs:
            parted = _parted(one, other)
            if parted:
                step = (one or other).step
                found.append(f"{policy}, step {step}: {'; '.join(parted)}")
                found += _metrics(a, b, step)
                break
    return found


def _parted(one: StepRecord | None, other: StepRecord | None) -> list[str]:
    if one is None or other is None:
        return ["only one of the runs has it"]
    parted: list[str] = []
    if (one.outcome, one.version) != (other.outcome, other.version):
        parted.append(
            f"{one.outcome or 'first'} version {one.version}, "
            f"{other.outcome or 'first'} version {other.version}"
        )
    if one.samples != other.samples:
        parted.append(_samples(one.samples, other.samples))
    elif one.samples_digest != other.samples_digest:
        parted.append(
            "the same samples in the log, yet the trainers accumulated different ones "
            f"(digests {one.samples_digest}, {other.samples_digest})"
        )
    if one.checksum != other.checksum and not parted:
        logged = one.samples or one.samples_digest is not None
        whence = (
            "samples of the same ids: their contents or the arithmetic differ"
            if logged
            else "samples that no log tells of"
            if one.version
            else "the same model"
        )
        parted.append(f"other weights ({one.checksum[:12]}, {other.checksum[:12]}) from {whence}")
    if parted:
        parted += _numbers(one.metrics, other.metrics)
    return parted


def _samples(one: dict[str, str], other: dict[str, str]) -> str:
    parts: list[str] = []
    for name, only in (("first", one.keys() - other.keys()), ("second", other.keys() - one.keys())):
        if only:
            parts.append(f"{len(only)} samples only in the {name} run ({_some(sorted(only))})")
    fates = [
        f"{sample} {one[sample]} / {other[sample]}"
        for sample in sorted(one.keys() & other.keys())
        if one[sample] != other[sample]
    ]
    if fates:
        parts.append(f"{len(fates)} with another fate ({_some(fates)})")
    return ", ".join(parts)


def _numbers(one: dict[str, float], other: dict[str, float]) -> list[str]:
    changed = [
        f"{name} {one.get(name)!r} / {other.get(name)!r}"
        for name in sorted({*one, *other})
        if one.get(name) != other.get(name) and not any(part in name for part in _TIMES)
    ]
    return [f"metrics: {_some(changed)}"] if changed else []


def _metrics(a: Transcript, b: Transcript, step: int) -> list[str]:
    changed = _numbers(a.metrics.get(step, {}), b.metrics.get(step, {}))
    return [f"  the job's {changed[0]}"] if changed else []


def _some(parts: list[str]) -> str:
    more = f" and {len(parts) - _SHOWN} more" if len(parts) > _SHOWN else ""
    return ", ".join(parts[:_SHOWN]) + more


def main() -> int:
    """Print the differences of two transcripts; the exit status is 1 when there are any."""
    if len(sys.argv) != 3:
        print(__doc__, file=sys.stderr)
        return 2
    one, other = (Transcript.load(Path(argument)) for argument in sys.argv[1:])
    found = differences(one, other)
    for line in [*one.gaps, *other.gaps, *found]:
        print(line)
    if not found:
        print("the runs agree in every step")
    return 1 if found else 0


if __name__ == "__main__":
    raise SystemExit(main())
