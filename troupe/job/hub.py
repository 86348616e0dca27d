"""Models by their ids on the hub: why one cannot be loaded on a host, and sizes of known ones.

The sizes serve where no file of the model is, as on a laptop. transformers turns the errors of its
hub client into an OSError with a text for notebooks, whose cause is the client's own error. Errors
are distinguished by class names, so that no client is imported here.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from troupe.job.section import no_directory
from troupe.rpc import InvalidArgument

_TRUE: Final = frozenset({"1", "on", "yes", "true"})
_OFFLINE: Final = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
# Error classes for a hub that does not answer.
_AWAY: Final = frozenset(
    {
        *("LocalEntryNotFoundError", "OfflineModeIsEnabled", "ConnectionError", "ConnectError"),
        *("ConnectTimeout", "ReadTimeout", "ProxyError", "Timeout", "MaxRetryError", "SSLError"),
    }
)


@dataclass(frozen=True)
class HubProblem:
    """Why a hub id cannot be loaded: the field of `model` at fault, the problem and the remedy."""

    field: str
    message: str
    remedy: str


def hub_problem(
    source: str,
    revision: str | None,
    error: BaseException,
    environment: Mapping[str, str] = os.environ,
) -> HubProblem | None:
    """Return the problem of the hub id `source`, whose loading raised `error`; `field` is "path"
    for the id itself. None for a directory, and for faults of the model's files."""
    if os.path.isdir(os.path.expanduser(source)) or no_directory(source):
        return None
    names = {kind.__name__ for one in _chain(error) for kind in type(one).__mro__}
    text = " ".join(map(str, _chain(error)))
    at = f" at revision {revision}" if revision else ""
    where = environment.get("HF_HUB_CACHE") or environment.get("HF_HOME") or "~/.cache/huggingface"
    download = f"`hf download {source}{f' --revision {revision}' if revision else ''}`"
    if "GatedRepoError" in names or "gated repo" in text:
        token = (
            "the token of this host (HF_TOKEN) cannot"
            if environment.get("HF_TOKEN")
            else ("this host has no token (HF_TOKEN), and only some accounts can")
        )
        return HubProblem(
            "path",
            f"{source} is gated: {token} read it",
            "Accept the model's terms on its page, and set HF_TOKEN of that account where workers "
            f"run, or {download} on every host.",
        )
    if "RevisionNotFoundError" in names or "not a valid git identifier" in text:
        return HubProblem(
            "revision",
            f"{source} has no revision {revision}",
            "Give a branch, tag or commit of the model, or leave it out for the newest.",
        )
    if "RepositoryNotFoundError" in names or "is not a valid model identifier" in text:
        return HubProblem(
            "path",
            f"the hub has no model {source}, or does not show it to this host",
            "Check the spelling; a private model needs HF_TOKEN where workers run. A directory is "
            "written with a leading '/' or './'.",
        )
    offline = next((n for n in _OFFLINE if environment.get(n, "").lower() in _TRUE), None)
    if offline:
        return HubProblem(
            "path",
            f"{source}{at} is not in this host's cache ({where}), and {offline} is set",
            f"Run {download} on this host, share the cache (HF_HOME), or unset {offline}.",
        )
    if names & _AWAY or "couldn't connect" in text.lower():
        return HubProblem(
            "path",
            f"{source}{at} is not in this host's cache ({where}), and the hub cannot be reached "
            "from it",
            f"Run {download} where there is a network and share the cache (HF_HOME), or give the "
            "path of a directory that a host with a trainer has.",
        )
    return None


def first_line(error: Exception) -> str:
    """Return the first line of an error, extended by the next lines while it ends in a colon; at
    most 300 characters."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = lines.pop(0) if lines else type(error).__name__
    while lines and text.endswith(":"):
        text = f"{text} {lines.pop(0)}"
    return text if len(text) <= 300 else f"{text[:297]}..."


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error and its causes."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__


# Sizes in the order of `_NAMES`, and what else is the model's own: as the models' own
# configurations say.
_NAMES: Final = (
    "num_hidden_layers",
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
)
_QWEN3: Final[dict[str, tuple[tuple[int, ...], dict[str, int | bool]]]] = {
    "Qwen3-0.6B": ((28, 1024, 3072, 16, 8), {"tie_word_embeddings": True}),
    "Qwen3-1.7B": ((28, 2048, 6144, 16, 8), {"tie_word_embeddings": True}),
    "Qwen3-4B": ((36, 2560, 9728, 32, 8), {"tie_word_embeddings": True}),
    "Qwen3-8B": ((36, 4096, 12_288, 32, 8), {}),
    "Qwen3-14B": ((40, 5120, 17_408, 40, 8), {}),
    "Qwen3-32B": ((64, 5120, 25_600, 64, 8), {}),
    "Qwen3-30B-A3B": ((48, 2048, 6144, 32, 4), {"moe_intermediate_size": 768}),
    "Qwen3-235B-A22B": ((94, 4096, 12_288, 64, 4), {"moe_intermediate_size": 1536}),
}
_COMMON: Final = {
    "vocab_size": 151_936,
    "head_dim": 128,
    "max_position_embeddings": 40_960,
    "tie_word_embeddings": False,
}
_DENSE: Final = {"model_type": "qwen3"}
_MIXTURE: Final = {"model_type": "qwen3_moe", "num_experts": 128, "num_experts_per_tok": 8}


def model_config(name: str) -> dict[str, Any]:
    """Return the configuration of a Qwen3 model by its name. Raises InvalidArgument for another
    one."""
    if name not in _QWEN3:
        raise InvalidArgument(
            f"the dimensions of the model {name!r} are unknown",
            field="model",
            value=name,
            remedy=f"Give a configuration, or one of {', '.join(_QWEN3)}.",
        )
    sizes, own = _QWEN3[name]
    kind = _MIXTURE if "moe_intermediate_size" in own else _DENSE
    return {**_COMMON, **kind, **dict(zip(_NAMES, sizes, strict=True)), **own}


def known_config(path: str) -> dict[str, Any] | None:
    """Return the configuration of a model by its path or its id on the hub, if the name is a Qwen3
    model's."""
    name = path.rstrip("/").rpartition("/")[2]
    return model_config(name) if name in _QWEN3 else None
