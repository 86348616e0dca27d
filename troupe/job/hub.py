"""Explains, in terms of the job, why a model or tokenizer with a hub id cannot be loaded on a host.

transformers turns the errors of its hub client into an OSError with a text for notebooks, whose
cause is the client's own error. Errors are distinguished by class names, so that no client is
imported here.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from troupe.job.section import no_directory

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
