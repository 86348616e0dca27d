"""Assessment of the split of a running job's devices, from the measured times of its steps.

Rollout is a closed network: `in_flight` trajectories, each in an engine's batch, in a queue before
it, or waiting for tools. Its throughput follows from Little's law and from an engine's seconds per
token at a given number of concurrent turns (`EngineSpeed`). The measured part of a step that is
neither its tail nor training scales with the throughput that one engine more would give.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Final, NamedTuple

from troupe.twin.profile import EngineSpeed

# Minimum number of measured steps for advice, and number of steps considered.
LEAST_STEPS: Final = 3
MOST_STEPS: Final = 8
# A smaller gain is not worth a device.
_LEAST_GAIN: Final = 0.1
# Standard errors of the mean step that a gain must exceed.
_ERRORS: Final = 2.0
# Fraction of an engine's rate that the throughput may reach.
_FULL: Final = 0.999
IDLE_TRAINERS: Final = "split/trainers_idle"
IDLE_ENGINES: Final = "split/engines_idle"
_GAIN: Final = "split/gain/"
# Changes that would help, but find no free core or device, by what is missing.
_LACKING: Final = {"core": "split/no_core/", "device": "split/no_device/"}


# Between the names of policies that share engines, in the names of changes.
JOINT: Final = "."


@dataclass(frozen=True, slots=True)
class PolicyUse:
    """Use of a policy's engines and trainer in one step."""

    engines: int
    """Its engines; those that it shares with other policies are counted by each of them."""
    limit: int
    """Turns that one engine runs at once."""
    turns: float
    """In the step, like all following fields."""
    read_tokens: float
    drawn_tokens: float
    train_seconds: float = 0.0
    """Forward, backward, optimizer step and publishing; 0: not trained."""
    gang: int = 1


@dataclass(frozen=True, slots=True)
class StepUse:
    """One measured step."""

    seconds: float
    rollout_seconds: float
    trajectories: float
    trajectory_seconds: float
    """Mean seconds, from beginning to end."""
    wait_seconds: float
    """Part of these seconds outside of engines and their queues."""
    policies: Mapping[str, PolicyUse]
    groups: Sequence[tuple[str, ...]] = ()
    """Policies that share engines."""


class _Fleet(NamedTuple):
    """The engines of one policy, or of those that share them, and all turns on these."""

    use: PolicyUse
    speed: EngineSpeed


def split_metrics(
    steps: Sequence[StepUse],
    speeds: Mapping[str, EngineSpeed],
    *,
    mode: str,
    in_flight: int,
    trainers: int,
    lacking: Mapping[str, str] | None = None,
) -> dict[str, float]:
    """Return the idle fractions of engines and trainers, and the fraction by which a step would be
    shorter with one more engine of each policy (`split/gain/engine/P`; `P.Q` of policies that share
    engines), one more trainer (`split/gain/trainer`), or a gang of twice as many devices
    (`split/gain/gang/P`); 0 if that is within noise.

    `trainers`: devices of all trainer workers. `lacking`: changes for which the cluster has no free
    "core" or "device" (`engine/P`, `trainer`, `gang/P`); their gains are `split/no_core/...` and
    `split/no_device/...` instead. Empty before `LEAST_STEPS` steps, and while a policy's engines
    have no measurements.
    """
    steps = list(steps)[-MOST_STEPS:]
    if len(steps) < LEAST_STEPS or any(name not in speeds for name in steps[-1].policies):
        return {}
    mean = _mean_of(steps)
    if mean.seconds <= 0 or trainers < 1:
        return {}
    deviation = math.sqrt(
        sum((one.seconds - mean.seconds) ** 2 for one in steps) / (len(steps) - 1)
    )
    noise = _ERRORS * deviation / math.sqrt(len(steps)) / mean.seconds
    trained = sum(one.train_seconds * one.gang for one in mean.policies.values())
    fleets = _fleets(mean, speeds)
    found = {
        IDLE_TRAINERS: max(0.0, 1 - trained / (trainers * mean.seconds)),
        IDLE_ENGINES: max(0.0, 1 - _engines_busy(mean, fleets.values())),
    }
    window = max(1.0, min(float(in_flight), mean.trajectories))
    rate = _throughput(mean, fleets.values(), window)
    for name, fleet in fleets.items():
        more = fleet._replace(use=replace(fleet.use, engines=fleet.use.engines + 1))
        others = [one for key, one in fleets.items() if key != name]
        faster = rate / max(rate, _throughput(mean, [*others, more], window))
        # The part with full concurrency scales; the longest trajectories stay as long.
        rollout = min(mean.rollout_seconds, mean.seconds)
        full = min(rollout, mean.trajectories * mean.trajectory_seconds / window)
        shorter = rollout - full * (1 - faster)
        found[f"{_GAIN}engine/{name}"] = _gain(mean, mode, trainers, rollout=shorter)
    policies = {name: one for name, one in mean.policies.items() if one.train_seconds > 0}
    if len(policies) > trainers:
        found[f"{_GAIN}trainer"] = _gain(mean, mode, trainers, more_trainers=1)
    else:
        for name, one in policies.items():
            halved = replace(one, train_seconds=one.train_seconds / 2, gang=2 * one.gang)
            wider = replace(mean, policies={**mean.policies, name: halved})
            training = _training(wider, trainers + one.gang)
            if mode == "serial":
                training = sum(one.train_seconds for one in wider.policies.values())
            found[f"{_GAIN}gang/{name}"] = _gain(mean, mode, trainers, training=training)
    least = max(_LEAST_GAIN, noise)
    metrics = {}
    for name, value in found.items():
        if not name.startswith(_GAIN):
            metrics[name] = value
            continue
        change = name.removeprefix(_GAIN)
        prefix = _LACKING[lacking[change]] if lacking and change in lacking else _GAIN
        metrics[prefix + change] = value if value > least else 0.0
    return metrics


