"""What a job's events add up to: the state that both the live and the plain display show.

Pure: it is fed events and asked questions; the clock is the events' own.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Mapping
from dataclasses import dataclass

from troupe.client.events import Activity, Event, MetricsLogged, Notice, StateChanged
from troupe.client.records import Job, JobState

# Recent enough to follow a change of pace, long enough not to jump about.
_PACE_STEPS = 5
EVALUATION = "evaluation/"


@dataclass(frozen=True)
class PolicyLine:
    """The newest numbers of one policy."""

    name: str
    version: int
    # Whether the newest step updated it; None: it does not say.
    updated: bool | None
    loss: float | None
    grad_norm: float | None
    kl: float | None
    entropy: float | None


class Progress:
    """Follows one job. `apply` events in order."""

    def __init__(self, job: Job) -> None:
        """Starts from the job's record as it was before the first event."""
        spec = job.spec
        self.job_id = job.id
        self.mode = job.mode
        self.total_steps = job.total_steps
        self.agents = list(spec.get("agents", {}))
        self.policies = [
            name for name, policy in spec.get("policies", {}).items() if policy["trainable"]
        ]
        self.state = job.state
        self.step = 0
        self.activity = ""
        self.activity_done: tuple[float, float] = (0.0, 0.0)
        self.metrics: dict[str, float] = {}
        # Of the newest step alone: a value that it does not have is not that of one before.
        self.newest: Mapping[str, float] = {}
        self.rewards: defaultdict[str, list[float]] = defaultdict(list)
        self.before: dict[str, float] = {}
        self.evaluation: dict[str, float] = {}
        self.problem = job.problem
        # Counted from the log, so that a replay shows what was and not what is.
        self._versions = dict.fromkeys(self.policies, 0)
        self._pace: deque[float] = deque(maxlen=_PACE_STEPS)
        self._last_step_at: float | None = None

    def apply(self, event: Event) -> None:
        """Take one event in."""
        match event:
            case StateChanged():
                self.state = event.state
                self.problem = event.problem
                if event.state != JobState.RUNNING:
                    # Time spent paused or starting says nothing about the pace.
                    self._last_step_at = None
                if event.state.ended:
                    self.activity = ""
            case MetricsLogged():
                self._take(event)
            case Activity():
                self.activity = event.text
                self.activity_done = (event.done, event.total)
                self.total_steps = event.total_steps or self.total_steps
            case Notice():
                pass

    def _take(self, event: MetricsLogged) -> None:
        self.metrics.update(event.values)
        if is_step(event):
            self.newest = event.values
        evaluation = evaluation_of(event)
        if evaluation:
            self.before = self.before or evaluation
            self.evaluation = evaluation
        if not is_step(event):
            return
        self.step = max(self.step, event.step)
        for policy in self.policies:
            self._versions[policy] += _updates(event.values, policy)
        for agent in self.agents:
            value = event.values.get(f"reward/{agent}/mean")
            if value is not None:
                self.rewards[agent].append(value)
        at = event.at.timestamp()
        seconds = event.values.get("step/seconds")
        if seconds is None and self._last_step_at is not None:
            seconds = at - self._last_step_at
        if seconds is not None:
            self._pace.append(seconds)
        self._last_step_at = at

    @property
    def tokens_per_second(self) -> float | None:
        """Generated tokens per second in the newest step."""
        return self.newest.get("rollout/tokens_per_second")

    @property
    def seconds_left(self) -> float | None:
        """Estimated from the pace of the newest steps; None until there is one."""
        if not self._pace or self.state.ended:
            return None
        return sum(self._pace) / len(self._pace) * max(0, self.total_steps - self.step)

    def reward(self, agent: str) -> float | None:
        """Its mean reward in the newest step."""
        return self.newest.get(f"reward/{agent}/mean")

    def policy(self, name: str) -> PolicyLine:
        """The newest numbers of a policy; none where the newest step did not update it."""
        told = f"{name}/skipped" in self.newest
        updated = _updates(self.newest, name) if told else None

        def get(metric: str) -> float | None:
            return None if updated is False else self.metrics.get(f"{name}/{metric}")

        return PolicyLine(
            name=name,
            version=self._versions[name],
            updated=updated,
            loss=get("loss/policy"),
            grad_norm=get("grad_norm"),
            kl=get("kl"),
            entropy=get("entropy"),
        )


def _updates(values: Mapping[str, float], policy: str) -> bool:
    """Whether a step with these metrics updated the policy."""
    return values.get(f"{policy}/skipped") == 0 and values.get(f"{policy}/samples", 0) > 0


def is_step(event: MetricsLogged) -> bool:
    """Whether the metrics are those of a training step (and not of an evaluation alone)."""
    return any(not name.startswith(EVALUATION) for name in event.values)


def evaluation_of(event: MetricsLogged) -> dict[str, float]:
    """Held-out scores among the metrics: the team's and each agent's, by name."""
    scores: dict[str, float] = {}
    for name, value in event.values.items():
        parts = name.removeprefix(EVALUATION).split("/")
        if name.startswith(EVALUATION) and parts[-1] == "mean":
            if parts[0] == "reward" and len(parts) == 3:
                scores[parts[1]] = value
            elif parts == ["team", "mean"]:
                scores["team"] = value
    return scores
