"""deploy/grafana: dashboards, alerts and Prometheus' targets match the services' own metrics."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from prometheus_client import CollectorRegistry

from services.chassis.telemetry import Telemetry
from services.experience_store.metrics import Meters
from services.orchestrator.server import make_service as make_orchestrator
from services.orchestrator.settings import OrchestratorSettings
from services.reward.hosts.agent import RewardHost
from services.reward.runtime import Runtime
from services.reward.settings import RewardSettings
from services.rollout.metrics import RolloutMetrics
from services.trainer.worker import PolicySteps, Swaps
from troupe.transfer.counters import TransferCounters

ROOT = Path(__file__).parents[2]
PLACE = ROOT / "deploy/grafana"
COMPOSE = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
DASHBOARDS = sorted((PLACE / "dashboards").glob("*.json"))
RULES = yaml.safe_load((PLACE / "rules.yml").read_text())["groups"]
# Prometheus' own.
BUILT_IN = {"up", "ALERTS"}
# Words of PromQL that could be taken for names of metrics.
WORDS = {"and", "or", "unless", "on", "by", "sum", "max", "offset"}
WORDS |= {"rate", "increase", "changes", "count", "vector", "absent", "histogram_quantile"}


def series_of(registry: CollectorRegistry) -> set[str]:
    """Names of the series of all metrics in a registry, also of those without a value yet."""
    found = set()
    suffixes = {"counter": ["_total"], "histogram": ["_bucket", "_sum", "_count"]}
    for metric in registry.collect():
        found |= {metric.name + one for one in suffixes.get(metric.type, [""])}
    return found


@pytest.fixture(scope="module")
def exported() -> set[str]:
    """All series of the five services, from the objects that register them."""
    telemetry, host = Telemetry(), Telemetry()
    nothing: Any = None
    idle: Any = SimpleNamespace(all=list)
    runner: Any = []

    async def make() -> None:  # some begin in an event loop
        make_orchestrator(OrchestratorSettings(), telemetry)
        Runtime([], telemetry)
        RewardHost(RewardSettings(), host)
        Meters(telemetry, nothing)
        RolloutMetrics(telemetry, idle, runner)
        PolicySteps(nothing, nothing, telemetry)
        Swaps(nothing, nothing, nothing, nothing, telemetry)
        telemetry.registry.register(TransferCounters())

    asyncio.run(make())
    return series_of(telemetry.registry) | series_of(host.registry)


def named(expression: str) -> set[str]:
    """Names of the metrics in a PromQL expression."""
    bare = re.sub(r'"[^"]*"', "", expression)
    bare = re.sub(r"\{[^}]*\}|\[[^\]]*\]", "", bare)
    bare = re.sub(r"\b(by|on) *\([^)]*\)", "", bare)
    return set(re.findall(r"\b[a-zA-Z_][a-zA-Z0-9_]{1,}\b", bare)) - WORDS


def expressions(board: dict[str, Any]) -> list[str]:
    return [one["expr"] for panel in board["panels"] for one in panel["targets"]]


def test_names_are_found_in_expressions() -> None:
    text = 'sum by (le, x) (rate(a_bucket{b=~"c|d"}[5m])) / on (e) f_total > 2 and gg offset 10m'
    assert named(text) == {"a_bucket", "f_total", "gg"}


@pytest.mark.parametrize("file", DASHBOARDS, ids=lambda file: file.stem)
def test_a_dashboard_shows_metrics_that_there_are(file: Path, exported: set[str]) -> None:
    board = json.loads(file.read_text())
    assert board["uid"] == f"troupe-{file.stem}"
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])
    for expression in expressions(board):
        names = named(expression)
        assert names, expression
        assert names <= exported | BUILT_IN, names - exported - BUILT_IN
    for variable in board["templating"]["list"]:
        (name,) = re.findall(r"label_values\((\w+),", variable["query"]["query"])
        assert name in exported
    for panel in board["panels"]:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        for other in board["panels"]:
            if other is not panel:
                assert not _overlap(place, other["gridPos"]), (panel["title"], other["title"])


def _overlap(one: dict[str, int], other: dict[str, int]) -> bool:
    beside = one["x"] + one["w"] <= other["x"] or other["x"] + other["w"] <= one["x"]
    apart = one["y"] + one["h"] <= other["y"] or other["y"] + other["h"] <= one["y"]
    return not (beside or apart)


def test_alerts_read_metrics_that_there_are_and_are_explained(exported: set[str]) -> None:
    explained = (ROOT / "docs/operating.md").read_text()
    rules = [rule for group in RULES for rule in group["rules"]]
    assert len({rule["alert"] for rule in rules}) == len(rules)
    for rule in rules:
        names = named(rule["expr"])
        assert names, rule
        assert names <= exported | BUILT_IN, names - exported - BUILT_IN
        assert f"`{rule['alert']}`" in explained
        assert rule["labels"]["severity"] in ("warning", "critical")


def test_prometheus_reads_the_five_services_where_they_serve_metrics() -> None:
    config = yaml.safe_load((PLACE / "prometheus.yml").read_text())
    (job,) = config["scrape_configs"]
    (found,) = job["dns_sd_configs"]
    panel = {"control-panel"}
    services = {
        name
        for name, one in COMPOSE["services"].items()
        if one["image"] == f"troupe-{name}" and name not in panel
    }
    assert set(found["names"]) == services
    assert len(services) == 5
    dockerfile = (ROOT / "deploy/docker/Dockerfile").read_text()
    assert f"TROUPE_METRICS_PORT={found['port']}" in dockerfile


def test_the_monitoring_profile_mounts_files_that_exist_where_they_are_read() -> None:
    services = COMPOSE["services"]
    chosen = {name for name, one in services.items() if one.get("profiles") == ["monitoring"]}
    assert chosen == {"prometheus", "grafana"}
    inside = {}
    for name in chosen:
        one = services[name]
        assert re.fullmatch(r"[a-z/]+:v?\d+\.\d+\.\d+", one["image"]), "a version, not `latest`"
        for port in one["ports"]:
            assert port.startswith("127.0.0.1:")
        for mount in one["volumes"]:
            source, target, *mode = mount.split(":")
            if source.startswith("./"):
                assert (ROOT / source).exists(), source
                assert mode == ["ro"]
                inside[target] = ROOT / source
            else:
                assert source in COMPOSE["volumes"]
    prometheus = yaml.safe_load(inside["/etc/prometheus/prometheus.yml"].read_text())
    assert all(inside[file].is_file() for file in prometheus["rule_files"])
    provisioning = inside["/etc/grafana/provisioning"]
    (source,) = yaml.safe_load((provisioning / "datasources/prometheus.yml").read_text())[
        "datasources"
    ]
    for file in DASHBOARDS:
        board = json.loads(file.read_text())
        assert {panel["datasource"]["uid"] for panel in board["panels"]} == {source["uid"]}
    assert source["url"] == "http://prometheus:9090"
    (provider,) = yaml.safe_load((provisioning / "dashboards/troupe.yml").read_text())["providers"]
    assert inside[provider["options"]["path"]] == PLACE / "dashboards"
    home = services["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
    assert (inside["/etc/troupe/dashboards"] / Path(home).name).is_file()


# Alert -> ten-second values of series; it fires after a hundred minutes, once.
FIRES: dict[str, dict[str, str]] = {
    "TroupeNoWorker": {
        'troupe_workers{kind="trainer", state="usable"}': "0x600",
        'troupe_jobs{state="running"}': "1x600",
    },
    "TroupeServiceDown": {'up{job="troupe", service="orchestrator"}': "1x500 0x100"},
    "TroupeJobFailed": {'troupe_jobs_ended_total{state="failed"}': "0x570 1x30"},
    "TroupeJobStalled": {'troupe_job_steps{job_id="j"}': "3x600"},
    "TroupeStaleVersion": {
        'troupe_policy_version{job_id="j", policy="p"}': "9x600",
        'troupe_engine_oldest_version{job_id="j", policy="p"}': "5x600",
    },
    "TroupeTurnsQueue": {
        "troupe_rollout_turns_waiting": "0x500 0+2x100",
        'troupe_engine_turns{state="running"}': "8x600",
    },
    "TroupeRewardsQueue": {"troupe_reward_queued": "0x500 0+2x100"},
    "TroupeStoreErrors": {"troupe_store_redis_up": "0x600"},
    "TroupeRedisUnfit": {'troupe_redis_unfit{service="orchestrator"}': "0x500 1x100"},
    "TroupeCallsFail": {'troupe_rpc_seconds_count{method="m", code="INTERNAL"}': "0+5x600"},
    "TroupeMemoryHigh": {
        'process_resident_memory_bytes{job="troupe", service="trainer"}': "3000000000x500 7e9x100"
    },
}
QUIET = {
    'up{job="troupe", service="orchestrator"}': "1x600",
    'troupe_workers{kind="trainer", state="usable"}': "1x600",
    'troupe_jobs{state="running"}': "1x600",
    'troupe_jobs_ended_total{state="failed"}': "2x600",
    'troupe_job_steps{job_id="j"}': "0+0.01x600",
    'troupe_policy_version{job_id="j", policy="p"}': "0+0.1x600",
    'troupe_engine_oldest_version{job_id="j", policy="p"}': "0+0.1x600",
    "troupe_rollout_turns_waiting": "100x600",
    'troupe_engine_turns{state="running"}': "8x600",
    "troupe_reward_queued": "100x600",
    "troupe_store_redis_up": "1x600",
    'troupe_redis_unfit{service="orchestrator"}': "0x600",
    "troupe_store_pushed_back_total": "7x600",
    "troupe_store_over_high_water": "0x600",
    'troupe_rpc_seconds_count{method="m", code="OK"}': "0+50x600",
    'process_resident_memory_bytes{job="troupe", service="trainer"}': "9000000000x600",
}


def test_every_alert_has_a_case() -> None:
    assert FIRES.keys() == {rule["alert"] for group in RULES for rule in group["rules"]}


promtool = pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")


@promtool
def test_prometheus_understands_every_expression_of_a_dashboard(tmp_path: Path) -> None:
    texts = [one for file in DASHBOARDS for one in expressions(json.loads(file.read_text()))]
    known = [one.replace("$__rate_interval", "1m").replace("$job_id", ".*") for one in texts]
    rules = [{"record": f"r{number}", "expr": one} for number, one in enumerate(known)]
    file = tmp_path / "rules.yml"
    file.write_text(yaml.safe_dump({"groups": [{"name": "dashboards", "rules": rules}]}))
    done = subprocess.run(
        ["promtool", "check", "rules", str(file)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


@promtool
def test_alerts_fire_when_they_should_and_only_then(tmp_path: Path) -> None:
    def case(alert: str, series: dict[str, str], count: int) -> dict[str, Any]:
        expression = f'count(ALERTS{{alertname=~"{alert}", alertstate="firing"}})'
        samples = [{"labels": "{}", "value": count}] if count else []
        return {
            "interval": "10s",
            "input_series": [{"series": one, "values": values} for one, values in series.items()],
            "promql_expr_test": [{"expr": expression, "eval_time": "100m", "exp_samples": samples}],
        }

    tests = [case(alert, series, 1) for alert, series in FIRES.items()]
    tests.append(case(".*", QUIET, 0))
    file = tmp_path / "tests.yml"
    file.write_text(yaml.safe_dump({"rule_files": [str(PLACE / "rules.yml")], "tests": tests}))
    done = subprocess.run(
        ["promtool", "test", "rules", str(file)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
