"""A gang loads a model in parts: the same from any form of checkpoint, or an error."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from services.trainer.gang.gang import Gangs
from services.trainer.gang.group import GangGroup
from services.trainer.gang.learner import GangLearner
from services.trainer.gang.loads import LoadProgress, together
from services.trainer.learning.learner import Learner
from services.trainer.learning.model import load_model
from tests.support.architectures import ARCHITECTURES, make
from tests.support.training import tiny_config
from tests.support.waiting import PATIENCE
from tests.trainer.gang.test_gang import PLAIN, alone, assert_equal, gang_spec, gangs
from tests.trainer.gang.test_gang import together as gang_of
from tests.trainer.learning.test_learner import make_rows
from tests.trainer.learning.test_policy_model import UNFIT, changed, rewritten
from troupe.checkpoints.format import CheckpointFormat, ModelArrangement
from troupe.checkpoints.reading import StoredTensors
from troupe.checkpoints.tensors import TensorsDoNotFit, fitted
from troupe.checkpoints.writing import write_checkpoint
from troupe.job import JobSpec
from troupe.rpc import DeadlineExceeded, InvalidArgument

__all__ = ["gangs"]

# Architectures whose checkpoints differ most from the model; slow runs try the others.
QUICK = {"qwen3_moe_tied", "gpt2"}
EVERY = [
    pytest.param(name, marks=[] if name in QUICK else [pytest.mark.slow]) for name in ARCHITECTURES
]


def stored_spec(tokenizer: Path, folder: Path, **sections: Any) -> JobSpec:
    model = {"path": str(folder), "tokenizer": str(tokenizer)}
    return gang_spec(tokenizer, model=model, **sections)


@pytest.mark.parametrize("name", EVERY)
def test_ranks_that_read_their_parts_hold_the_whole_model_together(
    tokenizer: Path, tmp_path: Path, gangs: Gangs, name: str
) -> None:
    """Weights and published tensors bit for bit, and what is computed: also with the buffers that
    no checkpoint has. In several files, as large models are."""
    make(name).save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    optimizer = {"lr": 1e-3, "eps": 1e-3, "max_grad_norm": 1e9}
    spec = stored_spec(tokenizer, tmp_path, optimizer=optimizer)
    told: list[tuple[int, int]] = []
    # In float32: transformers' experts compute in no other type.
    gang = GangLearner(
        gangs, "job/solver", spec, "solver", PLAIN, loaded=lambda *some: told.append(some)
    )
    model = load_model("solver", spec.policies["solver"], 0)
    one = Learner(model, spec, "solver", **PLAIN)
    try:
        assert told[-1][0] <= told[-1][1]
        assert_equal(gang.weights(), one.weights())
        assert_equal(dict(gang.published()), dict(one.published()))
        rows = make_rows(model, 5, 0, noise=0.3)
        outcomes = []
        for learner in (gang, one):
            learner.accumulate(rows)
            outcomes.append(learner.apply(0))
        ours, theirs = outcomes
        assert ours.applied, ours.reason
        for metric in ("grad_norm", "loss/policy"):
            assert ours.metrics[metric] == pytest.approx(theirs.metrics[metric], rel=1e-4), metric
    finally:
        gang.release()


@pytest.mark.parametrize("kind", UNFIT)
def test_a_checkpoint_that_does_not_fit_its_model_is_refused_by_name(
    tokenizer: Path, tmp_path: Path, gangs: Gangs, kind: str
) -> None:
    """As on one device (test_policy_model.py), and the ranks stay."""
    tied, change, values, said, advised = UNFIT[kind]
    config = tiny_config(tie_word_embeddings=tied)
    spec = gang_spec(tokenizer, model={"config": config, "tokenizer": str(tokenizer)})
    load_model("solver", spec.policies["solver"], 0).save_pretrained(tmp_path)
    rewritten(tmp_path, change)
    changed(tmp_path, **values)
    spec = stored_spec(tokenizer, tmp_path)
    for load in (lambda: gang_of(gangs, spec), lambda: alone(spec)):
        with pytest.raises(InvalidArgument) as caught:
            load()
        error = caught.value
        assert (error.kind, error.field) == ("model_mismatch", "policies.solver.model.path")
        assert error.value == str(tmp_path)
        assert said in error.message
        assert advised in (error.remedy or "")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("missing", "it lacks tensor 'model.layers.1.mlp.experts.2.up_proj.weight'"),
        ("renamed", "'model.layers.1.mlp.experts.2.up_projection.weight'"),
        ("superfluous", "the model has no tensor 'model.layers.1.mlp.experts.2.odd.weight'"),
        ("one_expert_less", "'model.layers.1.mlp.experts.3.down_proj.weight'"),
    ],
)
def test_experts_that_do_not_fit_the_model_are_refused_by_name(
    tokenizer: Path, tmp_path: Path, gangs: Gangs, change: str, said: str
) -> None:
    stem = "model.layers.1.mlp.experts"

    def change_tensors(tensors: dict[str, torch.Tensor]) -> None:
        match change:
            case "missing":
                tensors.pop(f"{stem}.2.up_proj.weight")
            case "renamed":
                moved = tensors.pop(f"{stem}.2.up_proj.weight")
                tensors[f"{stem}.2.up_projection.weight"] = moved
            case "superfluous":
                tensors[f"{stem}.2.odd.weight"] = torch.zeros(2)
            case _:
                for name in [name for name in tensors if name.startswith(f"{stem}.3.")]:
                    tensors.pop(name)

    make("qwen3_moe").save_pretrained(tmp_path)
    rewritten(tmp_path, change_tensors)
    spec = stored_spec(tokenizer, tmp_path)
    for load in (lambda: gang_of(gangs, spec), lambda: alone(spec)):
        with pytest.raises(InvalidArgument) as caught:
            load()
        assert caught.value.kind == "model_mismatch"
        assert said in caught.value.message


def test_a_damaged_file_is_refused(tokenizer: Path, tmp_path: Path, gangs: Gangs) -> None:
    make("qwen3").save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])
    with pytest.raises(InvalidArgument) as caught:
        gang_of(gangs, stored_spec(tokenizer, tmp_path))
    assert caught.value.kind in ("model_unreadable", "model_mismatch")
    assert caught.value.field == "policies.solver.model.path"


def test_a_model_in_another_format_is_made_by_one_rank(
    tokenizer: Path, tmp_path: Path, gangs: Gangs
) -> None:
    model = make("qwen3_tied")
    model.save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    spec = stored_spec(tokenizer, tmp_path)
    gang = gang_of(gangs, spec)
    assert_equal(gang.weights(), alone(spec).weights())
    gang.release()


@settings(max_examples=10)
@given(data=st.data())
def test_rows_of_a_conversion_equal_rows_of_the_whole(data: st.DataObject) -> None:
    """A rank converts only the experts of its rows; conversions that mix rows run on the whole."""
    name = data.draw(st.sampled_from(["qwen3_moe", "mixtral", "gpt_oss", "phi3", "jamba"]))
    model = make(name)
    tensors = dict(CheckpointFormat(model, torch.float32).of(model.state_dict()))
    parts = 0
    for one in ModelArrangement(model, tensors).conversions:
        whole = one.convert(tensors.__getitem__)
        ((target, tensor), *others) = whole.items()
        begin = data.draw(st.integers(0, len(tensor) - 1))
        end = data.draw(st.integers(begin + 1, len(tensor)))
        part = one.rows(range(begin, end))
        if part is None:
            continue
        assert not others
        parts += 1
        assert torch.equal(part.convert(tensors.__getitem__)[target], tensor[begin:end])
        assert len(part.sources) * len(tensor) == len(one.sources) * (end - begin)
    assert (parts > 0) == (name in ("qwen3_moe", "mixtral", "jamba"))


@given(data=st.data())
def test_rows_are_read_from_whole_tensors_and_parts(tmp_path_factory: Any, data: Any) -> None:
    folder = tmp_path_factory.mktemp("rows")
    shape = data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=3))
    tensor = torch.arange(torch.Size(shape).numel(), dtype=torch.float32).reshape(shape)
    save_file({"t": tensor}, folder / "model.safetensors")
    begin = data.draw(st.integers(0, shape[0]))
    rows = range(begin, data.draw(st.integers(begin, shape[0])))
    found = StoredTensors.of_checkpoint(folder).read("t", torch.float64, rows)
    assert torch.equal(found, tensor[begin : rows.stop].double())


def test_names_of_a_model_that_fits_raise_no_error(tmp_path: Path) -> None:
    """Older files contain buffers that are computed today."""
    model = make("llama")
    stored = {n: t.to("meta") for n, t in model.state_dict().items()}
    stored["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.empty(4, device="meta")
    assert set(fitted(model, stored).layout) == set(model.state_dict())
    with pytest.raises(TensorsDoNotFit, match=r"the model has no tensor 'odd'"):
        fitted(model, {**stored, "odd": torch.empty(1, device="meta")})
    write_checkpoint(tmp_path, CheckpointFormat(model, torch.float32).of(model.state_dict()))
    assert set(load_file(tmp_path / "model.safetensors")) == set(model.state_dict())


class Alone:
    """A group of one rank, as far as `together` uses it."""

    rank, size, timeout_seconds = 0, 1, 0.2

    def __init__(self) -> None:
        self.told: list[tuple[int, int]] = []

    def summed(self, values: torch.Tensor) -> torch.Tensor:
        return values

    def gather(self, data: bytes) -> list[bytes]:
        return [data]

    def report_load(self, done: int, total: int) -> None:
        self.told.append((done, total))


def test_the_deadline_of_a_load_grows_with_its_bytes() -> None:
    group = Alone()

    def slow(progress: LoadProgress) -> int:
        progress.total = 10**9
        for _ in range(4):
            time.sleep(0.2)  # longer than the timeout of one operation
            progress.add(250_000_000)
        return 7

    assert together(cast(GangGroup, group), "loading", slow) == 7
    assert group.told[-1] == (10**9, 10**9)
    assert len(set(group.told)) > 2

    stuck = threading.Event()
    with pytest.raises(DeadlineExceeded) as caught:
        together(cast(GangGroup, group), "loading policy p", lambda progress: stuck.wait(PATIENCE))
    assert caught.value.kind == "gang_load_slow"
    assert "loading policy p" in caught.value.message
    stuck.set()


def test_an_error_of_a_load_is_raised() -> None:
    def fails(progress: LoadProgress) -> None:
        raise InvalidArgument("no", kind="model_unreadable", field="f")

    with pytest.raises(InvalidArgument, match="no"):
        together(cast(GangGroup, Alone()), "loading", fails)
    with pytest.raises(OSError, match="odd"):
        together(cast(GangGroup, Alone()), "loading", lambda _: SimpleNamespace(x=_raise()))


def _raise() -> None:
    raise OSError("odd")
