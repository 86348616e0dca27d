"""The client of a cluster's functions (rewards and tools): deploy, invoke, list, delete.

Calls go to the orchestrator, which forwards them to the reward service.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from pydantic import ValidationError

from troupe.client.program import ProgramJob
from troupe.client.records.functions import Function, Invocation, InvocationProgress, LogLine
from troupe.contracts import kinds
from troupe.functions.costs import to_spec
from troupe.functions.describing import DescribeError, described
from troupe.functions.sources import MAX_BYTES, MAX_FILES, collect, walk
from troupe.job import FunctionSpec, JobSpec
from troupe.job.loading import FieldProblem, explained
from troupe.outcomes import NotJsonError, json_text
from troupe.rpc.errors import InvalidArgument, NotFound
from troupe.rpc.ids import new_id
from troupe.v1 import reward_pb2 as reward_pb

if TYPE_CHECKING:
    from troupe.v1.reward_pb2_grpc import RewardAsyncStub

_LISTED: Final = "docs/job-reference.md lists what a function can declare."
_MODULE: Final = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")
_SECONDS: Final = 600.0
_NO_COSTS: Final = frozenset(("name", "source", "entrypoint", "function", "version", "arguments"))
_REMEDY: Final = (
    "Give FILE.py, FILE.py:function, a FOLDER that contains an entrypoint, or a "
    "package.module[:function] that is installed where the cluster runs."
)


class AsyncFunctions:
    """The rewards and tools of a cluster. All methods raise `troupe.rpc.TroupeError`."""

    def __init__(self, stub: RewardAsyncStub) -> None:
        """Called by `AsyncClient.functions`."""
        self._stub = stub

    async def deploy(
        self,
        /,
        source: str | Path,
        *,
        entrypoint: str | None = None,
        name: str | None = None,
        version: str | None = None,
        **costs: Any,
    ) -> list[Function]:
        """Deploy the functions that a file, a folder or a module declares. Idempotent.

        `source` is FILE.py or a folder, whose text is uploaded (identified by its SHA-256, never
        pickled), or a `package.module` that is installed where the cluster runs.
        `entrypoint` selects one function, declared or not (`FILE.py:function` does the same); for a
        folder it is `module[:function]`. `costs`, `name` and `version` override the declaration.
        Raises `InvalidArgument` for code that cannot be imported or for an invalid declaration,
        and `AlreadyExists` when the version exists with different code.
        """
        files, functions = await asyncio.to_thread(
            prepare, source, entrypoint, name, version, costs
        )
        sha256 = ""
        if files:
            upload = reward_pb.UploadSourceRequest(request_id=new_id("upload"), files=files)
            sha256 = (await self._stub.UploadSource(upload)).sha256
        deployed = []
        for spec in functions:
            spec.source_sha256 = sha256
            await self._stub.RegisterFunction(
                reward_pb.RegisterFunctionRequest(request_id=new_id("deploy"), function=spec)
            )
            deployed.append(Function.of(reward_pb.FunctionStatus(function=spec)))
        return deployed

    async def get(self, name: str, version: str | None = None) -> Function:
        """Return one function, by default in the version registered last. Raises `NotFound`."""
        found = [f for f in await self.list() if f.name == name and version in (None, f.version)]
        if not found:
            raise NotFound(
                "is not a known function" + (f" in version {version!r}" if version else ""),
                kind=kinds.FUNCTION_NOT_FOUND,
                field="name",
                value=name,
                remedy="`troupe functions list` shows the known functions.",
            )
        return found[-1]

    async def invoke(
        self,
        name: str,
        arguments: Mapping[str, Any] | None = None,
        *,
        version: str | None = None,
        trajectory_id: str = "",
        invocation_id: str | None = None,
        expected_seconds: float = 0.0,
        timeout: float = _SECONDS,
    ) -> Any:
        """Call a function and return its value within `timeout` seconds. The default `version` is
        the one deployed last.

        A call repeated with the same `invocation_id` runs once. Stateful functions keep their
        files by `trajectory_id`. `expected_seconds` is the estimated run time with the fewest
        cores, for callers that know better than past calls tell; 0: unknown. Raises
        `InvocationFailed` when the call ends without a value.
        """
        request = _request(name, arguments, version, trajectory_id, invocation_id)
        request.expected_seconds = expected_seconds
        reply = await self._stub.Invoke(request, timeout=timeout)
        ended = Invocation.of_call(name, request.invocation_id, reply)
        if ended.error is not None:
            raise ended.error
        return ended.value

    async def invoke_batch(
        self,
        name: str,
        calls: Sequence[Mapping[str, Any]],
        *,
        version: str | None = None,
        timeout: float = _SECONDS,
    ) -> list[Invocation]:
        """Call a function once for each item of `calls` (the arguments of one call); return the
        outcomes in the same order."""
        ids = [new_id("invoke") for _ in calls]
        request = reward_pb.InvokeBatchRequest(
            name=name,
            version=version or "",
            calls=[
                reward_pb.BatchCall(invocation_id=one, arguments_json=_json(arguments))
                for one, arguments in zip(ids, calls, strict=True)
            ],
        )
        reply = await self._stub.InvokeBatch(request, timeout=timeout)
        responses = list(reply.responses)
        for i, (call, response) in enumerate(zip(request.calls, responses, strict=True)):
            if response.error.kind == reward_pb.InvocationError.KIND_RESULT_TOO_LARGE:
                # The call has ended, and its result fits into a reply by itself.
                alone = reward_pb.InvokeRequest(
                    invocation_id=call.invocation_id,
                    name=name,
                    version=request.version,
                    arguments_json=call.arguments_json,
                )
                responses[i] = await self._stub.Invoke(alone, timeout=timeout)
        return [
            Invocation.of_call(name, one, response)
            for one, response in zip(ids, responses, strict=True)
        ]

    async def invoke_stream(
        self,
        name: str,
        arguments: Mapping[str, Any] | None = None,
        *,
        version: str | None = None,
        trajectory_id: str = "",
        invocation_id: str | None = None,
    ) -> AsyncIterator[InvocationProgress | Invocation]:
        """Call a function; yield its progress and output, and finally its outcome. Closing the
        iterator cancels the call."""
        request = _request(name, arguments, version, trajectory_id, invocation_id)
        call = self._stub.InvokeStream(request)
        try:
            async for event in call:
                yield _event(name, request.invocation_id, event)
        finally:
            call.cancel()

    async def cancel(self, invocation_id: str) -> bool:
        """Cancel a queued or running call. Returns False if it has ended or is unknown."""
        request = reward_pb.CancelInvocationRequest(invocation_id=invocation_id)
        return (await self._stub.CancelInvocation(request)).cancelled

    async def logs(
        self,
        name: str,
        *,
        version: str | None = None,
        job_id: str = "",
        invocation_id: str = "",
        lines: int = 0,
        follow: bool = False,
    ) -> AsyncIterator[LogLine]:
        """Yield the last `lines` that calls of the function printed (0: all that are kept). With
        `follow`, also yield new lines as they appear, until the iterator is closed."""
        call = self._stub.ReadLogs(
            reward_pb.ReadLogsRequest(
                name=name,
                version=version or "",
                job_id=job_id,
                invocation_id=invocation_id,
                lines=lines,
                follow=follow,
            )
        )
        try:
            async for line in call:
                yield LogLine.of(line)
        finally:
            call.cancel()

    async def delete(self, name: str, version: str) -> bool:
        """Delete a deployed function and cancel its calls. Returns False if it did not exist."""
        request = reward_pb.DeleteFunctionRequest(
            request_id=new_id("delete"), name=name, version=version
        )
        return (await self._stub.DeleteFunction(request)).deleted

    # Keep this method last: below it, `list` is no longer the type.
    async def list(self) -> list[Function]:
        """Return all functions of the reward service, including functions of jobs."""
        reply = await self._stub.ListFunctions(reward_pb.ListFunctionsRequest())
        return [Function.of(status) for status in reply.functions]


async def with_code(stub: RewardAsyncStub, job: JobSpec | ProgramJob) -> JobSpec:
    """Send the files that the job's `code` names to the cluster, and return the job with their
    hash. A job without `code`, or with a hash, is returned as it is. Raises `InvalidArgument`."""
    if isinstance(job, ProgramJob):
        upload = reward_pb.UploadSourceRequest(request_id=new_id("upload"), files=job.files)
        await stub.UploadSource(upload)
        return job.spec
    code = job.code
    if code is None or code.sha256 is not None:
        return job
    files = await asyncio.to_thread(collect, Path(code.root), code.include, code.exclude)
    upload = reward_pb.UploadSourceRequest(request_id=new_id("upload"), files=files)
    sha256 = (await stub.UploadSource(upload)).sha256
    return job.model_copy(update={"code": code.model_copy(update={"sha256": sha256})})


def _request(
    name: str,
    arguments: Mapping[str, Any] | None,
    version: str | None,
    trajectory_id: str,
    invocation_id: str | None,
) -> reward_pb.InvokeRequest:
    return reward_pb.InvokeRequest(
        invocation_id=invocation_id or new_id("invoke"),
        name=name,
        version=version or "",
        arguments_json=_json(arguments or {}),
        trajectory_id=trajectory_id,
    )


def _json(arguments: Mapping[str, Any]) -> str:
    try:
        return json_text(dict(arguments))
    except NotJsonError as error:
        raise InvalidArgument(
            f"are not JSON: {error}",
            field="arguments",
            value=arguments,
            remedy="Pass strings, finite numbers, booleans, None, lists and dicts only.",
        ) from error


def _event(
    name: str, invocation_id: str, event: reward_pb.InvocationEvent
) -> InvocationProgress | Invocation:
    match event.WhichOneof("event"):
        case "outcome":
            return Invocation.of_call(name, invocation_id, event.outcome)
        case "queued":
            return InvocationProgress("queued", ahead=event.queued.ahead)
        case "started":
            started = event.started
            return InvocationProgress("started", attempt=started.attempt, cores=started.cores)
        case _:
            return InvocationProgress("output", output=event.output)


def prepare(
    source: str | Path,
    entrypoint: str | None,
    name: str | None,
    version: str | None,
    costs: Mapping[str, Any],
) -> tuple[tuple[reward_pb.SourceFile, ...], list[reward_pb.FunctionSpec]]:
    """Return the files of `source` (none if the cluster has the code installed) and its functions
    to deploy; see `AsyncFunctions.deploy`. Raises `InvalidArgument`."""
    target, folder, files = _read(str(source), entrypoint)
    try:
        found = described(target, folder)
    except DescribeError as error:
        raise InvalidArgument(
            str(error),
            kind=kinds.NOT_IMPORTABLE,
            field="source",
            value=source,
            remedy="Make it importable here, or fix the problem.",
        ) from error
    if (name or version) and len(found) > 1:
        raise InvalidArgument(
            f"the source declares {len(found)} functions: {', '.join(one.name for one in found)}",
            field="name" if name else "version",
            value=name or version,
            remedy="Select one of them: FILE.py:function.",
        )
    own = checked_costs(costs)
    return files, [
        to_spec(
            name or one.name,
            version or one.version,
            one.entrypoint,
            own,
            declared=one.costs,
            kind=one.kind,
            description=one.description,
            parameters=one.parameters,
        )
        for one in found
    ]


def checked_costs(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the costs `given`, validated like the costs of a job's rewards and tools. Raises
    `InvalidArgument`."""
    for field in _NO_COSTS & given.keys():
        raise InvalidArgument(
            "is not a cost of a function",
            field=field,
            value=given[field],
            remedy="Name, version and code have parameters of their own; each call gives its "
            "arguments.",
        )
    try:
        return FunctionSpec(entrypoint="any:function", **given).costs
    except (ValidationError, TypeError) as error:
        if isinstance(error, ValidationError):
            first = explained(error, FunctionSpec, _LISTED)[0]
        else:
            first = FieldProblem("costs", "", str(error), _LISTED)
        raise InvalidArgument(
            first.message,
            field=first.field,
            value=given.get(first.field),
            remedy=first.remedy,
        ) from error


