"""The chaos harness, which runs one job undisturbed and with injected faults, and compares the
runs."""

from __future__ import annotations

import asyncio
import sys
import time
from contextlib import suppress
from itertools import zip_longest
from pathlib import Path
from typing import Final, Protocol

from testbed.chaos.accounts import SampleAudit, audit, newest
from testbed.chaos.cluster import DisturbedCluster
from testbed.chaos.fault_injector import FaultInjector, InjectionLog
from testbed.chaos.plan import JOB_ID, ChaosPlan, prepare_directory, prepared
from testbed.chaos.report import ChaosReport, JobOutcome
from testbed.chaos.schedule import schedule
from testbed.chaos.transcript import StepRecord, Transcript, transcribe
from troupe.client.records.jobs import Job, JobState
from troupe.job import JobSpec
from troupe.rpc.errors import DeadlineExceeded, FailedPrecondition, Internal, TroupeError
from troupe.rpc.settings import ClientSettings

# Metrics of durations differ between any two runs.
_TIMES = ("seconds", "tokens_per_second", "staleness_seconds", "_ms", "utilization")
_SHOWN = 5


def differences(a: Transcript, b: Transcript) -> list[str]:
    """Return the first step at which the runs differ, by policy, with the differences; empty if
    none does."""
    found: list[str] = []
    for policy in sorted({*a.policies, *b.policies}):
        pairs = zip_longest(a.policies.get(policy, []), b.policies.get(policy, []))
        for one, other in pairs:
            parted = _parted(one, other)
            if parted:
                step = (one or other).step
                found.append(f"{policy}, step {step}: {'; '.join(parted)}")
                found += _metrics(a, b, step)
                break
    return found


def _parted(one: StepRecord | None, other: StepRecord | None) -> list[str]:
    if one is None or other is None:
        return ["only one of the runs has it"]
    parted: list[str] = []
    if (one.outcome, one.version) != (other.outcome, other.version):
        parted.append(
            f"{one.outcome or 'first'} version {one.version}, "
            f"{other.outcome or 'first'} version {other.version}"
        )
    if one.samples != other.samples:
        parted.append(_samples(one.samples, other.samples))
    elif one.samples_digest != other.samples_digest:
        parted.append(
            "the same samples in the log, but the trainers accumulated different ones "
            f"(digests {one.samples_digest}, {other.samples_digest})"
        )
    if one.checksum != other.checksum and not parted:
        logged = one.samples or one.samples_digest is not None
        whence = (
            "samples of the same ids: their contents or the arithmetic differ"
            if logged
            else "samples without a log"
            if one.version
            else "the same model"
        )
        parted.append(f"other weights ({one.checksum[:12]}, {other.checksum[:12]}) from {whence}")
    if parted:
        parted += _numbers(one.metrics, other.metrics)
    return parted


def _samples(one: dict[str, str], other: dict[str, str]) -> str:
    parts: list[str] = []
    for name, only in (("first", one.keys() - other.keys()), ("second", other.keys() - one.keys())):
        if only:
            parts.append(f"{len(only)} samples only in the {name} run ({_some(sorted(only))})")
    fates = [
        f"{sample} {one[sample]} / {other[sample]}"
        for sample in sorted(one.keys() & other.keys())
        if one[sample] != other[sample]
    ]
    if fates:
        parts.append(f"{len(fates)} with another fate ({_some(fates)})")
    return ", ".join(parts)


def _numbers(one: dict[str, float], other: dict[str, float]) -> list[str]:
    changed = [
        f"{name} {one.get(name)!r} / {other.get(name)!r}"
        for name in sorted({*one, *other})
        if one.get(name) != other.get(name) and not any(part in name for part in _TIMES)
    ]
    return [f"metrics: {_some(changed)}"] if changed else []


def _metrics(a: Transcript, b: Transcript, step: int) -> list[str]:
    changed = _numbers(a.metrics.get(step, {}), b.metrics.get(step, {}))
    return [f"  the job's {changed[0]}"] if changed else []


def _some(parts: list[str]) -> str:
    more = f" and {len(parts) - _SHOWN} more" if len(parts) > _SHOWN else ""
    return ", ".join(parts[:_SHOWN]) + more


def main() -> int:
    """Print the differences of two transcripts; the exit status is 1 when there are any."""
    if len(sys.argv) != 3:
        print(__doc__, file=sys.stderr)
        return 2
    one, other = (Transcript.load(Path(argument)) for argument in sys.argv[1:])
    found = differences(one, other)
    for line in [*one.gaps, *other.gaps, *found]:
        print(line)
    if not found:
        print("the runs agree in every step")
    return 1 if found else 0


