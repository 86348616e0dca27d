"""The jobs of `benchmarks.papers.pipeline` for the twin: same trajectories, same cost model.

The workflow is played with responses drawn by the turns' seeds, as in simulated engines, so that
the twin has exactly the live run's turns, lengths and tool calls.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from transformers import PreTrainedTokenizerFast

from benchmarks.papers.pipeline.research_team import AGENTS, Queries, play
from benchmarks.papers.pipeline.workload import TRAINERS, Mode, Setup
from benchmarks.workloads.tokenizer import save_tokenizer
from testbed.simulated_engine import draw_response
from troupe.job import SimulatedSpec
from troupe.scheduling.admission import seed_of
from troupe.twin.costs import EngineRates, TrainerRates
from troupe.twin.job import ControlPlane, EngineFleet, TwinJob, TwinPolicy
from troupe.twin.trainers import single_rank_workers
from troupe.twin.workload import Replayed, TwinTrajectory, TwinTurn
from troupe.workflow.backend import Sampling
from troupe.workflow.conversation import ChatTokenizer
from troupe.workflow.loading import Query
from troupe.workflow.trying.play import Trial
from troupe.workflow.trying.policies import Prompt, Spoken
from troupe.workflow.turns import Role

MAX_NEW_TOKENS: Final = 600
# Measured once on the machine of docs/benchmarks/twin.md; see there.
CONTROL: Final = ControlPlane(turn=0.004, trajectory=0.004, claim=0.004, commit=0.02, step=0.03)


def rehearse(setup: Setup, queries: int, directory: Path) -> list[list[TwinTrajectory]]:
    """Return the trajectories of the first `queries` queries, equal to those of a live run."""
    vocabulary = save_tokenizer(directory / "tokenizer")
    tokenizer = ChatTokenizer(PreTrainedTokenizerFast.from_pretrained(directory / "tokenizer"))
    paces = {name: SimulatedSpec.model_validate(setup.simulated(name)) for name in AGENTS}
    sampling = Sampling(max_new_tokens=MAX_NEW_TOKENS, stop_token_ids=(1,))
    roles = {name: Role(name, name, tokenizer, sampling) for name in AGENTS}
    given: dict[str, Any] = dict(setup.tasks)
    tasks = Queries("train", **given)
    return asyncio.run(_play_all(setup, queries, roles, paces, vocabulary, tasks))


async def _play_all(
    setup: Setup,
    queries: int,
    roles: dict[str, Role],
    paces: dict[str, SimulatedSpec],
    vocabulary: int,
    tasks: Queries,
) -> list[list[TwinTrajectory]]:
    return [
        [
            await _play(setup, index, number, roles, paces, vocabulary, tasks[index])
            for number in range(setup.group_size)
        ]
        for index in range(queries)
    ]


async def _play(
    setup: Setup,
    index: int,
    number: int,
    roles: dict[str, Role],
    paces: dict[str, SimulatedSpec],
    vocabulary: int,
    task: dict[str, Any],
) -> TwinTrajectory:
    waits: dict[int, float] = {}
    turns: list[tuple[str, int, int]] = []

    def draw(prompt: Prompt) -> Spoken:
        assert prompt.sampling.seed is not None
        response = draw_response(
            paces[prompt.agent],
            seed=prompt.sampling.seed,
            vocabulary=vocabulary,
            stop_ids=frozenset({1}),
            max_new_tokens=MAX_NEW_TOKENS,
        )
        turns.append((prompt.agent, len(prompt.ids), len(response)))
        return Spoken(response.token_ids, response.logprobs)

    async def run(seconds: float) -> float:
        waits[len(turns) - 1] = seconds
        return seconds

    query = Query(f"q{index}", "train", index, task)
    trial = Trial(
        play,
        query,
        policy=draw,
        agents=roles,
        tools={"run": run},
        seed=seed_of(0, "train", index, number),
    )
    await trial.run()
    return TwinTrajectory(
        tuple(
            TwinTurn(agent, read, drawn, waits.get(at, 0.0))
            for at, (agent, read, drawn) in enumerate(turns)
        )
    )


def twin_job(
    mode: Mode,
    setup: Setup,
    queries: Sequence[Sequence[TwinTrajectory]],
    control: ControlPlane = CONTROL,
) -> TwinJob:
    """Return the twin's job for one row of the benchmark."""
    policies = {}
    for name in AGENTS:
        pace = setup.simulated(name)
        engine = EngineRates(
            pace["prefill_tokens_per_second"],
            pace["decode_seconds"],
            pace["decode_seconds_per_turn"],
            load_seconds=pace["load_seconds"],
        )
        trainer = TrainerRates(
            pace["backward_tokens_per_second"],
            pace["step_seconds"],
            micro_batch_seconds=control.claim,
        )
        policies[name] = TwinPolicy((EngineFleet(1, engine),), trainer)
    return TwinJob(
        policies=policies,
        workload=Replayed(queries),
        trainers=single_rank_workers(TRAINERS),
        mode=mode.pipeline["mode"],
        alpha=mode.pipeline.get("alpha", 0),
        queries_per_step=setup.queries_per_step,
        micro_batch=setup.micro_batch_samples,
        in_flight=setup.in_flight,
        prefix_cache=False,
        control=control,
        spans=True,
    )
