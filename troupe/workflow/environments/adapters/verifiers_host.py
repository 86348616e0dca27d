"""The program of a child process with one environment of the `verifiers` library.

It runs with the interpreter of the Python environment in which `verifiers` is installed, so it does
not import Troupe. It reads requests from standard input and answers them on standard output, one
JSON object per line: `open` loads the environment, `task` gives the data of one task, `play` runs
an episode (many concurrently), `cancel` ends one. A model call of a role goes to the role's address
in the `play` request: the OpenAI-compatible endpoint of that trajectory's agent.

It supports two generations of the library: 0.1 (`load_environment`, rubrics, one role) and 0.4
(tasksets, harnesses, several roles).
"""

from __future__ import annotations

import argparse
import asyncio
import copy
import importlib
import importlib.metadata
import importlib.util
import itertools
import json
import os
import signal
import sys
import threading
import traceback
import types
from collections import OrderedDict
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from typing import Any, BinaryIO, Final

Object = dict[str, Any]

# Name of the only role of environments that do not name it.
SINGLE_ROLE: Final = "agent"
# Number of tasks of an endless taskset that are kept, in the order of their creation.
_KEPT_TASKS: Final = 4096
# Marks the clients of roles that Troupe serves; the variable does not exist, and no key is needed.
_KEY_VARIABLE: Final = "TROUPE_ENDPOINT"
_CHAT_HARNESS: Final = "troupe-chat"
_TRACEBACK_CHARS: Final = 2000
# Errors of verifiers 0.1 about the policy's behaviour; its rollout is scored as it is.
_OF_POLICY: Final = (
    "EmptyModelResponseError",
    "InvalidModelResponseError",
    "OverlongPromptError",
    "ToolParseError",
)


class Refusal(Exception):
    """The environment cannot be used as the job requires; `kind` is stable, `field` is below
    `tasks.verifiers`."""

    def __init__(self, kind: str, field: str, message: str, remedy: str = "") -> None:
        super().__init__(message)
        self.kind, self.field, self.remedy = kind, field, remedy


class EpisodeFailed(Exception):
    """An episode has no rewards; `kind`: `model` (a model call failed), `deadline`, or
    `environment`."""

    def __init__(self, kind: str, message: str, trace: str = "") -> None:
        super().__init__(message)
        self.kind, self.trace = kind, trace


class RubricEnvironment:
    """An environment of verifiers 0.1: `load_environment`, a data set, a rubric, one role."""

    def __init__(self, ident: str, args: Object) -> None:
        import httpx
        import verifiers as vf

        self._vf = vf
        self._env = vf.load_environment(ident, **args)
        if not hasattr(self._env, "run_rollout"):
            raise _unsupported()
        if getattr(self._env, "requires_group_rollouts", False):
            raise Refusal(
                "environment_unsupported",
                "environment",
                "a reward function compares the rollouts of a group, which Troupe plays separately",
                "Reward each rollout separately; `algorithm.advantage` compares the rollouts of a "
                "group.",
            )
        self.roles = [SINGLE_ROLE]
        self.fixed_roles: list[str] = []
        # One client for all episodes: making one costs a tenth of a second.
        self._http: Any = httpx.AsyncClient(
            timeout=None,
            trust_env=False,
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=64),
        )

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        """Keep the resources that all episodes share until the process ends."""
        try:
            yield
        finally:
            await self._env._teardown()

    def count(self, held_out: bool) -> int | None:
        """Number of tasks of a split; None: it has no such split."""
        rows = self._rows(held_out)
        return None if rows is None else len(rows)

    def task(self, index: int, held_out: bool) -> Object:
        """Return the data of a task."""
        rows = self._rows(held_out)
        assert rows is not None
        return dict(rows[index])

    def _rows(self, held_out: bool) -> Any:
        if held_out:
            return self._env.build_eval_dataset()
        rows = self._env.build_dataset()
        # Some environments are only for evaluation.
        return self._env.build_eval_dataset() if rows is None else rows

    async def play(self, task: Object, endpoints: dict[str, Object]) -> list[Object]:
        """Play one episode, and return it as one trace. Raises `EpisodeFailed`."""
        from openai import AsyncOpenAI
        from verifiers.clients import OpenAIChatCompletionsClient

        endpoint = endpoints[SINGLE_ROLE]
        client = AsyncOpenAI(
            base_url=endpoint["base_url"],
            api_key=endpoint["api_key"],
            http_client=self._http,
            max_retries=0,
        )
        rollout = await self._env.run_rollout(
            task, OpenAIChatCompletionsClient(client), endpoint["model"], {}
        )
        error = rollout.get("error")
        if error and error["error"] not in _OF_POLICY:
            chain = error["error_chain_repr"]
            raise EpisodeFailed("model" if "ModelError" in chain else "environment", chain)
        metrics = dict(rollout.get("metrics") or {})
        return [
            {
                "role": SINGLE_ROLE,
                "session": "",
                "reward": rollout["reward"],
                "rewards": self._rewards(metrics),
                "metrics": metrics,
            }
        ]

    def _rewards(self, metrics: Object) -> dict[str, list[float]]:
        """Return score and weight by reward function, as far as the rubric names its functions."""
        rubric = self._env.rubric
        names: list[str] = getattr(rubric, "_get_reward_func_names", list)()
        weights: list[float] = getattr(rubric, "_get_reward_weights", list)()
        weighed: dict[str, float] = {}
        for name, weight in zip(names, weights, strict=False):
            weighed[name] = weighed.get(name, 0.0) + float(weight)
        return {n: [metrics[n], w] for n, w in weighed.items() if n in metrics and w}


