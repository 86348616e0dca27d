"""The measured profile of a job, bounded in size: its trajectories, waits and speeds.

The orchestrator adds every trajectory and training step and keeps the profile with the job, for
planners (`troupe plan --profile`). The weight of older steps halves every `HALF_LIFE` steps.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple, Self

import numpy as np

from troupe.job import JobSpec
from troupe.rpc import FailedPrecondition, InvalidArgument
from troupe.twin.workload import Replayed, TwinTrajectory, TwinTurn

HALF_LIFE: Final = 8
_DECAY: Final = 0.5 ** (1 / HALF_LIFE)
# Maximum turns of all kept trajectories, and of one of them.
_MOST_TURNS: Final = 4096
_MOST_OF_ONE: Final = 512
_BUCKETS_PER_OCTAVE: Final = 8
# The bucket of values that are 0.
_ZERO: Final = -1000
# Weight of the prior that gives each term of the engines' equations an equal part.
_RIDGE: Final = 1e-3
_FORMAT: Final = 2


class MeasuredTurn(NamedTuple):
    """Turn as reported by a rollout worker. `concurrency`: mean number of turns that its engine
    ran meanwhile, itself included; 0: unknown."""

    agent: str
    policy: str
    prompt: int
    response: int
    cached: int = 0
    queue_seconds: float = 0.0
    generate_seconds: float = 0.0
    concurrency: float = 0.0


@dataclass
class LogHistogram:
    """A distribution of values from 0 up, as counts in buckets that are 9 % wide."""

    count: float = 0.0
    total: float = 0.0
    buckets: dict[int, float] = field(default_factory=dict)

    def add(self, value: float) -> None:
        """Count one value; negative and non-finite values are not counted."""
        if not 0 <= value < math.inf:
            return
        self.count += 1
        self.total += value
        bucket = math.floor(_BUCKETS_PER_OCTAVE * math.log2(value)) if value > 0 else _ZERO
        self.buckets[bucket] = self.buckets.get(bucket, 0.0) + 1

    @property
    def mean(self) -> float:
        """The mean; 0 without values."""
        return self.total / self.count if self.count else 0.0

    def quantile(self, fraction: float) -> float:
        """Return the value that a fraction `fraction` of all values do not exceed, within a
        bucket's width; 0: no values."""
        left = fraction * self.count
        for bucket, count in sorted(self.buckets.items()):
            left -= count
            if left <= 1e-9 * self.count:
                return 0.0 if bucket == _ZERO else 2 ** ((bucket + 0.5) / _BUCKETS_PER_OCTAVE)
        return 0.0

    def fade(self) -> None:
        """Reduce the weight of earlier values; drop buckets with almost no weight."""
        self.count *= _DECAY
        self.total *= _DECAY
        self.buckets = {b: c for b, n in self.buckets.items() if (c := n * _DECAY) >= 0.05}

    def to_values(self) -> dict[str, Any]:
        """Convert to JSON values."""
        buckets = {str(bucket): round(count, 3) for bucket, count in sorted(self.buckets.items())}
        return {"count": round(self.count, 3), "total": self.total, "buckets": buckets}

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Self:
        """Parse the result of `to_values`."""
        buckets = {int(one): float(count) for one, count in values["buckets"].items()}
        return cls(float(values["count"]), float(values["total"]), buckets)


@dataclass(frozen=True, slots=True)
class EngineSpeed:
    """Measured seconds of an engine: per prefilled token, per decoding step, and per decoding step
    and running turn. 0: not distinguishable from the others."""

    read_seconds: float
    decode_seconds: float
    decode_seconds_per_turn: float
    concurrency: float
    """Mean number of turns that ran on it at once."""

    def step_seconds(self, turns: float) -> float:
        """Return the seconds of a decoding step with so many running turns."""
        return self.decode_seconds + self.decode_seconds_per_turn * turns


