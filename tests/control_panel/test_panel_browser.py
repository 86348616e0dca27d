"""The page in a real headless Chromium: what a person sees and does."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

import pytest

from tests.control_panel.conftest import SPEC, Panel
from troupe.v1 import common_pb2 as common

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

CHROMIUM = os.environ.get("TROUPE_CHROMIUM") or shutil.which("chromium")
FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
PATIENCE_MS = 60_000


@pytest.mark.skipif(CHROMIUM is None, reason="no chromium on PATH (apt-get install chromium)")
async def test_a_person_submits_watches_reads_and_pauses(panel: Panel, tmp_path: Path) -> None:
    from playwright.async_api import async_playwright, expect

    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        page = await browser.new_page(viewport={"width": 1400, "height": 1300})
        page.set_default_timeout(PATIENCE_MS)
        expect.set_options(timeout=PATIENCE_MS)
        faults: list[str] = []
        page.on("pageerror", lambda error: faults.append(str(error)))
        # What the content security policy forbids is said on the console.
        page.on("console", lambda said: "Security Policy" in said.text and faults.append(said.text))
        await page.goto(panel.url)

        # A specification with a fault: the dialog says which field and what to do.
        await page.click("#submit-open")
        await page.fill("#submit-spec", "name: [")
        await page.click("#submit-send")
        await expect(page.locator("#submit-problem")).not_to_be_empty()
        await page.fill("#submit-spec", SPEC)
        await page.click("#submit-send")
        await expect(page.locator("#job-state")).to_have_text("submitted")
        job_id = next(iter(panel.orchestrator.jobs))

        # It runs: reward curves grow live, engines and services show.
        orchestrator = panel.orchestrator
        await orchestrator.move(job_id, common.JOB_STATE_STARTING, common.JOB_STATE_RUNNING)
        for step in range(1, 4):
            await orchestrator.step(
                job_id,
                step,
                reward__solver__mean=step / 4,
                reward__checker__mean=step / 8,
                rollout__tokens_per_second=100.0 * step,
            )
        await expect(page.locator("#job-state")).to_have_text("running")
        await expect(page.locator("#chart-reward")).to_have_attribute("data-points", "3")
        await expect(page.locator("#chart-reward .u-legend")).to_contain_text("checker")
        await expect(page.locator("#live")).to_have_text("live")
        await expect(page.locator("#services")).to_contain_text("reward")

        # The conversation of a trajectory.
        await page.click("[data-trajectory=t1]")
        await expect(page.locator("#conversation .bubble")).to_have_text("4")
        await expect(page.locator("#conversation .asked")).to_have_text("2+2")
        await expect(page.locator("#conversation")).not_to_contain_text("null")

        # What functions do, hold, and gain from cores.
        row = page.locator("#functions tbody tr")
        await expect(row).to_contain_text("tools/run_tests@1")
        await expect(row).to_contain_text("mine")
        await expect(row).to_contain_text("20 ms / 20 ms")
        await expect(row.locator("svg")).to_have_attribute("aria-label", "4x with 4 cores")
        await expect(page.locator("#functions-pool")).to_contain_text("1 of 2 workers run calls")

        # The population: payoffs, whom the learner meets, who descends from whom, a match to read.
        await expect(page.locator("#population-facts")).to_contain_text("NashConv 0.5")
        met = page.locator("#payoffs tbody tr").nth(1).locator("td")
        await expect(met.first).to_have_text("0.5")
        await expect(met.first).to_have_attribute("title", re.compile("computed"))
        await expect(met.last).to_have_text("·")
        await expect(page.locator("#members")).to_contain_text("27.5 ± 2.3")
        await expect(page.locator("#chart-mixture")).to_have_attribute("data-points", "2")
        await page.click("[data-match=m0x1-t1]")
        await expect(page.locator("#conversation h2")).to_contain_text("t1")

        # Numbers of samples are shown for as long as there are any.
        await expect(page.locator("#samples tbody tr")).to_have_count(1)
        orchestrator.freed = True
        await expect(page.locator("#samples tbody tr")).to_have_count(0)
        await expect(page.locator("#samples-store")).to_contain_text("freed. `troupe jobs audit`")

        await page.click("[data-action=pause]")
        await expect(page.locator("#job-state")).to_have_text("paused")
        await page.screenshot(path=os.environ.get("TROUPE_SCREENSHOT", tmp_path / "panel.png"))
        assert not faults
        await browser.close()


@pytest.mark.skipif(CHROMIUM is None, reason="no chromium on PATH (apt-get install chromium)")
async def test_the_rest_interface_is_shown_without_other_hosts(panel: Panel) -> None:
    from playwright.async_api import async_playwright, expect

    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        page = await browser.new_page()
        page.set_default_timeout(PATIENCE_MS)
        expect.set_options(timeout=PATIENCE_MS)
        faults: list[str] = []
        page.on("pageerror", lambda error: faults.append(str(error)))
        page.on("console", lambda said: "Security Policy" in said.text and faults.append(said.text))
        asked: list[str] = []
        page.on("request", lambda request: asked.append(request.url))
        await page.goto(f"{panel.url}/docs")
        submit = page.locator("details", has_text="POST /api/jobs").first
        await submit.locator("summary").click()
        await expect(submit).to_contain_text("application/yaml")
        assert all(url.startswith(panel.url) for url in asked)
        assert faults == []
        await browser.close()
