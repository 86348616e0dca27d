"""Vectorised environments whose factories, properties and `close` are hostile."""

from __future__ import annotations

import time
from typing import Any

from tests.support.hostile import leaf_errors, nested_group, raising
from troupe.networks.environments.matrix import TwoStep
from troupe.rpc.errors import Unavailable

ERRORS = [*leaf_errors(), nested_group(KeyboardInterrupt(), 2), Unavailable("of the user's")]


def raises(copies: int, number: int) -> Any:
    raise ERRORS[number]


def hangs(copies: int) -> Any:
    time.sleep(3600)


def nothing(copies: int) -> Any:
    return raising(SystemExit(1))


class BadAgents(TwoStep):
    @property
    def agents(self) -> Any:
        raise SystemExit("of agents")

    @agents.setter
    def agents(self, value: Any) -> None:
        pass


class ClosesBadly(TwoStep):
    def close(self) -> None:
        raise KeyboardInterrupt
