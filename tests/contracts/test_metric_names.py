"""Names of metrics that have a writer and a reader are written once; the panel's scripts and the
dashboards, which cannot import them, name metrics that there are."""

import ast
import json
import re
from pathlib import Path

import pytest

from troupe.contracts import metric_names

ROOT = Path(__file__).parents[2]
NAMES = {
    text for name, text in vars(metric_names).items() if name.isupper() and isinstance(text, str)
}
WITH_SLASH = {name for name in NAMES if "/" in name}
# Metrics as a job's log has them, one of each form.
LOGGED = (
    NAMES
    | {f"solver/{name}" for name in NAMES}
    | {metric_names.mean_reward("solver")}
    | {f"{metric_names.EVALUATION}{metric_names.TEAM_MEAN}"}
)
SCRIPTS = sorted((ROOT / "services/control_panel/static").glob("*.js"))
DASHBOARDS = sorted((ROOT / "deploy/grafana/dashboards").glob("*.json"))


def test_a_metric_with_a_reader_is_a_literal_only_where_it_is_defined() -> None:
    found = set()
    for top in ("troupe", "services", "testbed", "benchmarks"):
        for path in (ROOT / top).rglob("*.py"):
            if path == Path(metric_names.__file__):
                continue
            found |= {
                f"{path.relative_to(ROOT)}:{node.lineno}: {node.value}"
                for node in ast.walk(ast.parse(path.read_text()))
                if isinstance(node, ast.Constant) and node.value in WITH_SLASH
            }
    assert not found, "use troupe.contracts.metric_names:\n" + "\n".join(sorted(found))


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_the_panel_looks_up_metrics_that_there_are(script: Path) -> None:
    text = script.read_text()
    looked_up = {
        *re.findall(r'\bmetric\("([^"]+)"\)', text),
        *re.findall(r'\b(?:m|metrics)\["([^"]+)"\]', text),
        *re.findall(r"\bmetrics\[`\$\{policy\}/([a-z_/]+)`\]", text),
    }
    assert looked_up <= NAMES


def test_some_script_of_the_panel_looks_up_metrics() -> None:
    assert any('metric("' in script.read_text() for script in SCRIPTS)


@pytest.mark.parametrize("board", DASHBOARDS, ids=lambda path: path.name)
def test_dashboards_select_metrics_of_jobs_that_there_are(board: Path) -> None:
    text = json.dumps(json.loads(board.read_text()), ensure_ascii=False).replace('\\"', '"')
    for selected in re.findall(r'troupe_job_metric\{[^}]*\bname=~?"([^"]+)"', text):
        for one in re.split(r"\|(?![^(]*\))", selected):
            assert any(re.fullmatch(one, name) for name in LOGGED), one
