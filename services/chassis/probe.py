"""`python -m services.chassis.probe HOST:PORT [SERVICE]`: exit 0 when the server is SERVING.

With `http://HOST:PORT/PATH` instead: exit 0 when the answer is 200 (the panel's /healthz). Both use
TLS if the `TROUPE_TLS_*` variables configure it for servers, and never a proxy.

This is the health check of containers. It runs every few seconds next to the service, so it imports
only gRPC: the clients of `troupe.rpc` take several times as long to load.
"""

from __future__ import annotations

import argparse
import os
import ssl
import sys
from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc


def main() -> int:
    """Check once, print the answer unless it is SERVING, and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("address")
    parser.add_argument("service", nargs="?", default="", help="default: the server as a whole")
    parser.add_argument("--timeout", type=float, default=5.0, metavar="SECONDS")
    args = parser.parse_args()
    if args.address.startswith("http://"):
        return _check_http(args.address, args.timeout)
    request = health_pb2.HealthCheckRequest(service=args.service)
    with _channel(args.address) as channel:
        try:
            reply = health_pb2_grpc.HealthStub(channel).Check(
                request, timeout=args.timeout, wait_for_ready=True
            )
        except grpc.RpcError as error:
            print(f"{args.address}: {error.code().name}: {error.details()}", file=sys.stderr)
            return 1
    if reply.status != health_pb2.HealthCheckResponse.SERVING:
        name = health_pb2.HealthCheckResponse.ServingStatus.Name(reply.status)
        print(f"{args.address}: {name}", file=sys.stderr)
        return 1
    return 0


def _check_http(url: str, timeout: float) -> int:
    from http.client import HTTPConnection, HTTPException, HTTPSConnection
    from urllib.parse import urlsplit

    parts = urlsplit(url)
    assert parts.hostname is not None
    connection = HTTPConnection(parts.hostname, parts.port, timeout=timeout)
    if os.environ.get("TROUPE_TLS_CERT"):
        # The panel's certificate names its public address, not the loopback.
        context = ssl._create_unverified_context()
        connection = HTTPSConnection(parts.hostname, parts.port, timeout=timeout, context=context)
    try:
        connection.request("GET", parts.path or "/")
        status = connection.getresponse().status
    except (OSError, HTTPException) as error:
        print(f"{url}: {error or type(error).__name__}", file=sys.stderr)
        return 1
    finally:
        connection.close()
    if status != 200:
        print(f"{url}: HTTP status {status}", file=sys.stderr)
    return 0 if status == 200 else 1


def _channel(address: str) -> grpc.Channel:
    options: list[tuple[str, int | str]] = [("grpc.enable_http_proxy", 0)]
    authority = os.environ.get("TROUPE_TLS_CA")
    if not authority:
        return grpc.insecure_channel(address, options)
    files = [os.environ.get(name) for name in ("TROUPE_TLS_KEY", "TROUPE_TLS_CERT")]
    key, certificate = (Path(f).read_bytes() if f else None for f in files)
    credentials = grpc.ssl_channel_credentials(Path(authority).read_bytes(), key, certificate)
    if name := os.environ.get("TROUPE_TLS_NAME"):
        options.append(("grpc.ssl_target_name_override", name))
    return grpc.secure_channel(address, credentials, options)


if __name__ == "__main__":
    raise SystemExit(main())
