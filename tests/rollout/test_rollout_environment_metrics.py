"""Environments' counters on the service's metrics page."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, generate_latest

from services.rollout.metrics import EnvironmentCollector
from troupe.workflow.environments.host import Counters


def test_environment_events_appear_in_the_scraped_metrics() -> None:
    counters, registry = Counters(), CollectorRegistry()
    registry.register(EnvironmentCollector(counters))
    name = "troupe_rollout_environment_events_total"
    assert "Nim" not in generate_latest(registry).decode()
    counters.count("resets", "games:Nim")
    counters.count("resets", "games:Nim")
    counters.count("kills", "games:Chess")
    shown = generate_latest(registry).decode()
    assert f'{name}{{environment="games:Nim",event="resets"}} 2.0' in shown
    assert f'{name}{{environment="games:Chess",event="kills"}} 1.0' in shown