_POLL_SECONDS: Final = 0.25
_ANSWER_SECONDS: Final = 10.0
# Maximum times that a job failed by infrastructure faults is resumed; each time is reported.
_RESUMES: Final = 5
_HEALTHY_SECONDS: Final = 60.0
_ACCOUNT_SECONDS: Final = 120.0
# From experience, for a hint only: the seconds of a kill with its recovery and pause, and the
# slowdown of a job under faults.
_KILL_SECONDS, _SLOWDOWN = 4.0, 3.0


class Screen(Protocol):
    """A display of a run's progress."""

    def say(self, text: str) -> None:
        """Print a line."""

    def status(self, text: str) -> None:
        """Replace the status line."""


async def run(plan: ChaosPlan, screen: Screen) -> ChaosReport:
    """Run `plan`. No process is left behind, however the run ends.

    Raises `FailedPrecondition` if the undisturbed job fails, `DeadlineExceeded` if the time limit
    passes before the disturbed one begins, and the errors of a cluster's start.
    """
    prepare_directory(plan.directory)
    spec, changes = prepared(plan.spec)
    for change in changes:
        screen.say(f"--set {change}")
    deadline = time.monotonic() + plan.max_seconds
    baseline = await _undisturbed(plan, spec, deadline, screen) if plan.baseline else None
    if baseline is not None and plan.kills * _KILL_SECONDS > baseline.seconds * _SLOWDOWN:
        screen.say(
            f"the job took {baseline.seconds:.0f} s undisturbed: it may end before {plan.kills} "
            "kills are done; use more steps with --set pipeline.steps=N"
        )
    cluster = DisturbedCluster(
        plan.cluster("disturbed", disturbed=True), proxied=plan.proxied, tell=lambda text: None
    )
    for name, value in plan.environment().items():
        screen.say(f"{name}={value}")
    run_ = _JobRun(cluster, spec, deadline, screen, "disturbed")
    disturber = FaultInjector(
        cluster,
        schedule(plan.seed, cluster.services, cluster.pairs, plan.kinds),
        kills=plan.kills,
        power_offs=plan.power_offs,
        progress=run_.progress,
        tell=screen.say,
    )
    outcome = await run_.carry_out(disturber)
    outcome.transcript.save(plan.directory / "disturbed.json")
    report = ChaosReport(
        seed=plan.seed,
        kills_wanted=plan.kills,
        disturbed=outcome,
        disturbance=disturber.done,
        baseline=baseline,
        deterministic=spec.pipeline.deterministic,
    )
    if report.bitwise_equal is False and baseline is not None:
        report.differences.extend(differences(baseline.transcript, outcome.transcript))
    return report


async def _undisturbed(
    plan: ChaosPlan, spec: JobSpec, deadline: float, screen: Screen
) -> JobOutcome:
    cluster = DisturbedCluster(plan.cluster("baseline", disturbed=False), proxied=False)
    outcome = await _JobRun(cluster, spec, deadline, screen, "undisturbed").carry_out(None)
    outcome.transcript.save(plan.directory / "baseline.json")
    if outcome.cut_short:
        raise DeadlineExceeded(
            f"the time limit passed when the undisturbed job was at step {outcome.steps} of "
            f"{outcome.total_steps}.",
            field="--max-minutes",
            value=plan.max_seconds / 60,
            remedy="Allow more time, or use fewer steps with --set pipeline.steps=N.",
        )
    if outcome.state != JobState.SUCCEEDED:
        raise FailedPrecondition(
            f"the undisturbed job {outcome.state}: {'; '.join(outcome.failures)}",
            remedy="Fix the job first: `troupe train` shows more.",
        )
    return outcome