def _read(
    source: str, entrypoint: str | None
) -> tuple[str, str | None, tuple[reward_pb.SourceFile, ...]]:
    """Return the entrypoint to import, the directory to import it from, and the files to upload."""
    path, attribute = source, entrypoint or ""
    if not Path(source).exists() and ":" in source:
        path, _, attribute = source.rpartition(":")
    place = Path(path).expanduser()
    if place.is_file() and place.suffix == ".py":
        if not _MODULE.fullmatch(place.stem):
            raise InvalidArgument(
                "is not a module name", field="source", value=place.name, remedy="Rename it."
            )
        file = reward_pb.SourceFile(path=place.name, content=place.read_bytes())
        _, _, attribute = attribute.rpartition(":")
        return _joined(place.stem, attribute), str(place.resolve().parent), (file,)
    if place.is_dir():
        if not attribute:
            raise InvalidArgument(
                "is a folder; name the module that holds the functions",
                field="entrypoint",
                value="",
                remedy="Give `module` or `package.module:function`, relative to the folder.",
            )
        return attribute, str(place.resolve()), tuple(_files(place))
    if place.is_file():
        raise InvalidArgument(
            "is a file, but not Python source", field="source", value=source, remedy=_REMEDY
        )
    if place.suffix == ".py" or not _MODULE.fullmatch(path):
        raise InvalidArgument(
            "is not a file, folder or module", field="source", value=source, remedy=_REMEDY
        )
    return _joined(path, attribute), str(Path.cwd()), ()


def _joined(module: str, attribute: str) -> str:
    return f"{module}:{attribute}" if attribute else module


def _files(folder: Path) -> Iterator[reward_pb.SourceFile]:
    """Return a folder's text files, except hidden files and byte code. Raises `InvalidArgument`."""
    try:
        yield from _readable_files(folder)
    except OSError as error:
        raise InvalidArgument(
            f"'{error.filename or folder}' cannot be read: {error.strerror or error}",
            field="source",
            value=folder,
            remedy="Make it readable, or deploy a folder without it.",
        ) from error


def _readable_files(folder: Path) -> Iterator[reward_pb.SourceFile]:
    size = 0
    for count, path in enumerate(walk(folder)):
        size += path.stat().st_size
        if count >= MAX_FILES or size > MAX_BYTES:
            raise InvalidArgument(
                f"holds more than {MAX_FILES:,} files or {MAX_BYTES // 2**20} MiB",
                field="source",
                value=folder,
                remedy="Deploy a folder with the code only; install large parts as a package.",
            )
        content = path.read_bytes()
        try:
            content.decode("utf-8")
        except UnicodeDecodeError:
            continue  # a binary file is not source
        yield reward_pb.SourceFile(path=path.relative_to(folder).as_posix(), content=content)
