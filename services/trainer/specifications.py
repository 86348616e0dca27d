"""Specifications of jobs as a trainer's host reads them: with its copies of models, and with the
code that jobs ship."""

from __future__ import annotations

import asyncio
import threading
from typing import Any, Final

import structlog
from pydantic import ValidationError

from services.chassis.model_files import ModelFiles
from services.chassis.settings import ServiceSettings
from services.trainer.learning.model import load_config, with_dtype
from troupe.functions.shipped import open_shipped, opened
from troupe.functions.sources import SourceStore
from troupe.job import JobSpec
from troupe.job.loading import explained
from troupe.outcomes import described
from troupe.rpc import Internal, InvalidArgument, TroupeError, connect
from troupe.v1 import orchestrator_pb2_grpc as orchestrator_grpc
from troupe.yaml_input import MAX_BYTES

log = structlog.get_logger("troupe.trainer")

_REMEDY: Final = "Send the validated specification (JobSpec.model_dump_json)."


def spec_with(policy: str, spec_json: str) -> JobSpec:
    """Parse the specification and check that it has this policy.

    Raises InvalidArgument, of kind "invalid_spec" if it cannot be parsed.
    """
    if len(spec_json) > MAX_BYTES:
        raise InvalidArgument(
            f"has {len(spec_json):,} characters, more than {MAX_BYTES:,}",
            kind="invalid_spec",
            field="spec_json",
            remedy=_REMEDY,
        )
    try:
        spec = JobSpec.model_validate_json(spec_json)
    except ValidationError as error:
        first = explained(error, JobSpec, _REMEDY)[0]
        raise InvalidArgument(
            first.message,
            kind="invalid_spec",
            field="spec_json" if first.field == "job" else first.field,
            value=first.value or None,
            remedy=first.remedy,
        ) from error
    if policy not in spec.policies:
        raise InvalidArgument(
            f"the job has no policy '{policy}'",
            field="policy",
            value=policy,
            remedy=f"Known: {', '.join(sorted(spec.policies))}.",
        )
    return spec


class Specifications:
    """Parses jobs' specifications, has their models copied to this host, and opens the code that
    jobs ship for it: networks' environment, whose shapes it must know, and functions of users."""

    def __init__(self, settings: ServiceSettings) -> None:
        self._models = ModelFiles(settings)
        self._sources = SourceStore()
        # The orchestrator's stub; set before the first call.
        self.orchestrator: Any = None

    async def parse(self, policy: str, spec_json: str) -> JobSpec:
        """Return the specification of a job with this policy. Raises as `spec_with`, and what
        `SourceStore.fetch` and `ModelFiles.localized` raise."""
        spec = await self._models.localized(spec_with(policy, spec_json), self.orchestrator)
        imports = spec.environment is not None or spec.algorithm.own_functions
        if imports and spec.code is not None and spec.code.sha256:
            folder = await self._sources.fetch(spec.code.sha256, self.orchestrator)
            await asyncio.to_thread(open_shipped, spec.code.sha256, folder)
        return spec

    def close(self) -> None:
        """Remove the files."""
        self._sources.close()


class HostSpecification:
    """The specification of a job on a host of a gang that another host leads, made in a thread: the
    copy of a model may take minutes, in which ranks go on."""

    def __init__(self, settings: ServiceSettings, policy: str, spec_json: str) -> None:
        """`settings`: of this host's worker. `spec_json`: as the job was submitted."""
        self.spec_json = spec_json
        self._settings, self._policy = settings, policy
        self._found: tuple[str, str] | TroupeError | None = None
        self._thread = threading.Thread(target=self._run, name="specification", daemon=True)
        self._thread.start()

    def found(self) -> tuple[str, str] | TroupeError | None:
        """Specification (JSON) and the folder of its code ("": ranks import none), the error that
        there was, or None: not yet."""
        return None if self._thread.is_alive() else self._found

    def _run(self) -> None:
        try:
            self._found = asyncio.run(self._read())
        except TroupeError as error:
            self._found = error
        except Exception as error:
            log.exception("a gang's host cannot prepare a job")
            self._found = Internal(described(error))

    async def _read(self) -> tuple[str, str]:
        settings = self._settings
        specs = Specifications(settings)
        async with connect(settings.orchestrator_address, settings.client()) as channel:
            specs.orchestrator = orchestrator_grpc.OrchestratorStub(channel)
            spec = await specs.parse(self._policy, self.spec_json)
        spec = await asyncio.to_thread(with_dtype, self._policy, spec)
        await asyncio.to_thread(load_config, self._policy, spec.policies[self._policy])
        code = opened(spec.code.sha256) if spec.code else None
        return spec.model_dump_json(), "" if code is None else str(code.folder)
