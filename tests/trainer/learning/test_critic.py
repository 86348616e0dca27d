"""The critic: chains, values that learn, its observations, its state; several updates of a step."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from services.trainer.learning.critic import chained_advantages
from services.trainer.learning.learner import Learner, schedule
from services.trainer.learning.model import load_adapted, load_model
from services.trainer.learning.passes import Passes
from services.trainer.learning.samples import Row
from tests.support.seeing_model import STAND_IN, TOKENS, payload, seeing_config
from tests.support.training import make_spec
from tests.trainer.batches import Shape, random_rows
from troupe.contracts import metric_names
from troupe.contracts.payloads import PlacedPayload
from troupe.job import JobSpec
from troupe.rpc import FailedPrecondition

SYNC = {"mode": "sync", "steps": 10, "queries_per_step": 4}


def _spec(tokenizer: Path, policies: tuple[str, ...] = ("solver",), **changes: Any) -> JobSpec:
    pipeline = SYNC | changes.pop("pipeline", {})
    critic = {"optimizer": {"lr": 1e-2}} | changes.pop("critic", {})
    algorithm = {"advantage": "gae", "critic": critic} | changes
    return make_spec(tokenizer, policies=policies, algorithm=algorithm, pipeline=pipeline)


def _learner(spec: JobSpec) -> Learner:
    return Learner(load_model("solver", spec.policies["solver"], 0), spec, "solver")


def _rows(learner: Learner, seed: int = 0, **shape: Any) -> list[Row]:
    rows = random_rows(learner.model, seed, Shape(**shape))
    return [replace(row, turn=i) for i, row in enumerate(rows) if row.response_length]


def _row(trajectory: str, turn: int, length: int, reward: float, **more: Any) -> Row:
    ids, drawn = np.zeros(length + 1, np.int64), np.zeros(length, np.float32)
    name = f"{trajectory}{turn}"
    return Row(name, ids, 1, drawn, reward, (reward,), 0, trajectory=trajectory, turn=turn, **more)


def test_an_agents_turns_are_one_episode_in_whatever_order_they_come() -> None:
    """The agent's reward counts once, at the end; a turn's own reward at the turn."""
    rows = [
        _row("b", 4, 1, 7.0),
        _row("a", 2, 2, 5.0),
        _row("a", 0, 2, 5.0),
        _row("a", 1, 1, 1.0, own_reward=True),
        _row("a", 3, 1, 9.0, chain="0#1"),
        _row("a", 5, 1, 3.0, agent="other"),
    ]
    values = torch.zeros(8)
    got = chained_advantages(rows, values, gamma=1.0, gae_lambda=1.0)
    assert got.tolist() == [7.0, 5.0, 5.0, 6.0, 6.0, 6.0, 9.0, 3.0]
    # One step: the value of the next turn's first token, whichever agent spoke in between.
    values = torch.tensor([0.0, 10.0, 0.0, 0.0, 0.0, 20.0, 0.0, 0.0])
    got = chained_advantages(rows, values, gamma=0.5, gae_lambda=0.0)
    assert got.tolist() == [7.0, -10.0, 5.0, 0.0, 10.0, -14.0, 9.0, 3.0]


def test_initial_values_are_zero_and_advantages_are_returns(tokenizer: Path) -> None:
    learner = _learner(_spec(tokenizer, critic={"gae_lambda": 1.0}))
    rows = _rows(learner)
    learner.accumulate(rows)
    applied = learner.apply(0)
    assert applied.applied, applied.reason
    metrics = applied.metrics
    mean = sum(abs(row.reward) for row in rows) / len(rows)
    assert metrics["critic/value_mean"] == 0.0
    assert metrics["critic/explained_variance"] == pytest.approx(0.0, abs=1e-6)
    assert metrics["advantage/abs_mean"] == pytest.approx(mean)
    tokens = sum(row.response_length for row in rows)
    squares = sum(row.response_length * row.reward**2 for row in rows)
    assert metrics["loss/value"] == pytest.approx(squares / tokens / 2)
    assert metrics["critic/grad_norm"] > 0


def test_values_approach_the_rewards(tokenizer: Path) -> None:
    """The prompt determines the reward: after some steps it is fully predicted."""
    learner = _learner(_spec(tokenizer, critic={"gae_lambda": 1.0}))
    rows = _rows(learner, groups=3, members=6)
    rows = [replace(r, reward=float(r.ids[0] % 3)) for r in rows]
    found = []
    for version in range(10):
        learner.accumulate(rows)
        found.append(learner.apply(version).metrics)
    assert found[-1]["critic/explained_variance"] > 0.8
    assert found[-1]["advantage/abs_mean"] < 0.5 * found[0]["advantage/abs_mean"]


def test_the_critic_is_in_the_state_but_not_in_engines_or_checkpoints(tokenizer: Path) -> None:
    plain = make_spec(tokenizer, pipeline=SYNC)
    one, two, without = _learner(_spec(tokenizer)), _learner(_spec(tokenizer)), _learner(plain)
    rows = _rows(one)
    for version in range(2):
        one.accumulate(rows)
        assert one.apply(version).applied
    for part in ("published", "weights"):
        assert getattr(one, part)().keys() == getattr(without, part)().keys()
    state = {n: t.clone() for n, t in one.moments().items()}
    assert {"critic/weight/lm_head.weight", "critic/exp_avg/lm_head.weight"} <= state.keys()
    two.restore({n: t.clone() for n, t in one.weights().items()}, state)
    for learner in (one, two):
        learner.accumulate(rows)
        learner.apply(2)
    for part in ("weights", "moments"):
        mine, theirs = getattr(one, part)(), getattr(two, part)()
        assert all(torch.equal(t, theirs[n]) for n, t in mine.items())
    with pytest.raises(ValueError, match="no weights of the critic: missing"):
        two.restore(two.weights(), {})
    head = "critic/weight/lm_head.weight"
    spare = {"critic/weight/v_head.weight": torch.zeros(1, 32)}
    with pytest.raises(ValueError, match=r"the model has no tensor 'v_head\.weight'"):
        two.restore(two.weights(), state | spare)
    with pytest.raises(ValueError, match=r"'lm_head\.weight' is \[2, 32\] and not \[1, 32\]"):
        two.restore(two.weights(), state | {head: torch.zeros(2, 32)})


def test_a_policy_suspended_in_the_middle_takes_its_critic_along(tokenizer: Path) -> None:
    one, two, three = (_learner(_spec(tokenizer)) for _ in range(3))
    rows = _rows(one, groups=4)
    half = len(rows) // 2  # within a group: its rows wait
    one.accumulate(rows[:half])
    tensors, values = one.suspended()
    tensors = {n: t.clone() for n, t in tensors.items()}
    one.release()
    two.accumulate(rows)  # is forgotten
    two.adopt(tensors, values)
    two.accumulate(rows[half:])
    three.accumulate(rows[:half])
    three.accumulate(rows[half:])
    assert two.apply(0).metrics["critic/grad_norm"] == three.apply(0).metrics["critic/grad_norm"]
    mine = {**two.weights(), **two.moments()}
    for name, tensor in {**three.weights(), **three.moments()}.items():
        assert torch.equal(tensor, mine[name]), name


@pytest.mark.parametrize("algorithm", [{}, {"epochs": 2, "minibatches": 2}])
def test_order_and_partition_leave_no_trace_in_deterministic_mode(
    tokenizer: Path, algorithm: dict[str, Any]
) -> None:
    states = []
    for seed in (1, 2):
        learner = _learner(_spec(tokenizer, pipeline={"deterministic": True}, **algorithm))
        dice = random.Random(seed)
        for version in range(2):
            rows = dice.sample(whole := _rows(learner, version, groups=4), len(whole))
            while rows:
                size = dice.randint(1, 6)
                learner.accumulate(rows[:size])
                rows = rows[size:]
            assert learner.apply(version).applied
        states.append({**learner.weights(), **learner.moments()})
    assert all(torch.equal(t, states[1][name]) for name, t in states[0].items())


def test_micro_batches_add_up_to_the_full_batch(tokenizer: Path) -> None:
    """In float64, where only rounding could differ. In the second step values differ."""
    spec = _spec(tokenizer)
    found = []
    for pieces in (1, 5):
        model = load_model("solver", spec.policies["solver"], 0).double()
        learner = Learner(model, spec, "solver")
        for version in range(2):
            rows = _rows(learner, version, groups=4, members=6)
            for k in range(pieces):
                learner.accumulate(rows[len(rows) * k // pieces : len(rows) * (k + 1) // pieces])
            metrics = learner.apply(version).metrics
        found.append(metrics)
    for name in ("grad_norm", "critic/grad_norm", "loss/value", "loss/policy"):
        assert found[0][name] == pytest.approx(found[1][name], rel=1e-6), name


def test_a_value_that_is_not_finite_skips_the_step(tokenizer: Path) -> None:
    learner = _learner(_spec(tokenizer))
    rows = _rows(learner)
    before = {n: t.clone() for n, t in {**learner.weights(), **learner.moments()}.items()}
    worst = [replace(rows[0], reward=1e30, group_rewards=(1e30,)), *rows[1:]]
    learner.accumulate(worst)
    applied = learner.apply(0)
    assert not applied.applied
    assert "value loss" in applied.reason
    after = {**learner.weights(), **learner.moments()}
    assert all(torch.equal(t, after[n]) for n, t in before.items())


def test_a_critic_of_the_team_sees_more_than_one_of_the_agent(tokenizer: Path) -> None:
    """MAPPO: the reward depends on the other agent's observation. A critic on the agent's own
    prompt explains none of it; one on the team's explains nearly all, and advantages shrink
    accordingly."""
    dice = np.random.default_rng(0)
    found = {}
    for observes in ("agent", "team"):
        spec = _spec(tokenizer, ("solver", "other"), critic={"observes": observes})
        learner = _learner(spec)
        for version in range(10):
            rows = []
            for i in range(32):
                told = int(dice.integers(2))
                ids = np.array([3, int(dice.integers(40, 44))])
                reward = float(told)
                rows.append(
                    Row(
                        f"{i}", ids, 1, np.full(1, -4.0, np.float32), reward, (reward,), 0,
                        group=f"q{i}", trajectory=f"t{i}", agent="solver",
                        context=np.array([7, 20 + told]),
                    )
                )  # fmt: skip
            learner.accumulate(rows)
            metrics = learner.apply(version).metrics
        found[observes] = metrics
    assert found["agent"]["critic/explained_variance"] < 0.1
    assert found["team"]["critic/explained_variance"] > 0.8
    assert found["team"]["loss/value"] < 0.3 * found["agent"]["loss/value"]
    assert found["team"]["advantage/abs_mean"] < 0.6 * found["agent"]["advantage/abs_mean"]


def test_payloads_keep_their_tokens_when_a_critic_reads_the_teams_context_before_them(
    tokenizer: Path,
) -> None:
    spec = _spec(tokenizer, ("solver", "other"), critic={"observes": "team"})
    values = spec.model_dump()
    values["policies"]["solver"]["model"]["config"] = seeing_config()
    learner = _learner(JobSpec.model_validate(values))
    seen: list[tuple[int, list[int]]] = []

    def note(_module: Any, _inputs: Any, given: dict[str, Any]) -> None:
        flat = given["input_ids"].flatten()
        seen.extend(
            (one.position, flat[one.position : one.position + one.tokens].tolist())
            for one in given.get("payloads") or ()
        )

    assert learner._critic is not None
    learner._critic._module.register_forward_pre_hook(note, with_kwargs=True)
    ids = np.array([3, *[STAND_IN] * TOKENS, 9, 4])
    row = Row("s", ids, len(ids) - 1, np.zeros(1, np.float32), 1.0, (1.0,), 0, agent="solver")
    placed = (PlacedPayload(payload(1), 1, TOKENS),)
    learner.accumulate([replace(row, payloads=placed, context=np.array([7, 20, 21]))])
    assert learner.apply(0).applied
    assert seen == [(4, [STAND_IN] * TOKENS)] * len(seen)
    assert seen


def test_a_critic_of_the_team_reads_rows_that_record_the_policys_routes(tokenizer: Path) -> None:
    spec = _spec(tokenizer, ("solver", "other"), critic={"observes": "team"})
    learner = _learner(spec)
    [row, *_] = _rows(learner)
    routes = np.zeros((len(row.ids) - 1, 2, 1), np.int16)
    learner.accumulate([replace(row, routes=routes, context=np.array([7, 20, 21]))])
    assert learner.apply(0).applied


def test_a_row_without_the_teams_context_is_refused(tokenizer: Path) -> None:
    learner = _learner(_spec(tokenizer, ("solver", "other"), critic={"observes": "team"}))
    with pytest.raises(FailedPrecondition, match="no column critic_context") as refused:
        learner.accumulate(_rows(learner))
    assert refused.value.remedy


def test_the_critic_of_an_adapter_is_an_adapter(tokenizer: Path) -> None:
    values = _spec(tokenizer).model_dump(mode="json")
    values["policies"]["solver"]["lora"] = {"rank": 4}
    spec = JobSpec.model_validate(values)
    model = load_adapted("solver", spec.policies["solver"], 0, torch.device("cpu"))
    learner = Learner(model, spec, "solver")
    base = {n: p.clone() for n, p in model.named_parameters() if ".lora_" not in n}
    weights = {n for n in learner.moments() if n.startswith("critic/weight/")}
    heads = {n for n in weights if ".lora_" not in n}
    assert heads == {"critic/weight/lm_head.weight", "critic/weight/lm_head.bias"}
    assert len(weights) > 2
    for version in range(2):
        learner.accumulate(_rows(learner, version))
        assert learner.apply(version).applied
    assert all(torch.equal(p, base[n]) for n, p in model.named_parameters() if n in base)
    critic = learner.moments()
    assert any(bool(t.any()) for n, t in critic.items() if "lora_B" in n and n in weights)


# Several updates.


def test_every_epoch_takes_every_unit_once_in_another_order() -> None:
    parts = list(schedule(7, 2, 3, "seed"))
    assert [len(part) for part in parts] == [2, 2, 3, 2, 2, 3]
    first, second = ([unit for part in parts[k : k + 3] for unit in part] for k in (0, 3))
    assert sorted(first) == sorted(second) == list(range(7))
    assert first != second
    assert parts == list(schedule(7, 2, 3, "seed"))
    assert parts != list(schedule(7, 2, 3, "another"))
    assert [len(part) for part in schedule(2, 1, 5, "")] == [1, 1]
    assert list(schedule(0, 3, 2, "")) == []


def _several(tokenizer: Path, **algorithm: Any) -> Learner:
    spec = make_spec(tokenizer, algorithm=algorithm, pipeline=SYNC)
    return _learner(spec)


@pytest.mark.parametrize("old", ["behaviour", "recomputed"])
def test_each_update_of_a_step_is_an_optimizer_step_on_its_rows(tokenizer: Path, old: str) -> None:
    """Two epochs are two steps on the same rows, whose old log-probs are the first one's."""
    learner = _several(tokenizer, epochs=2, old_logprobs=old)
    plain = _several(tokenizer)
    rows = _rows(learner, noise=0.0 if old == "recomputed" else 0.2)
    for row in rows:
        learner.accumulate([row])
        plain.accumulate([row])
    metrics = learner.apply(0).metrics
    assert metrics["train/updates"] == 2.0
    assert metrics["samples"] == len(rows)
    plain.apply(0)
    plain.accumulate(rows)
    plain.apply(0)
    for name, tensor in plain.weights().items():
        torch.testing.assert_close(learner.weights()[name], tensor, rtol=1e-4, atol=1e-5)


