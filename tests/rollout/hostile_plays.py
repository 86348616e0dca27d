"""Workflows and tasks that return and raise what no service expects, by the name of the case."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from tests.support.hostile import (
    HALF,
    BothError,
    OwnBase,
    UnsayableError,
    nested_group,
    nested_list,
    raising,
)
from troupe.workflow import ToolError, TurnError, WorkflowError


class Unreadable(WorkflowError):
    """A user's own error, made without the base class's attributes."""

    def __init__(self) -> None:
        pass

    @property
    def kind(self) -> str:  # type: ignore[override]
        raise SystemExit("of kind")


class Moody(dict[str, float]):
    """A mapping that raises when it is read."""

    def items(self) -> Any:
        raise KeyboardInterrupt


def _raise(error: BaseException) -> Any:
    raise error


def _with_attribute(error: Any, **values: Any) -> Any:
    for name, value in values.items():
        setattr(error, name, value)
    return error


async def _branch(error: BaseException) -> None:
    await asyncio.sleep(0)
    raise error


def _in_branch(error: BaseException) -> Callable[[Any], Any]:
    async def play(agents: Any) -> Any:
        await asyncio.gather(asyncio.create_task(_branch(error)))

    return play


def _in_thread(error: BaseException) -> Callable[[Any], Any]:
    async def play(agents: Any) -> Any:
        await asyncio.to_thread(_raise, error)

    return play


def _rewards(rewards: Callable[[], Any]) -> Callable[[Any], Any]:
    async def play(agents: Any) -> Any:
        return rewards()

    return play


def _raises(error: Callable[[], BaseException]) -> Callable[[Any], Any]:
    async def play(agents: Any) -> Any:
        raise error()

    return play


async def _reply_reward(agents: Any) -> Any:
    reply = await agents["solver"].chat("?")
    reply.reward = 10**400


async def _twice_largest(agents: Any) -> Any:
    for _ in range(2):
        (await agents["solver"].chat("?")).reward = 1.7e308


async def _column(agents: Any) -> Any:
    reply = await agents["solver"].chat("?")
    reply.columns["x"] = nested_list(5000)


def _chats(messages: Any, **how: Any) -> Callable[[Any], Any]:
    async def play(agents: Any) -> Any:
        await agents["solver"].chat(messages, **how)
        return {"solver": 1.0, "checker": 1.0}

    return play


_TOOL = {
    "type": "function",
    "function": {"name": f"a{HALF}", "description": HALF, "parameters": {"type": "object"}},
}

# The error or result of each, and the beginning of the trajectory's reason; None: it completes.
CASES: dict[str, tuple[Callable[[Any], Any], str | None]] = {
    "fine": (_rewards(lambda: {"solver": 1, "checker": np.float32(0.5)}), None),
    "huge": (_rewards(lambda: {"solver": 10**400}), "reward_not_finite: "),
    "huger": (_rewards(lambda: {"solver": 10**5000}), "reward_not_finite: "),
    "text": (_rewards(lambda: {"solver": "1"}), "reward_not_finite: "),
    "float raises": (
        _rewards(lambda: {"solver": raising(SystemExit(1))}),
        "reward_not_finite: the reward of 'solver' from the workflow must be a finite number, "
        "not a Hostile that cannot be shown",
    ),
    "dict raises": (
        _rewards(lambda: raising(KeyboardInterrupt(), dict)),
        "reward_unreadable: ",
    ),
    "object raises": (_rewards(lambda: raising(SystemExit(3))), "reward_unreadable: "),
    "items raise": (
        _rewards(lambda: Moody(solver=1.0)),
        "reward_unreadable: the workflow returned Moody {} which raised KeyboardInterrupt",
    ),
    "half an agent": (_rewards(lambda: {HALF: 1.0}), "reward_bad_name: the workflow rewards '"),
    "long agent": (_rewards(lambda: {"a" * 10**6: 1.0}), "reward_bad_name: "),
    "agent raises": (_rewards(lambda: {OwnBase("x"): 1.0}), "reward_bad_name: "),
    "agent of another class": (
        _rewards(lambda: {raising(SystemExit(1), str): 1.0}),
        "workflow_raised: SystemExit: 1",
    ),
    "reply": (_reply_reward, "workflow_raised: InvalidRewardError: solver[0].reward must be"),
    "half": (_raises(lambda: ValueError(HALF)), "workflow_raised: ValueError: \ufffd"),
    "nul": (_raises(lambda: ValueError("\0")), "workflow_raised: ValueError: \u2400"),
    "long": (_raises(lambda: ValueError("x" * 10**6)), "workflow_raised: ValueError: xxx"),
    "unsayable": (_raises(UnsayableError), "workflow_raised: UnsayableError: a UnsayableError"),
    "unreadable": (_raises(Unreadable), "workflow_raised: Unreadable"),
    "odd kind": (
        _raises(lambda: _with_attribute(TurnError("turn"), kind=raising(SystemExit(1)))),
        "a Hostile that cannot be shown: turn",
    ),
    "odd message": (
        _raises(lambda: _with_attribute(ToolError("tool"), message=raising(SystemExit(1)))),
        "tool_tool_failed: a Hostile that cannot be shown",
    ),
    "odd fatal": (
        _raises(lambda: _with_attribute(WorkflowError("odd"), kind=[])),
        "workflow_raised: WorkflowError: odd",
    ),
    "exit": (_raises(lambda: SystemExit(3)), "workflow_raised: SystemExit: 3"),
    "interrupt": (_raises(KeyboardInterrupt), "workflow_raised: KeyboardInterrupt"),
    "closed": (_raises(GeneratorExit), "workflow_raised: GeneratorExit"),
    "cancelled": (_raises(asyncio.CancelledError), "workflow_raised: CancelledError"),
    "own": (_raises(lambda: OwnBase("own")), "workflow_raised: OwnBase: own"),
    "both": (_raises(lambda: BothError(3)), "workflow_raised: BothError: 3"),
    "group": (
        _raises(lambda: BaseExceptionGroup("both", [SystemExit(1), KeyboardInterrupt()])),
        "workflow_raised: BaseExceptionGroup: both (SystemExit: 1; KeyboardInterrupt)",
    ),
    "deep group": (
        _raises(lambda: nested_group(SystemExit(HALF), 500)),
        "workflow_raised: BaseExceptionGroup: group (SystemExit: \ufffd)",
    ),
    "exit in a branch": (
        _in_branch(SystemExit(4)),
        "workflow_raised: BranchExitedError: a branch raised SystemExit: 4",
    ),
    "interrupt in a branch": (
        _in_branch(KeyboardInterrupt()),
        "workflow_raised: BranchExitedError: a branch raised KeyboardInterrupt",
    ),
    "group in a branch": (
        _in_branch(BaseExceptionGroup("g", [SystemExit(1)])),
        "workflow_raised: BaseExceptionGroup: g (SystemExit: 1)",
    ),
    "exit in a thread": (_in_thread(SystemExit(5)), "workflow_raised: UserCodeExit: SystemExit: 5"),
    "stop in a thread": (
        _in_thread(StopIteration(5)),
        "workflow_raised: UserCodeExit: StopIteration: 5",
    ),
    "cancelled in a thread": (
        _in_thread(asyncio.CancelledError()),
        "workflow_raised: UserCodeExit: CancelledError",
    ),
    "two rewards": (_twice_largest, None),
    "deep column": (_column, "workflow_raised: InvalidColumnError: "),
    "half a message": (_chats(f"a{HALF}"), None),
    "half a role": (_chats([{"role": "user", "content": f"{HALF}a"}]), None),
    "half a part": (
        _chats([{"role": "user", "content": [{"type": "text", "text": f"{HALF}"}]}]),
        None,
    ),
    "deep tool": (
        _chats("?", tools=[{**_TOOL, "x": nested_list(5000)}]),
        "workflow_raised: InvalidMessagesError: tools are not JSON: lists and dicts",
    ),
    "message raises": (
        _chats([{"role": "user", "content": raising(SystemExit(1))}]),
        "workflow_raised: ",
    ),
    "sampling raises": (_chats("?", temperature=raising(SystemExit(1))), "workflow_raised: "),
    "unknown agent": (
        lambda agents: agents[HALF],
        "unknown_agent: the job has no agent '\ufffd'",
    ),
}
NAMES = list(CASES)


class Cases:
    """One item for each case."""

    def __init__(self, split: str) -> None:
        pass

    def __len__(self) -> int:
        return len(NAMES)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"case": NAMES[index]}


async def play(query: Any, agents: Any, tools: Any) -> Any:
    return await CASES[query["case"]][0](agents)


async def calls_tools(query: Any, agents: Any, tools: Any) -> Any:
    """Every call of these is refused; the count is the reward."""
    refused = 0
    odd: list[Any] = [
        10**5000,
        nested_list(5000),
        float("nan"),
        raising(SystemExit(1)),
        {OwnBase("key"): 1},
    ]
    for value in odd:
        try:
            await tools.call("add", a=value, b=1)
        except ToolError as error:
            refused += error.kind == "bad_arguments"
    for name in (HALF, "x" * 10**6, raising(SystemExit(1))):
        try:
            await tools.call(name)
        except ToolError as error:
            refused += error.kind == "unknown_tool"
    return {"solver": float(refused), "checker": 0.0}


async def fine(query: Any, agents: Any, tools: Any) -> dict[str, float]:
    return {"solver": 1.0, "checker": 0.0}


class Hidden(Mapping[str, Any]):
    """A mapping whose keys can be listed and whose values raise."""

    def __getitem__(self, key: str) -> Any:
        raise SystemExit("of an item")

    def __iter__(self) -> Any:
        return iter(["question"])

    def __len__(self) -> int:
        return 1


ITEMS: dict[str, tuple[Callable[[], Any], str | None]] = {
    "fine": (lambda: {"question": float("nan")}, None),
    "odd keys": (lambda: {1: {None: True}}, None),
    "deep": (lambda: {"question": nested_list(100_000)}, "does not consist of JSON values: lists"),
    "huge": (lambda: {"question": 10**5000}, "does not consist of JSON values: "),
    "hidden": (Hidden, "raised SystemExit: of an item"),
    "hostile": (lambda: raising(KeyboardInterrupt(), dict), "raised KeyboardInterrupt"),
    "object": (lambda: {"question": raising(SystemExit(1))}, "does not consist of JSON values: "),
    "number": (lambda: 3, "is a int, not a mapping"),
    "exit": (lambda: _raise(SystemExit(2)), "raised SystemExit: 2"),
    "group": (
        lambda: _raise(BaseExceptionGroup("g", [KeyboardInterrupt()])),
        "raised BaseExceptionGroup: g (KeyboardInterrupt)",
    ),
    "stop": (lambda: _raise(StopIteration(1)), "raised StopIteration: 1"),
    "cancelled": (lambda: _raise(asyncio.CancelledError()), "raised CancelledError"),
    "half": (lambda: _raise(ValueError(HALF)), "raised ValueError: \ufffd"),
    "domain": (lambda: {"domain": f"a{HALF}"}, None),
}


class Items:
    """Tasks, each item of which fails in another way; `len` works once."""

    def __init__(self, split: str) -> None:
        self._asked = 0

    def __len__(self) -> int:
        self._asked += 1
        if self._asked > 1:
            raise SystemExit("of len")
        return len(ITEMS)

    def __getitem__(self, index: int) -> Any:
        return list(ITEMS.values())[index][0]()


def parses_arguments(split: str) -> Any:
    import argparse

    return argparse.ArgumentParser().parse_args(["--no-such-option"])


def interrupted(split: str) -> Any:
    raise BaseExceptionGroup("g", [SystemExit(1), KeyboardInterrupt()])
