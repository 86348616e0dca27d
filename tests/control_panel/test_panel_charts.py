"""Colours of agents and policies, lines that cover each other, intervals, tiles of evaluations."""

from __future__ import annotations

import itertools
import math
import os
import re
from pathlib import Path
from typing import Any

import pytest

from tests.control_panel.chromium import needs_chromium, opened
from tests.control_panel.conftest import Panel
from troupe.v1 import common_pb2 as common_pb
from troupe.v1 import orchestrator_pb2 as orchestrator_pb

STATIC = Path(__file__).parents[2] / "services/control_panel/static"
Colour = tuple[float, float, float]

# Full dichromacy in linear RGB: Machado, Oliveira and Fernandes 2009, "A physiologically-based
# model for simulation of color vision deficiency", table of severity 1.0.
VISION = {
    "normal": ((1, 0, 0), (0, 1, 0), (0, 0, 1)),
    "protanopia": (
        (0.152286, 1.052583, -0.204868),
        (0.114503, 0.786281, 0.099216),
        (-0.003882, -0.048116, 1.051998),
    ),
    "deuteranopia": (
        (0.367322, 0.860646, -0.227968),
        (0.280085, 0.672501, 0.047413),
        (-0.011820, 0.042940, 0.968881),
    ),
    "tritanopia": (
        (1.255528, -0.076749, -0.178779),
        (-0.078411, 0.930809, 0.147602),
        (0.004733, 0.691367, 0.303900),
    ),
}
# Distances in OKLab; a just noticeable difference is about 0.02.
LEAST_DISTANCE = 0.085
# WCAG 2.2, 1.4.11 Non-text contrast.
LEAST_CONTRAST = 3.0


def linear(text: str) -> Colour:
    """Linear RGB of `#rrggbb`, or `#rgb`."""
    digits = text.lstrip("#")
    digits = "".join(2 * one for one in digits) if len(digits) == 3 else digits
    parts = [int(digits[i : i + 2], 16) / 255 for i in (0, 2, 4)]
    return tuple(c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts)  # type: ignore[return-value]


def times(matrix: Any, colour: Colour) -> Colour:
    return tuple(sum(a * b for a, b in zip(row, colour, strict=True)) for row in matrix)  # type: ignore[return-value]


def contrast(one: Colour, other: Colour) -> float:
    low, high = sorted(sum(times([(0.2126, 0.7152, 0.0722)], each)) for each in (one, other))
    return (high + 0.05) / (low + 0.05)


def oklab(colour: Colour) -> Colour:
    """OKLab of linear RGB (Ottosson 2020)."""
    cones = times(
        (
            (0.4122214708, 0.5363325363, 0.0514459929),
            (0.2119034982, 0.6806995451, 0.1073969566),
            (0.0883024619, 0.2817188376, 0.6299787005),
        ),
        colour,
    )
    roots = tuple(math.cbrt(max(0.0, one)) for one in cones)
    return times(
        (
            (0.2104542553, 0.7936177850, -0.0040720468),
            (1.9779984951, -2.4285922050, 0.4505937099),
            (0.0259040371, 0.7827717662, -0.8086757660),
        ),
        roots,  # type: ignore[arg-type]
    )


def variables(scheme: str) -> dict[str, Colour]:
    """The colours of panel.css in a scheme."""
    light, dark = (STATIC / "panel.css").read_text().split("@media", 2)[:2]
    found = re.findall(r"(--[\w-]+): (#[0-9a-f]+)", light if scheme == "light" else dark)
    return {name: linear(text) for name, text in found}


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_colours_of_series_keep_their_contrast_and_their_distance(scheme: str) -> None:
    known = variables(scheme)
    series = {name: one for name, one in known.items() if name.startswith("--series-")}
    written = re.search(r"COLOURS = (\d+)", (STATIC / "colours.js").read_text())
    assert written is not None
    assert len(series) == int(written[1])
    series["--team"] = known["--team"]
    for name, colour in series.items():
        for ground in ("--card", "--bg"):
            assert contrast(colour, known[ground]) >= LEAST_CONTRAST, (name, ground)
    for vision, matrix in VISION.items():
        seen = {
            name: oklab(tuple(min(1.0, max(0.0, c)) for c in times(matrix, one)))  # type: ignore[arg-type]
            for name, one in series.items()
        }
        for one, other in itertools.combinations(seen, 2):
            assert math.dist(seen[one], seen[other]) >= LEAST_DISTANCE, (vision, one, other)