def split_hint(metrics: Mapping[str, float]) -> str:
    """Describe the advice on a job's split in its newest metrics, or what bounds its steps if
    nothing is free for a change; empty if there is neither.

    A job with networks, or whose split is good, has no such metrics or gains of 0.
    """
    if best := _largest(metrics, _GAIN):
        kind, _, policy = best.partition("/")
        idle, what = {
            "engine": (IDLE_TRAINERS, f"one more engine for {_quoted(policy)}"),
            "trainer": (IDLE_ENGINES, "one more trainer worker"),
            "gang": (IDLE_ENGINES, f"a gang of twice as many devices for `{policy}`"),
        }[kind]
        who = "trainers" if idle == IDLE_TRAINERS else "engines"
        return (
            f"{who} idle {metrics.get(idle, 0.0):.0%}: {what} would shorten the step by about "
            f"{metrics[_GAIN + best]:.0%}"
        )
    for missing, prefix in _LACKING.items():
        if best := _largest(metrics, prefix):
            kind, _, policy = best.partition("/")
            who = {
                "engine": f"the engines of {_quoted(policy)}",
                "trainer": "a trainer worker",
                "gang": f"the trainer of `{policy}`",
            }[kind]
            return f"steps wait for {who}, and no {missing} is free for more"
    return ""


def _quoted(policies: str) -> str:
    """Return names of policies that share engines, for people: "`solver` and `critic`"."""
    *others, last = (f"`{name}`" for name in policies.split(JOINT))
    return f"{', '.join(others)} and {last}" if others else last


def _largest(metrics: Mapping[str, float], prefix: str) -> str:
    """Return the change with the largest gain among the metrics of a prefix; empty if none is
    above 0."""
    gains = {name: value for name, value in metrics.items() if name.startswith(prefix)}
    best = max(gains, key=lambda name: (gains[name], name), default="")
    return best.removeprefix(prefix) if best and gains[best] > 0 else ""


def _mean_of(steps: Sequence[StepUse]) -> StepUse:
    """Return the mean of the steps; engines, limits and gangs come from the newest."""
    count = len(steps)

    def mean(name: str) -> float:
        return float(sum(getattr(one, name) for one in steps)) / count

    policies = {}
    for name, newest in steps[-1].policies.items():
        same = [one.policies.get(name, newest) for one in steps]
        policies[name] = replace(
            newest,
            turns=sum(one.turns for one in same) / count,
            read_tokens=sum(one.read_tokens for one in same) / count,
            drawn_tokens=sum(one.drawn_tokens for one in same) / count,
            train_seconds=sum(one.train_seconds for one in same) / count,
        )
    return StepUse(
        mean("seconds"),
        mean("rollout_seconds"),
        mean("trajectories"),
        mean("trajectory_seconds"),
        mean("wait_seconds"),
        policies,
        steps[-1].groups,
    )


def _fleets(step: StepUse, speeds: Mapping[str, EngineSpeed]) -> dict[str, _Fleet]:
    """Return the engines of each policy by its name, or by the names of those that share them."""
    together: dict[str, list[_Fleet]] = {}
    for name, one in step.policies.items():
        group = next((group for group in step.groups if name in group), (name,))
        together.setdefault(JOINT.join(group), []).append(_Fleet(one, speeds[name]))
    return {key: _joint(some) for key, some in together.items()}


