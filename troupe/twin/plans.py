"""A plan as values: what `troupe plan --json` prints and the panel draws.

As a program (`python -m troupe.twin.plans`) it reads a request as JSON and writes the plan, or the
problem, so that a service can plan in a separate process and end it.
"""

from __future__ import annotations

import json
import re
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, Final

from troupe.devices import Device, parse_devices
from troupe.job import JobSpec, JobSpecError, parse_job
from troupe.rpc import InvalidArgument, TroupeError
from troupe.twin.cluster import TwinRun, TwinSpan
from troupe.twin.costs import GIB, device_costs
from troupe.twin.planner import Habits, JobPlan, Prediction, plan_job
from troupe.twin.profile import JobProfile

# Lanes of each kind in a picture: further lanes look the same.
_LANES: Final = 16
# Busy spans closer to each other than this fraction of a picture are drawn as one.
_GAP: Final = 1 / 400
# Devices written without their memory: 8xH100, H100.
_CLASS_ONLY: Final = re.compile(r"(?:\d{1,6}x)?(?P<name>[A-Za-z][\w.]*)", re.ASCII)


def plan_devices(text: str, field: str) -> tuple[Device, ...]:
    """Return the devices that `text` describes, like `parse_devices`. Devices of a class that the
    cost model knows may be written without their memory (8xH100) and then have the usual one.

    Raises InvalidArgument that names `field`, also for an unknown class without memory.
    """
    parts = []
    for part in text.split("+"):
        if (alone := _CLASS_ONLY.fullmatch(part.strip())) is not None:
            usual = device_costs(alone["name"], field=field).memory
            part = f"{part.strip()}-{usual // GIB}GB"
        parts.append(part)
    return parse_devices("+".join(parts), field)


def planned(
    spec: JobSpec,
    devices: Sequence[Device],
    *,
    hosts: int = 1,
    habits: Mapping[str, float] | None = None,
    profile: JobProfile | None = None,
    tflops: float = 0.0,
    gigabytes_per_second: float = 0.0,
    picture: bool = False,
) -> JobPlan:
    """Return the plan of a job on devices of one class; `habits` are fields of `Habits`."""
    some = devices[0]
    costs = device_costs(
        some.device_class,
        memory=some.memory,
        tflops=tflops,
        gigabytes_per_second=gigabytes_per_second,
    )
    return plan_job(
        spec,
        devices,
        costs,
        hosts=hosts,
        habits=Habits(**(habits or {})),
        profile=profile,
        picture=picture,
    )


def assignments(spec: JobSpec, best: Prediction) -> list[str]:
    """Return the fields of the job that set this split, in the form of `--set`. A population's
    slots have none: it adds them, each with one engine."""
    changes = []
    for name, one in best.split.policies.items():
        if name in spec.slots:
            continue
        section = f"policies.{name}"
        changes.append(f"{section}.engine.replicas={one.engines}")
        if spec.policies[name].engine.is_server:
            changes.append(f"{section}.engine.tensor_parallel={one.tensor_parallel}")
        if one.gang:
            changes.append(f"{section}.trainer.gang={one.gang}")
    return changes


def plan_values(spec: JobSpec, found: JobPlan, hosts: int) -> dict[str, Any]:
    """Return a plan as JSON values."""
    values = {
        "best": _prediction_values(found.best),
        "others": [_prediction_values(one) for one in alternatives(found)],
        "considered": found.considered,
        "hosts": hosts,
        "seconds_with_one_more_host": found.more_seconds,
        "shared": list(found.shared),
        "measured": list(found.measured),
        "assumed": list(found.assumed),
        "set": assignments(spec, found.best),
    }
    return values if found.run is None else values | {"picture": picture_values(found.run)}


def alternatives(found: JobPlan) -> list[Prediction]:
    """Return the other splits, without those that people would write like a faster one: with the
    same devices, engines and gangs of each policy."""
    seen = {_written(found.best)}
    different = []
    for one in found.others:
        if (written := _written(one)) not in seen:
            seen.add(written)
            different.append(one)
    return different


def _written(one: Prediction) -> tuple[Any, ...]:
    policies = one.split.policies.items()
    parts = [(name, p.engines, p.tensor_parallel, p.gang) for name, p in policies]
    return one.split.devices, one.split.engine_hosts, *parts


