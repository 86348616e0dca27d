"""What a function may not declare: refused at once, with field, value and remedy."""

from __future__ import annotations

import math
import re
from typing import Final

from services.reward.function import KINDS
from services.reward.sandbox import (
    BUBBLEWRAP,
    CONTAINER,
    LEVELS,
    PROCESS,
    find_bubblewrap,
    unprivileged,
)
from services.reward.sandboxes import landlock
from services.reward.sandboxes.container import find_engine
from troupe.outcomes import NotJsonError, parse_json
from troupe.rpc import FailedPrecondition, InvalidArgument
from troupe.v1 import reward_pb2 as pb

_ENTRYPOINT: Final = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")
_ARGUMENT: Final = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")
_MOST_ARGUMENTS: Final = 16
_SHA256: Final = re.compile(r"[0-9a-f]{64}")
_MOST_RETRIES: Final = 100
# No machine has as many, and each is looked at for what it would be worth.
_MOST_CORES: Final = 4096
# What Linux has ids for.
_MOST_PROCESSES: Final = 1 << 22
_COUNTS: Final = (
    *("memory_mib", "max_concurrency", "max_queued", "min_workers", "retries"),
    *("cores", "max_cores", "gpus", "quota_units", "processes", "disk_mib"),
)


def check(spec: pb.FunctionSpec) -> None:
    """Raises `InvalidArgument` or `FailedPrecondition` for a field that cannot work anywhere."""

    def refuse(field: str, value: object, message: str, remedy: str) -> None:
        raise InvalidArgument(message, field=f"function.{field}", value=value, remedy=remedy)

    if not spec.name:
        refuse("name", "", "is empty", "Name the function.")
    if not _ENTRYPOINT.fullmatch(spec.entrypoint):
        refuse(
            "entrypoint",
            spec.entrypoint,
            "is not of the form package.module:attribute",
            "Write for example my_project.rewards:exact_match.",
        )
    try:
        schema = parse_json(spec.parameters_json or "{}")
    except NotJsonError as error:
        refuse("parameters_json", None, f"is not JSON: {error}", "Give a JSON schema, or nothing.")
    else:
        if not isinstance(schema, dict):
            refuse("parameters_json", None, "is no JSON object", "Give a JSON schema, or nothing.")
    if not (math.isfinite(spec.timeout_seconds) and spec.timeout_seconds > 0):
        refuse(
            "timeout_seconds",
            spec.timeout_seconds,
            "is not a positive number",
            "Give every function a timeout.",
        )
    if spec.sandbox and spec.sandbox not in LEVELS:
        refuse("sandbox", spec.sandbox, "is no sandbox", f"Known: {', '.join(LEVELS)}.")
    if spec.sandbox == BUBBLEWRAP:
        find_bubblewrap()
        unprivileged()
    if spec.sandbox == CONTAINER:
        if not spec.image:
            refuse("image", "", "is empty", "Name the image that its containers are made of.")
        find_engine()
    if spec.stateful and spec.sandbox in ("", PROCESS):
        refuse(
            "stateful",
            True,
            "is for sandboxes",
            f"Declare `sandbox: {BUBBLEWRAP}`, or `sandbox: {CONTAINER}` with an image.",
        )
    if (spec.reads or spec.writes) and spec.sandbox not in ("", PROCESS):
        refuse(
            "reads" if spec.reads else "writes",
            list(spec.reads or spec.writes),
            f"is for `sandbox: {PROCESS}`; a sandbox reaches no files of the host",
            "Leave it out.",
        )
    if (spec.reads or spec.writes) and not landlock.version():
        raise FailedPrecondition(
            "the kernel where the reward service runs has no landlock",
            kind="no_sandbox",
            field="function.reads" if spec.reads else "function.writes",
            remedy=f"Leave reads and writes out, or declare `sandbox: {BUBBLEWRAP}`.",
        )
    if spec.max_cores and spec.max_cores < spec.cores:
        refuse("max_cores", spec.max_cores, f"less than cores ({spec.cores})", "0 means no more.")
    if spec.max_cores > _MOST_CORES:
        refuse(
            "max_cores",
            spec.max_cores,
            f"is more than {_MOST_CORES:,}",
            "Say how many cores a call can make use of.",
        )
    if spec.processes > _MOST_PROCESSES:
        refuse(
            "processes",
            spec.processes,
            f"is more than {_MOST_PROCESSES:,}",
            "Say how many processes and threads a call needs at once.",
        )
    if not 0 <= spec.parallel_fraction <= 1:
        refuse(
            "parallel_fraction",
            spec.parallel_fraction,
            "is not within 0 .. 1",
            "It is the part of the time that more cores make shorter.",
        )
    if not (math.isfinite(spec.expected_seconds) and spec.expected_seconds >= 0):
        refuse(
            "expected_seconds",
            spec.expected_seconds,
            "is not a number of 0 or more",
            "Say how long a call takes with the fewest cores; 0 where nobody knows.",
        )
    if len(spec.seconds_per) > _MOST_ARGUMENTS:
        refuse(
            "seconds_per",
            sorted(spec.seconds_per),
            f"names more than {_MOST_ARGUMENTS} arguments",
            "Name those that decide how long a call takes.",
        )
    for name, seconds in spec.seconds_per.items():
        if not _ARGUMENT.fullmatch(name):
            refuse("seconds_per", name, "is no argument", 'Write "tests", or "query.data.tests".')
        if not (math.isfinite(seconds) and seconds >= 0):
            refuse(
                f"seconds_per.{name}",
                seconds,
                "is not a number of 0 or more",
                "Say how many seconds each one of it adds.",
            )
    if spec.kind not in KINDS:
        refuse("kind", spec.kind, "is no kind of function", 'Known: "reward" and "tool".')
    if spec.retries > _MOST_RETRIES:
        refuse(
            "retries",
            spec.retries,
            f"is more than {_MOST_RETRIES}",
            "A call that fails so often fails by itself.",
        )
    for name in ("idle_seconds", "sandbox_idle_seconds"):
        value = getattr(spec, name)
        if not (math.isfinite(value) and value >= 0):
            refuse(name, value, "is not a number of 0 or more", "Say how many seconds.")
    if spec.source_sha256 and not _SHA256.fullmatch(spec.source_sha256):
        refuse(
            "source_sha256",
            spec.source_sha256,
            "is no SHA-256 in hexadecimal",
            "Use what UploadSource returned.",
        )
    for name in _COUNTS:
        if getattr(spec, name) < 0:
            refuse(name, getattr(spec, name), "is negative", "0 means no limit.")
