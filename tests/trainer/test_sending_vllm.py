"""Weights from a real trainer into a real vLLM server by its four-phase protocol, on a CPU.

The server runs vLLM's own engines of weight transfer. What needs GPUs below them is replaced on
both sides: a handle opens a file, and NCCL's broadcasts go through a store of torch.distributed.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed import TCPStore

from services.rollout.engines.servers.direct import DirectLoader
from services.rollout.engines.vllm import replies
from services.rollout.engines.vllm.engine import VllmEngine
from services.trainer import sending
from tests.rollout.engines.real_vllm import START_SECONDS, TINY, interpreter
from tests.trainer.stage import TrainingStage
from troupe.job import PolicySpec
from troupe.transfer.flat_buckets import JoinedGroup, Meeting
from troupe.transfer.formats import vllm as encoding

pytestmark = pytest.mark.slow

UUID = "GPU-of-both"
# Appended to vLLM's modules in the server's processes.
SITE = """
import importlib.abc, importlib.machinery, sys

HANDLES = '''
import torch
from types import SimpleNamespace
from torch.multiprocessing import reductions
torch.cuda.get_device_properties = lambda index: SimpleNamespace(uuid="GPU-of-both")
torch.accelerator.synchronize = lambda *device: None

def _opened(*arguments):
    return torch.frombuffer(bytearray(open(arguments[0], "rb").read()), dtype=torch.uint8)

reductions.rebuild_cuda_tensor = _opened
'''

GROUPS = HANDLES + '''
import contextlib

class _Group:
    def __init__(self, info):
        port = int(info.nccl_unique_id_bytes.rstrip(b"."))
        self.store = torch.distributed.TCPStore("127.0.0.1", port, is_master=False)
        assert (info.rank_offset, info.world_size) == (1, 2)
        self.received = 0

    def broadcast(self, tensor, src):
        sent = self.store.get(f"sent{self.received}")
        self.received += 1
        assert len(sent) == tensor.nbytes
        tensor.copy_(torch.frombuffer(bytearray(sent), dtype=torch.uint8))

    def destroy(self):
        pass

def worker_init_process_group(info, parallel):
    return _Group(info)
'''

STREAMS = '''
import contextlib
from types import SimpleNamespace

def _get_streams(device_idx, num_buffers):
    return (SimpleNamespace(synchronize=lambda: None),) * num_buffers

torch.cuda.stream = lambda stream: contextlib.nullcontext()
torch.accelerator.current_device_index = lambda: 0
'''

PACKAGE = "vllm.distributed.weight_transfer."
ADDED = {
    PACKAGE + "ipc_engine": HANDLES,
    PACKAGE + "nccl_engine": GROUPS,
    PACKAGE + "packed_tensor": STREAMS,
}

class Adding(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name not in ADDED:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        loader = spec.loader

        class Loader(importlib.machinery.SourceFileLoader):
            def get_code(self, name):
                return compile(open(self.path).read() + ADDED[name], self.path, "exec")

        spec.loader = Loader(name, spec.origin)
        return spec

sys.meta_path.insert(0, Adding())
"""


class StoreGroup(JoinedGroup):
    """The trainer's side of the double of NCCL."""

    stores: dict[bytes, TCPStore] = {}  # noqa: RUF012

    def __init__(self, store: TCPStore) -> None:
        self._store, self._numbers = store, itertools.count()

    def broadcast(self, tensor: torch.Tensor) -> Any:
        content = tensor.view(torch.uint8).numpy().tobytes()
        self._store.set(f"sent{next(self._numbers)}", content)
        return SimpleNamespace(wait=lambda: None)

    def end(self) -> None:
        return


class StoreFormat(encoding.VllmFormat):
    """vLLM's format, over doubles of what needs a GPU."""

    def unique_id(self) -> bytes:
        store = TCPStore("127.0.0.1", 0, 2, is_master=True, wait_for_workers=False)
        unique_id = str(store.port).encode().ljust(128, b".")
        StoreGroup.stores[unique_id] = store
        return unique_id

    def join(self, meeting: Meeting) -> JoinedGroup:
        assert meeting.size == 2
        return StoreGroup(StoreGroup.stores[meeting.unique_id])


@pytest.fixture
def doubles(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    numbers = itertools.count()

    def reduced(flat: torch.Tensor) -> tuple[None, tuple[Any, ...]]:
        place = tmp_path / f"handle{next(numbers)}"
        place.write_bytes(flat.numpy().tobytes())
        return None, (str(place), *range(1, 14))

    properties = SimpleNamespace(uuid=UUID)
    monkeypatch.setattr(encoding, "reduce_tensor", reduced)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(sending, "format_of", lambda name: StoreFormat())
    monkeypatch.setattr(sending, "_BUCKET_BYTES", 64 << 10)


@pytest.mark.usefixtures("doubles")
@pytest.mark.parametrize(("way", "backend"), [("ipc", "ipc"), ("broadcast", "nccl")])
async def test_versions_travel_from_the_trainer_to_a_vllm_server(
    stage: TrainingStage, tmp_path: Path, way: str, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")
    # The server says that it computes on a CPU.
    monkeypatch.setattr(replies, "_direct_ways", lambda *described: frozenset({way}))
    spec = stage.spec(model={"config": TINY, "tokenizer": str(stage.tokenizer)})
    trainer = await stage.trainer()
    first = await trainer.bind(spec)
    own = spec.policies["solver"].model_dump()
    own["engine"] |= {
        "kind": "vllm",
        "python": interpreter(tmp_path, SITE),
        "max_running": 4,
        "max_context": 64,
        "update": way,
        "start_timeout_seconds": START_SECONDS,
        "launch": ["--weight-transfer-config", f'{{"backend": "{backend}"}}'],
    }
    engine = VllmEngine("e0", "solver", PolicySpec.model_validate(own))
    await engine.start()
    try:
        await engine.update_weights(first, stage.transfer)
        for version in (1, 2):
            await stage.open(version - 1, version=version - 1)
            await stage.play(stage.first_model(spec), step=version - 1, version=version - 1)
            ref = (await trainer.run(version - 1, version - 1)).weights
            await engine.update_weights(ref, stage.transfer)  # proven by the prompt's log-probs
            assert engine.last_update is not None
            assert (engine.last_update.version, engine.last_update.way) == (version, way)
        assert engine.update_fallbacks == 0
        loader = engine._server.updater._loader
        assert isinstance(loader, DirectLoader)
        assert bool(loader._group) == (way == "broadcast")
    finally:
        await engine.stop()
