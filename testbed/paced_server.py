"""A server that speaks SGLang's HTTP API and draws random tokens at a given pace.

    python -m testbed.paced_server MODEL_DIRECTORY PORT_FILE --step-seconds 0.02 --answer 200

It is a separate process, so that the cost of a rollout service can be measured without its engine.
Weights are loaded from disk (`/update_weights_from_disk`) into a real tiny model, which proves them
like any server: by the log-probs of given tokens. Turns are not computed: a turn has `--answer`
tokens, drawn by its id, after as many steps.
"""

from __future__ import annotations

import argparse
import asyncio
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import torch
import uvicorn
from safetensors.torch import load_file
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from transformers import AutoConfig, AutoModelForCausalLM

# The part of the server's OpenAPI document that the client reads: weights from disk, pauses.
_DOCUMENT = {
    "paths": {
        "/generate": {},
        "/pause_generation": {},
        "/update_weight_version": {},
        "/v1/loads": {},
    },
    "components": {
        "schemas": {"PauseGenerationReqInput": {"properties": {"mode": {"type": "string"}}}}
    },
}


class PacedServer:
    """The server's state: its tiny model, its version, its running turns."""

    def __init__(self, directory: Path, *, step_seconds: float, answer: int) -> None:
        """`directory`: of the model's configuration. `answer`: tokens of every turn."""
        config = AutoConfig.from_pretrained(directory)
        self._model = AutoModelForCausalLM.from_config(config).eval()
        self._type = config.model_type
        self._context = config.max_position_embeddings
        self._vocabulary: int = config.vocab_size
        self._step_seconds, self._answer = step_seconds, answer
        self._version = "default"
        self._running = 0
        self._going = asyncio.Event()
        self._going.set()

    def app(self) -> Starlette:
        """Return the server's routes."""

        def fixed(reply: dict[str, Any]) -> Any:
            async def answer(request: Request) -> Response:
                return _json(reply)

            return answer

        done = fixed({"success": True, "message": ""})
        get = {
            "/openapi.json": fixed(_DOCUMENT),
            "/health_generate": done,
            "/model_info": self._model_info,
            "/server_info": self._server_info,
            "/v1/loads": self._loads,
        }
        post = {
            "/generate": self._generate,
            "/update_weights_from_disk": self._load,
            "/update_weight_version": self._rename,
            "/pause_generation": self._pause,
            "/continue_generation": self._resume,
            "/flush_cache": done,
            "/abort_request": done,
            "/weights_checker": self._refuse,
        }
        return Starlette(
            routes=[
                *(Route(path, answer) for path, answer in get.items()),
                *(Route(path, answer, methods=["POST"]) for path, answer in post.items()),
            ]
        )

    async def _model_info(self, request: Request) -> Response:
        return _json({"weight_version": self._version, "model_type": self._type})

    async def _server_info(self, request: Request) -> Response:
        return _json({"tp_size": 1, "dp_size": 1, "context_length": self._context})

    async def _loads(self, request: Request) -> Response:
        return _json({"loads": [{"num_running_reqs": self._running, "num_waiting_reqs": 0}]})

    async def _refuse(self, request: Request) -> Response:
        return _json({"error": {"message": "needs CUDA"}}, 400)

    async def _load(self, request: Request) -> Response:
        body = orjson.loads(await request.body())
        tensors = load_file(Path(body["model_path"]) / "model.safetensors")
        self._model.load_state_dict(tensors, strict=False)
        self._version = body["weight_version"]
        return _json({"success": True, "message": ""})

    async def _rename(self, request: Request) -> Response:
        self._version = orjson.loads(await request.body())["new_version"]
        return _json({"success": True, "message": ""})

    async def _pause(self, request: Request) -> Response:
        self._going.clear()
        return _json({})

    async def _resume(self, request: Request) -> Response:
        self._going.set()
        return _json({})

    async def _generate(self, request: Request) -> Response:
        body = orjson.loads(await request.body())
        sampling, prompt = body["sampling_params"], body["input_ids"]
        for token in sampling.get("logit_bias") or {}:
            if int(token) >= self._vocabulary:
                message = f"logit_bias must has keys in [0, {self._vocabulary - 1}], got {token}."
                return _json({"error": {"message": message}}, 400)
        count = min(self._answer, sampling["max_new_tokens"])
        random = np.random.default_rng(zlib.crc32(str(body.get("rid")).encode()))
        # Never an end of sequence, and all within the vocabulary.
        ids = random.integers(self._vocabulary // 2, self._vocabulary, size=count)
        logprobs = -random.exponential(size=count)
        meta: dict[str, Any] = {
            "id": body.get("rid"),
            "finish_reason": {"type": "length", "length": count},
            "prompt_tokens": len(prompt),
            "completion_tokens": count,
            "cached_tokens": 0,
            "weight_version": self._version,
            "weight_versions": [{"version": self._version, "start": 0, "end": count}],
            "output_token_logprobs": [
                [logprob, token, None]
                for logprob, token in zip(logprobs.tolist(), ids.tolist(), strict=True)
            ],
            "input_token_logprobs": [],
        }
        if (start := body.get("logprob_start_len", -1)) >= 0:
            meta["input_token_logprobs"] = self._scored(prompt, start)
        self._running += 1
        try:
            # A turn takes its number of tokens times a step, regardless of other turns.
            await asyncio.sleep(self._step_seconds * count)
        finally:
            self._running -= 1
        await self._going.wait()
        return _json({"output_ids": ids.tolist(), "meta_info": meta})

    def _scored(self, prompt: list[int], start: int) -> list[list[Any]]:
        """Return log-probs of the prompt's tokens after `start`; the first one has none."""
        with torch.no_grad():
            logits = self._model(torch.tensor([prompt]), use_cache=False).logits[0, :-1]
        table = torch.log_softmax(logits, dim=-1)
        rows = [[float(table[i, t]), t, None] for i, t in enumerate(prompt[1:])]
        return [[None, prompt[start], None], *rows[start:]]


def _json(reply: dict[str, Any], status: int = 200) -> Response:
    return Response(orjson.dumps(reply), status, media_type="application/json")


async def _serve(options: argparse.Namespace) -> None:
    server = PacedServer(
        options.directory, step_seconds=options.step_seconds, answer=options.answer
    )
    settings = uvicorn.Config(server.app(), port=0, log_level="warning", lifespan="off")
    listening = uvicorn.Server(settings)
    serving = asyncio.create_task(listening.serve())
    while not listening.started:  # noqa: ASYNC110 - uvicorn offers no event
        await asyncio.sleep(0.01)
    port = listening.servers[0].sockets[0].getsockname()[1]
    _tell(options.port_file, port)
    await serving


def _tell(port_file: Path, port: int) -> None:
    """Write the port atomically, so that a reader of the file never sees a part of it."""
    partial = port_file.with_suffix(".partial")
    partial.write_text(str(port))
    partial.rename(port_file)


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("directory", type=Path)
    parser.add_argument("port_file", type=Path)
    parser.add_argument("--step-seconds", type=float, default=0.02)
    parser.add_argument("--answer", type=int, default=200)
    import uvloop

    uvloop.run(_serve(parser.parse_args()))


if __name__ == "__main__":
    main()
