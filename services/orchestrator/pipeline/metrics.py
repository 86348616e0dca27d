"""Metrics of a step or an evaluation: rewards, lengths, speeds, failures, staleness."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from typing import Final

from troupe.contracts import kinds
from troupe.contracts.metric_names import (
    BOUNDS,
    ENVIRONMENT_RETRIES,
    GRAD_NORM,
    NO_SIGNAL,
    REWARD_MEAN,
    ROLLOUT_SECONDS,
    SAMPLES,
    SIGNAL_STEPS,
    SKIPPED,
    STALENESS_MAX,
    STALENESS_MEAN,
    TEAM,
    TEAM_MEAN,
    TEAM_SCORE,
    TOKEN_SHARE,
    TOKENS_PER_SECOND,
    TURN_SHARE,
    UNUSED_ENDPOINT,
    ZERO_ADVANTAGES,
    mean_reward,
)
from troupe.job import JobSpec
from troupe.job.sections.algorithm import AlgorithmSpec
from troupe.rpc import FailedPrecondition
from troupe.twin.profile import JobProfile, MeasuredTurn
from troupe.v1 import common_pb2 as common_pb
from troupe.v1 import experience_store_pb2 as store_pb
from troupe.v1 import orchestrator_pb2 as orchestrator_pb
from troupe.v1 import rollout_pb2 as rollout_pb

_FAULTS: Final = (kinds.ENVIRONMENT_PREFIX, kinds.TOOL_PREFIX)
# Metrics of a step that count in the verdict on its job.
COMPLETED: Final = "trajectories/completed"
WITHOUT_TURNS: Final = "trajectories/without_turns"
# A job has a shortfall if a larger share of trajectories made no turn at their endpoint.
_WITHOUT_TURNS_SHARE: Final = 0.1
NO_TURNS_REMEDY: Final = (
    "The client answered from its own cache, or asked another model: switch its cache off "
    "(DSPy: `cache=False`; LangChain: `set_llm_cache(None)`) and give it the endpoint's base_url."
)


class Redundancy:
    """Metrics of redundancy in a job with `pipeline.redundant_trajectories`.

    Keeping the first completed trajectories favours short ones. The mean lengths show by how much:
    of kept trajectories at their end, and of cancelled ones at cancellation. Cancelled ones would
    have become longer, so if they are already longer, the bias is at least the difference.
    """

    def __init__(self, redundant: int) -> None:
        self._redundant = redundant
        self._kept = _Lengths()
        self._cancelled = _Lengths()
        # Cancelled before they began: without a length.
        self._unstarted = 0
        self._failed: Counter[str] = Counter()

    def add(self, event: rollout_pb.TrajectoryEvent) -> None:
        """Count an ended trajectory."""
        if event.state == common_pb.TRAJECTORY_STATE_COMPLETED:
            self._kept.add(event)
        elif event.state == common_pb.TRAJECTORY_STATE_FAILED:
            self._failed[event.query_id] += 1
        elif event.reason.partition(":")[0] == kinds.REDUNDANT:
            if event.seconds > 0:
                self._cancelled.add(event)
            else:
                self._unstarted += 1

    def values(self) -> dict[str, float]:
        """Metrics, `redundancy/...`; none where nothing is redundant. Lengths are means per
        trajectory: generated tokens, turns, seconds."""
        if not self._redundant:
            return {}
        # Failures beyond the redundant trajectories of a query make its group smaller.
        replaced = sum(min(count, self._redundant) for count in self._failed.values())
        found = {
            "redundancy/cancelled": float(self._cancelled.count + self._unstarted),
            "redundancy/unstarted": float(self._unstarted),
            "redundancy/failures_replaced": float(replaced),
        }
        for name, lengths in (("kept", self._kept), ("cancelled", self._cancelled)):
            if lengths.count:
                found[f"redundancy/{name}_tokens"] = lengths.tokens / lengths.count
                found[f"redundancy/{name}_turns"] = lengths.turns / lengths.count
                found[f"redundancy/{name}_seconds"] = lengths.seconds / lengths.count
        return found


class _Lengths:
    """Sums of lengths over trajectories."""

    __slots__ = ("count", "seconds", "tokens", "turns")

    def __init__(self) -> None:
        self.count = self.tokens = self.turns = 0
        self.seconds = 0.0

    def add(self, event: rollout_pb.TrajectoryEvent) -> None:
        self.count += 1
        self.tokens += sum(turn.response_tokens for turn in event.turns)
        self.turns += len(event.turns)
        self.seconds += event.seconds


class Tally:
    """Accumulated metrics of ended trajectories.

    A mean is over the trajectories that have the value; a failed one, for example, has no reward.
    """

    def __init__(self, agents: Iterable[str], versions: Mapping[str, int]) -> None:
        self._agents = frozenset(agents)
        self._versions = versions
        self.completed = 0
        self.failed = 0
        # Ended because they were not needed anymore.
        self.aborted = 0
        # Completed and rewarded trajectories that opened an endpoint but made no turn at it.
        self.without_turns = 0
        self._reasons: Counter[str] = Counter()
        # One problem per kind of failure; number of failures without a problem.
        self._problems: dict[str, common_pb.Problem] = {}
        self._unexplained = 0
        # Remarks of trajectories that completed nevertheless.
        self._remarks: Counter[str] = Counter()
        # Repeated attempts and permanently failed trajectories, because of an environment or a
        # tool.
        self._retries = 0.0
        self._faults = 0
        self._rewards: defaultdict[str, _RunningMean] = defaultdict(_RunningMean)
        self._team_metrics: defaultdict[str, _RunningMean] = defaultdict(_RunningMean)
        self._lengths: defaultdict[str, _RunningMean] = defaultdict(_RunningMean)
        self._reward = _RunningMean()
        self._team = _RunningMean()
        self._staleness = _RunningMean()
        self._queue = _RunningMean()
        self._turn_seconds: list[float] = []
        self._tokens = 0

    @property
    def ended(self) -> int:
        """Trajectories counted."""
        return self.completed + self.failed + self.aborted

    @property
    def most_common_reason(self) -> str:
        """The most common reason of failures; empty if there is none."""
        return self._reasons.most_common(1)[0][0] if self._reasons else ""

    @property
    def common_problem(self) -> common_pb.Problem | None:
        """Return the problem of the job's code or configuration with which all ended trajectories
        failed; None if one completed or failed otherwise."""
        if self.completed or self._unexplained or len(self._problems) != 1:
            return None
        [problem] = self._problems.values()
        return problem

    def add(self, event: rollout_pb.TrajectoryEvent, *, timed: bool = True) -> None:
        """Count an ended trajectory. `timed`: it ended within the seconds passed to `values`."""
        for turn in event.turns:
            self._tokens += turn.response_tokens if timed else 0
            self._lengths[turn.agent].add(turn.response_tokens)
            self._turn_seconds.append(turn.queue_seconds + turn.generate_seconds)
            self._queue.add(turn.queue_seconds)
            if turn.versions and turn.policy in self._versions:
                oldest = min(span.version for span in turn.versions)
                self._staleness.add(self._versions[turn.policy] - oldest)
        self._retries += event.metrics.get(ENVIRONMENT_RETRIES, 0.0)
        unused = event.metrics.get(UNUSED_ENDPOINT, 0.0) > 0
        if event.state == common_pb.TRAJECTORY_STATE_ABORTED:
            self.aborted += 1
            return
        if event.state != common_pb.TRAJECTORY_STATE_COMPLETED:
            self.failed += 1
            self._reasons[event.reason or "no reason given"] += 1
            self._faults += event.reason.startswith(_FAULTS)
            if not event.HasField("problem"):
                self._unexplained += 1
            elif event.problem.kind not in self._problems:
                copied = common_pb.Problem()  # a reference would keep the whole event in memory
                copied.CopyFrom(event.problem)
                self._problems[copied.kind] = copied
            return
        self.completed += 1
        self.without_turns += unused
        if event.reason:
            self._remarks[event.reason] += 1
        rewards = dict(event.rewards)
        if TEAM not in self._agents and (team := rewards.pop(TEAM, None)) is not None:
            self._team.add(team)
        for agent, reward in rewards.items():
            self._rewards[agent].add(reward)
        if rewards:
            self._reward.add(sum(rewards.values()) / len(rewards))
        for name, value in event.metrics.items():
            if name != UNUSED_ENDPOINT:
                self._team_metrics[name].add(value)

    @property
    def remark(self) -> tuple[int, str]:
        """Trajectories that completed with a remark, and the most common one."""
        if not self._remarks:
            return 0, ""
        return self._remarks.total(), self._remarks.most_common(1)[0][0]

    def scores(self) -> dict[str, float]:
        """Return the mean rewards for comparing evaluations: `reward/<agent>`, `team_success`."""
        found = {f"reward/{agent}": mean.value for agent, mean in sorted(self._rewards.items())}
        if self._team.count:
            found[TEAM_SCORE] = self._team.value
        if self.failed:
            found["trajectories/failed"] = float(self.failed)
        return found

    def values(self, seconds: float) -> dict[str, float]:
        """Return all metrics; `seconds` is the wall-clock time of the rollout."""
        found = {
            COMPLETED: float(self.completed),
            "trajectories/failed": float(self.failed),
        }
        if self.without_turns:
            found[WITHOUT_TURNS] = float(self.without_turns)
        if self.aborted:
            found["trajectories/aborted"] = float(self.aborted)
        if self._retries or self._faults:
            found["environment/retries"] = self._retries
            found["environment/failed"] = float(self._faults)
        found |= {mean_reward(agent): mean.value for agent, mean in self._rewards.items()}
        found |= {f"response_length/{name}": mean.value for name, mean in self._lengths.items()}
        found |= self._shares()
        found |= {f"trajectory/{name}": mean.value for name, mean in self._team_metrics.items()}
        optional = {
            REWARD_MEAN: self._reward,
            TEAM_MEAN: self._team,
            STALENESS_MEAN: self._staleness,
            "rollout/queue_seconds/mean": self._queue,
        }
        found |= {name: mean.value for name, mean in optional.items() if mean.count}
        if seconds > 0:
            found[ROLLOUT_SECONDS] = seconds
            found[TOKENS_PER_SECOND] = self._tokens / seconds
        if self._turn_seconds:
            found["rollout/turn_seconds/mean"] = sum(self._turn_seconds) / len(self._turn_seconds)
            found["rollout/turn_seconds/p95"] = percentile(self._turn_seconds, 0.95)
        return {name: value for name, value in found.items() if math.isfinite(value)}

    def _shares(self) -> dict[str, float]:
        """Return each agent's share of turns and of response tokens, 0 if it said nothing; none in
        a job with one agent."""
        if len(self._agents) < 2:
            return {}
        silent = _RunningMean()
        said = {agent: self._lengths.get(agent, silent) for agent in self._agents}
        turns = sum(lengths.count for lengths in said.values())
        tokens = sum(lengths.total for lengths in said.values())
        found = {f"{TURN_SHARE}{a}": one.count / turns for a, one in said.items() if turns}
        return found | {
            f"{TOKEN_SHARE}{a}": one.total / tokens for a, one in said.items() if tokens
        }


def add_to_profile(profile: JobProfile, event: rollout_pb.TrajectoryEvent, step: int) -> None:
    """Count an ended trajectory of training in the job's profile."""
    turns = [
        MeasuredTurn(
            turn.agent,
            turn.policy,
            turn.prompt_tokens,
            turn.response_tokens,
            turn.cached_tokens,
            turn.queue_seconds,
            turn.generate_seconds,
            turn.concurrency,
        )
        for turn in event.turns
    ]
    whole = event.state == common_pb.TRAJECTORY_STATE_COMPLETED
    profile.add(event.query_id, step, event.seconds, turns, whole=whole)


