"""Which class of devices fits which turns (RollArt, arXiv 2512.22560, hardware affinity).

Reading a prompt is bound by arithmetic, drawing a response by memory bandwidth. Task domains differ
in how much they do of each: many turns with short answers are prefill-heavy, one turn with a long
answer is decode-heavy. A job declares the class that fits a domain or an agent; what it does not
declare follows from what was observed of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from troupe.scheduling.routing import Rates, Work

# Weight of the newest turn in what a kind of turn is like.
_NEWEST: Final = 0.05
# Turns of a kind that are seen before anything is inferred from them.
SEEN: Final = 8
# A class is preferred when a kind of turn gains at least this much there over the worst class.
LEAST_GAIN: Final = 1.1


@dataclass(slots=True)
class _Profile:
    prompt: float = 0.0
    response: float = 0.0
    seen: int = 0

    def add(self, prompt: float, response: float) -> None:
        self.seen += 1
        part = max(_NEWEST, 1 / self.seen)
        self.prompt += part * (prompt - self.prompt)
        self.response += part * (response - self.response)


class Profiles:
    """What turns of one policy are like, by kind: (domain, agent)."""

    def __init__(self) -> None:
        self._kinds: dict[tuple[str, str], _Profile] = {}
        self._all = _Profile()

    def observe(self, kind: tuple[str, str], read_tokens: int, response_tokens: int) -> None:
        """A turn ended: prompt tokens that were not in a cache, and response tokens."""
        self._kinds.setdefault(kind, _Profile()).add(read_tokens, response_tokens)
        self._all.add(read_tokens, response_tokens)

    def expected(self, kind: tuple[str, str], prompt_tokens: int, max_new_tokens: int) -> Work:
        """What a turn will cost: its response is as long as those of its kind were."""
        profile = self._kinds.get(kind)
        if profile is None or profile.seen < SEEN:
            return Work(prompt_tokens, max_new_tokens)
        return Work(prompt_tokens, min(profile.response, max_new_tokens))

    def fitting(self, kind: tuple[str, str], rates: Mapping[str, Rates]) -> str | None:
        """The class where turns of this kind gain most over the average turn; None when too little
        is known, or it makes no difference.

        Not the class where they are fastest: where one class is faster at everything, every kind
        would want it, and the other would idle (comparative advantage).
        """
        profile = self._kinds.get(kind)
        if profile is None or profile.seen < SEEN or len(rates) < 2:
            return None
        own, usual = _work(profile), _work(self._all)
        cost = {name: r.seconds(own) / (r.seconds(usual) or 1.0) for name, r in rates.items()}
        best = min(cost, key=lambda name: (cost[name], name))
        return best if max(cost.values()) >= LEAST_GAIN * cost[best] else None


def _work(profile: _Profile) -> Work:
    return Work(profile.prompt, profile.response)


def classes_for(
    domain: str,
    agent: str,
    *,
    by_domain: Mapping[str, str],
    by_agent: Mapping[str, str],
    default: str,
    inferred: str | None,
) -> tuple[str, ...]:
    """Device classes for a turn, the best first: declared by domain, by agent, inferred; then the
    default pool."""
    declared = by_domain.get(domain) if domain else None
    fitting = declared or by_agent.get(agent) or inferred
    return tuple(dict.fromkeys(name for name in (fitting, default) if name))
