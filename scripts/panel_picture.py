"""Takes pictures of the panel: the docs' (docs/figures/panel*.png), or of every page.

troupe up --detach && troupe train JOB.yaml --cluster HOST:PORT
python -m scripts.panel_picture [--data-dir runs]        # of a cluster that runs here
python -m scripts.panel_picture --link URL --all DIRECTORY

With `--all`, every page at two widths in both colour schemes, and what is wider than its window.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from pathlib import Path
from typing import Any, Final, Literal
from urllib.parse import urljoin

from playwright.sync_api import sync_playwright

from troupe.cluster.state import require_running, sign_in_link

FIGURES: Final = Path(__file__).resolve().parent.parent / "docs/figures"
WIDTHS: Final = (1400, 400)
Scheme = Literal["light", "dark"]
SCHEMES: Final[tuple[Scheme, ...]] = ("light", "dark")
VIEWS: Final = ("run", "conversations", "compare", "population", "cluster", "new", "plan")
# Of the docs: name, view, scheme, width and height.
DOCS: Final[tuple[tuple[str, str, Scheme, int, int], ...]] = (
    ("panel", "run", "light", 1400, 900),
    ("panel-conversations", "conversations", "light", 1400, 800),
    ("panel-compare", "compare", "dark", 1400, 800),
)
WIDER: Final = """() => [document.documentElement.scrollWidth - innerWidth,
  [...document.querySelectorAll('main:not([hidden]) *, header *')]
    .filter(node => node.getBoundingClientRect().right > innerWidth + 1)
    .filter(node => !node.closest('.scroll, .plot, .conversation'))
    .slice(0, 5).map(node => `${node.tagName}.${node.className}#${node.id}`)]"""


def show(page: Any, link: str, view: str) -> None:
    """Open a view as a user would."""
    if view == "docs":
        page.goto(urljoin(link, "/docs"))
    else:
        page.evaluate("view => (location.hash = view)", view)
    page.wait_for_timeout(1_500)  # curves of all steps
    if view == "conversations":
        # A reply that was trained on and whose tokens are kept, if there is one.
        rows = page.locator("#trajectory-list [data-trajectory]")
        kept = rows.filter(has_text="tokens").filter(has_not_text="held-out")
        for _ in range(5):
            if kept.count() or not page.locator("#trajectory-more").is_visible():
                break
            page.click("#trajectory-more")
            page.wait_for_timeout(1_000)
        if rows.count():
            (kept if kept.count() else rows).first.click()
            page.select_option("#token-colour", "advantage")
            page.wait_for_timeout(700)
            page.evaluate("scrollTo(0, 0)")
    if view == "compare":
        others = page.locator("#compare-jobs input:not(:checked)")
        for _ in range(min(2, others.count())):
            others.first.click()
        page.wait_for_timeout(1_500)
    if view == "plan":
        page.click("#plan-form button")
        page.wait_for_selector(
            "#plan-result:not([hidden]), #plan-problem:not(:empty)", timeout=90_000
        )
    if view == "new":
        page.fill("#submit-spec", "")
        page.click("#submit-spec")
        page.keyboard.type("name: mine\npolicies:\n  solver:\nal", delay=5)
        page.wait_for_timeout(1_000)


def main() -> None:
    """Command line: PNG files."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data-dir", type=Path, default=Path("runs"))
    parser.add_argument("--link", help="of a panel elsewhere")
    parser.add_argument("--all", type=Path, metavar="DIRECTORY", help="every page, to look at")
    args = parser.parse_args()
    wanted = list(DOCS)
    if args.all:
        args.all.mkdir(parents=True, exist_ok=True)
        wanted = [
            (f"{view}-{width}-{scheme}", view, scheme, width, 1000)
            for scheme in SCHEMES
            for width in WIDTHS
            for view in (*VIEWS, "docs")
        ]
    faults = 0
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=shutil.which("chromium"), args=["--no-sandbox", "--disable-gpu"]
        )
        for name, view, scheme, width, height in wanted:
            page = browser.new_page(
                viewport={"width": width, "height": height}, color_scheme=scheme
            )
            # A link signs one browser in, once.
            link = args.link or sign_in_link(require_running(args.data_dir))
            if not link:
                raise SystemExit("the cluster has no panel: start it without --no-panel")
            page.goto(link)
            page.wait_for_selector("#chart-reward canvas", timeout=30_000)
            show(page, link, view)
            over, nodes = page.evaluate(WIDER)
            if over > 0:
                faults += 1
                print(f"{name}: {over} pixels too wide: {', '.join(nodes)}")
            path = (args.all or FIGURES) / f"{name}.png"
            page.screenshot(path=path, full_page=bool(args.all))
            page.close()
            print(path)
        browser.close()
    sys.exit(bool(faults))


if __name__ == "__main__":
    main()
