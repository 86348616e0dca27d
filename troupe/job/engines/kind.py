"""`EngineKind`: what a job may say about engines of one kind."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class EngineKind:
    """A kind of engines, as `policies.X.engine` knows it.

    `is_server`: its engines are model servers, launched or attached to, which compute outside the
    rollout process. `without_effect`: fields of `engine` that this kind does not read.
    `spread_arguments`: arguments of a launched server that say over how many devices it spreads,
    and on which; the job's field `tensor_parallel` sets them. `python_variable`: environment
    variable of rollout workers with the Python of the servers' environment. `requirement`: what pip
    installs there: a release that was tested. `joins_groups`: servers form process groups with
    trainers, for which both need the same release of NCCL. `needs_nvcc`: servers compile CUDA
    kernels when they start. `logprobs`: those that they can report of tokens drawn with top_p or
    top_k (`SamplingSpec.logprobs`).
    """

    name: str
    is_server: bool
    without_effect: tuple[str, ...] = ()
    spread_arguments: frozenset[str] = frozenset()
    python_variable: str = ""
    requirement: str = ""
    joins_groups: bool = False
    needs_nvcc: bool = False
    logprobs: tuple[str, ...] = ("full",)

    @property
    def package(self) -> str:
        """The server's distribution, which `requirement` begins with."""
        named = re.match(r"[\w.-]+", self.requirement)
        return named[0] if named else ""

    @property
    def install(self) -> str:
        """Commands that install the server in an environment of its own."""
        place = f"~/{self.name}"
        return f'`python -m venv {place} && {place}/bin/pip install "{self.requirement}"`'

    def interpreter(self, given: str | None, environment: Mapping[str, str] = os.environ) -> str:
        """Return the Python that launches a server on this host: `given` by the job, named by the
        environment, or the running one."""
        named = given or environment.get(self.python_variable)
        return os.path.expanduser(named) if named else sys.executable
