"""What Prometheus is told about the environments that workflows play in this process."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily
from prometheus_client.registry import Collector

from troupe.workflow.environments.counters import COUNTERS, Counters


class EnvironmentCollector(Collector):
    """Reads the library's counters when it is scraped: it knows no metrics, and we no games."""

    def __init__(self, counters: Counters = COUNTERS) -> None:
        self._counters = counters

    def collect(self) -> Iterator[CounterMetricFamily]:
        """One series per kind of event and environment."""
        family = CounterMetricFamily(
            "troupe_rollout_environment_events",
            "Resets, steps, retries, faults, kills, starts and illegal moves of environments.",
            labels=["event", "environment"],
        )
        for (event, environment), count in sorted(self._counters.all().items()):
            family.add_metric([event, environment], count)
        yield family
