"""A stand-in for the package `services`: real processes, real gRPC health, no work.

`write_stub_services(directory)` makes a package that `python -m services.<name>` finds first
when `directory` is the working directory. So the supervisor is tested with real children in
seconds, whatever the real services need.
"""

from __future__ import annotations

import textwrap
from pathlib import Path

_STUB = textwrap.dedent(
    '''
    """One stub service: serves until SIGTERM."""
    import json, os, signal, sys, threading
    from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
    from pathlib import Path

    def main(name):
        port = int(os.environ["TROUPE_PORT"])
        data_dir = Path(os.environ["TROUPE_DATA_DIR"])
        kept = ("TROUPE_", "OMP_", "PYTHONPATH")
        told = {k: v for k, v in os.environ.items() if k.startswith(kept)}
        worker = os.environ["TROUPE_WORKER_ID"]
        (data_dir / f"told-{worker}.json").write_text(json.dumps(told))
        if (data_dir / f"broken-{name}").exists():
            print(json.dumps({"event": "the stub is broken", "error": "on purpose"}), flush=True)
            raise SystemExit(3)
        done = threading.Event()
        if (data_dir / f"stubborn-{name}").exists():
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        else:
            signal.signal(signal.SIGTERM, lambda *_: done.set())
        if name == "control_panel":
            class Page(BaseHTTPRequestHandler):
                def do_GET(self):
                    self.send_response(200); self.end_headers()
                def log_message(self, *_): pass
            server = ThreadingHTTPServer(("127.0.0.1", port), Page)
            threading.Thread(target=server.serve_forever, daemon=True).start()
        else:
            import grpc
            from concurrent.futures import ThreadPoolExecutor
            from grpc_health.v1 import health, health_pb2, health_pb2_grpc
            server = grpc.server(ThreadPoolExecutor(2), options=[("grpc.so_reuseport", 0)])
            servicer = health.HealthServicer()
            health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
            if name == "orchestrator":
                from troupe.v1 import orchestrator_pb2 as orchestrator_pb
                from troupe.v1 import orchestrator_pb2_grpc as orchestrator_grpc
                class Nodes(orchestrator_grpc.OrchestratorServicer):
                    def JoinNode(self, request, context):
                        return orchestrator_pb.JoinNodeResponse(next_seconds=1)
                orchestrator_grpc.add_OrchestratorServicer_to_server(Nodes(), server)
            server.add_insecure_port(f"127.0.0.1:{port}")
            server.start()
            servicer.set("", health_pb2.HealthCheckResponse.SERVING)
        print("serving", flush=True)
        while not done.wait(0.05):
            pass
        with (data_dir / "stopped.txt").open("a") as file:
            file.write(name + chr(10))
'''
)

NAMES = ("experience_store", "reward", "orchestrator", "rollout", "trainer", "control_panel")


def write_stub_services(directory: Path, *, playing: bool = False) -> None:
    """Write the package `services` with one stub per real service into `directory`.

    `playing`: the orchestrator is one that plays its jobs (tests/support/playing_orchestrator.py).
    """
    package = directory / "services"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "_stub.py").write_text(_STUB)
    for name in NAMES:
        home = package / name
        home.mkdir()
        (home / "__init__.py").touch()
        (home / "__main__.py").write_text(f"from services._stub import main\nmain({name!r})\n")
    if playing:
        (package / "orchestrator" / "__main__.py").write_text(
            "import asyncio\n"
            "from tests.support.playing_orchestrator import main\n"
            "asyncio.run(main())\n"
        )
