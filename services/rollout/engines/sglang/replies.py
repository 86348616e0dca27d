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


def parse(meta: dict[str, Any], before: int | None, after: int | None) -> Reply:
    """Read `meta_info`; `before` and `after` are our versions when it was asked and answered.

    Raises `BrokenReply`.
    """
    try:
        # An abort before prefill has no log-probs at all.
        rows = meta.get("output_token_logprobs") or []
        tokens = [int(row[1]) for row in rows]
        logprobs = [float(row[0]) for row in rows]
        finish = meta["finish_reason"]
        reason = str(finish["type"])
        spans = meta.get("weight_versions")
        if spans:
            versions = _spread([(_number(s["version"]), s["start"], s["end"]) for s in spans])
        else:
            versions = [_number(meta.get("weight_version"))] * len(tokens)
            if before != after and tokens:
                return Reply(tokens, logprobs, None, reason, "", 0)
        count = meta.get("completion_tokens", len(tokens))
        if count != len(tokens) or len(versions) != len(tokens):
            raise BrokenReply(
                f"{count} tokens, {len(tokens)} log-probs and {len(versions)} versions"
            )
        # Servers without a version of ours: only one can have served.
        if None in versions and after is None:
            raise BrokenReply("tokens of unknown version")
        known = [after if version is None else version for version in versions]
        cached = int(meta.get("cached_tokens") or 0)
        return Reply(
            tokens, logprobs, [v for v in known if v is not None], reason, _text(finish), cached
        )
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise BrokenReply(f"not the answer to a generation: {error!r}") from error


def prompt_logprobs(meta: dict[str, Any]) -> list[float]:
    """Log-probs of the prompt's tokens after the first. Raises `BrokenReply`."""
    try:
        return [float(row[0]) for row in meta["input_token_logprobs"][1:]]
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise BrokenReply(f"no log-probs of the prompt: {error!r}") from error


def _spread(spans: list[tuple[int | None, int, int]]) -> list[int | None]:
    versions: list[int | None] = []
    for version, start, end in spans:
        if start != len(versions):
            raise BrokenReply(f"version spans do not join at token {len(versions)}")
        versions.extend([version] * (end - start))
    return versions


def _number(version: Any) -> int | None:
    """Our version number; None for a server's own name ("default")."""
    try:
        return int(version)
    except (TypeError, ValueError):
        return None


def _text(finish: dict[str, Any]) -> str:
    return str(finish.get("message") or "")