def _prediction_values(one: Prediction) -> dict[str, Any]:
    means = one.means
    return {
        "seconds_per_step": round(means.seconds, 3),
        "engine_hosts": one.split.engine_hosts,
        "training_hosts": one.split.training_hosts,
        "engine_devices": one.split.devices[0],
        "training_devices": one.split.devices[1],
        "engines_busy": round(means.engines, 3),
        "trainers_busy": round(means.trainers, 3),
        "response_tokens_per_second": round(means.response_tokens_per_second, 1),
        "bottleneck": one.bottleneck,
        "policies": {
            name: {
                "replicas": p.engines,
                "shares_engines_of": p.shares,
                "tensor_parallel": p.tensor_parallel,
                "gang": p.gang,
                "turns_at_once": p.engine_turns,
                "trainer_bytes": p.trainer_bytes,
            }
            for name, p in one.split.policies.items()
        },
    }


def picture_values(run: TwinRun) -> dict[str, Any]:
    """Return the busy spans of engines and trainers in the steps of a trial that the prediction is
    the mean of (all but the first), in seconds from their start: the policy and the times of each
    lane, and `ends`, when each step ended. Lanes beyond `_LANES` of a kind are only counted."""
    start = run.steps[0].at
    ends = [round(one.at - start, 3) for one in run.steps[1:]]
    seconds = run.steps[-1].at - start
    lanes, hidden = [], 0
    for kind, spans in (("engine", run.engine_spans), ("trainer", run.trainer_spans)):
        by_lane: defaultdict[str, list[TwinSpan]] = defaultdict(list)
        for span in spans:
            if span[3] > start and span[2] < start + seconds:
                by_lane[span[0]].append(span)
        names = sorted(by_lane)
        hidden += max(0, len(names) - _LANES)
        for name in names[:_LANES]:
            busy = _merged(by_lane[name], start, seconds)
            lanes.append({"kind": kind, "lane": name, "busy": busy})
    return {"seconds": round(seconds, 3), "ends": ends, "lanes": lanes, "hidden_lanes": hidden}


def _merged(spans: Sequence[TwinSpan], start: float, seconds: float) -> list[list[Any]]:
    """Merge the spans [policy, begin, end] of a lane that have the same policy and touch or nearly
    touch."""
    found: list[list[Any]] = []
    last: dict[str, list[Any]] = {}
    for _, policy, began, end, _ in sorted(spans, key=lambda one: one[2]):
        low, high = max(0.0, began - start), min(seconds, end - start)
        before = last.get(policy)
        if before is not None and low - before[2] <= _GAP * seconds:
            before[2] = round(max(before[2], high), 3)
        else:
            last[policy] = [policy, round(low, 3), round(high, 3)]
            found.append(last[policy])
    return found


def answer(request: Mapping[str, Any]) -> dict[str, Any]:
    """Return the plan of a request: `spec` (YAML or JSON text), `devices` (text for
    `plan_devices`), `hosts`, the fields of `Habits`, `tflops`, `gigabytes_per_second` and `profile`
    (JSON text, or empty)."""
    fields = dict(request)
    spec = parse_job(fields.pop("spec"))
    devices = plan_devices(fields.pop("devices"), "query.devices")
    profile = fields.pop("profile", "")
    hosts, tflops = fields.pop("hosts"), fields.pop("tflops")
    bandwidth = fields.pop("gigabytes_per_second")
    found = planned(
        spec,
        devices,
        hosts=hosts,
        habits=fields,
        profile=JobProfile.of_json(profile) if profile else None,
        tflops=tflops,
        gigabytes_per_second=bandwidth,
        picture=True,
    )
    return plan_values(spec, found, hosts)


def main() -> None:
    """Answer the request on stdin."""
    problem: dict[str, str | None]
    try:
        print(json.dumps(answer(json.load(sys.stdin))))
        return
    except JobSpecError as error:
        first = error.problems[0]
        problem = {
            "code": InvalidArgument.code.name,
            "kind": InvalidArgument.default_kind,
            "message": first.message,
            "field": first.field,
            "value": first.value or None,
            "remedy": first.remedy,
        }
    except TroupeError as error:
        problem = {
            "code": error.code.name,
            "kind": error.kind,
            "message": error.message,
            "field": error.field,
            "value": error.value,
            "remedy": error.remedy,
        }
    print(json.dumps({"problem": problem}))


if __name__ == "__main__":
    main()