class TasksetEnvironment:
    """An environment of verifiers 0.4: a taskset, roles with one harness each, rewards per trace.

    `args` is the library's own `[env]` block. Its defaults here suit training on a rollout worker:
    runtimes are local processes, and a role without a harness converses (`null`) inside this
    process, without a program per conversation.
    """

    def __init__(self, ident: str, args: Object) -> None:
        try:
            from verifiers.v1.configs.agent import agent_config_fields
            from verifiers.v1.configs.retries import RetryConfig
            from verifiers.v1.runtimes import SubprocessConfig
            from verifiers.v1.utils.loaders import (
                default_harness_id,
                load_environment,
                resolve_env_config,
            )
        except ImportError as error:
            raise _unsupported() from error
        _serve_through_endpoints()
        chat = _register_chat_harness()
        taskset = {"id": ident, **(args.get("taskset") or {})}
        config = resolve_env_config({**args, "taskset": taskset})
        ships_harness = default_harness_id(config.taskset.id) == config.taskset.id
        changed: Object = {}
        for role, spec in agent_config_fields(config).items():
            # A retry inside the episode would leave unrewarded turns of the failed attempt.
            update: Object = {"retries": RetryConfig()}
            if "runtime" not in spec.model_fields_set:
                update["runtime"] = SubprocessConfig()
            if spec.harness is None if not ships_harness else False:
                update["harness"] = chat()
            elif spec.harness is not None and spec.harness.id == "null":
                update["harness"] = chat(**{**spec.harness.model_dump(), "id": _CHAT_HARNESS})
            changed[role] = spec.model_copy(update=update)
        config = config.model_copy(update=changed)
        self.roles = list(changed)
        self.fixed_roles = [role for role, spec in changed.items() if spec.client is not None]
        self._env = load_environment(config)
        self._task_type = type(self._env.taskset).task_type()
        self._endless = bool(self._env.taskset.INFINITE)
        self._stream: Iterator[Any] = iter(())
        self._made: OrderedDict[int, Object] = OrderedDict()
        self._tasks: list[Any] | None = None
        self._next = 0

    def serving(self) -> Any:
        """Return the resources that all episodes share until the process ends: tool servers, the
        interception."""
        return self._env.serving()

    def count(self, held_out: bool) -> int | None:
        """Number of tasks; -1: they never end; None: it has no such split, as no taskset has."""
        if held_out:
            return None
        if self._endless:
            return -1
        if self._tasks is None:
            self._tasks = list(self._env.taskset)
        return len(self._tasks)

    def task(self, index: int, held_out: bool) -> Object:
        """Return the data of a task. In an endless taskset, a task that is no longer kept is made
        again from the first task on."""
        if self._tasks is not None:
            return _data_of(self._tasks[index])
        if index not in self._made and (index < self._next or not self._next):
            self._stream, self._next = iter(self._env.taskset), 0
        while index not in self._made:
            task = next(itertools.islice(self._stream, max(0, index - self._next), None))
            self._next = index + 1
            self._made[index] = _data_of(task)
            while len(self._made) > _KEPT_TASKS:
                self._made.popitem(last=False)
        return self._made[index]

    async def play(self, task: Object, endpoints: dict[str, Object]) -> list[Object]:
        """Play one episode, and return its traces. Raises `EpisodeFailed`."""
        from verifiers.v1.clients import EvalClientConfig, ModelContext

        env = copy.copy(self._env)  # the same servers, but its own clients
        roles: Object = {}
        for role, endpoint in endpoints.items():
            client = EvalClientConfig(base_url=endpoint["base_url"], api_key_var=_KEY_VARIABLE)
            own = getattr(env.config, role)
            roles[role] = own.model_copy(update={"client": client, "model": endpoint["model"]})
        env.config = env.config.model_copy(update=roles)
        first = next(iter(roles.values()))
        data = self._task_type.data_type().model_validate(task)
        built = self._task_type(data, env.config.taskset.task)
        episode = await env.run_episode(built, ModelContext(model=first.model, client=first.client))
        failed = [error for trace in episode.traces if not trace.ok for error in trace.errors[-1:]]
        # An environment may continue without one of its agents; then the episode itself is valid.
        if errors := [*episode.errors, *failed]:
            raise _episode_failure(errors[0], timed_out=episode.is_timeout)
        return [
            {
                "role": trace.agent.name,
                "session": trace.id,
                "reward": trace.reward,
                "rewards": {
                    name: [one.score, one.weight]
                    for name, one in trace.rewards.items()
                    if one is not None
                },
                "metrics": {k: v for k, v in trace.metrics.items() if v is not None},
            }
            for trace in episode.traces
        ]


