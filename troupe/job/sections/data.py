"""Sources of data: rows of data sets (hub or files), and the `tasks` of a job."""

from __future__ import annotations

from collections.abc import Mapping
from os.path import normpath
from typing import Annotated, Any, Final, Literal, Self

from pydantic import Field, field_validator, model_validator

from troupe.job.section import (
    MAX_COEFFICIENT,
    Seconds,
    Section,
    Tokens,
    check_entrypoint,
    check_json,
    expand_home,
)

# File extensions, and the reader of the `datasets` library for each.
READERS: Final = {
    ".parquet": "parquet",
    ".jsonl": "json",
    ".ndjson": "json",
    ".json": "json",
    ".csv": "csv",
    ".tsv": "csv",
    ".arrow": "arrow",
}
_COMPRESSED: Final = (".gz", ".bz2", ".xz", ".zst")
_BINARY: Final = ("parquet", "arrow")
FieldName = Annotated[str, Field(min_length=1, max_length=256)]
Weight = Annotated[float, Field(ge=-MAX_COEFFICIENT, le=MAX_COEFFICIENT)]


def reader_of(source: str) -> str | None:
    """Return the reader of a local file by its extension; None for anything else, such as a
    compressed file of a binary format, which `datasets` cannot read."""
    name = source.lower()
    for end in _COMPRESSED:
        name = name.removesuffix(end)
    reader = next((reader for end, reader in READERS.items() if name.endswith(end)), None)
    return None if reader in _BINARY and len(name) < len(source) else reader


class RowsSpec(Section):
    """Rows of a data set: of the Hugging Face hub, or of local files."""

    dataset: str = Field(default="", max_length=4096)
    """Id on the Hugging Face hub (`openai/gsm8k`), a local folder with a data set, or a local file:
    `.parquet`, `.arrow`, or `.jsonl`, `.ndjson`, `.json`, `.csv`, `.tsv`, also compressed (`.gz`,
    `.bz2`, `.xz`, `.zst`); `*` matches several. Paths name files that the job sends
    (`code`), else files of the hosts that read them. Needs `pip install "troupe-rl[data]"`."""
    config: str | None = Field(default=None, min_length=1, max_length=256)
    """Configuration ("subset") of a data set of the hub: `main`. Default: its only one."""
    revision: str | None = Field(default=None, min_length=1, max_length=256)
    """Commit, branch or tag on the hub. Default: its newest."""
    split: str | None = Field(default=None, min_length=1, max_length=256)
    """Split of the data set, or a part of it: `train[:90%]`. A file has no splits. Default:
    train."""
    columns: dict[FieldName, FieldName] = Field(default={}, max_length=256)
    """Column for each field of a row: `{question: problem}`; a dot selects a part of a column:
    `{answer: reward_model.ground_truth}`. Rows in which such a column is missing or an empty text
    are dropped. Default: all columns under their own names."""
    max_characters: dict[FieldName, Tokens] = Field(default={}, max_length=256)
    """Longest text by field, in characters; longer rows are dropped. For messages their contents
    count."""
    max_tokens: dict[FieldName, Tokens] = Field(default={}, max_length=256)
    """As `max_characters`, in tokens, by the tokenizer that needs most if policies have several."""
    duplicates: Literal["drop", "keep"] = "drop"
    """Drop or keep rows that equal an earlier one."""
    shuffle: bool = True
    """Shuffle the rows by the job's seed, in a new order for each pass. False: keep their order."""

    @field_validator("dataset")
    @classmethod
    def _home(cls, value: str) -> str:
        return expand_home(value) or ""

    @model_validator(mode="after")
    def _rows(self) -> Self:
        if self.dataset and reader_of(self.dataset) is not None:
            for name in ("config", "revision", "split"):
                if getattr(self, name) is not None:
                    raise ValueError(
                        f"`{name}` is for data sets of the hub, but `{self.dataset}` is a file; "
                        "remove it"
                    )
        known = self.columns
        for bounds in ("max_characters", "max_tokens"):
            for name in getattr(self, bounds):
                if known and name not in known:
                    raise ValueError(
                        f"{bounds}: '{name}' is not a field of `columns`; known: "
                        + ", ".join(sorted(known))
                    )
        return self


class VerifiersSpec(Section):
    """An environment of the `verifiers` library (docs/environments.md): its tasks, its episodes and
    its rewards. The job needs no `workflow`."""

    environment: str = Field(pattern=r"^[\w@./-]+$", max_length=256)
    """Id of an installed environment or taskset (`wordle`, `owner/name`), or its module."""
    args: dict[str, Any] = {}
    """verifiers 0.4: the library's own `[env]` block, `{taskset: {...}, ROLE: {max_turns: 8}}`;
    `id` pairs the taskset with another environment. verifiers 0.1: arguments of
    `load_environment`."""
    held_out_args: dict[str, Any] | None = None
    """Replaces `args` in evaluations, section by section. Default: no replacement; see
    `held_out`."""
    python: str | None = Field(default=None, min_length=1, max_length=4096)
    """Interpreter of the environment in which `verifiers` is installed, on rollout workers.
    Default: the worker's own."""
    roles: dict[FieldName, FieldName] = Field(default={}, max_length=256)
    """The job's agent by role of the environment. Default: the agent of that name; a single role
    is the job's single agent."""
    weights: dict[FieldName, Weight] = Field(default={}, max_length=256)
    """Weights of rewards and metrics by name, instead of the environment's own. 0: only a
    metric."""
    processes: int = Field(default=2, ge=1, le=1024)
    """Maximum number of processes per rollout worker; each plays many episodes at once."""
    start_seconds: Seconds = 300
    """Time limit of loading the environment."""
    episode_seconds: Seconds = 600
    """Time limit of an episode, its scoring included."""

    _json = field_validator("args", "held_out_args")(check_json)

    @field_validator("python")
    @classmethod
    def _home(cls, value: str | None) -> str | None:
        return expand_home(value)