async def pictured(page: Any, tmp_path: Path, name: str) -> None:
    """Keep a picture of the page, in TROUPE_PICTURES where it is set."""
    pictures = Path(os.environ.get("TROUPE_PICTURES", tmp_path))
    await page.screenshot(path=pictures / f"{name}.png", full_page=True)


async def swatches(page: Any, within: str) -> dict[str, str]:
    """The colour of each name that has a swatch, as computed."""
    found: dict[str, str] = await page.evaluate(
        """within => Object.fromEntries([...document.querySelectorAll(`${within} .swatch`)].map(
            one => [
                one.nextSibling.textContent.trim(),
                getComputedStyle(one).getPropertyValue('--swatch'),
            ]
        ))""",
        within,
    )
    return found


@pytest.mark.slow
@needs_chromium
@pytest.mark.parametrize(("width", "scheme"), [(1400, "light"), (400, "dark")])
async def test_a_name_has_one_colour_everywhere_and_after_a_reload(
    panel: Panel, tmp_path: Path, width: int, scheme: str
) -> None:
    from playwright.async_api import expect

    job_id = await panel.submit()
    await panel.orchestrator.move(job_id, common_pb.JOB_STATE_STARTING, common_pb.JOB_STATE_RUNNING)
    panel.orchestrator.jobs[job_id].versions.update({"big": 1, "small": 1})
    for step in (1, 2, 3):
        # The agents' rewards are equal: their lines cover each other.
        rewards = {f"reward__{agent}__mean": step / 4 for agent in ("solver", "checker")}
        rewards["team__mean"] = 0.1
        losses = {f"{policy}__loss__policy": 0.0 for policy in ("big", "small")}
        await panel.orchestrator.step(job_id, step, **rewards, **losses)
    size = {"width": width, "height": 1300}
    async with opened(viewport=size, color_scheme=scheme) as (page, faults):
        seen = []
        for _ in range(2):
            await page.goto(f"{panel.url}/#run")
            await page.reload()
            await expect(page.locator("#chart-reward .legend")).to_contain_text("checker 0.75")
            await expect(page.locator("#chart-loss .legend")).to_contain_text("small 0")
            await expect(page.locator("#policies tbody tr")).to_have_count(2)
            found = await swatches(page, "#chart-reward")
            by_policy = await swatches(page, "#chart-loss")
            assert await swatches(page, "#policies") == by_policy
            assert linear(found["team"]) == variables(scheme)["--team"]
            assert len(set((found | by_policy).values())) == 5
            dash = "n => [...n.querySelectorAll('.swatch')].map(one => one.dataset.dash)"
            reward, loss = page.locator("#chart-reward"), page.locator("#chart-loss")
            assert await reward.evaluate(dash) == ["0", "1", "0"]
            assert await loss.evaluate(dash) == ["0", "1"]
            if not seen:
                await pictured(page, tmp_path, f"run-{width}-{scheme}")
            await page.click("[href='#conversations']")
            await page.click("[data-trajectory=t1]")
            turn = page.locator("#conversation .turn").first
            # Waited for: the page may draw the conversation again meanwhile.
            await expect(turn).to_have_css("--speaker", found["solver"])
            seen.append(found | by_policy)
        assert seen[0] == seen[1]
        assert faults == []


