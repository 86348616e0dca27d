"""The page in a real headless Chromium: its display and its controls."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path

import pytest

from tests.control_panel.chromium import needs_chromium, opened
from tests.control_panel.conftest import SPEC, YAML, Panel
from tests.support.fake_orchestrator import shared_engines
from tests.support.waiting import until
from troupe.rpc.errors import FailedPrecondition
from troupe.v1 import common_pb2 as common_pb
from troupe.v1 import orchestrator_pb2 as orchestrator_pb
from troupe.v1 import rollout_pb2 as rollout_pb

pytestmark = [pytest.mark.slow, needs_chromium]


async def run_steps(panel: Panel, job_id: str, *steps: int, **more: float) -> None:
    """Let a job run, with rewards in these steps."""
    job = panel.orchestrator.jobs[job_id]
    if job.state == common_pb.JOB_STATE_SUBMITTED:
        states = common_pb.JOB_STATE_STARTING, common_pb.JOB_STATE_RUNNING
        await panel.orchestrator.move(job_id, *states)
    for step in steps:
        await panel.orchestrator.step(
            job_id,
            step,
            reward__solver__mean=step / 4,
            reward__checker__mean=step / 8,
            rollout__tokens_per_second=100.0 * step,
            **more,
        )


async def test_a_person_submits_watches_reads_and_pauses(panel: Panel) -> None:
    from playwright.async_api import expect

    async with opened(viewport={"width": 1400, "height": 1300}) as (page, faults):
        await page.goto(panel.url)

        # A specification with a fault: while one types, the form names the field and the remedy.
        await page.click("#submit-open")
        await page.fill("#submit-spec", "name: [")
        await expect(page.locator("#submit-checked")).to_have_text("1 to fix")
        await page.fill("#submit-spec", SPEC)
        await expect(page.locator("#submit-checked")).to_contain_text("valid: 2 agents")
        await page.click("#submit-send")
        await expect(page.locator("#job-state")).to_have_text("submitted")
        job_id = next(iter(panel.orchestrator.jobs))

        # Settings that it leaves open show once a worker has decided.
        await expect(page.locator("#settings")).to_be_hidden()
        panel.orchestrator.jobs[job_id].resolved.add(
            field="policies.solver.model.dtype", value="bfloat16", source="checkpoint"
        )

        # It runs: reward curves grow live, engines and services show.
        await run_steps(panel, job_id, 1, 2, 3)
        await expect(page.locator("#job-state")).to_have_text("running")
        await expect(page.locator("#chart-reward")).to_have_attribute("data-points", "3")
        await expect(page.locator("#chart-reward .legend")).to_contain_text("checker")
        await expect(page.locator("#live")).to_have_text("live")
        await expect(page.locator("#settings tbody")).to_have_text(
            "policies.solver.model.dtypebfloat16checkpoint"
        )
        await page.click("[href='#cluster']")
        await expect(page.locator("#services")).to_contain_text("reward")
        await expect(page.locator("#services .service", has_text="r0")).to_contain_text("for job")

        # What functions do, hold, and gain from cores.
        row = page.locator("#functions tbody tr")
        await expect(row).to_contain_text("tools/run_tests@1")
        await expect(row).to_contain_text("mine")
        await expect(row).to_contain_text("20 ms / 20 ms")
        await expect(row.locator("svg")).to_have_attribute("aria-label", "4x with 4 cores")
        await expect(page.locator("#functions-pool")).to_contain_text("1 of 2 workers run calls")

        # The conversation of a trajectory.
        await page.click("[href='#conversations']")
        await page.click("[data-trajectory=t2]")
        await expect(page.locator("#conversation .bubble")).to_have_text("4")
        await expect(page.locator("#conversation .asked")).to_contain_text("2+2")
        await expect(page.locator("#conversation")).not_to_contain_text("null")

        # Numbers of samples are shown for as long as there are any.
        await expect(page.locator("#samples tbody tr")).to_have_count(1)
        assert faults == []  # no 404 among them
        panel.orchestrator.freed = True
        await expect(page.locator("#samples tbody tr")).to_have_count(0)
        await expect(page.locator("#samples-store")).to_contain_text("freed. `troupe jobs audit`")

        await page.click("[data-action=pause]")
        await expect(page.locator("#job-state")).to_have_text("paused")
        assert {fault.rpartition("/")[2] for fault in faults} == {"tables"}


async def test_a_job_goes_on_with_more_steps_and_other_settings(panel: Panel) -> None:
    from playwright.async_api import expect

    job_id = await panel.submit()
    await run_steps(panel, job_id, 10)
    async with opened(viewport={"width": 1400, "height": 1300}) as (page, faults):
        await page.goto(panel.url)
        button = page.locator("[data-action=go-on]")
        await expect(page.locator("#job-state")).to_have_text("running")
        await expect(button).to_be_disabled()
        await panel.orchestrator.move(job_id, common_pb.JOB_STATE_SUCCEEDED)
        await expect(button).to_have_text("More steps …")
        await button.click()
        await expect(page.locator("#going-on-title")).to_have_text(
            f"Go on with {job_id} after step 10"
        )
        await expect(page.locator("#going-on [name=steps]")).to_have_value("10")

        # The fields that may change, and no others, with their values.
        fields = "all => all.map(one => one.value)"
        offered = await page.locator("#going-on-fields option").evaluate_all(fields)
        assert {"policies.big.optimizer.lr", "agents.solver.sampling.temperature"} <= set(offered)
        assert not {"seed", "pipeline.queries_per_step", "algorithm.name"} & set(offered)
        rows = page.locator("#going-on-settings li")
        await rows.nth(0).locator("[name=field]").fill("policies.big.optimizer.lr")
        await expect(rows.nth(0).locator("[name=value]")).to_have_attribute(
            "placeholder", re.compile("^now [0-9.e-]+$")
        )
        await rows.nth(0).locator("[name=value]").fill("3e-6")
        await page.click("#going-on-add")
        await rows.nth(1).locator("[name=field]").fill("seed")
        await rows.nth(1).locator("[name=value]").fill("3")

        # A refusal shows as the command line shows it, and the dialog stays as it was filled in.
        panel.orchestrator.refusal = FailedPrecondition(
            "this is not the specification of the same job",
            kind="spec_incompatible",
            field="seed",
            value=3,
            remedy="Undo these changes.",
        )
        await page.fill("#going-on [name=steps]", "25")
        await page.click("#going-on .primary")
        await expect(page.locator("#going-on-problem")).to_have_text(
            "seed = 3: this is not the specification of the same job. Undo these changes."
        )
        assert [fault.partition(" ")[0] for fault in faults] == ["409"]
        faults.clear()
        await rows.nth(1).locator("[name=field]").fill("")
        await page.click("#going-on .primary")
        await expect(page.locator("#going-on")).to_be_hidden()
        assert [dict(one.overrides) for one in panel.orchestrator.requests("ResumeJob")] == [
            {"pipeline.steps": "25", "policies.big.optimizer.lr": "3e-6", "seed": "3"},
            {"pipeline.steps": "25", "policies.big.optimizer.lr": "3e-6"},
        ]

        # The page follows the job again.
        await expect(page.locator("#tiles")).to_contain_text("10 / 25")
        await run_steps(panel, job_id, 11)
        await expect(page.locator("#job-state")).to_have_text("running")
        await expect(page.locator("#tiles")).to_contain_text("11 / 25")

        # A paused job is resumed as it is, or with changes.
        paused = common_pb.JOB_STATE_PAUSING, common_pb.JOB_STATE_PAUSED
        await panel.orchestrator.move(job_id, *paused)
        await expect(button).to_have_text("Resume with …")
        await button.click()
        await expect(page.locator("#going-on-settings li")).to_have_count(1)
        await page.click("#going-on-cancel")
        await expect(page.locator("#going-on")).to_be_hidden()
        await page.click("[data-action=resume]")
        await expect(page.locator("#job-state")).to_have_text("submitted")
        assert dict(panel.orchestrator.requests("ResumeJob")[-1].overrides) == {}
        assert faults == []


async def test_engines_that_policies_share_are_listed_together(panel: Panel) -> None:
    from playwright.async_api import expect

    job_id = await panel.submit()
    async with opened(viewport={"width": 1400, "height": 1300}) as (page, faults):
        await page.goto(f"{panel.url}#cluster")
        await expect(page.locator("#live")).to_have_text("live")
        column = page.locator("#engines th.shared")
        await expect(column).to_be_hidden()
        solver, critic = shared_engines(job_id)
        other = rollout_pb.EngineStatus(engine_id="other", job_id=job_id, policy="judge")
        panel.orchestrator.engines = [solver, other, critic]
        rows = page.locator("#engines tbody tr")
        await expect(rows).to_have_count(3)
        await expect(column).to_be_visible()
        await expect(rows.nth(0).locator("td").nth(3)).to_have_text("@5 (and @4)")
        await expect(rows.nth(0).locator("td").nth(4)).to_have_text("critic")
        await expect(rows.nth(1).locator("td").nth(1)).to_have_text("critic")
        await expect(rows.nth(1).locator("td").nth(4)).to_have_text("solver")
        await expect(rows.nth(2).locator("td").nth(4)).to_have_text("\N{EN DASH}")
        assert faults == []


async def test_the_population_of_a_job(panel: Panel) -> None:
    from playwright.async_api import expect

    job = panel.orchestrator.jobs[await panel.submit()]
    async with opened(viewport={"width": 1400, "height": 1300}) as (page, faults):
        # Whether there is one is known from the specification: nothing is asked in vain.
        await page.goto(panel.url)
        await expect(page.locator("#live")).to_have_text("live")
        await expect(page.locator("#population-link")).to_be_hidden()
        job.spec_json = json.dumps(json.loads(job.spec_json) | {"population": {"pools": {}}})
        await page.reload()

        # Payoffs, whom the learner meets, who descends from whom, a match to read.
        await page.click("#population-link")
        await expect(page.locator("#population-facts")).to_contain_text("NashConv 0.5")
        met = page.locator("#payoffs tbody tr").nth(1).locator("td")
        await expect(met.first).to_have_text("0.5")
        await expect(met.first).to_have_attribute("title", re.compile("computed"))
        await expect(met.last).to_have_text("·")
        await expect(page.locator("#members")).to_contain_text("27.5 ± 2.3")
        await expect(page.locator("#chart-mixture")).to_have_attribute("data-points", "2")
        await page.click("[data-match=m0x1-t1]")
        await expect(page.locator("#conversation h2")).to_contain_text("t1")
        assert faults == []


async def test_curves_have_gaps_whole_steps_smoothing_and_evaluations(panel: Panel) -> None:
    from playwright.async_api import expect

    job_id = await panel.submit()
    await run_steps(panel, job_id, 1, 2, big__loss__policy=0.5, big__samples=32)
    # Nothing to learn from in step 3; the metrics of the job still have the loss of step 2.
    await run_steps(panel, job_id, 3, big__samples=0)
    learned = {"big__loss__policy": 0.25, "big__samples": 32, "big__signal_steps": 2}
    await run_steps(panel, job_id, 4, **learned)
    job = panel.orchestrator.jobs[job_id]
    job.versions["big"] = 3
    job.before["gsm8k/pass@1"] = 0.25
    job.before_intervals["gsm8k/pass@1"].CopyFrom(
        orchestrator_pb.ScoreInterval(low=0.125, high=0.375)
    )
    for step, score in ((0, 0.25), (2, 0.5), (4, 0.375)):
        values = {
            "evaluations__gsm8k__pass@1": score,
            "evaluations__gsm8k__pass@1__low": score - 0.125,
            "evaluations__gsm8k__pass@1__high": score + 0.125,
            "evaluations__gsm8k__version__big": step,
        }
        await panel.orchestrator.step(job_id, step, **values)
    async with opened(viewport={"width": 1400, "height": 1300}) as (page, faults):
        await page.goto(panel.url)
        await expect(page.locator("#gaps")).to_have_text("gaps: steps without an update (big 1)")
        best = page.locator("#evaluations tbody tr.best")
        await expect(best).to_have_text(re.compile(r"2\s*big@2\s*0\.5 best \[0\.375, 0\.625\]"))

        await expect(page.locator("#tiles")).to_contain_text(
            "0.25 [0.125, 0.375] \u2192 0.375 [0.25, 0.5]pass@1 on gsm8k"
        )
        await expect(page.locator("#policies tbody tr", has_text="big")).to_contain_text("2 of 4")

        # By keyboard: the value of the step without a signal is none.
        plot = page.locator("#chart-loss .plot")
        await plot.focus()
        await plot.press("ArrowLeft")
        await expect(page.locator("#chart-loss .unseen")).to_have_text("step 3: big \u2013")

        # Smoothing is an average without the bias of its beginning: of two equal values, the value.
        await page.fill("#smoothing", "0.5")
        await expect(page.locator("#smoothing-value")).to_have_text("0.50")
        await page.check("#log-axis")
        module = "/static/charts.js"
        smoothed = await page.evaluate(
            f"import('{module}').then(m => m.smoothed([1, null, 1, 4], 0.5))"
        )
        assert smoothed[:3] == [1, None, 1]
        assert 1 < smoothed[3] < 4
        # A repeated step replaces its values, and a late one is inserted at its place.
        table = await page.evaluate(
            f"""import('{module}').then(m => {{
                const table = new m.MetricTable();
                for (const [step, a] of [[1, 1], [3, 3], [2, 2], [3, 4]]) table.add(step, {{a}});
                table.add(4, {{b: 1}});
                return [table.steps, table.column('a'), table.column('b')];
            }})"""
        )
        assert table == [[1, 2, 3, 4], [1, 2, 4, None], [None, None, None, 1]]
        # Its looks are kept, and its axis has whole steps.
        await page.reload()
        await expect(page.locator("#smoothing-value")).to_have_text("0.50")
        assert faults == []


async def test_a_long_history_is_read_once_and_later_steps_are_streamed(panel: Panel) -> None:
    from playwright.async_api import expect

    steps, job_id = 5_000, await panel.submit()
    await run_steps(panel, job_id, 1)
    log, job = panel.orchestrator.logs[job_id], panel.orchestrator.jobs[job_id]
    for step in range(2, steps + 1):
        values = {"reward/solver/mean": float(step), "big/loss/policy": 0.5, "other": 1.0}
        event = orchestrator_pb.JobEvent(
            metrics=orchestrator_pb.MetricsLogged(step=step, values=values)
        )
        event.event_id = f"{len(log) + 1}-0"
        log.append(event)
    job.metrics.update(values)
    await panel.orchestrator.step(job_id, steps, evaluation__team__mean=0.25)
    async with opened(viewport={"width": 1400, "height": 1300}) as (page, faults):
        await page.goto(panel.url)
        chart = page.locator("#chart-reward")
        await expect(chart).to_have_attribute("data-points", str(steps))
        await expect(page.locator("#evaluations tbody tr")).to_have_count(1)
        # Every step is there: the first, the last, and only for the drawn curves.
        plot = chart.locator(".plot")
        await plot.focus()
        await plot.press("Home")
        await expect(chart.locator(".unseen")).to_have_text("step 1: checker 0.125, solver 0.25")
        await plot.press("End")
        await expect(chart.locator(".unseen")).to_have_text(
            "step 5000: checker \u2013, solver 5,000"
        )
        read = panel.orchestrator.requests("ListMetrics")
        pages = [(one.page_size, one.page_token) for one in read]
        assert pages == [(1_000, token) for token in ("", "4001", "3001", "2001", "1001", "1")]
        assert "other" not in read[0].names
        for step in range(steps + 1, steps + 4):
            await panel.orchestrator.step(job_id, step, reward__solver__mean=1.0)
            await expect(chart).to_have_attribute("data-points", str(step))
        # A comparison reads the history of its metric once, and later steps from then on.
        await expect(page.locator("#tiles")).to_contain_text(f"{steps + 3} / 10")
        await page.click("[href='#compare']")
        await expect(page.locator("#compare-values tbody tr")).to_have_count(1)
        await page.evaluate("import('/static/compare.js').then(m => m.compareJobs())")
        asked = panel.orchestrator.requests("ListMetrics")[len(read) :]
        assert [one.after_step for one in asked[:7]] == [*[-1] * 6, steps + 3]
        assert faults == []


async def test_jobs_are_compared(panel: Panel) -> None:
    from playwright.async_api import expect

    for name, steps in (("one", 10), ("two", 20)):
        spec = SPEC.replace("steps: 10", f"steps: {steps}")
        await panel.http.post("/api/jobs", params={"job_id": name}, content=spec, headers=YAML)
        await run_steps(panel, name, 1, 2, 3)
    async with opened(viewport={"width": 1400, "height": 1300}) as (page, faults):
        await page.goto(f"{panel.url}/?job=two#compare")
        await page.check("#compare-jobs input[value=one]")
        await page.fill("#compare-metric", "reward/solver/mean")
        await page.press("#compare-metric", "Enter")
        await expect(page.locator("#chart-compare .legend")).to_contain_text("one 0.75")
        await expect(page.locator("#compare-values tbody tr")).to_have_count(2)
        await expect(page.locator("#compare-differences tbody tr")).to_have_text(
            "pipeline.steps2010"
        )
        # The address can be shared.
        await page.reload()
        await expect(page.locator("#compare-values tbody tr")).to_have_count(2)
        assert faults == []


async def test_jobs_are_sorted_filtered_and_deleted(panel: Panel) -> None:
    from playwright.async_api import expect

    for name, reward in (("one", 0.5), ("two", 0.75), ("three", 0.25)):
        await panel.http.post("/api/jobs", params={"job_id": name}, content=SPEC, headers=YAML)
        await run_steps(panel, name, 1, reward__mean=reward)
    await panel.orchestrator.move("two", common_pb.JOB_STATE_SUCCEEDED)
    async with opened(viewport={"width": 1400, "height": 900}) as (page, faults):
        page.on("dialog", lambda dialog: asyncio.ensure_future(dialog.accept()))
        await page.goto(f"{panel.url}/?job=two#jobs")
        names = page.locator("#jobs tbody th")
        await expect(names).to_have_count(3)
        await page.click("#jobs thead button:text('last reward')")
        await expect(names).to_have_text(["two", "one", "three"])
        await page.click("#jobs thead button:text('last reward')")
        await expect(names).to_have_text(["three", "one", "two"])
        await page.fill("#jobs-filter", "succeeded")
        await expect(names).to_have_text(["two"])
        # Only what has ended can be deleted; the page of the deleted job begins anew.
        await page.fill("#jobs-filter", "")
        await expect(page.locator("#jobs .danger")).to_have_count(1)
        await page.click("#jobs .danger")
        await expect(page.locator("#jobs tbody tr")).to_have_count(2)
        await expect(page.locator("#job-select")).not_to_have_value("two")
        assert [one.job_id for one in panel.orchestrator.requests("ForgetJob")] == ["two"]
        await page.click("#jobs tbody button:text-is('one')")
        await expect(page.locator("#job-select")).to_have_value("one")
        assert page.url.endswith("#run")
        assert faults == []


async def test_tokens_of_a_long_reply_filters_pins_and_export(panel: Panel) -> None:
    from playwright.async_api import expect

    panel.orchestrator.reply_tokens = 32_000
    job_id = await panel.submit()
    async with opened(viewport={"width": 1400, "height": 900}) as (page, faults):
        await page.goto(f"{panel.url}/#conversations")
        await page.fill("#trajectory-filter [name=text]", "sum 1")
        await expect(page.locator("#trajectory-list li")).to_have_count(1)
        await page.select_option("#token-colour", "advantage")
        await page.click("[data-trajectory=t1]")
        tokens = page.locator("#conversation .token")
        await expect(tokens.first).to_have_attribute(
            "title", "token 0 · logprob -0.5 · advantage -1 · ratio 1.5 · solver@3"
        )
        background = "node => node.style.backgroundColor"
        assert "--low" in await tokens.first.evaluate(background)
        assert "--high" in await tokens.nth(1).evaluate(background)
        # The scale says what its colours mean, and the bubble gives up its own.
        legend = page.locator("#token-legend")
        await expect(legend.locator(".scale-marks span")).to_have_text(["-1", "0", "+1"])
        bubble = page.locator("#conversation .bubble")
        ground = "node => getComputedStyle(node).backgroundColor"
        card = await page.locator(".card.viewer").evaluate(ground)
        assert await bubble.evaluate(ground) == card
        await page.select_option("#token-colour", "")
        assert await bubble.evaluate(ground) != card
        await expect(legend).to_be_empty()
        # Only parts near the view are built, and parts out of view become text again.
        assert await tokens.count() <= 4_000
        await page.select_option("#token-colour", "version")
        await expect(legend.locator(".scale-marks span")).to_have_text(["@3", "@4"])
        await page.evaluate("document.querySelector('#conversation').scrollTop = 1e9")
        await expect(page.locator("[title*='token 31999 ']")).to_have_attribute(
            "title", re.compile("solver@4")
        )
        assert await tokens.count() <= 4_000

        # A pin is a copy in the browser.
        await page.click("#pin")
        await page.fill("#trajectory-filter [name=text]", "nothing like it")
        await expect(page.locator("#trajectory-list li")).to_have_count(0)
        await page.reload()
        await page.click("#pinned-list [data-trajectory=t1]")
        await expect(page.locator("#pin")).to_have_text("Unpin")
        async with page.expect_download() as download:
            await page.keyboard.press("e")
        path = Path(await (await download.value).path())
        saved = json.loads(await asyncio.to_thread(path.read_text))
        assert saved["job"] == job_id
        assert len(saved["turns"][0]["tokens"]["ratios"]) == 32_000
        assert faults == []


async def test_the_form_completes_and_explains_as_one_types(panel: Panel) -> None:
    from playwright.async_api import expect

    async with opened(viewport={"width": 1400, "height": 900}) as (page, faults):
        await page.goto(f"{panel.url}/#new")
        await page.focus("#submit-spec")
        await expect(page.locator("#field-help")).not_to_contain_text("is explained here")
        await page.keyboard.type("pipe")
        await expect(page.locator("#completions li").first).to_contain_text("pipeline")
        await page.keyboard.press("Enter")
        await page.keyboard.type("mo")
        await page.keyboard.press("Tab")
        await page.keyboard.type("as")
        await expect(page.locator("#completions li")).to_have_text(["async"])
        await page.keyboard.press("Enter")
        await expect(page.locator("#submit-spec")).to_have_value("pipeline:\n  mode: async")
        await expect(page.locator("#field-path")).to_have_text("pipeline.mode")

        # Also in flow mappings; a policy's name is one of the job's.
        text = "policies: {big: {}, small: {}}\nagents: {solver: {policy: "
        await page.fill("#submit-spec", text)
        await page.keyboard.press("Control+ ")
        await expect(page.locator("#completions b")).to_have_text(["big", "small"])
        await page.keyboard.press("ArrowDown")
        await page.keyboard.press("Enter")
        await expect(page.locator("#submit-spec")).to_have_value(f"{text}small")

        # A problem leads to its line.
        await page.fill("#submit-spec", SPEC.replace("steps: 10", "steps: no"))
        await page.click("#submit-problems button")
        assert "steps" in await page.evaluate(
            "(n => n.value.slice(n.selectionStart, n.selectionEnd))"
            "(document.querySelector('#submit-spec'))"
        )
        # A job is a beginning of the next one.
        await panel.submit()
        await page.reload()
        await expect(page.locator("#job-state")).to_have_text("submitted")
        await page.click("#submit-copy")
        await expect(page.locator("#submit-checked")).to_contain_text("valid: 2 agents")
        assert faults == []


PLACES = [
    ("policies:\n  big:\n    ", ["policies", "big"], "", False),
    ("policies:\n  big:\n    lora: {ra", ["policies", "big", "lora"], "ra", False),
    ("a: {b: {c: 1}, d: x", ["a", "d"], "x", True),
    ("a:\n- b: 1\n  c", ["a", "[]"], "c", False),
    ("a:\n  - b\n  - ", ["a", "[]"], "", False),
    ("a: [1, {b: ", ["a", "[]", "b"], "", True),
    ('a: "x: {"\nb: tr', ["b"], "tr", True),
    ("a: |\n  b: {\n  c\nd: ", ["d"], "", True),
    ("a:  # {\n  b", ["a"], "b", False),
    ("a: {\n  b: 1,\n  c: ", ["a", "c"], "", True),
]


async def test_the_form_knows_where_the_cursor_is(panel: Panel) -> None:
    async with opened() as (page, _):
        await page.goto(panel.url)
        for text, path, word, value in PLACES:
            place = await page.evaluate(
                "text => import('/static/form.js').then(m => m.readYaml(text))", text
            )
            assert (place["path"], place["word"], place["value"]) == (path, word, value), text


async def test_the_rest_interface_is_shown_without_other_hosts(panel: Panel) -> None:
    from playwright.async_api import expect

    async with opened() as (page, faults):
        asked: list[str] = []
        page.on("request", lambda request: asked.append(request.url))
        await page.goto(f"{panel.url}/docs")
        submit = page.locator("details", has_text="POST /api/jobs").first
        await submit.locator("summary").click()
        await expect(submit).to_contain_text("application/yaml")
        assert all(url.startswith(panel.url) for url in asked)
        assert faults == []


async def test_the_utilization_of_hosts_shows_on_the_cluster_and_over_the_time_of_a_job(
    panel: Panel,
) -> None:
    from playwright.async_api import expect

    job_id = await panel.submit()
    await run_steps(panel, job_id, 1)
    panel.orchestrator.jobs[job_id].started_at.FromJsonString("2026-11-29T03:00:00Z")
    panel.orchestrator.hosts["node-b"] = (1.0, 0.75, 0.9, 0.5)
    async with opened(viewport={"width": 1400, "height": 1300}) as (page, faults):
        await page.goto(f"{panel.url}/#cluster")
        rows = page.locator("#hosts tbody tr")
        await expect(rows).to_have_count(2)
        await expect(rows.first).to_contain_text("node-a50 %25 %")
        await expect(rows.last).to_contain_text("node-b100 %75 %90 %50 %")
        # A gap in the measurements is a gap in the line.
        await expect(rows.first.locator("svg").first.locator("polyline")).to_have_count(2)
        label = "CPU of node-a: now 50 %, mean 50 %, most 50 %"
        await expect(rows.first.locator("svg").first).to_have_attribute("aria-label", label)
        before = len(panel.orchestrator.requests("ListHostUse"))
        await page.select_option("#hosts-range", "24")
        await until(lambda: len(panel.orchestrator.requests("ListHostUse")) > before)

        await page.click("[href='#run']")
        await expect(page.locator("#job-hosts")).to_contain_text("every host of the cluster")
        card = page.locator("[data-figure=cpu]")
        await expect(card.locator(".legend")).to_contain_text("node-a 50")
        await expect(card.locator(".legend")).to_contain_text("node-b 100")
        await expect(page.locator("[data-figure=gpu] .legend")).not_to_contain_text("node-a")
        asked = panel.orchestrator.requests("ListHostUse")[-1]
        assert asked.since.ToJsonString() == "2026-11-29T03:00:00Z"
        assert not asked.HasField("until")

        # Many hosts are one line with its bounds.
        for number in range(64):
            panel.orchestrator.hosts[f"host-{number}"] = (0.5, 0.25, 0.9, 0.5)
        await page.reload()
        await expect(card.locator(".legend")).to_contain_text("mean of 66 hosts 50.76")
        await expect(page.locator("[data-figure=cpu] .chart")).to_have_attribute("data-bands", "1")
        assert faults == []


async def test_the_job_s_own_file_its_tags_and_its_folded_failure(panel: Panel) -> None:
    from playwright.async_api import expect

    text = f"# The baseline.{SPEC}"
    async with opened(viewport={"width": 1400, "height": 1300}) as (page, faults):
        await page.goto(f"{panel.url}/#new")
        await page.fill("#submit-spec", text)
        await page.fill("#submit-tags", "baseline, gsm8k,")
        await page.fill("#submit-notes", "first try")
        await page.click("#submit-send")
        await expect(page.locator("#job-notes")).to_have_text("baselinegsm8kfirst try")
        await page.click("#specification summary")
        await expect(page.locator("#given-spec")).to_contain_text("# The baseline.")
        await expect(page.locator("#resolved-spec")).to_contain_text("keep: 2")

        # What resumes have changed of it.
        job = next(iter(panel.orchestrator.jobs.values()))
        await expect(page.locator("#spec-changes")).to_be_empty()
        change = job.history.add(step=4)
        change.at.GetCurrentTime()
        change.fields.add(field="pipeline.steps", old="10", new="20")
        await expect(page.locator("#spec-changes")).to_contain_text("changed once")
        await expect(page.locator("#spec-history")).to_contain_text("pipeline.steps: 10 → 20")
        job.early_end.text = "the reward has not risen for 5 steps"
        await expect(page.locator("#activity")).to_have_text(
            "ends early: the reward has not risen for 5 steps"
        )

        job_id = next(iter(panel.orchestrator.jobs))
        await panel.orchestrator.move(
            job_id,
            common_pb.JOB_STATE_STARTING,
            common_pb.JOB_STATE_FAILED,
            problem=FailedPrecondition(
                "the workflow failed\nTraceback:\n  line 12", field="workflow", remedy="Correct it."
            ),
        )
        await page.click("[href='#run']")
        await expect(page.locator("#activity")).to_have_text("workflow: the workflow failed")
        problem = page.locator("#job-problem")
        await expect(problem.locator("summary")).to_have_text("workflow: the workflow failed")
        await expect(problem.locator("pre")).to_be_hidden()
        await expect(problem.locator(".remedy")).to_have_text("Correct it.")
        await problem.locator("summary").click()
        await expect(problem.locator("pre")).to_have_text("Traceback:\n  line 12")
        failed = page.locator("#log li.error")
        await expect(failed.locator("summary")).to_have_text(
            "failed: workflow: the workflow failed"
        )

        await page.click("[href='#jobs']")
        await page.fill("#jobs-filter", "gsm8k")
        await page.click(f"[aria-label='Edit tags and notes of {job_id}']")
        await page.fill("#annotation [name=tags]", "baseline, kept")
        await page.fill("#annotation [name=notes]", "second try")
        await page.click("#annotation [value=save]")
        await page.fill("#jobs-filter", "second")
        row = page.locator(f"[data-job='{job_id}']")
        await expect(row).to_contain_text("baselinekept")
        await expect(row).to_contain_text("second try")
        [change] = panel.orchestrator.requests("AnnotateJob")
        assert (list(change.add_tags), list(change.remove_tags)) == (["kept"], ["gsm8k"])
        assert faults == []
