"""Owners with certificates."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import grpc
import pytest
import torch
from pydantic import SecretStr

from tests.support.waiting import PATIENCE
from troupe.rpc import NO_RETRY, ClientSettings, Unavailable
from troupe.transfer import Transfer
from troupe.transfer.remote import HostOwner, OwnerProcess, Peer, TransferOwner

KEY = "job/solver/weights@3"


def certificate(directory: Path, name: str) -> tuple[Path, Path]:
    """Certificate and key for `name` ("IP:127.0.0.1"), its own authority."""
    if shutil.which("openssl") is None:
        pytest.skip("makes its certificates with the openssl program")
    key, made = directory / "key.pem", directory / "certificate.pem"
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"),
            *("-nodes", "-days", "1", "-subj", "/CN=troupe", "-keyout", key, "-out", made),
            *("-addext", f"subjectAltName={name}"),
        ],
        check=True,
        capture_output=True,
    )
    return made, key


@pytest.mark.slow
def test_owner_processes_serve_with_certificates(tmp_path: Path) -> None:
    made, key = certificate(tmp_path, "IP:127.0.0.1")
    token = SecretStr("secret")
    settings = ClientSettings(token=token, tls_ca=made, tls_cert=made, tls_key=key, retry=NO_RETRY)
    # The other host's owner, whose certificate is verified by name.
    far = TransferOwner(
        Transfer(tmp_path / "far"),
        token=token,
        credentials=grpc.ssl_server_credentials(
            [(key.read_bytes(), made.read_bytes())], made.read_bytes(), require_client_auth=True
        ),
        settings=settings,
        use_ucx=False,
    )
    socket = tmp_path / "socket"
    near = OwnerProcess(
        [tmp_path / "near"],
        settings=settings,
        tls_cert=made,
        tls_key=key,
        tls_client_auth=True,
        use_ucx=False,
        socket=socket,
    )
    try:
        state = {"w": torch.arange(1000)}
        Transfer(tmp_path / "far").set(KEY, state)
        # A Unix socket has no name to verify.
        for version, place in enumerate((f"unix:{socket}", near.local)):
            key_ = f"job/solver/weights@{4 + version}"
            Transfer(tmp_path / "far").set(key_, state)
            source = HostOwner(place, settings, locate=lambda key, expected: [far.address])
            got, _ = Transfer(tmp_path / "near", peers=[source]).get(key_)
            assert torch.equal(got["w"], state["w"])
            source.close()
        Transfer(tmp_path / "near").set("job/solver/weights@9", state)
        reader = Transfer(tmp_path / "reader", peers=[Peer(near.address, settings, use_ucx=False)])
        assert torch.equal(reader.get("job/solver/weights@9")[0]["w"], state["w"])
        uncertified = settings.model_copy(update={"tls_cert": None, "tls_key": None})
        for stranger in (uncertified, ClientSettings(token=token, retry=NO_RETRY)):
            peer = Peer(near.address, stranger, use_ucx=False)
            with pytest.raises(Unavailable):
                peer.delete(["job/x"], timeout=PATIENCE)
            peer.close()
        # This name is not in the certificate.
        peer = Peer(f"localhost:{near.port}", settings, use_ucx=False)
        with pytest.raises(Unavailable):
            peer.delete(["job/x"], timeout=PATIENCE)
        peer.close()
    finally:
        near.close()
        far.stop(0)
