"""A hub of models on this host: as much of its HTTP as `huggingface_hub` needs for an upload."""

from __future__ import annotations

import base64
import hashlib
import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

TOKEN = "hf_right"


class FakeHub:
    """The hub's content, its requests, and the requests that it refuses."""

    def __init__(self) -> None:
        self.url = ""
        # Files of repositories, by "owner/name" and path; large ones by the hash of their content.
        self.repositories: dict[str, dict[str, bytes]] = {}
        self.objects: dict[str, bytes] = {}
        self.uploads: list[str] = []
        self.private: dict[str, bool] = {}
        self.messages: list[str] = []
        # Owners that the token may not write to.
        self.foreign = {"somebody"}
        # Number of large files after which the next is refused; None: all are accepted.
        self.refuse_after: int | None = None
        # While set, requests wait.
        self.silent = threading.Event()

    def answer(self, method: str, path: str, token: str, body: bytes) -> tuple[int, Any]:
        """Status and JSON for a request."""
        path = path.partition("?")[0]
        if path.startswith("/objects/"):
            return self._take(path.rpartition("/")[2], body)
        if token != f"Bearer {TOKEN}":
            return 401, {"error": "Invalid username or password."}
        given = json.loads(body) if body and not path.endswith("/commit/main") else {}
        if path == "/api/validate-yaml":  # of a model card
            return 200, {"errors": [], "warnings": []}
        if path == "/api/repos/create":
            name = f"{given.get('organization') or 'me'}/{given['name']}"
            if name.partition("/")[0] in self.foreign:
                return 403, {"error": "You don't have the rights to create a model there"}
            if name in self.repositories:
                return 409, {"error": "You already created this model repo", "url": name}
            self.repositories[name], self.private[name] = (
                {},
                given.get("private", False) or (given.get("visibility") == "private"),
            )
            return 200, {"url": f"{self.url}/{name}"}
        owner, _, rest = path.removeprefix("/api/models/").strip("/").partition("/")
        name, _, rest = rest.partition("/")
        repository = f"{owner}/{name.removesuffix('.git')}"
        if repository not in self.repositories:
            return 404, {"error": "Repository not found"}
        return self._in(repository, rest, given, body)

    def _in(self, repository: str, rest: str, given: Any, body: bytes) -> tuple[int, Any]:
        files = self.repositories[repository]
        if rest == "preupload/main":
            modes = {True: "lfs", False: "regular"}
            return 200, {
                "files": [
                    {
                        "path": one["path"],
                        "uploadMode": modes[one["path"].endswith(".safetensors")],
                        "shouldIgnore": False,
                    }
                    for one in given["files"]
                ]
            }
        if rest == "info/lfs/objects/batch":
            objects = []
            for one in given["objects"]:
                there = one["oid"] in self.objects
                upload = {"upload": {"href": f"{self.url}/objects/{one['oid']}"}}
                objects.append({**one, **({} if there else {"actions": upload})})
            return 200, {"objects": objects, "transfer": "basic"}
        if rest == "commit/main":
            for line in body.splitlines():
                entry = json.loads(line)
                value = entry["value"]
                if entry["key"] == "header":
                    self.messages.append(value["summary"])
                elif entry["key"] == "file":
                    files[value["path"]] = base64.b64decode(value["content"])
                elif entry["key"] == "lfsFile":
                    files[value["path"]] = self.objects[value["oid"]]
            return 200, {"commitUrl": f"{self.url}/{repository}/commit/1", "commitOid": "1"}
        return 200, {"id": repository, "sha": "1", "siblings": []}

    def _take(self, oid: str, body: bytes) -> tuple[int, Any]:
        if self.refuse_after is not None and len(self.uploads) >= self.refuse_after:
            return 403, {"error": "the storage refuses"}
        assert hashlib.sha256(body).hexdigest() == oid
        self.objects[oid] = body
        self.uploads.append(oid)
        return 200, {}


@contextmanager
def fake_hub() -> Iterator[FakeHub]:
    """A hub that answers on a port of this host."""
    hub = FakeHub()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def _handle(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            if self.headers.get("Transfer-Encoding") == "chunked":
                while size := int(self.rfile.readline(), 16):
                    body += self.rfile.read(size)
                    self.rfile.readline()
                self.rfile.readline()
            while hub.silent.is_set():
                time.sleep(0.05)
            token = self.headers.get("Authorization", "")
            status, content = hub.answer(self.command, self.path, token, body)
            data = json.dumps(content).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        do_GET = do_POST = do_PUT = do_HEAD = _handle  # noqa: N815

        def log_message(self, format: str, *args: Any) -> None:
            """Say nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield hub
    finally:
        hub.silent.clear()
        server.shutdown()
        server.server_close()
