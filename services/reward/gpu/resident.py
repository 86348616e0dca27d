"""A torch model in a process of its own, which drops and restores its weights on request.

Started as `python -m services.reward.gpu.resident` with

    --entrypoint my_models:make_judge --port 8000 --copy /dev/shm/x/judge.safetensors

The object that the entrypoint makes is a torch module or has some as attributes. Their weights are
copied once to a file in shared memory and dropped; from there they are restored to the devices that
a request names. A method is called by `POST /call {"method": ., "arguments": {}}`.
"""

from __future__ import annotations

import argparse
import importlib
import json
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    import torch

_MAX_BODY: Final = 64 * 2**20


class ResidentModel:
    """The user's object, with its weights on devices or in host memory."""

    def __init__(self, made: Any, copy: Path) -> None:
        """Copy the weights to `copy` and drop them. Raises TypeError where there are none."""
        self._made = made
        self._copy = copy
        self._tensors = _tensors_of(made)
        if not self._tensors:
            raise TypeError(f"{type(made).__name__} has no torch modules")
        self._lock = threading.Condition()
        self._calls = 0
        self._devices: list[str] = []
        self._awake = False
        self._save()
        self._drop()

    @property
    def bytes(self) -> int:
        """Size of the weights."""
        return self._copy.stat().st_size

    def call(self, method: str, arguments: dict[str, Any]) -> Any:
        """Return the result of a public method. Raises RuntimeError while the weights are off
        devices."""
        function = None if method.startswith("_") else getattr(self._made, method, None)
        if not callable(function):
            raise AttributeError(f"{type(self._made).__name__} has no method {method!r}")
        with self._lock:
            if not self._awake:
                raise RuntimeError("its weights are in host memory: they were not restored")
            self._calls += 1
        try:
            import torch

            with torch.inference_mode():
                return _plain(function(**arguments))
        finally:
            with self._lock:
                self._calls -= 1
                self._lock.notify_all()

    def resume(self, devices: Sequence[int]) -> float:
        """Restore the weights to `devices` (to host memory without CUDA); the seconds it took."""
        import torch
        from safetensors import safe_open

        cuda = torch.cuda.is_available()
        names = [f"cuda:{index}" if cuda else "cpu" for index in devices or (0,)]
        chooses = getattr(self._made, "device_of", None)
        with self._lock:
            if self._awake and names == self._devices:
                return 0.0
            began = time.perf_counter()
            for device in dict.fromkeys(names):
                with safe_open(str(self._copy), framework="pt", device=device) as copy:
                    for name, tensor in self._tensors.items():
                        wanted = chooses(name, names) if chooses is not None else names[0]
                        if wanted == device:
                            found = copy.get_tensor(name)
                            # On the host the tensor would be the file itself.
                            tensor.data = found if cuda else found.clone()
            if cuda:
                torch.cuda.synchronize()
            self._awake, self._devices = True, names
            return time.perf_counter() - began

    def release(self) -> None:
        """Drop the weights from devices. Raises RuntimeError while calls run."""
        with self._lock:
            if self._calls:
                raise RuntimeError(f"{self._calls} calls run")
            self._drop()

    def _save(self) -> None:
        from safetensors.torch import save_file

        self._copy.parent.mkdir(parents=True, exist_ok=True)
        save_file({n: t.detach().cpu().contiguous() for n, t in self._tensors.items()}, self._copy)

    def _drop(self) -> None:
        import torch

        for tensor in self._tensors.values():
            tensor.data = torch.empty(0, dtype=tensor.dtype, device="cpu")
        self._awake = False
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def _tensors_of(made: Any) -> dict[str, torch.Tensor]:
    """Return the parameters and buffers by name; shared ones once."""
    import torch

    modules = {"": made} if isinstance(made, torch.nn.Module) else getattr(made, "__dict__", {})
    found: dict[str, torch.Tensor] = {}
    seen: set[int] = set()
    for prefix, module in modules.items():
        if not isinstance(module, torch.nn.Module):
            continue
        for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
            if id(tensor) not in seen:
                seen.add(id(tensor))
                found[f"{prefix}.{name}" if prefix else name] = tensor
    return found


def _plain(value: Any) -> Any:
    """Return `value`, with a tensor converted to numbers."""
    for name in ("tolist", "item"):
        method = getattr(value, name, None)
        if callable(method):
            return method()
    return value


class _Handler(BaseHTTPRequestHandler):
    resident: ResidentModel

    def do_GET(self) -> None:
        """Answer with health and size."""
        if self.path in ("/health", "/health_generate"):
            self._answer(200, {"status": "ok"})
        elif self.path == "/model_info":
            self._answer(200, {"bytes": self.resident.bytes})
        else:
            self._answer(404, {"error": f"nothing at {self.path}"})

    def do_POST(self) -> None:
        """Answer release, resume and method calls."""
        try:
            size = int(self.headers.get("content-length") or 0)
            if not 0 <= size <= _MAX_BODY:
                self._answer(413, {"error": f"{size} bytes; {_MAX_BODY} at most"})
                return
            body = json.loads(self.rfile.read(size) or b"{}")
            resident = self.resident
            if self.path == "/release_memory_occupation":
                resident.release()
                self._answer(200, {})
            elif self.path == "/resume_memory_occupation":
                self._answer(200, {"seconds": resident.resume(body.get("devices") or [])})
            elif self.path == "/call":
                result = resident.call(str(body.get("method")), body.get("arguments") or {})
                self._answer(200, {"result": result})
            else:
                self._answer(404, {"error": f"nothing at {self.path}"})
        except Exception as error:  # the user's code may raise anything
            text = f"{type(error).__name__}: {error}"
            self._answer(500, {"error": text[:2000], "traceback": traceback.format_exc()[-4000:]})

    def _answer(self, status: int, body: dict[str, Any]) -> None:
        data = json.dumps(body, default=str).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        """Do nothing: the manager logs moves."""


def load(entrypoint: str) -> Callable[[], Any]:
    """Return the object that "package.module:attribute" names. Raises ImportError,
    AttributeError."""
    module, _, path = entrypoint.partition(":")
    found: Any = importlib.import_module(module)
    for name in path.split("."):
        found = getattr(found, name)
    made: Callable[[], Any] = found
    return made


def main() -> None:
    """Load the model and serve it until SIGTERM."""
    parser = argparse.ArgumentParser(prog="services.reward.gpu.resident")
    parser.add_argument("--entrypoint", required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--copy", type=Path, required=True)
    arguments = parser.parse_args()
    resident = ResidentModel(load(arguments.entrypoint)(), arguments.copy)
    handler = type("Handler", (_Handler,), {"resident": resident})
    # Health is answered from here on.
    with ThreadingHTTPServer(("127.0.0.1", arguments.port), handler) as server:
        server.serve_forever()


if __name__ == "__main__":
    main()
