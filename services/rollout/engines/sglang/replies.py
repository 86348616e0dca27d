"""Between our turns and SGLang's words for them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from services.rollout.engines.sglang.client import BrokenReply
from services.rollout.engines.turns import Turn

_INT64 = (1 << 63) - 1


@dataclass(frozen=True)
class Reply:
    """One answer of `/generate`; the lists have equal length.

    `versions` is None when the server does not say which tokens came before an update and which
    after. `reason` is SGLang's: stop, length or abort.
    """

    token_ids: list[int]
    logprobs: list[float]
    versions: list[int] | None
    reason: str
    message: str
    cached_tokens: int


def sampling_of(turn: Turn) -> dict[str, Any]:
    """Sampling parameters for what is left of `turn`. All are given: some defaults are traps.

    Servers honour the seed when launched with `--enable-deterministic-inference`.
    """
    sampling: dict[str, Any] = {
        "max_new_tokens": turn.remaining,
        "temperature": turn.sampling.temperature,
        "top_p": turn.sampling.top_p,
        "top_k": turn.sampling.top_k if turn.sampling.top_k > 0 else -1,
        "stop_token_ids": sorted(turn.stop_ids),
        "skip_special_tokens": False,
    }
    if turn.sampling.seed is not None:  # releases that do not know the field refuse it
        sampling["sampling_seed"] = turn.seed & _INT64
    return sampling


def parse(
    meta: dict[str, Any], asked_of: int | None, *, steady: bool, adapter: int | None = None
) -> Reply:
    """Read `meta_info` of a request that was sent when the server held version `asked_of`.

    `steady`: no update has begun since. `adapter`: the version of the adapter that drew every
    token, whatever the server calls the weights under it. Raises `BrokenReply`.
    """
    try:
        # An abort before prefill has no log-probs at all.
        rows = meta.get("output_token_logprobs") or []
        tokens = [int(row[1]) for row in rows]
        logprobs = [float(row[0]) for row in rows]
        finish = meta["finish_reason"]
        versions: list[int] | None = [adapter or 0] * len(tokens)
        if adapter is None:
            versions = _versions(meta, len(tokens), asked_of, steady)
        count = meta.get("completion_tokens", len(tokens))
        if count != len(tokens) or (versions is not None and len(versions) != len(tokens)):
            raise BrokenReply(f"{count} tokens, but {len(tokens)} log-probs")
        return Reply(
            tokens,
            logprobs,
            versions,
            reason=str(finish["type"]),
            message=str(finish.get("message") or ""),
            cached_tokens=int(meta.get("cached_tokens") or 0),
        )
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise BrokenReply(f"not the answer to a generation: {error!r}") from error


def prompt_logprobs(meta: dict[str, Any]) -> list[float]:
    """Log-probs of the prompt's tokens after the first. Raises `BrokenReply`."""
    try:
        return [float(row[0]) for row in meta["input_token_logprobs"][1:]]
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise BrokenReply(f"no log-probs of the prompt: {error!r}") from error


def _versions(
    meta: dict[str, Any], count: int, asked_of: int | None, steady: bool
) -> list[int] | None:
    """The version of each token; None when the server does not say where it changed."""
    spans = meta.get("weight_versions")
    if spans:
        versions: list[int] = []
        for span in spans:
            if span["start"] != len(versions):
                raise BrokenReply(f"version spans do not join at token {len(versions)}")
            versions.extend([int(span["version"])] * (span["end"] - span["start"]))
        return versions
    # Older releases name the version that was loaded at the end.
    label = meta.get("weight_version")
    unchanged = str(label) == str(asked_of) if str(label).isdecimal() else steady
    if count == 0 or (unchanged and asked_of is not None):
        return [asked_of or 0] * count
    return None