def _data_of(task: Any) -> Object:
    data: Object = task.data.model_dump(mode="json")
    return data


def _episode_failure(error: Any, *, timed_out: bool) -> EpisodeFailed:
    of_model = error.type in ("ProviderError", "InterceptionError")
    kind = "deadline" if timed_out else "model" if of_model else "environment"
    return EpisodeFailed(kind, f"{error.type}: {error.message}", error.traceback or "")


def _serve_through_endpoints() -> None:
    """Let the library's interception servers reach the endpoints of trajectories.

    The servers keep a client per address forever, and making one costs a tenth of a second, but
    each trajectory has its own addresses. The clients for these share one pool of connections.
    """
    import httpx
    from verifiers.v1.clients.eval import EvalClient
    from verifiers.v1.interception.server import InterceptionServer

    if not hasattr(InterceptionServer, "_client"):
        raise _unsupported()
    shared = httpx.AsyncClient(
        timeout=None,
        trust_env=False,
        limits=httpx.Limits(max_connections=None, max_keepalive_connections=64),
    )
    of_others = InterceptionServer._client

    class EndpointClient(EvalClient):  # type: ignore[misc]
        """A client that relays the requests of a role to its endpoint."""

        def __init__(self, config: Any) -> None:
            self.base_url, self.api_key = config.base_url, "troupe"
            self.headers: dict[str, str] = {}
            self.client = shared

        async def close(self) -> None:
            pass

    def client(server: Any, config: Any) -> Any:
        ours = config.api_key_var == _KEY_VARIABLE
        return EndpointClient(config) if ours else of_others(server, config)

    InterceptionServer._client = client


def _register_chat_harness() -> Any:
    """Add a harness that does the work of `null` in this process, and return its configuration.

    `null` starts a program per conversation, which needs `uv`, packages from an index and a second
    of CPU time. This harness calls the program's own conversation loop instead.
    """
    from verifiers.v1.configs.harness import HarnessConfig
    from verifiers.v1.dialects.chat import message_to_wire
    from verifiers.v1.harnesses.null import NullHarness
    from verifiers.v1.harnesses.utils.launch import CHAT_PROGRAM_SOURCE
    from verifiers.v1.runtimes import ProgramResult

    # The library bundles three modules into a script; as modules they lack each other's names.
    program = types.ModuleType("troupe_chat_program")
    sys.modules[program.__name__] = program
    exec(compile(CHAT_PROGRAM_SOURCE, program.__name__, "exec"), vars(program))
    for name in ("run_chat_loop", "Compactor", "connect_mcp", "AsyncOpenAI"):
        if not hasattr(program, name):
            raise _unsupported()
    shared = program.httpx.AsyncClient(timeout=None, trust_env=False)

    class ChatHarnessConfig(HarnessConfig):  # type: ignore[misc]
        """The configuration of `ChatHarness`, equal to `null`'s."""

        id: str = _CHAT_HARNESS

    class ChatHarness(NullHarness):  # type: ignore[misc]
        """The conversation loop of `null`, in this process."""

        async def setup(self, runtime: Any) -> None:
            pass

        async def launch(
            self,
            ctx: Any,
            trace: Any,
            runtime: Any,
            endpoint: str,
            secret: str,
            mcp_urls: dict[str, str],
            data: Any,
            tool_interception_url: str | None = None,
        ) -> Any:
            system, prompt = self.resolve_prompt(data)
            messages = [{"role": "system", "content": system}] if system else []
            if isinstance(prompt, str):
                messages.append({"role": "user", "content": prompt})
            else:
                messages += [message_to_wire(message) for message in prompt or ()]
            client = program.AsyncOpenAI(base_url=endpoint, api_key=secret, http_client=shared)
            args = argparse.Namespace(
                api_key=secret,
                tool_interception_url=tool_interception_url or "",
                bash=False,
                edit=False,
                search=False,
                serper_key="",
            )
            servers = {
                name: {"url": url, "timeout": self.config.tool_timeout}
                for name, url in mcp_urls.items()
            }
            async with AsyncExitStack() as stack:
                tools, dispatch, connected = [], {}, {}
                if servers:
                    tools, dispatch, connected = await asyncio.wait_for(
                        program.connect_mcp({"mcpServers": servers}, stack, set()), 60
                    )
                compactor = program.Compactor(client, ctx.model, tools, False, None)
                compactor.note_good(messages)
                try:
                    await program.run_chat_loop(
                        args, compactor, messages, dispatch, connected, shared
                    )
                except SystemExit as error:  # how the program reports that the model was lost
                    return ProgramResult(int(error.code or 1), "", "the model was not reached")
                except Exception as error:  # equivalent to its exit status and last output
                    return ProgramResult(1, "", "".join(traceback.format_exception(error)))
            return ProgramResult(0, "", "")

    module = types.ModuleType(_CHAT_HARNESS.replace("-", "_"))
    module.__dict__.update(ChatHarness=ChatHarness, __all__=["ChatHarness"])
    sys.modules[module.__name__] = module
    # Plugins are looked up before they are imported.
    module.__spec__ = importlib.util.spec_from_loader(module.__name__, loader=None)
    return ChatHarnessConfig


