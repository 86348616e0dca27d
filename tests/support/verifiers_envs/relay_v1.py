"""A taskset of verifiers 0.4 with an environment of two roles: one writes, the other judges."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Iterator

import verifiers.v1 as vf

LETTERS = "abcdef"


class RelayData(vf.TaskData):
    letter: str


class WritingTask(vf.Task[RelayData]):
    @vf.reward(weight=2.0)
    async def right(self, trace: vf.Trace) -> float:
        return float(trace.last_reply.strip() == self.data.letter)

    @vf.reward(weight=0.0)
    async def brief(self, trace: vf.Trace) -> float:
        return float(len(trace.last_reply) < 3)

    @vf.metric
    async def characters(self, trace: vf.Trace) -> float:
        return float(len(trace.last_reply))


class JudgingTask(vf.Task[RelayData]):
    @vf.reward
    async def believed(self, trace: vf.Trace) -> float:
        return float(trace.last_reply.strip() == "yes")


class RelayTasksetConfig(vf.TasksetConfig):
    count: int = 12
    letters: str = LETTERS


class RelayTaskset(vf.Taskset[WritingTask, RelayTasksetConfig]):
    def load(self) -> Iterator[WritingTask]:
        for index in range(self.config.count):
            letter = self.config.letters[index % len(self.config.letters)]
            data = RelayData(prompt=f"{letter}?", letter=letter)
            yield WritingTask(data, self.config.task)


class RelayConfig(vf.EnvConfig):
    writer: vf.AgentConfig = vf.AgentConfig()
    judge: vf.AgentConfig = vf.AgentConfig(max_turns=2)
    drafts: int = 1
    trouble: str = ""
    """The fault after the first conversation: `raise`, `hang`, `block`, `die`."""


class RelayEnv(vf.Env[RelayConfig]):
    async def run(self, task: vf.Task, agents: vf.Agents) -> None:
        for _ in range(self.config.drafts):
            written = await agents.writer.run(task)
        match self.config.trouble:
            case "raise":
                raise LookupError("the relay broke")
            case "hang":
                await asyncio.sleep(600)
            case "block":
                time.sleep(600)  # noqa: ASYNC251
            case "die":
                os._exit(7)
        data = RelayData(prompt=f"is it {written.last_reply}?", letter=task.data.letter)
        await agents.judge.run(JudgingTask(data))


__all__ = ["RelayEnv", "RelayTaskset"]
