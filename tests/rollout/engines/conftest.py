"""Settings of all engine tests."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch
import transformers  # noqa: F401 - imported before the freeze

from tests.rollout.engines.real_server import RealServer, running

torch.set_num_threads(1)
# transformers collects garbage whenever an engine stops; without this each of those passes walks
# through everything that torch and transformers ever imported (about a second).
gc.collect()
gc.freeze()


@pytest.fixture(scope="session")
def real_sglang(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealServer]:
    """One real SGLang server for all slow tests."""
    with running(tmp_path_factory.mktemp("sglang")) as server:
        yield server