class _JobRun:
    """A run of one job on its own cluster."""

    def __init__(
        self, cluster: DisturbedCluster, spec: JobSpec, deadline: float, screen: Screen, name: str
    ) -> None:
        self._cluster = cluster
        self._spec = spec
        self._deadline = deadline
        self._screen = screen
        self._name = name
        self._job: Job | None = None
        self._failures: list[str] = []

    def progress(self) -> float:
        """Return the fraction of the job's steps that are committed."""
        job = self._job
        return 0.0 if job is None else job.step / max(1, job.total_steps)

    async def carry_out(self, disturber: FaultInjector | None) -> JobOutcome:
        """Start the cluster, run the job to its end, read the audit, stop the cluster."""
        cluster = self._cluster
        self._screen.say(f"{self._name} run in {cluster.settings.data_dir}")
        disturbing: asyncio.Task[None] | None = None
        try:
            await cluster.start()
            started = time.monotonic()
            await cluster.client.submit(self._spec, JOB_ID)
            if disturber is not None:
                disturbing = asyncio.create_task(disturber.run(), name="disturber")
            cut_short = not await self._until_over(disturber, disturbing)
            seconds = time.monotonic() - started
            await _end(disturbing)
            return await self._take_stock(seconds, cut_short)
        finally:
            with suppress(Exception):
                await _end(disturbing)
            await cluster.stop()

    async def _until_over(
        self, disturber: FaultInjector | None, disturbing: asyncio.Task[None] | None
    ) -> bool:
        """Return whether the job ended before the deadline."""
        shown = -1
        while time.monotonic() < self._deadline:
            if disturbing is not None and disturbing.done():
                disturbing.result()  # a fault of the harness itself ends it
            job = await self._look()
            if job is not None:
                self._job = job
                self._screen.status(self._line(job, disturber.done if disturber else None))
                if job.step > shown:
                    shown = job.step
                    self._screen.say(f"{self._name}: step {job.step} of {job.total_steps}")
                stopped = job.state.ended or job.state == JobState.PAUSED
                if stopped and not await self._goes_on(job, disturber):
                    return True
            self._check_cluster()
            await asyncio.sleep(_POLL_SECONDS)
        return False

    async def _look(self) -> Job | None:
        """Return the job's record; None while the orchestrator does not answer."""
        async with self._cluster.power:
            with suppress(TroupeError, TimeoutError):
                async with asyncio.timeout(_ANSWER_SECONDS):
                    return await self._cluster.job(JOB_ID).info()
        return None

    async def _goes_on(self, job: Job, disturber: FaultInjector | None) -> bool:
        """Return whether a job that stopped is resumed."""
        if job.state == JobState.SUCCEEDED:
            return False
        if job.state == JobState.FAILED:
            self._failures.append(str(job.problem))
            self._screen.say(f"{self._name}: the job failed: {job.problem}")
        if disturber is None or len(self._failures) > _RESUMES or not job.state.resumable:
            return False
        async with self._cluster.power:
            with suppress(TroupeError, TimeoutError):
                async with asyncio.timeout(_ANSWER_SECONDS):
                    await self._cluster.job(JOB_ID).resume()
                    self._screen.say(f"{self._name}: resumed the job")
        return True

    def _check_cluster(self) -> None:
        if self._cluster.power.locked():
            return
        for record in self._cluster.cluster.state.services:
            if record.state == "failed":
                raise Internal(
                    "is given up by its supervisor.",
                    field="service",
                    value=record.name,
                    remedy=f"Its log is {record.log}.",
                )

    async def _take_stock(self, seconds: float, cut_short: bool) -> JobOutcome:
        cluster = self._cluster
        cluster.network.heal()
        self._screen.status(f"{self._name}: accounts")
        settings = ClientSettings.of_environment().model_copy(
            update={"tls_ca": None, "tls_cert": None, "tls_key": None}
        )
        accounts, transcript = SampleAudit(missing="it was not requested"), Transcript()
        versions: dict[str, tuple[int, str]] = {}
        try:
            async with asyncio.timeout(_ACCOUNT_SECONDS):
                for service in cluster.services:
                    await cluster.until_healthy(service, _HEALTHY_SECONDS)
                handle = cluster.job(JOB_ID)
                self._job = await handle.info()
                for policy in sorted(self._job.versions):
                    if (last := newest(await handle.versions(policy))) is not None:
                        versions[policy] = (last.version, last.checksum)
                address = cluster.cluster.state.orchestrator_address
                accounts = await audit(address, JOB_ID, settings)
                store = cluster.record("experience_store").address
                transcript = await transcribe(handle, store, settings)
        except (TroupeError, TimeoutError) as error:
            # Report the known part, and that the rest is missing.
            why = str(error) or f"no answer within {_ACCOUNT_SECONDS:g} s"
            accounts = SampleAudit(missing=f"the accounts could not be taken: {why}")
        job = self._job
        return JobOutcome(
            state="unknown" if job is None else str(job.state),
            seconds=seconds,
            steps=0 if job is None else job.step,
            total_steps=self._spec.pipeline.steps if job is None else job.total_steps,
            versions=versions,
            accounts=accounts,
            transcript=transcript,
            failures=tuple(self._failures),
            cut_short=cut_short,
        )

    def _line(self, job: Job, done: InjectionLog | None) -> str:
        text = f"{self._name}: {job.state}, step {job.step} of {job.total_steps}"
        if done is not None:
            text += f", {done.kills} kills"
        return f"{text}, {job.activity}" if job.activity else text


async def _end(task: asyncio.Task[None] | None) -> None:
    """Cancel `task` and wait for it; raise its error."""
    if task is None:
        return
    task.cancel()
    await asyncio.wait({task})
    if not task.cancelled():
        task.result()


if __name__ == "__main__":
    raise SystemExit(main())
