"""Takes the README's picture of the panel, of a cluster that runs here: docs/figures/panel.png.

troupe up --detach && troupe train JOB.yaml --cluster HOST:PORT
python -m scripts.panel_picture [--data-dir runs]
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

from playwright.sync_api import sync_playwright

from troupe.cluster.state import require_running, sign_in_link

OUT = Path(__file__).resolve().parent.parent / "docs/figures/panel.png"


def main() -> None:
    """Command line: the panel with the newest job, as PNG."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data-dir", type=Path, default=Path("runs"))
    parser.add_argument("--out", type=Path, default=OUT)
    args = parser.parse_args()
    link = sign_in_link(require_running(args.data_dir))
    if not link:
        raise SystemExit("the cluster has no panel: start it without --no-panel")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=shutil.which("chromium"), args=["--no-sandbox"]
        )
        page = browser.new_page(viewport={"width": 1400, "height": 900}, color_scheme="light")
        page.goto(link)
        page.wait_for_selector("canvas", timeout=30_000)
        page.wait_for_timeout(3_000)  # curves of all steps
        page.screenshot(path=args.out)
        browser.close()
    print(args.out)


if __name__ == "__main__":
    main()
