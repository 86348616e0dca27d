"""Does the ledger of versions say what the experience store says?"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection

from services.orchestrator.context import Shared
from troupe.v1 import experience_store_pb2 as es
from troupe.v1 import orchestrator_pb2 as orch


async def audit(shared: Shared, job_id: str) -> orch.AuditJobResponse:
    """The store's audit of its own log, and where the ledger contradicts it.

    Raises `NotFound` for a job without tables.
    """
    request = es.AuditTablesRequest(job_id=job_id)
    tables = await shared.experience.AuditTables(request)
    versions = await shared.ledger.versions(job_id)
    return orch.AuditJobResponse(
        tables=tables,
        violations=[*tables.violations, *contradictions(tables.policies, versions)],
        versions=list({one.weights.policy: one for one in versions}.values()),
    )


def contradictions(
    policies: Collection[es.PolicyAudit], versions: Collection[orch.PolicyVersion]
) -> list[str]:
    """What is wrong with the ledger's `versions`, oldest first, in words.

    A version must follow from the one before by one applied step, or be the first one's content
    without a step (a restart), and the newest must be the store's. The ledger may lag one step
    behind: a commit that nobody has reported yet.
    """
    found: list[str] = []
    newest: dict[str, orch.PolicyVersion] = {}
    first: dict[str, str] = {}
    # Versions that the store has not seen: restarts since the last step.
    ahead: Counter[str] = Counter()
    for one in versions:
        policy = one.weights.policy
        before = newest.get(policy)
        newest[policy] = one
        if before is None:
            first[policy] = one.weights.checksum
            continue
        if one.restarted:
            ahead[policy] += 1
            found += _restart(before, one, first[policy])
            continue
        ahead[policy] = 0
        rise = int(one.outcome == es.STEP_OUTCOME_APPLIED)
        if one.weights.version != before.weights.version + rise:
            found.append(
                f"{policy}: step {one.step - 1} moved the ledger from version "
                f"{before.weights.version} to {one.weights.version}"
            )
        if one.step != before.step + 1:
            found.append(f"{policy}: the ledger goes from {before.step} to {one.step} steps")
        same = one.weights.version == before.weights.version
        if same and one.weights.checksum != before.weights.checksum:
            found.append(f"{policy}: version {one.weights.version} has two checksums")
    for audited in policies:
        last = newest.get(audited.policy)
        steps = audited.steps_applied + audited.steps_skipped + audited.steps_empty
        if last is None or not steps:
            continue
        behind = steps - last.step
        if behind not in (0, 1):
            found.append(
                f"{audited.policy}: the store committed {steps} steps, the ledger has {last.step}"
            )
        elif behind == 0 and audited.version != last.weights.version - ahead[audited.policy]:
            found.append(
                f"{audited.policy}: the store is at version {audited.version}, the ledger at "
                f"{last.weights.version}"
            )
    return found


def _restart(before: orch.PolicyVersion, one: orch.PolicyVersion, first: str) -> list[str]:
    """What is wrong with a restart after `before`; `first`: the first version's checksum."""
    policy, version = one.weights.policy, one.weights.version
    found = []
    if (version, one.step) != (before.weights.version + 1, before.step):
        found.append(
            f"{policy}: a restart moved the ledger from version {before.weights.version} to "
            f"{version}, and from {before.step} to {one.step} steps"
        )
    if one.weights.checksum != first:
        found.append(f"{policy}: version {version} is a restart, and not the first weights")
    return found
