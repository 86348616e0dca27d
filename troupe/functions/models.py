"""Calls from inside a function to the model that it declares as `model_service`."""

from __future__ import annotations

import os
from typing import Any, Final

import httpx

_VARIABLE: Final = "TROUPE_MODEL_URL"


def model_url() -> str:
    """Return the URL of the model. An SGLang model serves OpenAI's API below `/v1`, a torch
    entrypoint its methods at `/call` (`ask_model`). Raises RuntimeError without `model_service`."""
    url = os.environ.get(_VARIABLE)
    if not url:
        raise RuntimeError(
            f"{_VARIABLE} is not set: declare `model_service` for this function, and the model in "
            "TROUPE_REWARD_MODELS of a reward host"
        )
    return url


def ask_model(method: str, timeout: float = 60.0, **arguments: Any) -> Any:
    """Call a method of the model's object and return the result. Raises RuntimeError with the
    model's error, and errors of httpx if it does not answer within `timeout` seconds."""
    # Models are local, so no proxy is used.
    with httpx.Client(trust_env=False, timeout=timeout) as http:
        reply = http.post(f"{model_url()}/call", json={"method": method, "arguments": arguments})
    body = reply.json()
    if not reply.is_success:
        raise RuntimeError(f"{method}: {body.get('error', reply.status_code)}")
    return body["result"]
