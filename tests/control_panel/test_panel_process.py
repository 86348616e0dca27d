"""The panel as a separate process: its output at the start, and TLS."""

from __future__ import annotations

import os
import shutil
import signal
import ssl
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from tests.support.processes import ports_of
from tests.support.waiting import PATIENCE

ROOT = Path(__file__).resolve().parents[2]


@contextmanager
def running(tmp_path: Path, **settings: str) -> Iterator[tuple[int, Path]]:
    """The panel's port, and the file of its output."""
    port_file, log = tmp_path / "port", tmp_path / "log"
    kept = {k: v for k, v in os.environ.items() if not k.startswith("TROUPE_")}
    given = {f"TROUPE_{name.upper()}": value for name, value in settings.items()}
    with log.open("wb") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", "services.control_panel"],
            cwd=ROOT,
            env={**kept, **given, "TROUPE_PORT_FILE": str(port_file)},
            stderr=file,
        )
    try:
        yield ports_of(process, port_file)[0], log
    finally:
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE) in (0, -signal.SIGTERM)


def answered(client: httpx.Client, url: str) -> httpx.Response:
    deadline = time.monotonic() + PATIENCE
    while True:
        try:
            return client.get(url)
        except httpx.ConnectError:
            assert time.monotonic() < deadline
            time.sleep(0.1)


def test_the_panel_warns_without_a_token(tmp_path: Path) -> None:
    with running(tmp_path) as (port, log), httpx.Client(trust_env=False) as client:
        assert answered(client, f"http://127.0.0.1:{port}/healthz").status_code == 200
        assert "every user of this machine can run code through it; set TROUPE_TOKEN" in (
            log.read_text()
        )


def test_the_panel_speaks_tls_like_services(tmp_path: Path) -> None:
    if shutil.which("openssl") is None:
        pytest.skip("makes its certificate with the openssl program")
    key, certificate = tmp_path / "key.pem", tmp_path / "cert.pem"
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"),
            *("-nodes", "-keyout", str(key), "-out", str(certificate), "-days", "1"),
            *("-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1"),
        ],
        check=True,
        capture_output=True,
    )
    tls = {"tls_cert": str(certificate), "tls_key": str(key), "tls_ca": str(certificate)}
    trusted = ssl.create_default_context(cafile=str(certificate))
    with (
        running(tmp_path, token="secret", **tls) as (port, log),
        httpx.Client(verify=trusted, trust_env=False) as client,
    ):
        url = f"https://127.0.0.1:{port}"
        assert answered(client, f"{url}/healthz").status_code == 200
        opened = client.post(f"{url}/session", json={"token": "secret"})
        assert "Secure" in opened.headers["set-cookie"]
        assert "set TROUPE_TOKEN" not in log.read_text()
        with pytest.raises(httpx.RemoteProtocolError):
            httpx.get(f"http://127.0.0.1:{port}/healthz", trust_env=False)
        probe = [sys.executable, "-m", "services.chassis.probe", f"http://127.0.0.1:{port}/healthz"]
        environment = {**os.environ, "TROUPE_TLS_CERT": str(certificate)}
        assert subprocess.run(probe, cwd=ROOT, env=environment).returncode == 0


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"TLS_CERT": "/nothing", "TLS_KEY": "/nothing"}, "TROUPE_TLS_CERT"),
        ({"TLS_KEY": __file__}, "TROUPE_TLS_CERT"),
        ({"TLS_CERT": __file__, "TLS_KEY": __file__}, "TROUPE_TLS_CERT"),
        ({"TOKEN": " not sendable"}, "TROUPE_TOKEN"),
    ],
)
def test_settings_that_do_not_fit_are_one_line(settings: dict[str, str], said: str) -> None:
    given = {f"TROUPE_{name}": value for name, value in settings.items()}
    done = subprocess.run(
        [sys.executable, "-m", "services.control_panel"],
        cwd=ROOT,
        env={**os.environ, **given},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert done.returncode in (1, 2)
    assert said in done.stderr
    assert "Traceback" not in done.stderr
    assert "sendable" not in done.stderr.replace("must be", "")
