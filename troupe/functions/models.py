"""Calls of the model that a function declares as `model_service`, from inside the function."""

from __future__ import annotations

import os
from typing import Any, Final

import httpx

_VARIABLE: Final = "TROUPE_MODEL_URL"


def model_url() -> str:
    """The URL of the model. A model of SGLang has OpenAI's API below `/v1`, one of a torch
    entrypoint its methods at `/call` (`ask_model`). Raises RuntimeError without `model_service`."""
    url = os.environ.get(_VARIABLE)
    if not url:
        raise RuntimeError(
            f"{_VARIABLE} is not set: declare `model_service` for this function, and the model in "
            "TROUPE_REWARD_MODELS of a reward host"
        )
    return url


def ask_model(method: str, timeout: float = 60.0, **arguments: Any) -> Any:
    """The result of a method of the model's object. Raises RuntimeError with the model's error, and
    errors of httpx where it does not answer within `timeout` seconds."""
    # Models are local: no proxy.
    with httpx.Client(trust_env=False, timeout=timeout) as http:
        reply = http.post(f"{model_url()}/call", json={"method": method, "arguments": arguments})
    body = reply.json()
    if not reply.is_success:
        raise RuntimeError(f"{method}: {body.get('error', reply.status_code)}")
    return body["result"]
