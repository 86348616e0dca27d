"""Ends a policy's step: all its samples become TRAINED and the version moves, at once.

The commit is the one truth about a step: what is not committed never happened, and the first
commit stays whoever comes after.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from services.experience_store.claims import cause_text, lost
from services.experience_store.database import Database
from services.experience_store.keys import PolicyKeys
from services.experience_store.notices import Notices
from services.experience_store.records import (
    LETTER_OF,
    commit_bytes,
    parse_commit,
    samples_digest,
)
from services.experience_store.requests import clean_reason
from services.experience_store.steps import Steps
from services.experience_store.tables import Tables
from troupe.rpc import FailedPrecondition, InvalidArgument
from troupe.v1 import common_pb2 as pb
from troupe.v1 import experience_store_pb2 as store_pb

# What the samples of a step become.
_TARGETS: Final = {
    store_pb.STEP_OUTCOME_APPLIED: LETTER_OF[pb.SAMPLE_STATE_TRAINED],
    store_pb.STEP_OUTCOME_SKIPPED: LETTER_OF[pb.SAMPLE_STATE_DROPPED],
    store_pb.STEP_OUTCOME_EMPTY: "",
}


class Commits:
    """Commits of all policies."""

    def __init__(self, database: Database, tables: Tables, steps: Steps, notices: Notices) -> None:
        self._database = database
        self._tables = tables
        self._steps = steps
        self._notices = notices

    async def commit(
        self, job: str, claimant: str, claims: Sequence[str], commit: store_pb.StepCommit
    ) -> tuple[store_pb.StepCommit, bool]:
        """End a step with `commit`; returns the commit that holds, and whether it was there.

        Raises `FailedPrecondition`, and changes nothing, when a claim is lost (`claim_lost`),
        trajectories are still running (`step_unsealed`), samples are left that these claims do not
        hold (`step_incomplete`), the version goes backwards (`version_backwards`), or the claims'
        samples have another digest than `commit` names (`digest_mismatch`). Without one it gets
        that of the samples.
        """
        await self._tables.check_policy(job, commit.policy)
        table = await self._tables.get(job)
        applied = commit.outcome == store_pb.STEP_OUTCOME_APPLIED
        version = commit.weights.version if commit.HasField("weights") else -1
        distinct = list(dict.fromkeys(claims))
        # What a live claim holds changes at its claimant's word only (DropGone): should it be lost
        # before the script runs, the script refuses.
        samples = await self._held(job, commit.policy, commit.step, distinct)
        digest = samples_digest(samples)
        agrees = not commit.HasField("samples_digest") or commit.samples_digest == digest
        if samples:
            commit.samples_digest = digest
        outcome, *rest = await self._steps.on_table(
            "commit",
            job,
            commit.policy,
            commit.step,
            claimant,
            _TARGETS[commit.outcome],
            clean_reason(commit.reason) or "step_skipped",
            version,
            int(applied),
            commit_bytes(commit),
            int(agrees),
            table.max_uses,
            *distinct,
        )
        if outcome in (b"committed", b"existed"):
            if outcome == b"committed":
                self._notices.written(job, commit.policy, commit.step)
            return parse_commit(rest[0]), bool(outcome == b"existed")
        raise _refusal(outcome, rest, commit, claimant)

    async def _held(self, job: str, policy: str, step: int, claims: Sequence[str]) -> list[str]:
        """The samples of these claims, as far as they live."""
        if not claims:
            return []
        key = PolicyKeys(job, policy).step(step, "claims")
        found = await self._database.execute("HMGET", key, *claims)
        texts = [text.decode() for text in found if text is not None]
        live = (text for text in texts if text and not text.startswith("\t"))
        return [sample for text in live for sample in text.split("\n")]


def _refusal(
    outcome: bytes, rest: Sequence[bytes], commit: store_pb.StepCommit, claimant: str
) -> FailedPrecondition | InvalidArgument:
    if outcome == b"lost":
        return lost(rest[0].decode(), cause_text(rest[1]), claimant=claimant)
    if outcome == b"taken":
        return lost(rest[0].decode(), f"it belongs to {rest[1].decode()}")
    where = f"step {commit.step} of policy {commit.policy}"
    if outcome == b"unsealed":
        return FailedPrecondition(
            f"{where} has {int(rest[0])} of {int(rest[1])} trajectories"
            + (", and is held open for more" if int(rest[2]) else ""),
            kind="step_unsealed",
            field="step",
            value=commit.step,
            remedy="Claim until OUTCOME_EXHAUSTED, then commit.",
        )
    if outcome == b"incomplete":
        pending, ready, others = (int(number) for number in rest)
        return FailedPrecondition(
            f"{where} has samples that these claims do not hold: "
            f"{pending} pending, {ready} ready, {others} claimed otherwise",
            kind="step_incomplete",
            field="claim_ids",
            remedy="Claim until OUTCOME_EXHAUSTED and name all claims.",
        )
    if outcome == b"digest":
        return FailedPrecondition(
            f"{where}: what was trained on are not the samples that the claims hold",
            kind="digest_mismatch",
            field="samples_digest",
            remedy="Throw the accumulated gradients away, release, and begin the step again.",
        )
    if outcome == b"backwards":
        return FailedPrecondition(
            f"policy {commit.policy} is at version {int(rest[0])} already",
            kind="version_backwards",
            field="weights.version",
            value=commit.weights.version,
            remedy="Bind the policy at the ledger's version and run the step again.",
        )
    return InvalidArgument(
        f"{where} has {int(rest[0])} samples: the outcome must say what became of them",
        field="outcome",
        value=store_pb.StepOutcome.Name(commit.outcome),
        remedy="EMPTY is for a step without samples, and only for that.",
    )
