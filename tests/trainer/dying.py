"""A trainer process that kills itself (SIGKILL) at a named point of its first step, or when it
is suspended or resumed.

Forked from a server that has everything imported already, so that a death costs little time.
"""

from __future__ import annotations

import functools
import multiprocessing
import os
import signal
from collections.abc import Callable, Mapping
from multiprocessing.context import ForkServerProcess
from typing import Any

from services.chassis.app import run
from services.trainer.__main__ import make_service
from services.trainer.claims import StepClaims
from services.trainer.learning.learner import Learner
from services.trainer.learning.model import import_transformers
from services.trainer.publication import Publication
from services.trainer.server import TrainerService  # noqa: F401 - imported before the fork
from services.trainer.settings import TrainerSettings
from services.trainer.state import training_state
from services.trainer.state.durability import Durability, HostCopy, KeptRowsClient
from services.trainer.state.suspension import Suspension
from services.trainer.state.training_state import StateStore
from services.trainer.versions import Versions

import_transformers()


def _die(*_: Any, **__: Any) -> None:
    # `os.kill` of itself is refused in a service.
    signal.raise_signal(signal.SIGKILL)


def _before(owner: Any, name: str) -> None:
    setattr(owner, name, _die)


def _after(owner: Any, name: str) -> None:
    call = getattr(owner, name)

    @functools.wraps(call)
    def wrapped(*args: Any, **kwargs: Any) -> None:
        call(*args, **kwargs)
        _die()

    setattr(owner, name, wrapped)


def _after_await(owner: Any, name: str) -> None:
    call = getattr(owner, name)

    @functools.wraps(call)
    async def wrapped(*args: Any, **kwargs: Any) -> None:
        await call(*args, **kwargs)
        _die()

    setattr(owner, name, wrapped)


def _on_version(version: int, owner: Any, name: str, patch: Callable[[Any, str], None]) -> None:
    """`patch` only once `name` is called for this version: binding saves and publishes too."""
    call = getattr(owner, name)

    @functools.wraps(call)
    def wrapped(self: Any, subject: Any, *args: Any) -> Any:
        number = subject if isinstance(subject, int) else subject.version
        if number != version:
            return call(self, subject, *args)
        setattr(owner, name, call)
        patch(owner, name)
        return getattr(owner, name)(self, subject, *args)

    setattr(owner, name, wrapped)


def _within_save(_owner: Any, _name: str) -> None:
    training_state.sync_file = _die  # type: ignore[assignment]


def _before_rename(_owner: Any, _name: str) -> None:
    """All files are written, the directory has not its name yet."""
    written = training_state.sync_file
    left = [4]

    def sync(path: Any) -> None:
        written(path)
        left[0] -= 1
        if not left[0]:
            _die()

    training_state.sync_file = sync  # type: ignore[assignment]


POINTS: Mapping[str, Callable[[], None]] = {
    "after accumulating": lambda: _before(Learner, "apply"),
    "after the optimizer's step": lambda: _after(Learner, "apply"),
    "after publishing": lambda: _on_version(1, Publication, "publish", _after),
    "within saving": lambda: _on_version(1, StateStore, "save", _within_save),
    "before the state has its name": lambda: _on_version(1, StateStore, "save", _before_rename),
    "after saving": lambda: _on_version(1, StateStore, "save", _after),
    "before the commit": lambda: _before(StepClaims, "commit"),
    "after the commit": lambda: _after_await(StepClaims, "commit"),
    "before old versions go": lambda: _before(Versions, "_prune"),
    "after old versions went": lambda: _after(Versions, "_prune"),
}


# Arrows of a suspension, and of a resumption.
SUSPENDING: Mapping[str, Callable[[], None]] = {
    "before the state is stored": lambda: _before(Suspension, "store"),
    "after the state is stored": lambda: _after(Suspension, "store"),
    "after the device is free": lambda: _after(Learner, "release"),
}
RESUMING: Mapping[str, Callable[[], None]] = {
    "before the state is fetched": lambda: _before(Suspension, "fetch"),
    "after the state was fetched": lambda: _after(Suspension, "fetch"),
    "after the state was taken": lambda: _after(Suspension, "take"),
    "after the device is filled": lambda: _after(Learner, "adopt"),
    "in the step that goes on": lambda: _before(Learner, "apply"),
}


# Points of a job whose states are written in the background, every three steps.
BEHIND: Mapping[str, Callable[[], None]] = {
    "before rows are kept": lambda: _before(StepClaims, "keep_rows"),
    "after rows were kept": lambda: _after_await(StepClaims, "keep_rows"),
    "at the commit of version 2": lambda: _on_version(2, Publication, "publish", _after),
    "before the copy": lambda: _before(HostCopy, "take"),
    "after the copy": lambda: _after(HostCopy, "take"),
    "within writing behind": lambda: _on_version(3, StateStore, "save", _within_save),
    "before the written state has its name": lambda: _on_version(
        3, StateStore, "save", _before_rename
    ),
    "before the store is told": lambda: _before(KeptRowsClient, "free"),
    "after the store was told": lambda: _after(KeptRowsClient, "free"),
    "after version 5 was published": lambda: _on_version(5, Publication, "publish", _after),
    "after steps were computed again": lambda: _before(Durability, "recomputed"),
}


def _at_update(patch: Callable[[Any, str], None]) -> None:
    # Imports TorchRL, which the other points need not wait for.
    from services.trainer.networks.learner import NetworkLearner

    patch(NetworkLearner, "apply")


# Points of a policy that is a network.
NETWORKS: Mapping[str, Callable[[], None]] = {
    "before a network's update": lambda: _at_update(_before),
    "after a network's update": lambda: _at_update(_after),
}


# Points of a step that exchanges sums of joint pairs.
JOINT: Mapping[str, Callable[[], None]] = {
    "before sums are given": lambda: _before(StepClaims, "exchange"),
    "after sums were exchanged": lambda: _after_await(StepClaims, "exchange"),
}


def _serve(point: str, environment: Mapping[str, str]) -> None:
    os.environ.update(environment)
    (POINTS | SUSPENDING | RESUMING | BEHIND | NETWORKS | JOINT)[point]()
    run(make_service, TrainerSettings)


def start(point: str, environment: Mapping[str, str]) -> ForkServerProcess:
    """Start a trainer process with this environment that dies at `point`."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    process = context.Process(target=_serve, args=(point, dict(environment)))
    process.start()
    return process