@pytest.mark.slow
@needs_chromium
@pytest.mark.parametrize(("width", "scheme"), [(1400, "light"), (400, "dark")])
async def test_updates_are_small_charts_over_steps_or_the_wall_clock(
    panel: Panel, tmp_path: Path, width: int, scheme: str
) -> None:
    from playwright.async_api import expect

    job_id = await panel.submit()
    await panel.orchestrator.move(job_id, common_pb.JOB_STATE_STARTING, common_pb.JOB_STATE_RUNNING)
    names = ("entropy", "kl", "clip_fraction", "response_length__mean", "grad_norm")
    for step in (1, 2, 3):
        values = {f"big__{name}": step / 4 for name in names} | {"step__seconds": 30.0 * step}
        values["evaluation__pass@1"] = step / 8
        await panel.orchestrator.step(job_id, step, **values)
    size = {"width": width, "height": 1300}
    async with opened(viewport=size, color_scheme=scheme) as (page, faults):
        await page.goto(panel.url)
        cards = page.locator("#multiples [data-metric]:visible")
        await expect(cards).to_have_count(len(names))
        kl = page.locator("#multiples [data-metric=kl]")
        await expect(kl.locator(".legend")).to_contain_text("big 0.75")
        boxes = [await cards.nth(i).bounding_box() for i in range(len(names))]
        for one, other in itertools.combinations(boxes, 2):
            assert one is not None
            assert other is not None
            beside = one["x"] + one["width"] <= other["x"]
            assert beside or one["y"] + one["height"] <= other["y"]
        await page.select_option("#x-axis", "clock")
        for _ in range(2):
            for within in ("#multiples [data-metric=kl]", "article:has(> #chart-evaluation)"):
                plot = page.locator(f"{within} .plot")
                await plot.focus()
                await plot.press("Home")
                await plot.press("ArrowRight")
                said = page.locator(f"{within} .unseen")
                await expect(said).to_contain_text("step 2 after 1m 30s: ")
            # The axis is kept in the browser.
            await pictured(page, tmp_path, f"multiples-{width}-{scheme}")
            await page.reload()
            await expect(page.locator("#x-axis")).to_have_value("clock")
            await expect(kl.locator(".legend")).to_contain_text("big 0.75")
        assert await page.evaluate("document.documentElement.scrollWidth - innerWidth") <= 0
        assert faults == []


@pytest.mark.slow
@needs_chromium
async def test_colours_follow_from_names_and_the_axis_of_zeros_ends_at_one(panel: Panel) -> None:
    async with opened() as (page, _):
        await page.goto(panel.url)
        assigned = "names => import('/static/colours.js').then(m => [...m.assign(names)])"
        names = [f"agent{i}" for i in range(12)]
        numbers = dict(await page.evaluate(assigned, names))
        assert len(set(list(numbers.values())[:8])) == 8
        assert set(numbers.values()) == set(range(8))
        # The colour is the name's own wherever no other name has it.
        for name in names:
            [[_, alone]] = await page.evaluate(assigned, [name])
            assert alone == dict(await page.evaluate(assigned, [name, "agent0"]))[name]
        ranges = await page.evaluate(
            """import('/static/charts.js').then(m => [[0, 0], [2, 4], [null, null]].map(values => {
                const place = document.createElement('div');
                place.className = 'chart';
                document.querySelector('main:not([hidden])').append(place);
                const chart = new m.Chart(place);
                chart.draw([1, 2], [{name: 'one', values}]);
                return new Promise(done => setTimeout(() => {
                    done([chart.plot.scales.y.min, chart.plot.scales.y.max]);
                }, 100));
            })).then(all => Promise.all(all))"""
        )
        assert ranges[0] == ranges[2] == [0, 1]
        assert ranges[1][0] <= 2
        assert ranges[1][1] >= 4