def _unsupported() -> Refusal:
    return Refusal(
        "environment_unsupported",
        "python",
        f"verifiers {_version()} is not supported",
        "Install verifiers 0.4 or 0.1.14 in that environment.",
    )


def _version() -> str:
    return importlib.metadata.version("verifiers")


def open_environment(ident: str, args: Object) -> RubricEnvironment | TasksetEnvironment:
    """Load the environment with this id, of either generation. Raises `Refusal`."""
    try:
        import verifiers
    except ImportError as error:
        raise Refusal(
            "environment_not_installed",
            "python",
            f"{sys.executable} has no package `verifiers` ({error})",
            "Name an interpreter that has it: `python -m venv DIR`, "
            "`DIR/bin/pip install verifiers ENVIRONMENT`, `python: DIR/bin/python`.",
        ) from error
    of_rubrics = hasattr(verifiers, "load_environment")
    try:
        return (RubricEnvironment if of_rubrics else TasksetEnvironment)(ident, args)
    except Refusal:
        raise
    except BaseException as error:
        raise _refused(ident, args, error) from error


def _refused(ident: str, args: Object, error: BaseException) -> Refusal:
    """Return the reason why an environment could not be loaded."""
    chain = [error]
    while (cause := chain[-1].__cause__ or chain[-1].__context__) is not None:
        chain.append(cause)
    if missing := missing_key(*chain):
        return missing
    module = ident.rsplit("/", 1)[-1].split("@", 1)[0].replace("-", "_")
    for one in chain:
        if isinstance(one, ModuleNotFoundError):
            its_own = (one.name or "").partition(".")[0] in (module.partition(".")[0], "verifiers")
            what = f"environment '{ident}'" if its_own else f"package `{one.name}` that it imports"
            return Refusal(
                "environment_not_installed",
                "environment",
                f"{sys.executable} has no {what}",
                f"`{sys.executable} -m pip install {ident}`; its name there may be another.",
            )
    text = "".join(traceback.format_exception_only(chain[0])).strip()
    return Refusal("environment_refused", "args", f"loading '{ident}' failed: {text}")


def missing_key(*errors: BaseException) -> Refusal | None:
    """Return the refusal if an environment did not find a key among its variables, else None."""
    for error in errors:
        names = error.keys if type(error).__name__ == "MissingKeyError" else None  # type: ignore[attr-defined]
        text = str(error)
        if not names and not ("api_key" in text and "must be set" in text):
            continue
        return Refusal(
            "environment_key_missing",
            "environment",
            f"it needs a key that is missing on this worker: {', '.join(names or [text])}",
            "Set the variable on the hosts of rollout workers, or choose `args` that need no key.",
        )
    return None