def _joint(fleets: Sequence[_Fleet]) -> _Fleet:
    """Return the engines that policies share, with the turns of all. Their speed is the mean of
    what each policy measured, weighted by its tokens."""
    if len(fleets) == 1:
        return fleets[0]
    total = sum(one.use.drawn_tokens for one in fleets) or 1.0

    def mean(name: str) -> float:
        weighted = (one.use.drawn_tokens * getattr(one.speed, name) for one in fleets)
        return float(sum(weighted)) / total

    return _Fleet(
        replace(
            fleets[0].use,
            engines=max(one.use.engines for one in fleets),
            turns=sum(one.use.turns for one in fleets),
            read_tokens=sum(one.use.read_tokens for one in fleets),
            drawn_tokens=sum(one.use.drawn_tokens for one in fleets),
        ),
        EngineSpeed(*(mean(field.name) for field in fields(EngineSpeed))),
    )


def _engines_busy(step: StepUse, fleets: Collection[_Fleet]) -> float:
    """Return the fraction of the step in which engines computed, over all engines."""
    busy = 0.0
    for one, speed in fleets:
        concurrency = max(1.0, min(speed.concurrency, one.limit))
        each = speed.step_seconds(concurrency) / concurrency
        busy += one.drawn_tokens * each + one.read_tokens * speed.read_seconds
    return busy / max(1, sum(one.engines for one, _ in fleets)) / step.seconds


def _throughput(step: StepUse, fleets: Collection[_Fleet], window: float) -> float:
    """Return the trajectories per second with `window` of them in flight."""
    low, high = 0.0, math.inf
    for one, speed in fleets:
        high = min(high, _capacity(step, one, speed))
    if not math.isfinite(high):
        return window / max(step.wait_seconds, 1e-9)
    high *= _FULL
    if high * _seconds(step, fleets, high) <= window:
        return high
    for _ in range(60):
        middle = (low + high) / 2
        if middle * _seconds(step, fleets, middle) <= window:
            low = middle
        else:
            high = middle
    return low


def _capacity(step: StepUse, one: PolicyUse, speed: EngineSpeed) -> float:
    """Return the maximum trajectories per second that a fleet can serve, with full batches."""
    if step.trajectories <= 0 or one.engines < 1:
        return 0.0
    each = speed.step_seconds(one.limit) / one.limit
    work = (one.drawn_tokens * each + one.read_tokens * speed.read_seconds) / step.trajectories
    return one.engines / work if work > 0 else math.inf


def _seconds(step: StepUse, fleets: Collection[_Fleet], rate: float) -> float:
    """Return the seconds of a trajectory if `rate` of them end per second."""
    total = step.wait_seconds
    for one, speed in fleets:
        drawn, read = (x / step.trajectories for x in (one.drawn_tokens, one.read_tokens))
        # The fraction of an engine's time in which it does not read prompts.
        left = max(1e-9, 1 - rate * read * speed.read_seconds / one.engines)
        tokens = rate * drawn / one.engines
        room = left - tokens * speed.decode_seconds_per_turn
        concurrency = tokens * speed.decode_seconds / room if room > 0 else math.inf
        concurrency = max(1.0, min(concurrency, float(one.limit)))
        total += drawn * speed.step_seconds(concurrency) / left + read * speed.read_seconds
    return total


def _training(step: StepUse, trainers: int) -> float:
    """Return the seconds until all policies are trained, the longest first, each with its gang on
    the trainers that become free first."""
    free = [0.0] * max(1, trainers)
    for one in sorted(step.policies.values(), key=lambda one: -one.train_seconds):
        if one.train_seconds > 0:
            free.sort()
            count = min(len(free), max(1, one.gang))
            end = free[count - 1] + one.train_seconds
            free[:count] = [end] * count
    return max(free)


def _gain(
    step: StepUse,
    mode: str,
    trainers: int,
    *,
    rollout: float | None = None,
    more_trainers: int = 0,
    training: float | None = None,
) -> float:
    """Return the fraction by which a step would be shorter with another rollout or other
    trainers."""
    before = min(step.rollout_seconds, step.seconds)
    after = before if rollout is None else rollout
    if mode == "serial":  # one policy after the other, whatever the number of trainers
        trained = wanted = sum(one.train_seconds for one in step.policies.values())
    else:
        trained, wanted = _training(step, trainers), _training(step, trainers + more_trainers)
    wanted = wanted if training is None else training
    if mode in ("serial", "sync"):
        saved = before - after + trained - wanted
    else:
        # The training that was left when the rollout ended shrinks in proportion; a step is never
        # shorter than the training.
        left = (step.seconds - before) * (wanted / trained if trained > 0 else 1.0)
        saved = step.seconds - max(after + left, wanted)
    return max(0.0, min(saved, step.seconds)) / step.seconds
