"""A headless Chromium for tests of the page, which collects the page's errors."""

from __future__ import annotations

import os
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.support.waiting import PATIENCE

CHROMIUM = os.environ.get("TROUPE_CHROMIUM") or shutil.which("chromium")
PATIENCE_MS = 1000 * PATIENCE
FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]

needs_chromium = pytest.mark.skipif(
    CHROMIUM is None, reason="no chromium on PATH (apt-get install chromium)"
)


@asynccontextmanager
async def opened(**options: Any) -> AsyncIterator[tuple[Any, list[str]]]:
    """A page, and the faults found in it: errors of scripts, what the content security policy
    forbids, answers of status 400 and above. `options`: the page's options."""
    from playwright.async_api import async_playwright, expect

    expect.set_options(timeout=PATIENCE_MS)
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        page = await browser.new_page(**options)
        page.set_default_timeout(PATIENCE_MS)
        faults: list[str] = []
        page.on("pageerror", lambda error: faults.append(str(error)))
        page.on("console", lambda said: "Security Policy" in said.text and faults.append(said.text))
        page.on(
            "response",
            lambda answer: answer.status >= 400 and faults.append(f"{answer.status} {answer.url}"),
        )
        yield page, faults
        await browser.close()


async def findings(page: Any, view: str, pictures: Path) -> list[tuple[str, str, list[Any]]]:
    """Return axe-core's findings in a page, at all severities, and whether it scrolls sideways.

    Keeps a picture of it, whose path begins with `pictures`."""
    from axe_playwright_python.async_playwright import Axe

    await page.screenshot(
        path=f"{pictures}-{view.strip('#').replace(' ', '-')}.png", full_page=True
    )
    results = await Axe().run(page)
    found = [
        (view, one["id"], [node["target"] for node in one["nodes"]][:3])
        for one in results.response["violations"]
    ]
    wide = await page.evaluate("document.documentElement.scrollWidth - innerWidth")
    return [*found, (view, f"{wide} px too wide", [])] if wide > 0 else found
