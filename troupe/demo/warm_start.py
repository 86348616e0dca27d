"""Supervised warm-start of both policies: `python -m troupe.demo.warm_start --out DIR`.

No pretrained model of this size exists, so the format - answer, critique, second answer - is taught
from generated conversations. It stops as soon as the team solves some of every dataset: what is
left to learn is for RL.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM
from transformers.utils import logging

from troupe.checkpoints.retention import remove
from troupe.demo import ending_in_a_line
from troupe.demo.models import AnswerToLearn, answer_all, make_model, make_tokenizer, train_step
from troupe.demo.tasks import TASKS, TeamTasks, score
from troupe.demo.workflow import criticise, propose, revise
from troupe.disks import system_error

# Raised when a change here makes other models of the same settings: a cached DIR is made anew.
RECIPE = 3


@dataclass(frozen=True)
class Settings:
    """The settings that the result depends on."""

    seed: int = 0
    max_steps: int = 400
    batch: int = 48
    solver_lr: float = 2e-3
    checker_lr: float = 3e-3
    # Stops when greedy team success on dev questions reaches `mean` on average and `least` on
    # every dataset.
    mean: float = 0.45
    least: float = 0.3
    dev_queries: int = 150
    recipe: int = RECIPE


class WarmStart:
    """Both models, their optimizers, and the conversations that they learn from."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.tokenizer: PreTrainedTokenizerFast = make_tokenizer()
        self.models: dict[str, Qwen3ForCausalLM] = {
            name: make_model(name, self.tokenizer, settings.seed + number)
            for number, name in enumerate(("solver", "checker"))
        }
        rates = {"solver": settings.solver_lr, "checker": settings.checker_lr}
        self._optimizers = {
            name: torch.optim.AdamW(
                model.parameters(), lr=rates[name], betas=(0.9, 0.98), weight_decay=0.01
            )
            for name, model in self.models.items()
        }
        self._rates = rates
        self._draw = random.Random(settings.seed)
        seed = settings.seed + 1_000_000  # other questions than RL draws first
        self._train = {name: TeamTasks("train", seed, only=name) for name in TASKS}
        self._drawn = dict.fromkeys(TASKS, 0)
        self._weights = dict.fromkeys(TASKS, 1.0)
        dev = TeamTasks("dev", settings.seed)
        self._dev = [dev[i] for i in range(settings.dev_queries)]
        self.steps = 0

    def step(self) -> None:
        """One supervised step of each model."""
        rows: dict[str, list[AnswerToLearn]] = {"solver": [], "checker": []}
        for _ in range(self.settings.batch):
            [name] = self._draw.choices(list(TASKS), list(self._weights.values()))
            query = self._train[name][self._drawn[name]]
            self._drawn[name] += 1
            question, answer = query["question"], query["answer"].lower()
            proposal = self._maybe_corrupt(answer)
            rows["solver"].append(AnswerToLearn(propose(question), answer))
            if self._draw.random() < 0.8:
                critique = self._maybe_corrupt(answer)
                rows["solver"].append(AnswerToLearn(revise(question, proposal, critique), answer))
            rows["checker"].append(AnswerToLearn(criticise(question, proposal), answer))
        warmup = min(1.0, (self.steps + 1) / 20)
        for name, model in self.models.items():
            optimizer = self._optimizers[name]
            for group in optimizer.param_groups:
                group["lr"] = self._rates[name] * warmup
            train_step(model, optimizer, self.tokenizer, rows[name])
        self.steps += 1

    def success(self) -> dict[str, float]:
        """Greedy team success per dataset on the dev questions; favours what lags from now on."""
        solver, checker = self.models["solver"], self.models["checker"]
        questions = [query["question"] for query in self._dev]
        first = answer_all(solver, self.tokenizer, [propose(q) for q in questions])
        advice = answer_all(
            checker,
            self.tokenizer,
            [criticise(q, a) for q, a in zip(questions, first, strict=True)],
        )
        final = answer_all(
            solver,
            self.tokenizer,
            [revise(*parts) for parts in zip(questions, first, advice, strict=True)],
        )
        right: dict[str, list[float]] = {name: [] for name in TASKS}
        for query, answer in zip(self._dev, final, strict=True):
            right[query["dataset"]] += score(query["answer"], [answer])
        found = {name: sum(values) / len(values) for name, values in right.items()}
        self._weights = {name: 0.1 if found[name] >= 0.4 else 1.0 for name in TASKS}
        return found

    def done(self, success: dict[str, float]) -> bool:
        """Whether the format is there and the rest can be left to RL."""
        settings = self.settings
        mean = sum(success.values()) / len(success)
        return mean >= settings.mean and min(success.values()) >= settings.least

    def _maybe_corrupt(self, answer: str) -> str:
        """The answer, or in four of ten cases one with a few characters wrong."""
        if self._draw.random() < 0.6:
            return answer
        letters = list(answer)
        for _ in range(self._draw.choice((1, 1, 2))):
            if len(letters) > 1 and self._draw.random() < 0.6:
                i, j = self._draw.sample(range(len(letters)), 2)
                letters[i], letters[j] = letters[j], letters[i]
            else:
                letters[self._draw.randrange(len(letters))] = self._draw.choice(answer)
        return "".join(letters)

    def save(self, out: Path) -> None:
        """Write `out`/solver and `out`/checker; `out` appears only when complete.

        Raises OSError, naming `out`, where that cannot be written; then nothing of it is left.
        """
        logging.disable_progress_bar()  # of files that are written at once
        scratch = Path(tempfile.mkdtemp(prefix=f".{out.name}.", dir=out.parent))
        try:
            for name, model in self.models.items():
                model.save_pretrained(scratch / name)
                self.tokenizer.save_pretrained(scratch / name)
            (scratch / "warm_start.json").write_text(json.dumps(asdict(self.settings)))
            remove(out)
            scratch.chmod(0o755)  # mkdtemp's is closed to others
            scratch.rename(out)
        except Exception as error:
            found = system_error(error)
            if found is None:
                raise
            raise OSError(found.errno, found.strerror, str(out)) from error
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
        for left in out.parent.glob(f".{out.name}.*"):  # of whoever was killed at it
            shutil.rmtree(left, ignore_errors=True)