@dataclass
class EngineTimes:
    """Least squares of `seconds = read * r + tokens * (a + b * concurrency)` over a policy's turns,
    as sums weighted by 1 / seconds, since a turn's deviation grows with its length."""

    products: list[list[float]] = field(default_factory=lambda: [[0.0] * 3 for _ in range(3)])
    sums: list[float] = field(default_factory=lambda: [0.0] * 3)
    concurrency: float = 0.0
    """Sum of concurrent turns, weighted by tokens."""

    def add(self, turn: MeasuredTurn) -> None:
        """Count a turn that has times, tokens and a number of concurrent turns."""
        seconds = turn.generate_seconds
        if not (0 < seconds < math.inf and turn.response > 0 and turn.concurrency > 0):
            return
        terms = (
            float(max(0, turn.prompt - turn.cached)),
            float(turn.response),
            turn.response * turn.concurrency,
        )
        for i, one in enumerate(terms):
            self.sums[i] += one
            for j, other in enumerate(terms):
                self.products[i][j] += one * other / seconds
        self.concurrency += turn.response * turn.concurrency

    def fade(self) -> None:
        """Reduce the weight of earlier turns."""
        self.products = [[_DECAY * one for one in row] for row in self.products]
        self.sums = [_DECAY * one for one in self.sums]
        self.concurrency *= _DECAY

    def speed(self) -> EngineSpeed | None:
        """Return the solution without negative terms that fits best; None before the first turn."""
        if self.sums[1] <= 0:
            return None
        matrix, right = np.array(self.products), np.array(self.sums)
        scale = np.sqrt(np.maximum(np.diag(matrix), 1e-30))
        matrix = matrix / np.outer(scale, scale) + _RIDGE * np.eye(3)
        right = right / scale
        best, found = -math.inf, np.zeros(3)
        for size in (3, 2, 1):
            for chosen in itertools.combinations(range(3), size):
                at = np.array(chosen)
                solution = np.linalg.solve(matrix[np.ix_(at, at)], right[at])
                explained = float(solution @ right[at])
                if (solution >= 0).all() and explained > best + 1e-12:
                    best, found = explained, np.zeros(3)
                    found[at] = solution
        read, step, per_turn = (float(one) for one in found / scale)
        return EngineSpeed(read, step, per_turn, self.concurrency / self.sums[1])


@dataclass
class PolicyTimes:
    """Measured times of a policy's engines and trainer."""

    engine: EngineTimes = field(default_factory=EngineTimes)
    queue_seconds: LogHistogram = field(default_factory=LogHistogram)
    tokens_per_second: LogHistogram = field(default_factory=LogHistogram)
    """Times of single turns."""
    rows: float = 0.0
    """New prompt tokens and drawn tokens of turns, in steps whose training was timed."""
    train_seconds: float = 0.0
    publish_seconds: float = 0.0
    steps: float = 0.0
    # Tokens of the current step.
    pending: float = 0.0

    def add(self, turn: MeasuredTurn) -> None:
        """Count a turn."""
        self.engine.add(turn)
        self.queue_seconds.add(turn.queue_seconds)
        if turn.generate_seconds > 0:
            self.tokens_per_second.add(turn.response / turn.generate_seconds)

    def end_step(self, train_seconds: float, publish_seconds: float) -> None:
        """Count a step's training; 0 seconds: it was not trained."""
        self.engine.fade()
        self.queue_seconds.fade()
        self.tokens_per_second.fade()
        trained = train_seconds > 0 and self.pending > 0
        self.rows = _DECAY * self.rows + (self.pending if trained else 0.0)
        self.train_seconds = _DECAY * self.train_seconds + (train_seconds if trained else 0.0)
        self.publish_seconds = _DECAY * self.publish_seconds + (publish_seconds if trained else 0.0)
        self.steps = _DECAY * self.steps + float(trained)
        self.pending = 0.0

    @property
    def trained_tokens_per_second(self) -> float:
        """Tokens of forward and backward per second, over the whole gang; 0: unknown."""
        return self.rows / self.train_seconds if self.train_seconds > 0 else 0.0


