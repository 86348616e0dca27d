"""An environment of verifiers 0.1: a tool, several turns, a rubric of two functions."""

from __future__ import annotations

import verifiers as vf
from datasets import Dataset


def add(a: int, b: int) -> int:
    """Add two integers.

    Args:
        a: The first one.
        b: The second one.
    """
    return a + b


def correct(completion, answer) -> float:
    """Whether the last message is the sum."""
    return float(completion[-1]["content"].strip() == answer)


def calls(completion) -> float:
    """Number of messages of tools."""
    return float(sum(message["role"] == "tool" for message in completion))


def most(completions) -> list[float]:
    """A reward that needs the whole group."""
    return [1.0] * len(completions)


def rows(first: int, count: int) -> Dataset:
    numbers = range(first, first + count)
    return Dataset.from_list(
        [{"question": f"What is {n} + 4?", "answer": str(n + 4)} for n in numbers]
    )


def load_environment(
    count: int = 20, key: str = "", group: bool = False, evaluated: bool = True
) -> vf.Environment:
    if key:
        vf.ensure_keys([key])
    rubric = vf.Rubric(funcs=[correct, calls], weights=[1.0, 0.25])
    if group:
        rubric.add_reward_func(most)
    return vf.ToolEnv(
        dataset=rows(0, count),
        eval_dataset=rows(1000, 3) if evaluated else None,
        tools=[add],
        max_turns=4,
        rubric=rubric,
        system_prompt="You add.",
    )