class VerifiersHost:
    """The server of the parent process's requests."""

    def __init__(self, answers: BinaryIO) -> None:
        self._answers = answers
        self._pid = os.getpid()
        self._env: RubricEnvironment | TasksetEnvironment | None = None
        self._stack = AsyncExitStack()
        self._playing: dict[int, asyncio.Task[None]] = {}

    async def serve(self, requests: asyncio.Queue[Object | None]) -> None:
        """Serve until None is requested. Episodes run concurrently, all other requests one by
        one."""
        async with self._stack:
            while (request := await requests.get()) is not None:
                number = request["id"]
                if request["op"] == "play":
                    task = asyncio.create_task(self._answer(number, self._play(request)))
                    self._playing[number] = task
                    task.add_done_callback(partial(self._forget, number))
                elif request["op"] == "cancel":
                    if (playing := self._playing.get(request["of"])) is not None:
                        playing.cancel()
                    self._write({"id": number, "ok": {}})
                else:
                    await self._answer(number, self._carry_out(request))
            for playing in list(self._playing.values()):
                playing.cancel()

    def _forget(self, number: int, task: asyncio.Task[None]) -> None:
        del self._playing[number]

    async def _carry_out(self, request: Object) -> Object:
        if request["op"] == "open":
            self._env = open_environment(request["environment"], request["args"])
            await self._stack.enter_async_context(self._env.serving())
            return {
                "version": _version(),
                "roles": self._env.roles,
                "fixed_roles": self._env.fixed_roles,
            }
        assert self._env is not None, "open comes first"
        if request["op"] == "count":
            return {"count": self._env.count(request["held_out"])}
        return {"task": self._env.task(request["index"], request["held_out"])}

    async def _play(self, request: Object) -> Object:
        assert self._env is not None, "open comes first"
        return {"traces": await self._env.play(request["task"], request["endpoints"])}

    async def _answer(self, number: int, work: Any) -> None:
        try:
            answer = {"ok": await work}
        except asyncio.CancelledError:
            answer = {"error": {"kind": "cancelled", "message": "the request was cancelled"}}
        except BaseException as error:
            answer = {"error": described(error)}
        self._write({"id": number, **answer})

    def _write(self, answer: Object) -> None:
        if os.getpid() != self._pid:  # forked by the environment, and came back from its code
            os._exit(0)
        try:
            line = json.dumps(answer, allow_nan=True)
        except (TypeError, ValueError, RecursionError) as error:
            why = {"kind": "not_json", "message": f"an answer is not JSON: {error}"}
            line = json.dumps({"id": answer["id"], "error": why})
        self._answers.write(line.encode() + b"\n")
        self._answers.flush()


def described(error: BaseException) -> Object:
    """Return an error as JSON values."""
    text = "".join(traceback.format_exception_only(error)).strip()
    full = "".join(traceback.format_exception(error))
    known = error if isinstance(error, Refusal) else missing_key(error)
    if known is not None:
        return {
            "kind": known.kind,
            "field": known.field,
            "message": str(known),
            "remedy": known.remedy,
        }
    if isinstance(error, EpisodeFailed):
        if missing := missing_key(error):
            return described(missing)
        return {"kind": error.kind, "message": str(error), "traceback": error.trace}
    return {"kind": "environment", "message": text, "traceback": full[-_TRACEBACK_CHARS:]}


def take_pipes() -> tuple[BinaryIO, BinaryIO]:
    """Return the pipes of the parent, and free standard input and output, which environments may
    use. Processes that an environment forks have neither: what they run must not answer for it."""
    requests, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    for pipe in (requests, answers):
        os.register_at_fork(after_in_child=pipe.raw.close)
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    os.dup2(2, 1)
    return requests, answers


def read_requests(
    requests: BinaryIO, queue: asyncio.Queue[Object | None], loop: asyncio.AbstractEventLoop
) -> None:
    """Pass requests on until the parent closes the pipe or dies; then end this process, whatever
    its event loop is doing. Runs in a thread."""
    for line in requests:
        loop.call_soon_threadsafe(queue.put_nowait, json.loads(line))
    loop.call_soon_threadsafe(queue.put_nowait, None)
    threading.Event().wait(5.0)  # time to stop tool servers cleanly
    os.killpg(0, signal.SIGKILL)


async def main() -> None:
    """Serve the requests of the parent."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is handled by the parent
    requests, answers = take_pipes()
    queue: asyncio.Queue[Object | None] = asyncio.Queue()
    arguments = (requests, queue, asyncio.get_running_loop())
    threading.Thread(target=read_requests, args=arguments, daemon=True).start()
    await VerifiersHost(answers).serve(queue)


if __name__ == "__main__":
    asyncio.run(main())