@dataclass
class _KeptQuery:
    """Trajectories of one query: the seconds outside of engines, and the turns, of each."""

    key: float
    turns: int = 0
    trajectories: list[tuple[float, list[tuple[int, int, int, int]]]] = field(default_factory=list)


class JobProfile:
    """The profile of one job. `agents`: the policy of each agent; `models`: the model of each
    policy."""

    def __init__(
        self,
        agents: Mapping[str, str],
        models: Mapping[str, str],
        *,
        tensor_parallel: Mapping[str, int] | None = None,
        gangs: Mapping[str, int] | None = None,
    ) -> None:
        """`tensor_parallel`, `gangs`: devices of an engine and of a gang during the measurement."""
        self.agents, self.models = dict(agents), dict(models)
        self.tensor_parallel = dict(tensor_parallel or {})
        self.gangs = dict(gangs or {})
        self.device_classes: dict[str, str] = {}
        """Device classes of policies' engines, if workers report them."""
        self.steps = 0
        self.policies = {name: PolicyTimes() for name in models}
        self.prompts = {name: LogHistogram() for name in agents}
        """New tokens that turns read, by agent."""
        self.responses = {name: LogHistogram() for name in agents}
        self.turns = {name: LogHistogram() for name in agents}
        """Turns of an agent per trajectory."""
        self.waits = LogHistogram()
        """Seconds of tools, environment and workflow per turn."""
        self.tools: dict[str, float] = {}
        """Mean seconds of a call, by function of the job."""
        self._names = tuple(agents)
        self._queries: dict[str, _KeptQuery] = {}
        self._kept = 0
        self._last = math.inf

    @classmethod
    def of_spec(cls, spec: JobSpec) -> JobProfile:
        """Return an empty profile of a job."""
        return cls(
            {name: one.policy for name, one in spec.agents.items()},
            {name: _model_of(spec, name) for name in spec.policies},
            tensor_parallel={n: one.engine.tensor_parallel for n, one in spec.policies.items()},
            gangs={n: one.trainer.ranks for n, one in spec.policies.items()},
        )

    def add(
        self, query: str, step: int, seconds: float, turns: Sequence[MeasuredTurn], *, whole: bool
    ) -> None:
        """Count a trajectory that took `seconds`. `whole`: it was completed, so that its lengths
        count."""
        known = [one for one in turns if one.agent in self.agents and one.policy in self.policies]
        shared = _shared(known)
        for one, old in zip(known, shared, strict=True):
            times = self.policies[one.policy]
            times.add(one)
            times.pending += one.prompt - old + one.response
        if not (whole and known):
            return
        engines = sum(one.queue_seconds + one.generate_seconds for one in known)
        wait = max(0.0, seconds - engines) / len(known)
        counts = dict.fromkeys(self.agents, 0)
        for one, old in zip(known, shared, strict=True):
            counts[one.agent] += 1
            self.prompts[one.agent].add(one.prompt - old)
            self.responses[one.agent].add(one.response)
            self.waits.add(wait)
        for name, count in counts.items():
            self.turns[name].add(count)
        rows = [
            (self._names.index(one.agent), one.prompt, one.response, old)
            for one, old in zip(known, shared, strict=True)
        ]
        self._keep(f"{step}/{query}", step, wait, rows[:_MOST_OF_ONE])

    def _keep(
        self, query: str, step: int, wait: float, rows: list[tuple[int, int, int, int]]
    ) -> None:
        """Keep a trajectory if its query is in the sample: a reservoir of whole queries in which a
        step has twice the weight of the one `HALF_LIFE` steps before (Efraimidis and Spirakis 2006,
        with keys compared as logarithms)."""
        kept = self._queries.get(query)
        if kept is None:
            digest = hashlib.blake2b(query.encode(), digest_size=8).digest()
            uniform = (int.from_bytes(digest, "big") + 0.5) / 2**64
            key = math.log(-math.log(uniform)) - step * math.log(2) / HALF_LIFE
            if key >= self._last:
                return
            kept = self._queries[query] = _KeptQuery(key)
        kept.trajectories.append((wait, rows))
        kept.turns += len(rows)
        self._kept += len(rows)
        while self._kept > _MOST_TURNS and len(self._queries) > 1:
            name, worst = max(self._queries.items(), key=lambda one: one[1].key)
            del self._queries[name]
            self._kept -= worst.turns
            self._last = worst.key

    def end_step(self, metrics: Mapping[str, float]) -> None:
        """End a step with its metrics (`<policy>/train/seconds`, ...)."""
        self.steps += 1
        for name, times in self.policies.items():
            times.end_step(
                metrics.get(f"{name}/train/seconds", 0.0),
                metrics.get(f"{name}/train/publish_seconds", 0.0),
            )
        every = (self.prompts, self.responses, self.turns)
        for one in (self.waits, *(hist for hists in every for hist in hists.values())):
            one.fade()

    def of_same(self, other: JobProfile) -> bool:
        """Return whether both measure the same agents, models and sizes of engines and gangs."""
        names = ("agents", "models", "tensor_parallel", "gangs")
        return all(getattr(self, name) == getattr(other, name) for name in names)

    def check(self, spec: JobSpec) -> None:
        """Raise InvalidArgument for another job (agents, policies, models), and FailedPrecondition
        before a step was measured."""
        other = JobProfile.of_spec(spec)
        for what, own, its in (
            ("agents", self.agents, other.agents),
            ("policies", self.models, other.models),
        ):
            if own != its:
                differing = sorted(n for n in own.keys() | its.keys() if own.get(n) != its.get(n))
                name = differing[0]
                raise InvalidArgument(
                    f"the profile belongs to another job: its {what} differ in "
                    f"{', '.join(differing)} "
                    f"({name}: {own.get(name, 'none')} there, {its.get(name, 'none')} here)",
                    field="profile",
                    value=name,
                    remedy="Give a run of this job, or use the options for assumptions.",
                )
        if not self._queries:
            raise FailedPrecondition(
                "the profile has no trajectories yet",
                field="profile",
                remedy="Wait for the job's first steps.",
            )

    def workload(self, group_size: int) -> Replayed:
        """Return the kept trajectories, as a workload whose queries have `group_size` of them."""
        queries = []
        for _, query in sorted(self._queries.items()):
            found = [
                TwinTrajectory(
                    tuple(
                        TwinTurn(self.agents[self._names[agent]], prompt, response, wait, shared)
                        for agent, prompt, response, shared in rows
                    )
                )
                for wait, rows in query.trajectories
            ]
            queries.append([found[number % len(found)] for number in range(group_size)])
        return Replayed(queries)

    @property
    def trajectories(self) -> int:
        """Number of kept trajectories."""
        return sum(len(one.trajectories) for one in self._queries.values())

    def to_json(self) -> str:
        """Return the profile as JSON text, at most about 100 KB."""

        def histograms(named: Mapping[str, LogHistogram]) -> dict[str, Any]:
            return {name: one.to_values() for name, one in named.items()}

        return json.dumps(
            {
                "format": _FORMAT,
                "agents": self.agents,
                "models": self.models,
                "tensor_parallel": self.tensor_parallel,
                "gangs": self.gangs,
                "device_classes": self.device_classes,
                "steps": self.steps,
                "policies": {
                    name: {
                        "products": one.engine.products,
                        "sums": one.engine.sums,
                        "concurrency": one.engine.concurrency,
                        "queue_seconds": one.queue_seconds.to_values(),
                        "tokens_per_second": one.tokens_per_second.to_values(),
                        "rows": one.rows,
                        "train_seconds": one.train_seconds,
                        "publish_seconds": one.publish_seconds,
                        "steps": one.steps,
                    }
                    for name, one in self.policies.items()
                },
                "prompts": histograms(self.prompts),
                "responses": histograms(self.responses),
                "turns": histograms(self.turns),
                "waits": self.waits.to_values(),
                "tools": self.tools,
                "kept": [
                    [name, one.key, [[round(wait, 4), rows] for wait, rows in one.trajectories]]
                    for name, one in self._queries.items()
                ],
                "last": None if math.isinf(self._last) else self._last,
            },
            separators=(",", ":"),
        )

    @classmethod
    def of_json(cls, text: str) -> JobProfile:
        """Parse the result of `to_json`. Raises InvalidArgument for anything else, and for rates
        that are negative or not finite."""
        try:
            values = json.loads(text)
            if values["format"] != _FORMAT:
                raise ValueError(f"its format is {values['format']}, not {_FORMAT}")
            return cls._of_values(values)
        except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
            raise InvalidArgument(
                f"this is not a profile of a job: {type(error).__name__}: {error}",
                field="profile",
                remedy="Take one with `troupe jobs profile JOB`.",
            ) from error

    @classmethod
    def _of_values(cls, values: Mapping[str, Any]) -> JobProfile:
        found = cls(
            values["agents"],
            values["models"],
            tensor_parallel=values["tensor_parallel"],
            gangs=values["gangs"],
        )
        found.device_classes = dict(values["device_classes"])
        found.steps = int(values["steps"])
        for name, one in values["policies"].items():
            found.policies[name] = PolicyTimes(
                EngineTimes(one["products"], one["sums"], _rate(one, "concurrency", name)),
                LogHistogram.of(one["queue_seconds"]),
                LogHistogram.of(one["tokens_per_second"]),
                _rate(one, "rows", name),
                _rate(one, "train_seconds", name),
                _rate(one, "publish_seconds", name),
                _rate(one, "steps", name),
            )
        for kind in ("prompts", "responses", "turns"):
            own = getattr(found, kind)
            own.update({name: LogHistogram.of(one) for name, one in values[kind].items()})
        found.waits = LogHistogram.of(values["waits"])
        found.tools = {name: float(one) for name, one in values["tools"].items()}
        for name, key, trajectories in values["kept"]:
            kept = _KeptQuery(float(key))
            for wait, rows in trajectories:
                turns = [(int(agent), int(p), int(r), int(old)) for agent, p, r, old in rows]
                kept.trajectories.append((float(wait), turns))
                kept.turns += len(rows)
            found._queries[name] = kept
            found._kept += kept.turns
        found._last = math.inf if values["last"] is None else float(values["last"])
        return found

    def pack(self) -> bytes:
        """Return the profile in its stored form."""
        return zlib.compress(self.to_json().encode(), 1)

    @classmethod
    def unpack(cls, stored: bytes) -> JobProfile:
        """Unpack a profile from `pack`."""
        return cls.of_json(zlib.decompress(stored).decode())


