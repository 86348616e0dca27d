"""Browsers sign in with a link that is good once, or the token; a cookie is their session."""

from __future__ import annotations

import os
import time
from http.cookies import SimpleCookie
from pathlib import Path

import httpx
import pytest
from pydantic import SecretStr

from services.control_panel.access import PanelSettings
from tests.control_panel.chromium import PATIENCE_MS, findings, needs_chromium, opened
from tests.control_panel.conftest import SPEC, YAML, Panel
from tests.control_panel.test_panel_other_sites import chromium_page
from troupe.rpc import tokens
from troupe.rpc.tokens import LinkCodes, one_time_link

TOKEN = "secret"
with_token = pytest.mark.parametrize("panel", [TOKEN], indirect=True)


@with_token
async def test_a_link_opens_one_session(panel: Panel) -> None:
    link = one_time_link(panel.url, SecretStr(TOKEN))
    for method, path in (
        ("GET", "/api/jobs"),
        ("GET", "/api/cluster/events"),
        ("POST", "/api/jobs"),
    ):
        refused = await panel.http.request(method, path)
        assert (refused.status_code, refused.json()["title"]) == (401, "unauthenticated")
    for path in ("/", "/static/main.js", "/healthz", "/docs", "/openapi.json"):  # tell nothing
        assert (await panel.http.get(path)).status_code == 200
    assert (await panel.http.head(link)).status_code == 405  # a preview does not use it up
    opened = await panel.http.get(link)
    assert (opened.status_code, opened.headers["location"]) == (303, "/")
    cookie = next(iter(SimpleCookie(opened.headers["set-cookie"]).values()))
    assert cookie["httponly"]
    assert cookie["samesite"] == "strict"
    assert cookie["path"] == "/"
    assert TOKEN not in cookie.value
    port = httpx.URL(panel.url).port
    assert cookie.key == f"troupe-session-{port}"
    # The client keeps the cookie, as a browser does.
    assert (await panel.http.get("/api/jobs")).status_code == 200
    posted = await panel.http.post("/api/jobs", content=SPEC, headers=YAML)
    assert posted.status_code == 201
    for headers in ({"Sec-Fetch-Site": "same-site"}, {"Origin": "http://127.0.0.1:1"}):
        assert (await panel.http.get("/api/jobs", headers=headers)).status_code == 403
    again = await panel.http.get(link)
    assert again.status_code == 401
    assert "troupe status" in again.json()["remedy"]


@with_token
async def test_an_invalid_session_cookie_is_refused(panel: Panel) -> None:
    good = LinkCodes(SecretStr(TOKEN)).session()
    link = one_time_link("", SecretStr(TOKEN)).partition("=")[2]
    other = LinkCodes(SecretStr("other")).session()
    port = httpx.URL(panel.url).port
    for value in ("", "x", "1.2.3", good[:-1], f"9{good}", other, link, TOKEN, "é"):
        sent = {"Cookie": f"troupe-session-{port}={value}".encode()}
        assert (await panel.http.get("/api/jobs", headers=sent)).status_code == 401, value
    fitting = {"Cookie": f"troupe-session-{port}={good}"}
    assert (await panel.http.get("/api/jobs", headers=fitting)).status_code == 200
    for code in ("", "x", good, one_time_link("", SecretStr("other")).partition("=")[2], "é"):
        assert (await panel.http.get("/session", params={"code": code})).status_code == 401


@with_token
async def test_the_token_opens_a_session(panel: Panel) -> None:
    wrong = await panel.http.post("/session", json={"token": "wrong"})
    assert wrong.status_code == 401
    assert "set-cookie" not in wrong.headers
    form = await panel.http.post("/session", data={"token": TOKEN})
    assert form.status_code == 415
    assert (await panel.http.post("/session", json={"token": TOKEN})).status_code == 204
    assert (await panel.http.get("/api/jobs")).status_code == 200


@with_token
async def test_a_script_sends_the_token(panel: Panel) -> None:
    for sent in ("Bearer secret", "bearer secret"):
        reply = await panel.http.get("/api/jobs", headers={"Authorization": sent})
        assert reply.status_code == 200
    for sent in ("secret", "Basic secret", "Bearer", "Bearer secret2", "Bearer sécret"):
        wrong = {"Authorization": sent.encode("latin-1")}
        assert (await panel.http.get("/api/jobs", headers=wrong)).status_code == 401


def test_codes_and_sessions_end(monkeypatch: pytest.MonkeyPatch) -> None:
    codes = LinkCodes(SecretStr(TOKEN))
    code = one_time_link("", SecretStr(TOKEN)).partition("=")[2]
    session = codes.session()
    assert codes.is_session(session)
    now = time.time()
    monkeypatch.setattr(tokens.time, "time", lambda: now + 8 * 24 * 3600)
    assert not codes.is_session(session)
    assert not codes.redeem(code)
    # A panel that was started after it was made knows of no use of it.
    assert not LinkCodes(SecretStr(TOKEN)).redeem(code)


def test_settings_list_the_panel_s_host_names() -> None:
    assert PanelSettings(panel_hosts="a").host_names == {"a", "127.0.0.1"}


@pytest.mark.slow
@needs_chromium
@with_token
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1400, 400])
async def test_signed_out_there_is_a_page_for_the_token_and_nothing_else(
    panel: Panel, tmp_path: Path, width: int, scheme: str
) -> None:
    from playwright.async_api import expect

    pictures = Path(os.environ.get("TROUPE_PICTURES", tmp_path), f"signed-out-{width}-{scheme}")

    size = {"width": width, "height": 900}
    async with opened(viewport=size, color_scheme=scheme) as (page, faults):
        await page.goto(f"{panel.url}/#cluster")
        await expect(page.locator("#sign-in")).to_be_visible()
        pressed = page.locator("a:visible, button:visible, input:visible, select:visible")
        assert await pressed.evaluate_all("all => all.map(one => one.closest('form').id)") == [
            "sign-in",
            "sign-in",
        ]
        assert await findings(page, "sign in", pictures) == []
        await expect(page.locator("#sign-in-token")).to_be_focused()
        await page.keyboard.type("wrong")
        await page.keyboard.press("Enter")
        await expect(page.locator("#sign-in-problem")).to_contain_text("not the cluster's token")
        assert await findings(page, "wrong token", pictures) == []
        await page.keyboard.type(TOKEN)
        await page.keyboard.press("Enter")
        await expect(page.locator("#live")).to_have_text("live")
        await expect(page.locator("#sign-in")).to_be_hidden()
        assert page.url.endswith("#cluster")
        assert all(fault.startswith("401 ") for fault in faults)


@pytest.mark.slow
@needs_chromium
@with_token
async def test_a_person_signs_in_with_the_link(panel: Panel) -> None:
    from playwright.async_api import expect

    async with chromium_page() as page:
        expect.set_options(timeout=PATIENCE_MS)
        await page.goto(panel.url)
        await expect(page.locator("#sign-in")).to_be_visible()
        await page.goto(one_time_link(panel.url, SecretStr(TOKEN)))
        await expect(page.locator("#live")).to_have_text("live")
        await page.reload()
        await expect(page.locator("#live")).to_have_text("live")
        assert await page.evaluate("document.cookie") == ""
        await page.click("#submit-open")
        await page.fill("#submit-spec", SPEC)
        await page.click("#submit-send")
        await expect(page.locator("#job-state")).to_have_text("submitted")
