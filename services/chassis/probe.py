"""`python -m services.chassis.probe HOST:PORT [SERVICE]`: exit 0 when the server is SERVING.

What containers use as their health check; grpc_health_probe in the language that is there already.
"""

from __future__ import annotations

import argparse
import sys

from grpc_health.v1 import health_pb2, health_pb2_grpc

from troupe.rpc import ClientSettings, TroupeError, connect_sync


def main() -> int:
    """Ask once; prints the answer when it is not SERVING."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("address")
    parser.add_argument("service", nargs="?", default="", help="default: the server as a whole")
    parser.add_argument("--timeout", type=float, default=5.0, metavar="SECONDS")
    args = parser.parse_args()
    with connect_sync(args.address, ClientSettings(deadline_seconds=args.timeout)) as channel:
        try:
            reply = health_pb2_grpc.HealthStub(channel).Check(
                health_pb2.HealthCheckRequest(service=args.service)
            )
        except TroupeError as error:
            print(f"{args.address}: {error}", file=sys.stderr)
            return 1
    status = health_pb2.HealthCheckResponse.ServingStatus.Name(reply.status)
    if reply.status != health_pb2.HealthCheckResponse.SERVING:
        print(f"{args.address}: {status}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
