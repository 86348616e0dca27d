"""`python -m services.control_panel`."""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path

import uvicorn

from services.chassis.settings import ServiceSettings
from services.control_panel.app import create_app


def main() -> int:
    """Serve until SIGTERM; returns the exit status."""
    settings = ServiceSettings()
    token = settings.token.get_secret_value() if settings.token else None
    try:
        listener = socket.create_server((settings.host, settings.port))
    except OSError as error:
        print(
            f"control panel: cannot listen on {settings.host}:{settings.port}: {error.strerror}. "
            "Stop what uses the port, or choose another with TROUPE_PORT (0: any free one).",
            file=sys.stderr,
        )
        return 1
    if settings.port_file:
        port = listener.getsockname()[1]
        scratch = Path(f"{settings.port_file}.tmp")
        scratch.write_text(f"{port} {port}\n")
        os.replace(scratch, settings.port_file)
    config = uvicorn.Config(
        create_app(settings.orchestrator_address, token),
        log_level=settings.log_level,
        access_log=False,
        # An open event stream would hold the process for ever.
        timeout_graceful_shutdown=2,
    )
    uvicorn.Server(config).run(sockets=[listener])
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
