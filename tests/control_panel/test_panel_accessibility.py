"""Accessibility of every view, by axe-core in Chromium; wide and narrow, light and dark."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.control_panel.chromium import findings, needs_chromium, opened
from tests.control_panel.conftest import Panel
from troupe.v1 import common_pb2 as common_pb

pytestmark = [pytest.mark.slow, needs_chromium]

VIEWS = [
    "#run",
    "#conversations",
    "#compare",
    "#jobs",
    "#population",
    "#cluster",
    "#new",
    "#plan",
    "docs",
]


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1400, 400])
async def test_no_view_has_a_finding_or_is_too_wide(
    panel: Panel, tmp_path: Path, width: int, scheme: str
) -> None:
    pictures = Path(os.environ.get("TROUPE_PICTURES", tmp_path), f"view-{width}-{scheme}")
    job_id = await panel.submit()
    panel.orchestrator.reply_tokens = 100
    await panel.orchestrator.move(job_id, common_pb.JOB_STATE_STARTING, common_pb.JOB_STATE_RUNNING)
    panel.orchestrator.jobs[job_id].started_at.GetCurrentTime()
    for step in (1, 2):
        values = {"reward__solver__mean": step / 4, "evaluations__gsm8k__pass@1": step / 4}
        await panel.orchestrator.step(job_id, step, big__loss__policy=0.5, **values)
    found = []
    async with opened(viewport={"width": width, "height": 1000}, color_scheme=scheme) as (page, _):
        for view in VIEWS:
            await page.goto(f"{panel.url}/{view}")
            ready = "#calls details" if view == "docs" else "#live.on"
            await page.wait_for_selector(ready)
            if view == "#conversations":
                await page.select_option("#token-colour", "advantage")
                await page.click("[data-trajectory=t1]")
                await page.wait_for_selector("#conversation .token")
            if view == "#run":
                await page.click("#specification summary")
                await page.wait_for_selector("#job-hosts .legend button")
            if view == "#cluster":
                await page.wait_for_selector("#hosts svg")
            if view == "#jobs":
                await page.click("[aria-label^='Edit tags']")
            found += await findings(page, view, pictures)
        await panel.orchestrator.move(
            job_id, common_pb.JOB_STATE_PAUSING, common_pb.JOB_STATE_PAUSED
        )
        await page.goto(f"{panel.url}/#run")
        await page.click("[data-action=go-on]")
        await page.wait_for_selector("#going-on[open] li")
        found += await findings(page, "going on", pictures)
    assert found == []
