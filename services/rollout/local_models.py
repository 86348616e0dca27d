"""Models that a program without a cluster plays with: embedded engines in this process, for
`troupe workflow try --policy`."""

from __future__ import annotations

import asyncio
import itertools
import os
import tempfile
import threading
from collections.abc import Coroutine, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self, TypeVar

from services.rollout.engines.embedded.engine import EmbeddedEngine
from troupe.checkpoints.adapters import distinct_tensors
from troupe.disks import memory_root
from troupe.job import EngineSpec, ModelSpec, PolicySpec
from troupe.job.hub import first_line
from troupe.rpc.errors import InvalidArgument, TroupeError, recast
from troupe.transfer import Transfer
from troupe.v1 import common_pb2 as common_pb
from troupe.workflow.backend import GeneratedTurn
from troupe.workflow.errors import TurnError
from troupe.workflow.trying.policies import Policy, Prompt

T = TypeVar("T")
# Turns that one model generates at once: branches of one conversation.
_RUNNING: Final = 16
# Seconds for one turn. The time limit of the trajectory is the one that people set.
_TURN_SECONDS: Final = 86_400.0


class LocalModels:
    """Embedded engines on this machine's CPU, one per model directory.

    A context manager: engines start with it and end with it. They run in an event loop in a thread
    of their own, so that programs may use them from any number of event loops, one after another.
    """

    def __init__(self, models: Mapping[str, Path], contexts: Mapping[str, int | None]) -> None:
        """`models`: the directory of each policy's model, with all weights. `contexts`: the context
        length that each policy asks for; None: the engine's default."""
        self._models, self._asked = dict(models), dict(contexts)
        self._engines: dict[Path, EmbeddedEngine] = {}
        self._numbers = itertools.count()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="local-models", daemon=True
        )
        self._place = tempfile.TemporaryDirectory(prefix="troupe-models-", dir=memory_root())

    def __enter__(self) -> Self:
        self._thread.start()
        try:
            for name, path in self._models.items():
                if path not in self._engines:
                    engine, tensors = _engine(name, path, self._asked[name])
                    self._engines[path] = engine
                    self._run(self._load(engine, name, tensors))
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def contexts(self) -> dict[str, int]:
        """The context length of each policy, in tokens."""
        return {name: self._engines[path].max_context for name, path in self._models.items()}

    def policy(self, name: str) -> Policy:
        """Return a policy that draws the turns of the policy `name` from its engine."""
        engine = self._engines[self._models[name]]

        async def draw(prompt: Prompt) -> GeneratedTurn:
            call = engine.generate(
                f"turn-{next(self._numbers)}",
                list(prompt.ids),
                prompt.sampling,
                deadline_seconds=_TURN_SECONDS,
            )
            try:
                return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(call, self._loop))
            except TroupeError as error:
                raise recast(error, TurnError) from error

        return draw

    def close(self) -> None:
        """Stop the engines. Repeatable."""
        if not self._thread.is_alive():
            return
        for engine in self._engines.values():
            self._run(engine.stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        self._place.cleanup()

    async def _load(self, engine: EmbeddedEngine, name: str, tensors: Mapping[str, Any]) -> None:
        await engine.start()
        transfer = Transfer(Path(self._place.name))
        key = f"local/{name}/weights@0"
        manifest = await asyncio.to_thread(transfer.set, key, tensors)
        ref = common_pb.WeightsRef(
            job_id="local",
            policy=name,
            version=0,
            key=key,
            checksum=manifest.checksum,
            num_bytes=manifest.num_bytes,
        )
        await engine.update_weights(ref, transfer)

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()


def _engine(name: str, path: Path, context: int | None) -> tuple[EmbeddedEngine, Mapping[str, Any]]:
    """Return an engine that has not started, and the weights of the model in `path`."""
    import torch
    from transformers import AutoModelForCausalLM

    try:
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    except Exception as error:  # transformers raises OSError, ValueError, KeyError, ...
        raise InvalidArgument(
            f"no model can be loaded: {first_line(error)}",
            kind="model_missing",
            field="--policy",
            value=str(path),
            remedy="Give a directory with a model as transformers saves it.",
        ) from error
    spec = PolicySpec(
        model=ModelSpec(path=str(path), dtype="float32"),
        engine=EngineSpec(max_running=_RUNNING, max_context=context),
    )
    threads = len(os.sched_getaffinity(0))
    return EmbeddedEngine(f"local.{name}", name, spec, threads=threads), distinct_tensors(model)
