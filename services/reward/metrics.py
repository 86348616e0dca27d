"""What the function runtime counts."""

from __future__ import annotations

from collections.abc import Callable

from services.chassis.telemetry import Telemetry
from services.reward.function import Function


class Metrics:
    """Histograms of invocations, gauges of the pool."""

    def __init__(self, telemetry: Telemetry) -> None:
        self._telemetry = telemetry
        self._run = telemetry.histogram(
            "troupe_reward_run_seconds", "Run time of an invocation.", ["function", "outcome"]
        )
        self._queue = telemetry.histogram(
            "troupe_reward_queue_seconds", "Wait of an invocation for a worker.", ["function"]
        )
        self._cold = telemetry.histogram(
            "troupe_reward_cold_start_seconds",
            "Start of a worker and import of the code, of calls that had to wait for it.",
            ["function"],
        )
        self._cores = telemetry.counter(
            "troupe_reward_core_seconds", "Cores times the seconds they were held.", ["function"]
        )
        self._retried = telemetry.counter(
            "troupe_reward_retried", "Invocations begun again after a worker died.", ["function"]
        )

    def watch(self, name: str, text: str, value: Callable[[], float]) -> None:
        """A gauge that is asked for when it is read."""
        self._telemetry.gauge(f"troupe_reward_{name}", text).set_function(value)

    def ended(self, function: Function, outcome: str, queued: float, ran: float) -> None:
        """An invocation has its outcome."""
        self._run.labels(function.label, outcome).observe(ran)
        self._queue.labels(function.label).observe(queued)

    def cold_start(self, function: Function, seconds: float) -> None:
        """A call had to wait for a worker to start, or to import the code."""
        self._cold.labels(function.label).observe(seconds)

    def held_cores(self, function: Function, cores: int, seconds: float) -> None:
        """Cores were handed out for so long."""
        if cores:
            self._cores.labels(function.label).inc(seconds * cores)

    def retried(self, function: Function) -> None:
        """An invocation is begun again."""
        self._retried.labels(function.label).inc()
