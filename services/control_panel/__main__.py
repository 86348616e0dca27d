"""`python -m services.control_panel`."""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path

import uvicorn

from services.chassis.parent import watch_parent
from services.control_panel.access import PanelSettings
from services.control_panel.app import create_app
from troupe.rpc.errors import port_error


def main() -> int:
    """Serve until SIGTERM; returns the exit status."""
    settings = PanelSettings()
    token = settings.token.get_secret_value() if settings.token else None
    try:
        listener = socket.create_server((settings.host, settings.port))
    except OSError as error:
        problem = port_error(settings.host, settings.port, "TROUPE_PORT", error)
        print(f"control panel: {problem}", file=sys.stderr)
        return 1
    if settings.port_file:
        port = listener.getsockname()[1]
        scratch = Path(f"{settings.port_file}.tmp")
        scratch.write_text(f"{port} {port}\n")
        os.replace(scratch, settings.port_file)
    config = uvicorn.Config(
        create_app(
            settings.orchestrator_address, token, settings.client(), hosts=settings.host_names
        ),
        log_level=settings.log_level,
        access_log=False,
        # An open event stream would hold the process for ever.
        timeout_graceful_shutdown=2,
    )
    server = uvicorn.Server(config)
    if settings.parent_pid is not None:
        watch_parent(settings.parent_pid, lambda: setattr(server, "should_exit", True))
    server.run(sockets=[listener])
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
