"""Rewards and tools of a job: the location of their code, and the resources of a call.

`READY` lists the predefined rewards and the sections of their arguments.

Missing values come from the function's declaration (`@troupe.reward`, `@troupe.tool`), else from
`troupe.functions.costs.DEFAULTS`. `troupe.functions.validation` has the bounds.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import PurePosixPath
from string import Template
from typing import Annotated, Any, Final, Literal, Self

from pydantic import Field, ValidationError, ValidationInfo, field_validator, model_validator

from troupe.functions.validation import (
    ARGUMENT,
    MAX_ARGUMENTS,
    MAX_CORES,
    MAX_COUNT,
    MAX_PATHS,
    MAX_PROCESSES,
    MAX_RETRIES,
    NAME,
    VERSION,
    SandboxName,
    check_costs,
)
from troupe.job.section import (
    MAX_COEFFICIENT,
    Seconds,
    SecondsOrNone,
    Section,
    Tokens,
    TokensOrNone,
    check_entrypoint,
    check_json,
    check_pattern,
    expand_home,
)

ArgumentPath = Annotated[str, Field(pattern=rf"^{ARGUMENT.pattern}$")]
Count = Annotated[int, Field(ge=0, le=MAX_COUNT)]
PositiveCount = Annotated[int, Field(ge=1, le=MAX_COUNT)]

# The function that calls tools of MCP servers.
_MCP_CALL: Final = "troupe.functions.library.mcp:call"
_DEPLOYED: Final = re.compile(rf"{NAME.pattern}@{VERSION.pattern}")


class ReadyArguments(Section):
    """Arguments of every reward that is ready to use and scores from 0 to 1."""

    agent: str = ""
    """Agent whose last reply is scored and that gets the reward. Default: the trajectory's last
    reply is scored, for all agents."""
    weight: float = Field(default=1.0, ge=-MAX_COEFFICIENT, le=MAX_COEFFICIENT)
    """Factor of the score, which is from 0 to 1."""


class ExactArguments(ReadyArguments):
    """`exact`: the reply is the query's answer, or one of a list. White space does not count, and
    numbers of the data are compared by value."""

    answer: str = Field(default="answer", min_length=1)
    """Field of the query that is compared."""
    answer_pattern: str = ""
    """Regular expression that cuts the compared part out of the field: the first group of its last
    match, or the whole match."""
    reply_pattern: str = ""
    """As `answer_pattern`, for the reply; a reply without a match is wrong."""
    ignore_case: bool = False
    """Compare without regard to upper and lower case."""

    _patterns = field_validator("answer_pattern", "reply_pattern")(check_pattern)


class MathArguments(ReadyArguments):
    """`math`: the reply's final answer equals the query's as mathematics (math-verify)."""

    answer: str = Field(default="answer", min_length=1)
    """Field of the query with the reference: a number, an expression, LaTeX; or a list of them."""
    answer_pattern: str = ""
    """Regular expression that cuts the reference out of the field: `"####\\s*(.+)"` for GSM8K."""
    boxed: bool = False
    """Only an answer in `\\boxed{}` counts."""
    digits: int = Field(default=6, ge=0, le=15)
    """Decimals to which numbers must agree; below 0.1 they are counted after the leading zeros."""

    _patterns = field_validator("answer_pattern")(check_pattern)


class RegexArguments(ReadyArguments):
    """`regex`: a regular expression is found in the reply."""

    pattern: str = Field(min_length=1)
    """The regular expression (Python's)."""
    whole: bool = False
    """The whole reply must match."""

    _patterns = field_validator("pattern")(check_pattern)


class JsonSchemaArguments(ReadyArguments):
    """`json_schema`: the reply is JSON that follows a JSON schema."""

    json_schema: dict[str, Any] | None = None
    """The schema; its `$schema` names the draft. Default: the newest draft."""
    field: str = ""
    """Field of the query that has the schema, as an object or as JSON text, instead of
    `json_schema`."""

    @model_validator(mode="after")
    def _one_schema(self) -> Self:
        if (self.json_schema is None) == (not self.field):
            raise ValueError("json_schema: give exactly one of `json_schema` and `field`")
        if self.json_schema is not None:
            # Its import takes a tenth of a second.
            from troupe.functions.library.answers import schema_validator

            try:
                schema_validator(self.json_schema)
            except ValueError as error:
                raise ValueError(f"json_schema: {error}") from error
        return self


class TagsArguments(ReadyArguments):
    """`format`: the reply consists of `<tag>...</tag>` for each tag, once and in order."""

    tags: list[str] = Field(min_length=1, max_length=64)
    """The tags: `[think, answer]`."""
    opened: bool = False
    """The prompt ends with the first opening tag, so that the reply begins inside it."""

    @field_validator("tags")
    @classmethod
    def _named(cls, names: list[str]) -> list[str]:
        for name in names:
            if not re.fullmatch(r"[A-Za-z][\w.-]*", name):
                raise ValueError(f"{name!r} is not a tag name; write `think` for <think>")
        if len(set(names)) < len(names):
            raise ValueError("a tag occurs twice")
        return names


class LengthArguments(ReadyArguments):
    """`length`: the reply is neither too short nor too long; thoughts count."""

    most: Tokens
    """Length up to which the score is 1."""
    least: TokensOrNone = 0
    """Length from which on the score is 1."""
    margin: TokensOrNone = 0
    """How far from these bounds the score reaches 0, falling linearly; 0: at once."""
    unit: Literal["tokens", "characters", "words"] = "tokens"
    """The unit that is counted."""

    @model_validator(mode="after")
    def _bounds(self) -> Self:
        if self.least > self.most:
            raise ValueError(f"least: {self.least} is more than `most`, {self.most}")
        return self


class TestsArguments(ReadyArguments):
    """`tests`: the code of the reply (its last fenced block of Python, else its last block, else
    all of it) passes the query's tests, run by pytest in a sandbox."""

    tests: str = Field(default="tests", min_length=1)
    """Field of the query with the tests: the text of a pytest file, or texts by file name, of which
    `test_*.py` and `*_test.py` are run."""
    file: str = Field(default="solution.py", min_length=1)
    """Name of the file with the reply's code, which tests import."""
    partial: bool = False
    """Score the fraction of tests that pass, instead of all or nothing."""
    seconds: float = Field(default=30.0, gt=0, le=300)
    """Time limit of a run."""

    @field_validator("file")
    @classmethod
    def _module(cls, value: str) -> str:
        path = PurePosixPath(value)
        if path.suffix != ".py" or path.is_absolute() or ".." in path.parts:
            raise ValueError(f"{value!r} is not the path of a Python file; write `solution.py`")
        if path.name == "conftest.py" or re.fullmatch(r"test_.*|.*_test", path.stem):
            raise ValueError(f"{value!r} is a test file's name, so pytest would run it")
        return value


class PuzzleArguments(ReadyArguments):
    """`reasoning_gym`: the score of the query's puzzle, for tasks of
    `troupe.data.reasoning_gym`."""

    reply_pattern: str = ""
    """Regular expression that cuts the answer out of the reply: the first group of its last match.
    Default: all of it. For answers of several lines: `"(?s)<answer>(.*?)</answer>"`."""

    _patterns = field_validator("reply_pattern")(check_pattern)


class JudgeArguments(ReadyArguments):
    """`judge`: a score from a judging model at any endpoint that speaks OpenAI's API."""

    base_url: str = Field(pattern=r"^https?://[^\s/]+")
    """The endpoint: `https://api.example.com/v1`."""
    model: str = Field(min_length=1)
    """Name of the model there."""
    rubric: str | None = None
    """Criteria of the score. Default: how correct, complete and to the point the answer is."""
    prompt: str | None = None
    """The whole prompt, instead of `rubric`: a `string.Template` of $task, $answer, $conversation,
    $rubric, $lowest, $highest and $tag. It shows $answer or $conversation; `$$` is a dollar."""
    task: str = ""
    """Field of the query that is the task. Default: all of its data."""
    lowest: float = 0.0
    """The worst score; scores are scaled to 0 .. 1."""
    highest: float = 1.0
    """The best score."""
    api_key_env: str = ""
    """Environment variable of the reward service with the key (TROUPE_REWARD_ENVIRONMENT)."""
    attempts: int = Field(default=4, ge=1, le=100)
    """Maximum number of requests per score, retries after refusals and replies without a score
    included."""
    seconds: float = Field(default=150.0, gt=0, le=3600)
    """Time for all requests of one score."""
    temperature: float = Field(default=0.0, ge=0, le=1000)
    """Sampling temperature of the judge."""
    max_tokens: Tokens = 1024
    """Longest reply of the judge."""

    @field_validator("prompt")
    @classmethod
    def _template(cls, value: str | None) -> str | None:
        if value is None:
            return None
        shown = set(Template(value).get_identifiers())
        if not Template(value).is_valid() or shown - set(JUDGE_FIELDS):
            known = ", ".join(f"${name}" for name in JUDGE_FIELDS)
            raise ValueError(f"is not a template of {known}; write $$ for a dollar")
        if not shown & {"answer", "conversation"}:
            raise ValueError("shows the judge neither $answer nor $conversation")
        return value

    @model_validator(mode="after")
    def _bounds(self) -> Self:
        if self.lowest >= self.highest:
            raise ValueError(f"lowest: {self.lowest:g} is not below `highest`, {self.highest:g}")
        return self


class RewardModelArguments(Section):
    """`reward_model`: the score of a sequence classification model with one output."""

    model: str = Field(min_length=1)
    """Directory or hub id, as `AutoModelForSequenceClassification` loads it; its tokenizer has a
    chat template. Paths are resolved on the hosts that run rewards."""
    revision: str | None = Field(default=None, min_length=1)
    """Commit, branch or tag on the hub. Default: its newest."""
    squash: bool = False
    """Take the sigmoid of the score, which is from 0 to 1."""
    max_tokens: TokensOrNone = 0
    """Longest conversation that is read, by its last tokens; 0: all of it."""
    agent: str = ""
    """Agent whose last reply is scored and that gets the reward. Default: the trajectory's last
    reply is scored, for all agents."""
    weight: float = Field(default=1.0, ge=-MAX_COEFFICIENT, le=MAX_COEFFICIENT)
    """Factor of the score, which has no bounds."""

    @field_validator("model")
    @classmethod
    def _home(cls, value: str) -> str:
        return expand_home(value) or ""


JUDGE_FIELDS: Final = ("task", "answer", "conversation", "rubric", "lowest", "highest", "tag")
"""Variables of a judge's prompt."""
_LIBRARY: Final = "troupe.functions.library"
READY: Final[Mapping[str, tuple[str, type[Section]]]] = {
    "math": (f"{_LIBRARY}.mathematics:math", MathArguments),
    "exact": (f"{_LIBRARY}.answers:exact", ExactArguments),
    "regex": (f"{_LIBRARY}.answers:regex", RegexArguments),
    "json_schema": (f"{_LIBRARY}.answers:json_schema", JsonSchemaArguments),
    "format": (f"{_LIBRARY}.answers:tags", TagsArguments),
    "length": (f"{_LIBRARY}.answers:length", LengthArguments),
    "tests": (f"{_LIBRARY}.answers:passes_tests", TestsArguments),
    "reasoning_gym": (f"{_LIBRARY}.answers:solves_puzzle", PuzzleArguments),
    "judge": (f"{_LIBRARY}.judge:judge", JudgeArguments),
    "reward_model": (f"{_LIBRARY}.reward_model:reward_model", RewardModelArguments),
}
"""Rewards that are ready to use by name: entrypoint, and the section of their arguments."""
# Arguments that name a field of the query.
_OF_QUERY: Final = ("answer", "tests", "field", "task")


class FunctionSpec(Section):
    """A reward or tool that the reward service runs in a worker process. What is left out is as
    the function declares it (`@troupe.reward`, `@troupe.tool`), else the default named."""

    entrypoint: str | None = None
    """`package.module:attribute`, importable where the reward service runs. This, `function` or
    `ready`."""
    ready: (
        Literal[
            "math",
            "exact",
            "regex",
            "json_schema",
            "format",
            "length",
            "tests",
            "reasoning_gym",
            "judge",
            "reward_model",
        ]
        | None
    ) = None
    """A reward that is ready to use (docs/rewards.md); `arguments` are its own, below."""
    function: str | None = None
    """`name@version` of a deployed function (`troupe functions deploy`), with the costs of its
    deployment; only `arguments` may be set in addition."""
    arguments: dict[str, Any] = Field(default={}, validate_default=True)
    """Further keyword arguments of every call; not shown to models."""
    version: str | None = Field(default=None, min_length=1)
    """Version of the function's behaviour. Default: "1"."""
    timeout_seconds: Seconds | None = None
    """Time limit of one call; it is then killed and fails with a timeout. Default: 30."""
    memory_mib: Count | None = None
    """Memory limit of the worker process in MiB; 0: unlimited. Default: 512."""
    max_concurrency: Count | None = None
    """Concurrent calls; 0: as many as there are worker processes. Default: 0."""
    max_queued: Count | None = None
    """Calls that may wait; further ones are refused with a retry hint. 0: the service's limit.
    Default: 0."""
    retries: int | None = Field(default=None, ge=0, le=MAX_RETRIES)
    """Retries of a call whose worker died or that timed out; only for functions that may run twice.
    Default: 0."""
    cores: Count | None = None
    """CPU cores that a call needs; 0 for a call that mostly waits. Enforced where the reward
    service schedules cores (`TROUPE_REWARD_CORES`). Default: 1."""
    max_cores: int | None = Field(default=None, ge=0, le=MAX_CORES)
    """Cores that a call can use at most; 0: `cores`. The scheduler decides for every call; the
    function finds its cores in `os.sched_getaffinity(0)`. Default: 0."""
    parallel_fraction: float | None = Field(default=None, ge=0, le=1)
    """Fraction of a call's time that scales with cores (Amdahl). An initial estimate, refined from
    calls with different numbers of cores. Default: 0.9."""
    expected_seconds: SecondsOrNone | None = None
    """Time of a call with the fewest cores: an initial estimate, refined from calls. With
    `seconds_per` the constant part. Default: 0, unknown."""
    seconds_per: dict[ArgumentPath, SecondsOrNone] | None = Field(
        default=None, max_length=MAX_ARGUMENTS
    )
    """Seconds per unit of an argument: of a number, else per item or character. `{tests: 2.5}`;
    `{query.data.tests: 2.5}` for a reward. The scale is refined from calls, also per query, so that
    it need not be measured on this machine. Default: none."""
    gpus: Count | None = None
    """GPU units that a call needs. Default: 0."""
    model_service: str | None = None
    """Model that must be resident on those GPUs. Default: none."""
    quota: str | None = None
    """External quota from which a call takes `quota_units`. Default: none."""
    quota_units: PositiveCount | None = None
    """Units of `quota` per call. Default: 1."""
    sandbox: SandboxName | None = None
    """Isolation of its worker processes. `process`: `memory_mib`, `reads` and `writes`, for trusted
    code. `bubblewrap`: for code that a model wrote: no network, read-only interpreter and packages,
    a private /tmp, no environment variables, an unprivileged user. `container`: a container of
    `image`. Default: process."""
    stateful: bool | None = None
    """All calls of one trajectory use one sandbox, one after another: files persist between calls,
    processes do not. Default: false."""
    sandbox_idle_seconds: SecondsOrNone | None = None
    """`stateful`: idle time after which a sandbox is ended; 0: the service's setting. Default:
    0."""
    image: str | None = None
    """`container`: image of the container."""
    processes: int | None = Field(default=None, ge=1, le=MAX_PROCESSES)
    """In a sandbox: maximum number of concurrent processes and threads. Default: 64."""
    disk_mib: PositiveCount | None = None
    """In a sandbox: size of its private /tmp in MiB. Default: 256."""
    reads: list[str] | None = Field(default=None, max_length=MAX_PATHS)
    """`process`, where the kernel has Landlock: files and folders that may be read, in addition to
    the interpreter, the packages and a temporary folder. Default: all that the service may read."""
    writes: list[str] | None = Field(default=None, max_length=MAX_PATHS)
    """As `reads`, for reading and writing."""
    idle_seconds: SecondsOrNone | None = None
    """How long an idle worker is kept. Default: the service's setting."""
    min_workers: Count | None = None
    """Workers that are started in advance and kept. Default: 0."""

    _json = field_validator("arguments")(check_json)

    @field_validator("arguments")
    @classmethod
    def _of_ready(cls, value: dict[str, Any], info: ValidationInfo) -> dict[str, Any]:
        """Convert the arguments of a predefined reward to their types: YAML reads 1e-3 as text, and
        "false" would count as true."""
        ready = info.data.get("ready")
        if ready is None:
            return value
        try:
            return READY[ready][1].model_validate(value).model_dump(exclude_unset=True)
        except ValidationError as error:
            raise ValueError("; ".join(map(_told, error.errors()))) from error

    @field_validator("entrypoint")
    @classmethod
    def _entrypoint(cls, value: str | None) -> str | None:
        return value if value is None else check_entrypoint(value)

    @field_validator("function")
    @classmethod
    def _function(cls, value: str | None) -> str | None:
        if value is not None and not _DEPLOYED.fullmatch(value):
            raise ValueError("must look like 'name@version'; `troupe functions list` shows them")
        return value

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if sum(one is not None for one in (self.entrypoint, self.function, self.ready)) != 1:
            raise ValueError("give exactly one of `entrypoint`, `function` and `ready`")
        if self.function is not None:
            for name in ("version", *self.costs):
                if getattr(self, name) is not None:
                    raise ValueError(
                        f"`{name}` of a deployed function is fixed by its deployment; remove it, "
                        "or deploy the function with another"
                    )
        return self

    @model_validator(mode="after")
    def _costs_that_work(self) -> Self:
        def refuse(field: str, value: object, message: str, remedy: str) -> None:
            raise ValueError(f"`{field}` = {value} {message}. {remedy}")

        check_costs(self.costs, refuse)
        return self

    @property
    def code(self) -> str | None:
        """The entrypoint, also of a predefined reward; None for a deployed function."""
        return self.entrypoint if self.ready is None else READY[self.ready][0]

    @property
    def query_fields(self) -> dict[str, str]:
        """Fields of the query that a predefined reward reads, by the argument that names them."""
        if self.ready is None:
            return {}
        given = READY[self.ready][1].model_validate(self.arguments)
        named = {name: getattr(given, name, "") for name in _OF_QUERY}
        return {name: field for name, field in named.items() if field}

    @property
    def deployed(self) -> tuple[str, str]:
        """Name and version of a deployed function; empty for one with an entrypoint."""
        name, _, version = (self.function or "").partition("@")
        return name, version

    @property
    def costs(self) -> dict[str, Any]:
        """Only the costs that the job sets."""
        return self.model_dump(
            exclude_none=True,
            exclude={"entrypoint", "function", "ready", "arguments", "version", "mcp"},
        )


def _told(fault: Any) -> str:
    """Return the text of one fault in the arguments of a predefined reward, with its place."""
    where = ".".join(map(str, fault["loc"]))
    message = str(fault["msg"]).removeprefix("Value error, ")
    if fault["type"] == "missing":
        message = "is missing"
    elif fault["type"] == "extra_forbidden":
        message = "there is no such argument"
    return f"`{where}` {message}" if where else message


class McpSpec(Section):
    """An MCP server, whose tools the workflow may call. In values of `env` and `headers` `$NAME` is
    a variable of the environment in which tools run (TROUPE_REWARD_ENVIRONMENT)."""

    command: list[str] | None = Field(default=None, min_length=1, max_length=256)
    """Program and arguments of a server that speaks over standard input and output; each worker
    process that runs its calls starts one. This or `url`."""
    env: dict[str, str] = Field(default={}, max_length=256)
    """`command`: further variables of its environment."""
    url: str | None = Field(default=None, pattern=r"^https?://[^\s/]+")
    """Address of a server that speaks streamable HTTP. This or `command`."""
    headers: dict[str, str] = Field(default={}, max_length=256)
    """`url`: headers of its requests: `{Authorization: Bearer $SEARCH_KEY}`."""
    offered: list[str] | None = Field(default=None, min_length=1, max_length=1000)
    """Which of its tools the workflow may call. Default: all."""
    prefix: str = Field(default="", pattern=r"^[A-Za-z0-9_-]{0,63}$")
    """Put before its tools' names, where two servers have a tool of one name."""
    start_seconds: Seconds = 20.0
    """How long its start, and the list of its tools, may take; counts into `timeout_seconds`."""

    @model_validator(mode="after")
    def _one_transport(self) -> Self:
        if (self.command is None) == (self.url is None):
            raise ValueError("give exactly one of `command` and `url`")
        for field, needs in (("env", "command"), ("headers", "url")):
            if getattr(self, field) and getattr(self, needs) is None:
                raise ValueError(f"`{field}` is for a server with `{needs}`; remove it")
            for name, value in getattr(self, field).items():
                if not Template(value).is_valid() or "\0" in name + value:
                    raise ValueError(
                        f"`{field}.{name}` is not a template; write $NAME for a variable, $$ for $"
                    )
        if self.command is not None and not self.command[0]:
            raise ValueError("`command` must begin with a program")
        return self


class ToolSpec(FunctionSpec):
    """A tool that the reward service runs, or an MCP server with any number of tools."""

    mcp: McpSpec | None = None
    """An MCP server, instead of `entrypoint` and `function`; its tools have the names and
    descriptions that it gives them. Costs are per call; `timeout_seconds` is 60 by default."""

    @model_validator(mode="before")
    @classmethod
    def _calls_the_server(cls, raw: Any) -> Any:
        if not isinstance(raw, dict) or raw.get("mcp") is None:
            return raw
        for name in ("entrypoint", "function", "ready", "arguments", "version"):
            if raw.get(name) and raw[name] != _MCP_CALL:
                raise ValueError(f"`{name}` is not for an MCP server; remove it, or `mcp`")
        return {**raw, "entrypoint": _MCP_CALL}
