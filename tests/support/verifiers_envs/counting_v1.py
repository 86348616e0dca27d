"""A taskset of verifiers 0.4 with a tool, whose server all tasks share; it never ends."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import verifiers.v1 as vf


class CountingTools(vf.Toolset[vf.SharedToolsetConfig, vf.State]):
    TOOL_PREFIX = None

    @vf.tool
    async def add(self, a: int, b: int) -> str:
        """Add two integers."""
        return str(a + b)


class CountingData(vf.TaskData):
    total: int


class CountingTask(vf.Task[CountingData]):
    @vf.reward
    async def correct(self, trace: vf.Trace) -> float:
        return float(str(self.data.total) in trace.last_reply)

    @vf.metric
    async def asked(self, trace: vf.Trace) -> float:
        return float(trace.num_turns)


class CountingTaskset(vf.Taskset[CountingTask, vf.TasksetConfig]):
    INFINITE = True

    def load(self) -> Iterator[CountingTask]:
        for index in itertools.count():
            prompt = f"What is {index} + 4?"
            data = CountingData(prompt=prompt, system_prompt="You add.", total=index + 4)
            yield CountingTask(data, self.config.task)

    @classmethod
    def toolsets(cls, config: vf.TasksetConfig) -> list[vf.Toolset]:
        return [CountingTools(vf.SharedToolsetConfig())]


__all__ = ["CountingTaskset"]

if __name__ == "__main__":
    CountingTools.run()
