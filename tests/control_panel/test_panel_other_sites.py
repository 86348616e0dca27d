"""Pages of other sites, in a browser on the same machine, reach nothing of the panel."""

from __future__ import annotations

import asyncio
import http.server
import itertools
import json
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import httpx
import pytest

from services.control_panel.access import PanelSettings, host_name
from tests.control_panel.chromium import CHROMIUM, FLAGS, PATIENCE_MS, needs_chromium
from tests.control_panel.conftest import SPEC, YAML, Panel
from troupe.rpc.addresses import is_loopback_host

FUNCTION = json.dumps({"name": "evil", "entrypoint": "subprocess:run"})
CHANGES = ("SubmitJob", "CancelJob", "PauseJob", "ForgetJob", "GeneratePolicy")


def changed(panel: Panel) -> list[str]:
    """Mutating calls that came through to the orchestrator."""
    return [name for name, _ in panel.orchestrator.calls if name in CHANGES]


# --- what a request says of itself ------------------------------------------------------------


HOSTS = ["evil.example", "evil.example:80", "127.0.0.1.evil.example", "localhost.evil.example"]
HOSTS += ["10.0.0.1", "0.0.0.0", "[2001:db8::1]:80", "127.1", "2130706433", "", "127.0.0.1@evil"]
HOSTS += ["[127.0.0.1]evil.example", "[::1]evil.example", "[127.0.0.1]", "[::1", "::1]", "[::1]:x"]
HOSTS += ["localhost:80@evil", "localhost:80:80", "localhost:x", "evil@localhost", "localhost/evil"]
HOSTS += ["127.0.0.1:80,evil", "localhost evil", "[localhost]", "[::1]@evil:80", "[::1].evil:80"]
PATHS = ["/", "/api/jobs", "/healthz", "/metrics", "/static/main.js", "/nothing", "/docs"]


async def test_a_name_that_is_not_the_panels_is_refused_everywhere(panel: Panel) -> None:
    for host, path in itertools.product(HOSTS, PATHS):
        reply = await panel.http.get(path, headers={"Host": host})
        assert reply.status_code in (400, 421), (host, path)  # 400: no HTTP any more
        if reply.status_code == 421:
            assert reply.headers["content-type"] == "application/problem+json"
            assert "TROUPE_PANEL_HOSTS" in reply.json()["remedy"]


async def test_loopback_is_the_panel_at_any_port(panel: Panel) -> None:
    for host in ("127.0.0.1", "localhost", "LOCALHOST:8080", "127.5.5.5:1", "[::1]:8080"):
        reply = await panel.http.get("/api/jobs", headers={"Host": host})
        assert reply.status_code == 200, host


def test_configured_names_are_the_panels() -> None:
    names = PanelSettings(
        panel_hosts="panel.lab, Other.Example:8443,",
        host="10.0.0.7",
        advertise_address="[fd00::7]:80",
    ).host_names
    assert names == {"panel.lab", "other.example", "10.0.0.7", "fd00::7"}
    assert PanelSettings(host="0.0.0.0").host_names == set()
    assert not any(map(is_loopback_host, names))
    assert host_name("[::1]:80") == "::1"


