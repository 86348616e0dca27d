"""Every request to the REST interface is answered according to its OpenAPI document
(schemathesis)."""

from __future__ import annotations

import contextlib
import json
from typing import Any

import httpx
import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from hypothesis.errors import Unsatisfiable
from schemathesis import Case, GenerationMode, Response
from schemathesis.specs.openapi import checks

from services.control_panel.app import create_app
from tests.fuzz.conftest import Target

pytestmark = pytest.mark.slow

DOCUMENT = create_app("127.0.0.1:1").openapi()
OPERATIONS = {
    found.ok().label: found.ok()
    for found in schemathesis.openapi.from_dict(DOCUMENT).get_all_operations()
}
STREAMS = ("GET /api/jobs/{job_id}/events", "GET /api/cluster/events")
# Calls that would remove the ended job.
DELETING = ("POST /api/jobs/{job_id}/forget",)
CONFORMANCE = [
    checks.status_code_conformance,
    checks.content_type_conformance,
    checks.response_headers_conformance,
]
# The orchestrator may report that it has no engines for a job now, or is late.
TYPED = (501, 503, 504)
EXAMPLES = 20
SECONDS = 20


@pytest.mark.parametrize("mode", list(GenerationMode), ids=lambda mode: str(mode.value))
@pytest.mark.parametrize("label", OPERATIONS)
def test_answers_are_as_the_document_says(target: Target, label: str, mode: GenerationMode) -> None:
    @settings(
        max_examples=EXAMPLES,
        deadline=None,
        derandomize=True,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=OPERATIONS[label].as_strategy(generation_mode=mode), known=st.booleans())
    def ask(case: Case, known: bool) -> None:
        if known and label not in DELETING:
            given_ids = {"job_id": target.job_id, "policy": "solver"}
            taken = {name: given_ids[name] for name in case.path_parameters if name in given_ids}
            case.path_parameters.update(taken)
        check(case, answer_of(case, target), streams=label in STREAMS)

    with contextlib.suppress(Unsatisfiable):  # nothing of this call can be asked wrongly
        ask()
    assert httpx.get(f"{target.panel}/healthz", timeout=SECONDS).status_code == 200


def answer_of(case: Case, target: Target) -> Response:
    """Return the panel's answer; for an endless stream, its first part."""
    asked: dict[str, Any] = case.as_transport_kwargs(
        base_url=target.panel, headers={"Authorization": target.authorization}
    )
    with requests.Session() as session:
        session.trust_env = False
        reply = session.request(**asked, stream=True, timeout=SECONDS)
        streams = reply.headers.get("content-type", "").startswith("text/event-stream")
        content = next(reply.iter_content(1 << 16), b"") if streams else reply.content
        found = Response(
            status_code=reply.status_code,
            headers={name.lower(): [value] for name, value in reply.headers.items()},
            content=content,
            request=reply.request,
            elapsed=reply.elapsed.total_seconds(),
            verify=False,
        )
        reply.close()
        return found


def check(case: Case, found: Response, *, streams: bool) -> None:
    """Raise unless the answer is one that the document has."""
    status = found.status_code
    said = f"{case.method} {case.formatted_path}: {status} {found.content[:500]!r}"
    assert status < 500 or status in TYPED, said
    schema = [] if streams and status < 400 else [checks.response_schema_conformance]
    case.validate_response(found, checks=[*CONFORMANCE, *schema])
    if status >= 400:
        problem = json.loads(found.content)
        assert problem["status"] == status, said
        assert problem["detail"], said


def test_the_document_that_is_served_is_this_one(target: Target) -> None:
    headers = {"Authorization": target.authorization}
    assert httpx.get(f"{target.panel}/openapi.json", headers=headers).json() == DOCUMENT
    assert set(STREAMS) | set(DELETING) <= set(OPERATIONS)