@pytest.mark.slow
@needs_chromium
@pytest.mark.parametrize(("width", "scheme"), [(1400, "dark"), (400, "light")])
async def test_nine_evaluations_are_few_tiles_and_a_chart_that_can_be_read(
    panel: Panel, tmp_path: Path, width: int, scheme: str
) -> None:
    from playwright.async_api import expect

    job_id = await panel.submit()
    await panel.orchestrator.move(job_id, common_pb.JOB_STATE_STARTING, common_pb.JOB_STATE_RUNNING)
    job = panel.orchestrator.jobs[job_id]
    sets = [f"set{i}" for i in range(1, 10)]
    for name in sets:
        for score in ("team_success", "pass@4", "pass@1", "reward/solver"):
            job.before[f"{name}/{score}"] = 0.25
            bounds = orchestrator_pb.ScoreInterval(low=0.125, high=0.375)
            job.before_intervals[f"{name}/{score}"].CopyFrom(bounds)
    for step in (0, 2, 4):
        values = {}
        for i, name in enumerate(sets):
            score = 0.25 + i * step / 64  # set1 never changes
            for metric in ("pass@1", "pass@4", "team__mean", "reward__solver__mean"):
                written = f"evaluations__{name}__{metric}"
                values |= {written: score, f"{written}__low": score - 0.1}
                values[f"{written}__high"] = score + 0.1
        await panel.orchestrator.step(job_id, step, **values)
    size = {"width": width, "height": 1300}
    async with opened(viewport=size, color_scheme=scheme) as (page, faults):
        await page.goto(panel.url)
        await expect(page.locator("#evaluations h3")).to_have_text(sets)
        tiles = page.locator("#tiles .tile")
        await expect(tiles).to_have_count(3 + 4 + 1)
        for i in range(4):
            await expect(tiles.nth(3 + i)).to_contain_text(f"pass@1 on set{i + 1}")
        await expect(tiles.last).to_contain_text("5further evaluations")

        # One line per evaluation; an interval only for the name under the pointer.
        chart = page.locator("#chart-evaluation")
        shown = chart.locator(".legend [aria-pressed=true]")
        await expect(shown).to_have_count(9)
        await expect(shown.first).to_contain_text("pass@1 on set1")
        await expect(chart).to_have_attribute("data-bands", "0")
        await shown.nth(8).hover()
        await expect(chart).to_have_attribute("data-bands", "1")
        await pictured(page, tmp_path, f"evaluations-{width}-{scheme}")
        # The names are nine, the colours eight: a dash tells the ninth apart.
        look = "n => getComputedStyle(n).getPropertyValue('--swatch') + n.dataset.dash"
        marks = [await shown.nth(i).locator(".swatch").evaluate(look) for i in range(9)]
        assert len(set(marks)) == 9, marks
        # A line that is chosen shows, one that is not is hidden.
        folded = chart.locator(".legend [aria-pressed=false]", has_text="reward of solver on set1")
        await folded.click()
        await expect(shown).to_have_count(10)

        # "best" only where values differ.
        tables = page.locator("#evaluations details")
        for i in range(2):
            await tables.nth(i).locator("summary").click()
        await expect(tables.nth(1).locator("td").first).to_be_visible()
        await expect(tables.first.locator(".pill")).to_have_count(0)
        await expect(tables.nth(1).locator(".pill")).to_have_count(4)
        assert await page.evaluate("document.documentElement.scrollWidth - innerWidth") <= 0
        assert faults == []


@pytest.mark.slow
@needs_chromium
@pytest.mark.parametrize(("width", "scheme"), [(1400, "light"), (400, "dark")])
async def test_monitors_of_a_team_are_small_charts_with_a_line_per_agent(
    panel: Panel, tmp_path: Path, width: int, scheme: str
) -> None:
    from playwright.async_api import expect

    job_id = await panel.submit()
    await panel.orchestrator.move(job_id, common_pb.JOB_STATE_STARTING, common_pb.JOB_STATE_RUNNING)
    size = {"width": width, "height": 1300}
    async with opened(viewport=size, color_scheme=scheme) as (page, faults):
        await panel.orchestrator.step(job_id, 1, reward__solver__mean=0.5)
        await page.goto(panel.url)
        await expect(page.locator("#chart-reward .legend")).to_contain_text("solver 0.5")
        # Without such metrics, as with one agent, there is no such section.
        await expect(page.locator("#team")).to_be_hidden()
        for step in (2, 3, 4):
            shares = {"turn_share__solver": 0.25, "turn_share__checker": 0.75}
            await panel.orchestrator.step(job_id, step, **shares, trajectory__copying__checker=0.5)
            values = {}
            for written in ("evaluation", "evaluations__gsm8k"):
                name = f"{written}__contribution__solver"
                bounds = {f"{name}__low": step / 8 - 0.25, f"{name}__high": step / 8 + 0.25}
                values |= {name: step / 8, **bounds}
            await panel.orchestrator.step(job_id, step, **values)
        cards = page.locator("#team [data-metric]:visible")
        await expect(cards).to_have_count(3)
        contribution = page.locator("#team [data-metric=contribution]")
        await expect(contribution.locator(".legend")).to_contain_text("solver 0.5")
        await expect(contribution.locator(".legend")).to_contain_text("solver on gsm8k 0.5")
        await expect(contribution.locator(".chart")).to_have_attribute("data-bands", "2")
        turns = page.locator("#team [data-metric=turn_share] .legend")
        await expect(turns).to_contain_text("checker 0.75")
        await expect(page.locator("#team [data-metric='trajectory/copying']")).to_be_visible()
        await pictured(page, tmp_path, f"team-{width}-{scheme}")
        assert await page.evaluate("document.documentElement.scrollWidth - innerWidth") <= 0
        # The earlier steps come as columns, and the page is the same.
        await page.reload()
        await expect(contribution.locator(".legend")).to_contain_text("solver on gsm8k 0.5")
        await expect(cards).to_have_count(3)
        assert faults == []