class TasksSpec(RowsSpec):
    """Where queries come from: `source`, a class of yours; `dataset`, rows of a data set; or
    `verifiers`, an environment of that library."""

    source: str = ""
    """`package.module:attribute`: called with `split=` ("train" or "held_out") and `args`;
    returns an object with `__len__` and `__getitem__(index) -> dict` (JSON values)."""
    args: dict[str, Any] = {}
    """Keyword arguments of `source`."""
    verifiers: VerifiersSpec | None = None
    """An environment of the `verifiers` library."""
    held_out: str | Annotated[float, Field(gt=0, lt=1)] | None = None
    """`dataset`: rows for evaluations: a split of the data set, another file if `dataset` is a
    file, or a fraction of the rows (0.05), the same rows for every seed. `verifiers`: a fraction of
    its tasks; default: the environment's own tasks for evaluations, if it has some."""

    _json = field_validator("args")(check_json)

    @field_validator("source")
    @classmethod
    def _source(cls, value: str) -> str:
        return check_entrypoint(value) if value else value

    @field_validator("held_out")
    @classmethod
    def _path(cls, value: str | float | None) -> str | float | None:
        return expand_home(value) if isinstance(value, str) else value

    @property
    def mixed(self) -> Mapping[str, MixedTasksSpec]:
        """The sources of a mixture by name; empty for a single source."""
        return {}

    @property
    def evaluated(self) -> bool:
        """Whether this part of a mixture has queries for evaluations."""
        aside = self.verifiers is not None and self.verifiers.held_out_args is not None
        return bool(self.source) or self.held_out is not None or aside

    @property
    def every(self) -> Mapping[str, TasksSpec]:
        """All sources by name; a single source has the name ""."""
        return self.mixed or {"": self}

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if sum(map(bool, (self.source, self.dataset, self.verifiers, self.mixed))) != 1:
            raise ValueError(
                "give exactly one of `source` (a class of yours), `dataset` (rows of a data set) "
                "and `verifiers` (an environment of that library), or a `mix` of several"
            )
        if isinstance(self.held_out, str) and self.verifiers is not None:
            raise ValueError(
                "held_out: an environment has no splits by name; give a fraction (0.05) of its "
                "tasks, or `verifiers.held_out_args`"
            )
        if not self.dataset:
            # Compared with the defaults, since services write them out.
            own = {"source", "args", "verifiers"}
            own |= {"held_out", "shuffle"} if self.verifiers is not None else set()
            for name in sorted(TasksSpec.model_fields.keys() - own):
                if getattr(self, name) != TasksSpec.model_fields[name].default:
                    raise ValueError(f"`{name}` needs a `dataset`, and there is none; remove it")
        if self.args and not self.source:
            raise ValueError("`args` need a `source`; remove them")
        if (
            isinstance(self.held_out, str)
            and reader_of(self.dataset)
            and not reader_of(self.held_out)
        ):
            raise ValueError(
                f"held_out: `{self.held_out}` is not a file with a known extension "
                f"({', '.join(READERS)}), and `{self.dataset}` is a file, which has no splits; "
                "name another file, or a fraction"
            )
        for one in self.every.values():
            if one.held_out is not None and any(map(one._holds_out_rows_of, self.every.values())):
                raise ValueError(
                    f"held_out: `{one.held_out}` names the training rows; name another "
                    "split or file, or a fraction (0.05) of the rows"
                )
        return self

    def _holds_out_rows_of(self, other: TasksSpec) -> bool:
        """Return whether `held_out` names the training rows of `other`."""
        if not isinstance(self.held_out, str) or not other.dataset:
            return False
        if reader_of(other.dataset):
            return normpath(self.held_out) == normpath(other.dataset)
        same = (self.dataset, self.config) == (other.dataset, other.config)
        return same and self.held_out == (other.split or "train")


class MixedTasksSpec(TasksSpec):
    """One of several sources of queries."""

    weight: float = Field(default=1.0, gt=0, le=1e6)
    """How often it is asked, relative to the others."""


class JobTasksSpec(TasksSpec):
    """Where a job's queries come from: `source`, a class of yours; `dataset`, rows of a data set;
    `verifiers`, an environment of that library; or a `mix` of these."""

    mix: dict[FieldName, MixedTasksSpec] = Field(default={}, max_length=256)
    """Several sources by name, in proportion to their weights. Evaluations ask every held-out query
    of all sources once."""

    @property
    def mixed(self) -> Mapping[str, MixedTasksSpec]:
        """The sources of a mixture by name; empty for a single source."""
        return self.mix

    @property
    def holds_out(self) -> bool:
        """Whether there are queries for evaluations, as far as the job shows."""
        return any(one.evaluated for one in self.every.values()) or self.verifiers is not None