def warm_start(out: Path, settings: Settings) -> None:
    """Make the models unless `out` holds those of the same settings. Shows progress."""
    if _made(out) == asdict(settings):
        print(f"warm-started models are in {out} already")
        return
    torch.set_num_threads(max(1, int(os.environ.get("OMP_NUM_THREADS", "1"))))
    out.parent.mkdir(parents=True, exist_ok=True)
    work = WarmStart(settings)
    columns = ("warm-start", BarColumn(), "step {task.completed:.0f}", TimeElapsedColumn())
    with Progress(*columns, TextColumn("{task.fields[success]}")) as progress:
        task = progress.add_task("", total=settings.max_steps, success="")
        while work.steps < settings.max_steps:
            work.step()
            progress.advance(task)
            if work.steps >= 40 and work.steps % 10 == 0:
                success = work.success()
                shown = " ".join(f"{name} {value:.2f}" for name, value in success.items())
                progress.update(task, success=shown)
                if work.done(success):
                    progress.update(task, total=work.steps)
                    break
    work.save(out)
    sizes = {
        name: sum(p.numel() for p in model.parameters()) for name, model in work.models.items()
    }
    print(f"warm-started {sizes} parameters in {work.steps} steps: {out}")


def _made(out: Path) -> Any:
    try:
        return json.loads((out / "warm_start.json").read_text())
    except (OSError, ValueError):
        return None


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--mean", type=float, default=Settings.mean, help="success at which it stops (0.45)"
    )
    args = parser.parse_args()
    with ending_in_a_line():
        warm_start(args.out, Settings(seed=args.seed, mean=args.mean))


if __name__ == "__main__":
    main()
