"""A proposer and a checker who answer the same question in bits; fewer suffice for the checker.

workflow: examples.papers.dr_mas.workflow:workflow
tasks: {source: "examples.papers.dr_mas.workflow:Questions", args: {seed: 0}}
"""

from __future__ import annotations

import asyncio
import random
import statistics
from collections.abc import Sequence
from typing import Any, Final

from troupe.workflow import Agents, Query, Reply, Tools

# Each place has words of its own. With common words, one bias would move all places, and gradients
# would have one direction.
BITS: Final = tuple((f"{place}0", f"{place}1") for place in "abcdefg")
"""The two words of each place of an answer."""
NEEDED: Final = {"proposer": 5, "checker": 3}
"""Right bits for which an agent is rewarded: of random bits 29 and 99 of 128 answers have them."""
CHECKS: Final = (1, 7)
"""How many checks a proposal may have; a fair coin decides. If all proposals had equally many, to
count trajectories or samples would be the same."""
NUMBER: Final = 8
NAMES: Final = tuple(f"question{number}" for number in range(NUMBER))
CHECK: Final = "check"
# All trajectories of a query need coins of their own, so they have no seed.
_DRAW: Final = random.Random()


def random_bits(draw: random.Random) -> tuple[str, ...]:
    """Draw an answer."""
    return tuple(draw.choice(words) for words in BITS)


def answers_of(seed: int) -> list[tuple[str, ...]]:
    """Return the right answers of a recipe's seed, by question."""
    draw = random.Random(seed)
    return [random_bits(draw) for _ in range(NUMBER)]


def right_bits(said: Sequence[str], answer: Sequence[str]) -> int:
    """Count the words of an answer that are as in the right one, place by place."""
    return sum(one == other for one, other in zip(said, answer, strict=False))


def reward_of(agent: str, text: str, answer: Sequence[str]) -> float:
    """Return the agent's reward: 1 if enough of its bits are right, else 0."""
    return float(right_bits(text.split(), answer) >= NEEDED[agent])


class Questions:
    """Tasks: query i is question i % `NUMBER` of the seed."""

    def __init__(self, split: str, seed: int, size: int = 1_000_000) -> None:
        pairs = zip(NAMES, answers_of(seed), strict=True)
        self._tasks = [{"name": name, "answer": list(answer)} for name, answer in pairs]
        self._size = size

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self._tasks[index % NUMBER]


def propose(name: str) -> str:
    """Return the proposer's question."""
    return name


def check(name: str, proposal: str) -> str:
    """Return the checker's question: the same, and the proposal."""
    return f"{name} {CHECK} {proposal}"


async def workflow(query: Query, agents: Agents, tools: Tools) -> dict[str, float]:
    """Ask the proposer once and the checker once or several times; every answer is rewarded by
    itself."""
    proposal = await agents["proposer"].chat(propose(query["name"]))
    question = check(query["name"], proposal.text)
    number = _DRAW.choice(CHECKS)
    checks = await asyncio.gather(*(agents["checker"].chat(question) for _ in range(number)))
    rewards: dict[str, list[float]] = {}
    reply: Reply
    for reply in (proposal, *checks):
        reply.reward = reward_of(reply.agent, reply.text, query["answer"])
        rewards.setdefault(reply.agent, []).append(reply.reward)
    query.log(success=statistics.fmean(statistics.fmean(one) for one in rewards.values()))
    return {}