def without_signal(commit: store_pb.StepCommit, algorithm: AlgorithmSpec) -> bool:
    """Return whether a step with samples had no signal: all advantages are zero, as when all
    trajectories of each group got the same reward.

    Regularizers (KL, entropy, expert load) have a gradient even then. It counts only if `algorithm`
    learns from more than advantages.
    """
    return (
        commit.outcome == store_pb.STEP_OUTCOME_APPLIED
        and commit.num_samples > 0
        and commit.metrics.get(ZERO_ADVANTAGES) == 1
        and not (algorithm.learns_without_advantages and commit.metrics.get(GRAD_NORM) != 0)
    )


class JobTotals:
    """Sums over all steps of a job, for the verdict on the job when it ends.

    They follow from the logged metrics alone, so a runner that takes a job over has them too.
    """

    def __init__(self, spec: JobSpec, past: Iterable[orchestrator_pb.MetricsLogged]) -> None:
        """`past`: metrics logged so far."""
        self._workflow = spec.workflow
        self._completed = 0.0
        self._without_turns = 0.0
        self._steps = 0
        # Steps with a signal, by policy: the policy's update was applied, and not all advantages
        # were zero.
        self._signals = dict.fromkeys(spec.trained_policies, 0)
        for row in past:
            self.add(row.values)

    def add(self, values: Mapping[str, float]) -> None:
        """Add the metrics of a step. Ignores metrics of an evaluation."""
        if COMPLETED not in values:
            return
        self._steps += 1
        self._completed += values[COMPLETED]
        self._without_turns += values.get(WITHOUT_TURNS, 0.0)
        for policy in self._signals:
            updated = values.get(f"{policy}/{SAMPLES}", 0.0) > 0
            idle = values.get(f"{policy}/{SKIPPED}") or values.get(f"{policy}/{NO_SIGNAL}")
            self._signals[policy] += updated and not idle

    def metrics(self) -> dict[str, float]:
        """Return `<policy>/signal_steps`: the number of steps so far with a signal for the
        policy."""
        return {f"{policy}/{SIGNAL_STEPS}": float(count) for policy, count in self._signals.items()}

    @property
    def silent(self) -> list[str]:
        """The policies for which none of the steps had a signal."""
        return [policy for policy, count in self._signals.items() if self._steps and not count]

    def shortfall(self) -> FailedPrecondition | None:
        """Return why no policy learned anything; None if one did."""
        unused = self._without_turns
        if self._signals and unused and unused >= _WITHOUT_TURNS_SHARE * self._completed:
            return FailedPrecondition(
                f"{unused:.0f} of {self._completed:.0f} trajectories opened an endpoint and were "
                "rewarded, but made no turn, so they gave no training data",
                kind="no_turns",
                field="workflow",
                value=self._workflow,
                remedy=NO_TURNS_REMEDY,
            )
        if not self.silent or len(self.silent) < len(self._signals):
            return None
        return FailedPrecondition(
            f"no policy learned anything: 0 of {self._steps} steps had a signal",
            kind="nothing_learned",
            field="policies",
            value=", ".join(self.silent),
            remedy="Rewards that are equal within every group give no signal: look at "
            "`reward/*/mean`, at the trajectories, and at `troupe jobs audit` for why samples were "
            "dropped. The job's log says which updates were skipped, and why.",
        )


