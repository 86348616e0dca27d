"""A model service without a model: SGLang's surface of sleep and wake, and what goes wrong.

python model_server.py PORT LOG [refuse=N] [deaf]
`refuse=N`: the first N resumes fail. `deaf`: it does not let go of its memory.
"""

from __future__ import annotations

import json
import os
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

PORT, LOG, OPTIONS = int(sys.argv[1]), sys.argv[2], sys.argv[3:]
refuse = next((int(o.partition("=")[2]) for o in OPTIONS if o.startswith("refuse=")), 0)


def note(what: str) -> None:
    with open(LOG, "a") as log:
        log.write(f"{what} {os.environ.get('CUDA_VISIBLE_DEVICES', '')}\n")


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.answer(200, {})

    def do_POST(self) -> None:
        global refuse
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        what = self.path.strip("/").partition("_")[0]
        if what == "resume" and refuse > 0:
            refuse -= 1
            self.answer(500, {"error": "CUDA out of memory"})
        elif what == "release" and "deaf" in OPTIONS:
            self.answer(500, {"error": "not now"})
        else:
            assert what not in ("release", "resume") or body["tags"] == ["kv_cache", "weights"]
            note(what)
            self.answer(200, {})

    def answer(self, status: int, body: dict[str, str]) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: object) -> None:
        pass


note("start")
ThreadingHTTPServer(("127.0.0.1", PORT), Handler).serve_forever()