def test_old_log_probs_come_from_the_weights_before_the_first_update(
    tokenizer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    learner = _several(tokenizer, epochs=2, old_logprobs="recomputed", advantage="rloo")
    rows = _rows(learner, noise=0.5)
    expected = {r.sample_id: learner._passes.logprobs([r], None) for r in rows}
    seen: list[Row] = []
    backward = Passes.backward

    def look(self: Passes, rows: list[Row], *rest: Any) -> str:
        seen.extend(rows)
        return backward(self, rows, *rest)

    monkeypatch.setattr(Passes, "backward", look)
    learner.accumulate(rows)
    assert learner.apply(0).applied
    assert len(seen) > len({row.sample_id for row in seen})
    for row in seen:
        assert row.old is not None
        torch.testing.assert_close(torch.from_numpy(row.old), expected[row.sample_id])


def test_a_step_that_fails_at_a_later_update_reports_changed_weights(
    tokenizer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    learner = _several(tokenizer, epochs=3)
    rows = _rows(learner)
    norms = iter([1.0, float("nan")])
    monkeypatch.setattr(learner._gradients, "finish", lambda *_: next(norms))
    learner.accumulate(rows)
    applied = learner.apply(0)
    assert (applied.applied, applied.moved) == (False, True)
    assert "norm of the gradient is nan" in applied.reason


def test_a_step_that_overflows_the_critic_is_refused(tokenizer: Path) -> None:
    learner = _learner(_spec(tokenizer))
    learner.accumulate(_rows(learner))
    refused = learner.apply(0, rates={metric_names.CRITIC_LEARNING_RATE: 1e30})
    assert (refused.applied, refused.moved) == (False, True)
    assert refused.reason == "the norm of the critic's weights is inf after the step"


def _plain_gae(
    rewards: list[float], values: list[float], gamma: float, lamda: float
) -> list[float]:
    """The sums of equation 16, one by one."""
    following = [*values[1:], 0.0]
    deltas = [r + gamma * after - v for r, v, after in zip(rewards, values, following, strict=True)]
    return [
        sum((gamma * lamda) ** k * delta for k, delta in enumerate(deltas[t:]))
        for t in range(len(deltas))
    ]


def test_a_teams_turns_are_one_episode_with_the_mean_of_its_agents_rewards() -> None:
    rows = [
        _row("t", 3, 1, 0.0, agent="b", earned=0.5, final=4.0),
        _row("t", 0, 1, 0.0, agent="a", earned=1.0, final=2.0),
        _row("t", 1, 1, 0.0, agent="b", earned=0.0, final=4.0),
        _row("t", 2, 1, 0.0, agent="a", earned=0.0, final=2.0),
        # Candidates of one call are episodes of their own.
        _row("t", 4, 1, 0.0, agent="a", chain="1#0", earned=7.0, final=2.0),
    ]
    values = torch.tensor([0.3, -0.2, 0.9, 0.4, 0.0])
    got = chained_advantages(rows, values, gamma=0.9, gae_lambda=0.7, team=True)
    expected = _plain_gae([1.0, 0.0, 0.0, 0.5 + 3.0], [-0.2, 0.9, 0.4, 0.3], 0.9, 0.7)
    torch.testing.assert_close(
        got[[1, 2, 3, 0, 4]],
        torch.tensor([*expected, 9.0], dtype=torch.float64),
        rtol=1e-5,
        atol=1e-6,
    )
    # A reward of the agent that only `reward` tells.
    known = [_row("t", 0, 1, 3.0, agent="a"), _row("t", 1, 1, 5.0, agent="b")]
    got = chained_advantages(known, torch.zeros(2), gamma=1.0, gae_lambda=1.0, team=True)
    assert got.tolist() == [4.0, 4.0]


@pytest.mark.parametrize("penalised", [False, True])
def test_values_of_turns_are_those_of_prompts_and_discounts_are_per_turn(
    tokenizer: Path, penalised: bool
) -> None:
    spec = _spec(tokenizer, critic={"values": "turn", "gamma": 0.9, "gae_lambda": 0.6})
    learner = _learner(spec)
    critic = learner._critic
    assert critic is not None
    rows = [
        replace(
            row, trajectory=f"t{k // 3}", agent="solver", turn=k % 3, earned=float(k), final=2.0
        )
        for k, row in enumerate(_rows(learner))
    ]
    if penalised:
        rows = [replace(r, penalty=np.full(r.response_length, 0.1)) for r in rows]
    # A head that is not zero any more.
    draw = torch.Generator().manual_seed(0)
    with torch.no_grad():
        head = critic._module.get_output_embeddings()
        head.weight.copy_(torch.randn(head.weight.shape, generator=draw))
    batch = critic.estimate(rows, None)
    assert batch.values is not None
    for trajectory in dict.fromkeys(row.trajectory for row in rows):
        mine = [i for i, row in enumerate(rows) if row.trajectory == trajectory]
        values = []
        for i in mine:
            prompt = torch.from_numpy(rows[i].ids[: rows[i].prompt_length])
            with torch.no_grad():
                values.append(float(critic._module(prompt[None]).logits[0, -1, 0]))
        rewards = [float(rows[i].earned or 0.0) for i in mine]
        rewards[-1] += 2.0
        if penalised:
            rewards = [
                r - 0.1 * rows[i].response_length for r, i in zip(rewards, mine, strict=True)
            ]
        expected = _plain_gae(rewards, values, 0.9, 0.6)
        assert batch.advantages[mine].tolist() == pytest.approx(expected, rel=1e-5, abs=1e-5)
        found = batch.values[mine].tolist()
        assert found == pytest.approx(values, rel=1e-5, abs=1e-5)
        assert batch.returns is not None
        returns = [v + a for v, a in zip(values, expected, strict=True)]
        assert batch.returns[mine].tolist() == pytest.approx(returns, rel=1e-5, abs=1e-5)
    # The loss is a mean over turns, and the policy's tokens have the advantage of their turn.
    assert critic.backward(batch, None) == ""
    assert critic._tokens == len(rows)
    assert all(row.advantages is None for row in batch.rows)


def test_a_critic_of_turns_learns_what_a_team_will_earn(tokenizer: Path) -> None:
    critic = {"values": "turn", "episodes": "team", "gae_lambda": 1.0}
    agents = {"a": {"policy": "solver"}, "b": {"policy": "solver"}}
    spec = make_spec(
        tokenizer,
        agents=agents,
        algorithm={"advantage": "gae", "critic": {"optimizer": {"lr": 1e-2}, **critic}},
        pipeline=SYNC,
    )
    assert spec.algorithm.grouping == "query"
    learner = _learner(spec)
    rows = _rows(learner, groups=3, members=6)
    rows = [
        replace(
            row,
            trajectory=f"t{k // 2}",
            agent="ab"[k % 2],
            turn=k % 2,
            reward=float(rows[k // 2 * 2].ids[0] % 3),
            group="q0/*",
            group_rewards=(0.0,) * len(rows),
        )
        for k, row in enumerate(rows)
    ]
    found = []
    for version in range(10):
        learner.accumulate(rows[: len(rows) // 2])
        learner.accumulate(rows[len(rows) // 2 :])
        found.append(learner.apply(version).metrics)
    assert found[0]["advantage/abs_mean"] == pytest.approx(np.mean([r.reward for r in rows]))
    assert found[-1]["critic/explained_variance"] > 0.5
    assert found[-1]["advantage/abs_mean"] < 0.6 * found[0]["advantage/abs_mean"]