FOREIGN: list[dict[str, str]] = [
    {"Origin": "http://evil.example"},
    {"Origin": "http://127.0.0.1:1"},
    {"Origin": "http://localhost:9999"},
    {"Origin": "null"},
    {"Origin": "file://"},
    {"Origin": "nonsense"},
    {"Sec-Fetch-Site": "cross-site"},
    {"Sec-Fetch-Site": "same-site"},
    {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate", "Sec-Fetch-Dest": "document"},
]


async def test_a_page_of_another_site_changes_and_reads_nothing(panel: Panel) -> None:
    for headers in FOREIGN:
        await refused_everywhere(panel, headers)
    assert changed(panel) == []


async def refused_everywhere(panel: Panel, headers: dict[str, str]) -> None:
    refused = await panel.http.post("/api/jobs", content=SPEC, headers={**YAML, **headers})
    assert (refused.status_code, refused.json()["title"]) == (403, "foreign_origin")
    assert refused.json()["field"] in headers
    for path in ("/api/jobs/mine/pause", "/api/jobs/mine/cancel", "/api/functions/f/invoke"):
        assert (await panel.http.post(path, headers=headers)).status_code == 403
    assert (await panel.http.delete("/api/functions/f/1", headers=headers)).status_code == 403
    for path in ("/api/jobs", "/api/cluster/events", "/api/jobs/mine/events"):
        assert (await panel.http.get(path, headers=headers)).status_code == 403


async def test_a_link_from_another_site_opens_the_page(panel: Panel) -> None:
    followed = {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate"}
    page = await panel.http.get("/", headers={**followed, "Sec-Fetch-Dest": "document"})
    assert page.status_code == 200
    framed = await panel.http.get("/", headers={**followed, "Sec-Fetch-Dest": "iframe"})
    assert framed.status_code == 403


async def test_the_panels_own_page_and_programs_are_answered(panel: Panel) -> None:
    own = {"Origin": panel.url, "Sec-Fetch-Site": "same-origin"}
    for headers in ({}, own, {"Sec-Fetch-Site": "none"}):
        reply = await panel.http.post("/api/jobs", content=SPEC, headers={**YAML, **headers})
        assert reply.status_code == 201, reply.text


SIMPLE = ["text/plain", "text/plain;charset=UTF-8", "application/x-www-form-urlencoded", "", None]
SIMPLE += ["multipart/form-data; boundary=application/json", "text/plain; application/json"]


async def test_a_type_that_forms_can_send_is_refused(panel: Panel) -> None:
    calls = [
        ("/api/jobs", SPEC),
        ("/api/jobs/mine/resume", SPEC),
        ("/api/functions", FUNCTION),
        ("/api/functions/f/invoke", "{}"),
        ("/api/jobs/mine/policies/p/generate", '{"messages": [{"role": "user", "content": "x"}]}'),
    ]
    for kind in SIMPLE:
        headers = {} if kind is None else {"Content-Type": kind}
        for path, body in calls:
            refused = await panel.http.post(path, content=body, headers=headers)
            assert refused.status_code == 415, (path, kind, refused.text)
            assert refused.json()["field"] == "Content-Type"
        if kind:  # a form without fields
            empty = await panel.http.post("/api/jobs/mine/pause", headers=headers)
            assert empty.status_code == 415
    assert changed(panel) == []


async def test_yaml_and_json_that_say_so_are_taken(panel: Panel) -> None:
    for kind in ("application/yaml", "text/x-yaml", "Application/JSON; charset=utf-8"):
        reply = await panel.http.post("/api/jobs", content=SPEC, headers={"Content-Type": kind})
        assert reply.status_code == 201, reply.text


async def test_every_answer_has_the_security_headers_for_browsers(panel: Panel) -> None:
    asked: list[dict[str, str]] = [{}, {"Host": "evil.example"}, {"Origin": "null"}]
    for path, headers in itertools.product([*PATHS, "/api/x"], asked):
        told = (await panel.http.get(path, headers=headers)).headers
        policy = told["content-security-policy"]
        assert "frame-ancestors 'none'" in policy
        assert "default-src 'none'" in policy
        assert "base-uri 'none'" in policy
        assert "unsafe-inline" not in policy
        assert "://" not in policy  # nothing of other hosts
        assert told["x-content-type-options"] == "nosniff"
        assert told["x-frame-options"] == "DENY"
        assert told["referrer-policy"] == "no-referrer"
        assert told["cross-origin-resource-policy"] == "same-origin"
        assert "access-control-allow-origin" not in told


# --- a real browser -------------------------------------------------------------------------

EVIL_PAGE = b"""<!doctype html><title>evil</title><body><script>
const results = {};
window.attack = async (panel, spec, fn) => {
  const api = panel + "/api/jobs";
  const bodies = {
    text: { body: spec, headers: { "content-type": "text/plain" } },
    form: { body: spec, headers: { "content-type": "application/x-www-form-urlencoded" } },
    multipart: { body: (() => { const f = new FormData(); f.append("x", spec); return f; })() },
    untyped: { body: new TextEncoder().encode(spec) },
    blob: { body: new Blob([spec]) },
    yaml: { body: spec, headers: { "content-type": "application/yaml" } },
    json: { body: fn, headers: { "content-type": "application/json" } },
  };
  for (const [name, options] of Object.entries(bodies))
    for (const mode of ["no-cors", "cors"])
      for (const url of [api, panel + "/api/functions", panel + "/api/jobs/mine/cancel"])
        for (const referrerPolicy of ["no-referrer", "unsafe-url"]) {
          const key = `${name} ${mode} ${url.slice(panel.length)}`;
          try {
            const rest = { mode, credentials: "include", referrerPolicy, ...options };
            const r = await fetch(url, { method: "POST", ...rest });
            results[key] = `${r.type} ${r.status}`;
          } catch (error) { results[key] = "failed"; }
        }
  results.delete = "failed";
  try {
    await fetch(panel + "/api/functions/f/1", { method: "DELETE" });
    results.delete = "sent";
  } catch {}
  navigator.sendBeacon(api, spec);
  navigator.sendBeacon(api, new Blob([spec], { type: "text/plain" }));
  try { results.read = await (await fetch(api)).text(); } catch { results.read = "failed"; }
  results.events = await new Promise((done) => {
    const source = new EventSource(panel + "/api/cluster/events");
    source.addEventListener("cluster", () => done("read"));
    source.onerror = () => done("failed");
  });
  results.socket = await new Promise((done) => {
    const socket = new WebSocket(panel.replace("http", "ws") + "/api/cluster/events");
    socket.onopen = () => done("open");
    socket.onerror = () => done("failed");
  });
  results.script = await new Promise((done) => {
    const script = document.createElement("script");
    script.src = api;
    script.onload = () => done("loaded");
    script.onerror = () => done("failed");
    document.body.append(script);
  });
  results.frame = await new Promise((done) => {
    const frame = document.createElement("iframe");
    frame.src = panel + "/";
    frame.onload = () => done(frame.contentDocument ? "readable" : "blocked");
    document.body.append(frame);
  });
  return results;
};
window.submitForm = (panel, path, spec, type) => {
  const form = document.createElement("form");
  form.method = "POST"; form.action = panel + path; form.enctype = type;
  const field = document.createElement("textarea");
  field.name = spec; form.append(field); document.body.append(form); form.submit();
};
</script></body>"""


@contextmanager
def evil_site() -> Iterator[int]:
    """A site on another port; the port."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "text/html")
            self.end_headers()
            self.wfile.write(EVIL_PAGE)

        def log_message(self, *_: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield server.server_port
    finally:
        server.shutdown()
        server.server_close()


@asynccontextmanager
async def chromium_page(*flags: str) -> AsyncIterator[Any]:
    """A page of a Chromium to which evil.example is this machine."""
    from playwright.async_api import async_playwright

    rules = "--host-resolver-rules=MAP *.example 127.0.0.1"
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(
            executable_path=CHROMIUM, args=[*FLAGS, rules, *flags]
        )
        page = await browser.new_page()
        page.set_default_timeout(PATIENCE_MS)
        yield page
        await browser.close()


@pytest.mark.slow
@needs_chromium
@pytest.mark.parametrize("site", ["evil.example", "127.0.0.1", "localhost"])
async def test_a_real_browser_on_another_site_reaches_nothing(panel: Panel, site: str) -> None:
    with evil_site() as port:
        async with chromium_page() as page:
            await page.goto(f"http://{site}:{port}/")
            results = await page.evaluate(
                "([panel, spec, fn]) => attack(panel, spec, fn)", [panel.url, SPEC, FUNCTION]
            )
            for name in ("read", "events", "socket", "script", "delete"):
                assert results[name] == "failed", (name, results)
            assert results["frame"] == "blocked"
            for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data"):
                for path in ("/api/jobs", "/api/jobs/mine/cancel"):
                    await page.goto(f"http://{site}:{port}/")
                    async with page.expect_navigation():
                        await page.evaluate(
                            "([panel, path, spec, kind]) => submitForm(panel, path, spec, kind)",
                            [panel.url, path, SPEC, kind],
                        )
                    assert "foreign_origin" in await page.content()
    await asyncio.sleep(0.2)  # beacons
    assert changed(panel) == []
    assert "RegisterFunction" not in [name for name, _ in panel.orchestrator.calls]


@pytest.mark.slow
@needs_chromium
async def test_a_rebound_name_reaches_nothing(panel: Panel) -> None:
    port = httpx.URL(panel.url).port
    async with chromium_page() as page:
        # The page of the panel itself under another name is same-origin with it: not even that.
        reply = await page.goto(f"http://evil.example:{port}/")
        assert reply.status == 421
        # A page that was loaded before its name was pointed here asks with its own name.
        status = await page.evaluate(
            """async (spec) => {
              const yaml = { "content-type": "application/yaml" };
              const post = await fetch("/api/jobs", { method: "POST", headers: yaml, body: spec });
              const read = await fetch("/api/jobs");
              return [post.status, read.status];
            }""",
            SPEC,
        )
        assert status == [421, 421]
    assert changed(panel) == []
    assert "ListJobs" not in [name for name, _ in panel.orchestrator.calls]