def _rate(values: Mapping[str, Any], name: str, policy: str) -> float:
    found = float(values[name])
    if not 0 <= found < math.inf:
        raise InvalidArgument(
            f"{name} of policy {policy} must be a number of 0 or more",
            field=f"profile.policies.{policy}.{name}",
            value=found,
            remedy="Take the profile again with `troupe jobs profile JOB`.",
        )
    return found


def _shared(turns: Sequence[MeasuredTurn]) -> list[int]:
    """Return the number of tokens at the beginning of each turn's prompt that its agent's previous
    turn also had."""
    last: dict[str, MeasuredTurn] = {}
    found = []
    for one in turns:
        before = last.get(one.agent)
        shared = 0
        if before is not None:
            whole = before.prompt + before.response
            # A workflow that drops thoughts keeps the prompt; engines report the rest by their
            # caches.
            shared = whole if one.prompt >= whole else min(one.cached, before.prompt)
        found.append(max(0, min(shared, one.prompt - 1)))
        last[one.agent] = one
    return found


def _model_of(spec: JobSpec, name: str) -> str:
    """Describe the properties that distinguish a policy's model from others."""
    own = spec.policies[name]
    if own.model is None:
        return "network"
    known = own.model.path
    if known is None:
        config = json.dumps(own.model.config, sort_keys=True, default=str)
        known = f"config {hashlib.blake2b(config.encode(), digest_size=4).hexdigest()}"
    return known if own.lora is None else f"{known} with LoRA rank {own.lora.rank}"
