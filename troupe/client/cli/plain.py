"""Progress as one line per step, for logs and pipes."""

from __future__ import annotations

from typing import TextIO

from troupe.client.cli.formats import duration, number, score
from troupe.client.cli.progress import Progress, evaluation_of, is_step
from troupe.client.events import Event, MetricsLogged, Notice, StateChanged


class PlainDisplay:
    """Writes lines as events come. A context manager, as the live display is."""

    def __init__(self, stream: TextIO) -> None:
        """`stream` gets the lines; each is flushed, so that `tee` and CI logs follow."""
        self._stream = stream

    def __enter__(self) -> PlainDisplay:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def say(self, text: str) -> None:
        """One line for people."""
        print(text, file=self._stream, flush=True)

    def show(self, progress: Progress, event: Event) -> None:
        """What `event`, already applied to `progress`, means in a line; activities are left out."""
        match event:
            case StateChanged():
                why = f": {event.problem}" if event.problem else ""
                self.say(f"job {progress.job_id} is {event.state}{why}")
            case Notice():
                self.say(f"{event.severity}: {event.text}")
            case MetricsLogged() if is_step(event):
                self.say(self._step_line(progress))
            case MetricsLogged():
                scores = " ".join(f"{k} {score(v)}" for k, v in evaluation_of(event).items())
                self.say(f"evaluation after {event.step} steps | {scores}")

    def _step_line(self, progress: Progress) -> str:
        parts = [f"step {progress.step}/{progress.total_steps}"]
        rewards = [
            f"{agent} {score(value)}"
            for agent in progress.agents
            if (value := progress.reward(agent)) is not None
        ]
        if "team/mean" in progress.newest:
            rewards.append(f"team {score(progress.newest['team/mean'])}")
        if rewards:
            parts.append("reward " + " ".join(rewards))
        for name in progress.policies:
            policy = progress.policy(name)
            numbers = f"loss {number(policy.loss)} grad {number(policy.grad_norm)}"
            if policy.updated is False:
                numbers = "no update"
            parts.append(f"{name} v{policy.version} {numbers}")
        if progress.tokens_per_second:  # networks have none
            parts.append(f"{number(progress.tokens_per_second)} tok/s")
        parts.append(f"eta {duration(progress.seconds_left)}")
        return " | ".join(parts)
