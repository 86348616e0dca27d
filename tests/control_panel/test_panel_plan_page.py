"""The page Plan in Chromium: its form, its display and its messages."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests.control_panel.chromium import needs_chromium, opened
from tests.control_panel.conftest import Panel
from tests.twin.test_planner import job
from tests.twin.test_profile import measured
from troupe.job import JobSpec
from troupe.v1 import common_pb2 as common_pb

pytestmark = [pytest.mark.slow, needs_chromium]
PLANNED_MS = 150_000


@pytest.mark.parametrize(("width", "scheme"), [(1400, "light"), (400, "dark")])
async def test_a_job_is_planned_by_keys_with_a_picture_of_a_step(
    panel: Panel, tmp_path: Path, width: int, scheme: str
) -> None:
    from axe_playwright_python.async_playwright import Axe
    from playwright.async_api import expect

    spec = JobSpec.model_validate(job())
    headers = {"Content-Type": "application/json"}
    reply = await panel.http.post("/api/jobs", content=json.dumps(job()), headers=headers)
    job_id = reply.json()["job_id"]
    panel.orchestrator.profiles[job_id] = measured(spec).to_json()
    await panel.orchestrator.move(job_id, common_pb.JOB_STATE_STARTING, common_pb.JOB_STATE_RUNNING)
    hint = "trainers idle 45%: one more engine for `solver` would shorten the step by about 20%"
    panel.orchestrator.jobs[job_id].split_hint = hint
    size = {"width": width, "height": 1000}
    async with opened(viewport=size, color_scheme=scheme) as (page, faults):
        await page.goto(f"{panel.url}/?job={job_id}#run")
        await expect(page.locator("#split-hint")).to_have_text(hint)
        await page.click("#views a[href='#plan']")
        slider = page.locator("#plan-form [name=count]")
        await expect(page.locator("#plan-devices")).to_have_text("8 on 1 host")
        await slider.press("ArrowRight")
        await expect(page.locator("#plan-devices")).to_have_text("16 on 2 hosts")
        await slider.press("ArrowLeft")
        await page.check("#plan-form [name=measured]")
        await page.press("#plan-form [name=memory]", "Enter")
        await expect(page.locator("#plan-facts")).to_contain_text("s per step", timeout=PLANNED_MS)
        await expect(page.locator("#plan-policies tbody tr")).to_have_count(2)
        assert await page.locator("#plan-picture .bars i").count() > 3
        # Bars have places and colours, though the page allows no style attributes in markup.
        box = await page.locator("#plan-picture .bars i").first.bounding_box()
        assert box is not None
        assert box["width"] >= 1
        await expect(page.locator("#plan-steps")).to_have_text("2 steps")
        facts = await page.locator("#plan-facts").text_content()
        assert facts is not None
        per_step = facts.partition(" \u00b7 ")[0]
        await expect(page.locator("#plan-legend")).to_contain_text(f", {per_step}")
        top = "n => n.getBoundingClientRect().top"
        assumed = await page.locator("#plan-origins").evaluate(top)
        assert assumed < await page.locator("#plan-policies").evaluate(top)
        await expect(page.locator("#plan-set")).to_contain_text("engine.replicas=")
        await expect(page.locator("#plan-origins")).to_contain_text("measured: turns, lengths")
        assert await page.evaluate("document.documentElement.scrollWidth - innerWidth") <= 0
        results = await Axe().run(page)
        serious = [
            (one["id"], [node["target"] for node in one["nodes"]][:3])
            for one in results.response["violations"]
            if one["impact"] in ("serious", "critical")
        ]
        assert serious == []
        pictures = Path(os.environ.get("TROUPE_PICTURES", tmp_path))
        await page.screenshot(path=pictures / f"plan-{width}-{scheme}.png", full_page=True)
        assert faults == []
        # A failed plan shows its reason, and the previous plan disappears.
        await page.fill("#plan-form [name=memory]", "2")
        await page.click("#plan-form button")
        await expect(page.locator("#plan-problem")).to_contain_text(
            "does not fit", timeout=PLANNED_MS
        )
        await expect(page.locator("#plan-result")).to_be_hidden()
