"""The documentation builds as a site without a warning; its links out of docs/ lead somewhere."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest

from tests.control_panel.chromium import needs_chromium, opened

ROOT = Path(__file__).resolve().parents[2]


def test_every_page_is_in_the_navigation() -> None:
    named = set(re.findall(r": ([\w/-]+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.M))
    pages = {str(page.relative_to(ROOT / "docs")) for page in (ROOT / "docs").rglob("*.md")}
    assert named == pages


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the built site, which has no warning."""
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict", "-d", str(folder)],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=600,
    )
    assert (done.returncode, done.stdout) == (0, "")
    return folder


@contextmanager
def served(folder: Path) -> Iterator[str]:
    """Serve a folder on loopback; yields its address."""
    with ThreadingHTTPServer(
        ("127.0.0.1", 0), partial(SimpleHTTPRequestHandler, directory=str(folder))
    ) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()


@pytest.mark.slow
def test_the_site_builds_without_a_warning(site: Path) -> None:
    assert (site / "tutorials/first-team/index.html").is_file()
    # A README outside of docs/, and a module, from where pages link to them.
    assert (site / "repository/examples/reasoning_team/index.html").is_file()
    # A recipe's page shows its picture.
    recipe = site / "repository/examples/papers/turn_baselines"
    [picture] = re.findall(r'<img[^>]*src="([^"]*)"', (recipe / "index.html").read_text())
    assert (recipe / picture).resolve().read_text().startswith("<svg")
    page = (site / "data/index.html").read_text()
    link = re.search(r'href="(\.\./repository/troupe/workflow/asking[^"]*)"', page)
    assert link is not None
    assert (site / "data" / link[1] / "index.html").resolve().is_file()


@pytest.mark.slow
def test_the_first_page_of_the_site_is_the_readme(site: Path) -> None:
    page = (site / "index.html").read_text()
    readme = (ROOT / "README.md").read_text()
    for heading in re.findall(r"(?m)^## (.+)$", readme):
        assert re.search(rf"<h2[^>]*>{re.escape(heading)}<", page), heading
    for place in ("tutorials/first-team/", "repository/examples/real_team/"):
        assert f'href="{place}"' in page
        assert (site / place / "index.html").is_file()
    assert 'src="figures/panel.png"' in page
    # The escape that GitHub needs for pipes in the code of a table is not shown.
    assert "\\|" not in (site / "commands/index.html").read_text()


# Addresses, pages and Markdown that stand in a text as such.
_UNLINKED = r"""() => {
  const found = [];
  const walk = document.createTreeWalker(document.querySelector("article"), NodeFilter.SHOW_TEXT);
  while (walk.nextNode()) {
    const text = walk.currentNode;
    if (text.parentElement.closest("a, pre, code, script, style")) continue;
    found.push(...(text.data.match(/https?:\/\/\S+|\bdocs\/[\w\/-]+\.md|\]\(/g) || []));
  }
  return found;
}"""
# Names in the first column of tables of fields that take several lines.
_BROKEN = """() => [...document.querySelectorAll("table[data-list=fields] td:first-child code")]
  .filter((name) => name.getClientRects().length > 1).map((name) => name.textContent)"""


@pytest.mark.slow
@needs_chromium
@pytest.mark.parametrize("width", [1400, 400])
async def test_pages_fit_their_screen_with_whole_names_and_links(site: Path, width: int) -> None:
    with served(site) as address:
        async with opened(viewport={"width": width, "height": 900}) as (page, faults):
            for name in ("", "faq/", "job-reference/", "where/", "commands/", "operating/"):
                await page.goto(f"{address}/{name}")
                over = "() => document.documentElement.scrollWidth - window.innerWidth"
                assert await page.evaluate(over) <= 0, name
                assert await page.evaluate(_UNLINKED) == [], name
                assert await page.evaluate(_BROKEN) == [], name
            assert await page.goto(f"{address}/job-reference/")
            assert await page.locator("table[data-list=fields]").count() > 10
        assert not faults