def commit_metrics(
    commits: Iterable[store_pb.StepCommit], algorithm: AlgorithmSpec
) -> dict[str, float]:
    """Return the trainers' metrics of a step, `<policy>/<name>`."""
    found: dict[str, float] = {}
    for commit in commits:
        for name, value in commit.metrics.items():
            if math.isfinite(value):
                found[f"{commit.policy}/{name}"] = value
        found[f"{commit.policy}/{SAMPLES}"] = float(commit.num_samples)
        found[f"{commit.policy}/{NO_SIGNAL}"] = float(without_signal(commit, algorithm))
        found[f"{commit.policy}/{SKIPPED}"] = float(commit.outcome == store_pb.STEP_OUTCOME_SKIPPED)
    return found


def staleness(commits: Iterable[store_pb.StepCommit]) -> dict[str, float]:
    """Return the staleness of a step's samples in versions, over all policies: mean over samples,
    and maximum. Empty when no trainer reports it."""
    metrics = [one for one in commits if one.num_samples and STALENESS_MEAN in one.metrics]
    samples = sum(one.num_samples for one in metrics)
    found: dict[str, float] = {}
    if samples:
        total = sum(one.metrics[STALENESS_MEAN] * one.num_samples for one in metrics)
        found[STALENESS_MEAN] = total / samples
    if worst := [one.metrics[STALENESS_MAX] for one in metrics if STALENESS_MAX in one.metrics]:
        found[STALENESS_MAX] = max(worst)
    return found


def bounds_of(name: str, bounds: tuple[float, float]) -> dict[str, float]:
    """Return the bounds of an interval as values: `<name>/low` and `<name>/high`."""
    return dict(zip((f"{name}{one}" for one in BOUNDS), bounds, strict=True))


def percentile(values: list[float], fraction: float) -> float:
    """Return the nearest-rank quantile: the smallest value not exceeded by `fraction` of
    `values`."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(fraction * len(ordered)) - 1)]


class _RunningMean:
    """A mean of values that are added one by one."""

    __slots__ = ("count", "total")

    def __init__(self) -> None:
        self.total = 0.0
        self.count = 0

    def add(self, value: float) -> None:
        self.total += value
        self.count += 1

    @property
    def value(self) -> float:
        return self.total / self.count if self.count else math.nan
