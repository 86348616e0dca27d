"""`python -m services.control_panel`."""

from __future__ import annotations

import ssl
import sys
from typing import Any

import uvicorn

from services.chassis.process import read_pem, watch_parent
from services.chassis.settings import read_settings
from services.control_panel.access import PanelSettings
from services.control_panel.app import create_app
from troupe.disks import replace_file
from troupe.http.connections import bounded_protocol, most_idle
from troupe.rpc.addresses import listen
from troupe.rpc.errors import InvalidArgument, TroupeError, port_error


def main() -> int:
    """Serve until SIGTERM; return the exit status."""
    settings = read_settings(PanelSettings, "control panel")
    if settings is None:
        return 2
    token = settings.token.get_secret_value() if settings.token else None
    try:
        tls = tls_options(settings)
    except TroupeError as error:
        print(f"control panel: {error}", file=sys.stderr)
        return 1
    try:
        listener = listen(settings.host, settings.port)
    except OSError as error:
        problem = port_error(settings.host, settings.port, "TROUPE_PORT", error)
        print(f"control panel: {problem}", file=sys.stderr)
        return 1
    if settings.port_file:
        port = listener.getsockname()[1]
        replace_file(settings.port_file, f"{port} {port}\n")
    if strangers := settings.strangers:
        warning = f"{strangers} can run code through it; set TROUPE_TOKEN"
        print(f"control panel: warning: {warning}", file=sys.stderr)
    config = uvicorn.Config(
        create_app(
            settings.orchestrator_address, token, settings.client(), hosts=settings.host_names
        ),
        http=bounded_protocol(most_idle()),
        log_level=settings.log_level,
        access_log=False,
        # An open event stream would keep the process from ending.
        timeout_graceful_shutdown=2,
        **tls,
    )
    server = uvicorn.Server(config)
    if settings.parent_pid is not None:
        watch_parent(settings.parent_pid, lambda: setattr(server, "should_exit", True))
    server.run(sockets=[listener])
    return 0


def tls_options(settings: PanelSettings) -> dict[str, Any]:
    """Return uvicorn's options for HTTPS, by the services' `TROUPE_TLS_*`; {} without TLS.

    Raises InvalidArgument, which names the file that is missing, unreadable or does not match.
    """
    if settings.tls_cert is None and settings.tls_key is None:
        return {}
    names = ["tls_cert", "tls_key", *(["tls_ca"] if settings.tls_client_auth else [])]
    for name in names:
        read_pem(getattr(settings, name), name)
    assert settings.tls_cert is not None  # read_pem
    try:
        ssl.create_default_context(ssl.Purpose.CLIENT_AUTH).load_cert_chain(
            settings.tls_cert, settings.tls_key
        )
    except ssl.SSLError as error:
        raise InvalidArgument(
            f"the certificate and its key do not match, or are not PEM: {error.reason}",
            field="tls_cert",
            value=settings.tls_cert,
            remedy="Set TROUPE_TLS_CERT and TROUPE_TLS_KEY to a PEM certificate and its key.",
        ) from error
    return {
        "ssl_certfile": settings.tls_cert,
        "ssl_keyfile": settings.tls_key,
        "ssl_ca_certs": settings.tls_ca if settings.tls_client_auth else None,
        "ssl_cert_reqs": ssl.CERT_REQUIRED if settings.tls_client_auth else ssl.CERT_NONE,
    }


if __name__ == "__main__":
    raise SystemExit(main())
