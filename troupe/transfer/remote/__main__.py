"""`python -m troupe.transfer.remote PARENT_PID`: the owner process of a host (`OwnerProcess`).

It reads its configuration as one line of JSON from stdin, and prints its port when it serves, or
one line with the reason why it cannot. It ends on SIGTERM, and with its parent.
"""

from __future__ import annotations

import faulthandler
import json
import logging
import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any

import grpc
import torch
from pydantic import SecretStr

from troupe.processes.tether import end_with_parent
from troupe.rpc.errors import TroupeError
from troupe.rpc.settings import ClientSettings
from troupe.transfer import Transfer
from troupe.transfer.remote.owner import TransferOwner


def main() -> None:
    """Serve until SIGTERM or the end of the parent."""
    end_with_parent(int(sys.argv[1]))
    # A crash of UCX leaves a stack trace in the log.
    faulthandler.enable()
    config: dict[str, Any] = json.loads(sys.stdin.readline())
    logging.basicConfig(
        level=config["log_level"].upper(),
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
        stream=sys.stderr,
    )
    torch.set_num_threads(1)
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    try:
        owner = _owner(config)
    except (TroupeError, OSError) as error:
        print(str(error).replace("\n", " "), flush=True)
        raise SystemExit(1) from None
    print(owner.port, flush=True)
    # It ends with its parent, which closes the pipe.
    threading.Thread(target=_until_end, args=[stop], daemon=True).start()
    # Nothing reads stdout from here on.
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    stop.wait()
    owner.stop(2.0)


def _until_end(stop: threading.Event) -> None:
    sys.stdin.read()
    stop.set()


def _owner(config: dict[str, Any]) -> TransferOwner:
    token = None if config["token"] is None else SecretStr(config["token"])
    settings = ClientSettings(**config["settings"], token=token)
    first, *rest = (Path(root) for root in config["roots"])
    transfer = Transfer(first, fallback=rest[0] if rest else None)
    return TransferOwner(
        transfer,
        host=config["host"],
        port=config["port"],
        advertise=config["advertise"],
        token=token,
        credentials=_credentials(config, settings),
        settings=settings,
        use_ucx=config["use_ucx"],
        socket=None if config["socket"] is None else Path(config["socket"]),
    )


def _credentials(config: dict[str, Any], settings: ClientSettings) -> grpc.ServerCredentials | None:
    if config["tls_cert"] is None or config["tls_key"] is None:
        return None
    ask = config["tls_client_auth"] and settings.tls_ca is not None
    return grpc.ssl_server_credentials(
        [(Path(config["tls_key"]).read_bytes(), Path(config["tls_cert"]).read_bytes())],
        root_certificates=settings.tls_ca.read_bytes() if ask and settings.tls_ca else None,
        require_client_auth=ask,
    )


if __name__ == "__main__":
    main()
