"""The chat page in a real browser: it streams, shows what left the machine, stops, and cannot be injected."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
from client_dirs import listing, write_client
from parties import Gateway, StandIn, until

import cloister
from cloister.manifest import OBFUSCATION

ARTEFACTS = Path(__file__).parents[3] / "artefacts"
FLAGS = [
    "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update", "--disable-sync",
    "--no-first-run",
]  # fmt: skip
ANSWER = (
    "The quality of mercy is not strained: it falls as gentle rain from heaven upon the place beneath. "
    "It is twice blest — it blesses him that gives and him that takes. 😀"
)
MEASURED = {
    "percent": 98.7,
    "sentence": "A server that knows the public base recovers 98.7 % of 2,000 tokens (sorted rows, one forward pass).",
}


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    executable = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if executable is None:
        pytest.skip("no Chromium here (apt-get install chromium)")
    with sync_api.sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=executable, args=FLAGS)
        yield chromium
        chromium.close()


@pytest.fixture(scope="module")
def served(
    tmp_path_factory: pytest.TempPathFactory,
    start_standin: Callable[..., StandIn],
    start_gateway: Callable[..., Gateway],
) -> tuple[Gateway, StandIn]:
    folder = tmp_path_factory.mktemp("page") / "client"
    order = write_client(folder, name="bard-small", label=OBFUSCATION, key_id="k-page", measured=MEASURED)
    standin = start_standin(order, reply=ANSWER, models=listing("k-page", "bard-small"))
    return start_gateway(folder, standin.url, "--heartbeat", "0.5"), standin


@pytest.fixture
def page(browser: Any, served: tuple[Gateway, StandIn]) -> Iterator[Any]:
    gateway, standin = served
    standin.reset()
    context = browser.new_context(viewport={"width": 1280, "height": 800})
    opened = context.new_page()
    problems: list[str] = []
    opened.on("pageerror", lambda error: problems.append(str(error)))
    opened.on("console", lambda message: problems.append(message.text) if message.type == "error" else None)
    opened.on("request", lambda r: problems.append(r.url) if not r.url.startswith((gateway.url, "data:")) else None)
    opened.goto(gateway.url)
    opened.wait_for_selector("#trust:not([hidden])")
    yield opened
    context.close()
    assert not problems


def test_ask_and_see_what_left(page: Any, served: tuple[Gateway, StandIn]) -> None:
    _, standin = served
    standin.set(delay=0.02)
    assert page.inner_text("#trust-label").startswith("Obfuscation, not privacy")
    assert "98.7 %" in page.inner_text("#trust-text")
    assert page.evaluate("document.activeElement.id") == "prompt"
    page.fill("#tokens", "200")
    page.focus("#prompt")
    page.keyboard.type("What is mercy?")
    page.keyboard.press("Enter")
    until(lambda: page.evaluate("document.querySelector('.assistant .text').textContent.length > 20"))
    partial = page.inner_text(".assistant .text")
    assert ANSWER.startswith(partial) and len(partial) < len(ANSWER)  # it streams
    page.wait_for_selector(".assistant:not(.running)")
    assert page.inner_text(".assistant .text") == ANSWER
    until(
        lambda: page.evaluate(
            "/ out · .* in · 1 round · /.test(document.querySelector('.assistant .cost').textContent)"
        )
    )
    until(lambda: page.evaluate("document.querySelectorAll('#entries > li').length >= 2"))
    entry = page.inner_text("#entries > li:first-child")
    assert "completion" in entry and "They can read:" in entry and f"127.0.0.1:{standin.port}" in entry
    assert page.inner_text("#total-sent") != "0 B"
    page.wait_for_timeout(600)
    page.emulate_media(color_scheme="dark")
    _save(page, "chat-page-standin-dark.png")
    page.set_viewport_size({"width": 420, "height": 800})
    _save(page, "chat-page-standin-narrow.png")
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_the_whole_road_on_the_page(
    browser: Any, tmp_path: Path, start_server: Callable[..., str], start_gateway: Callable[..., Gateway]
) -> None:
    """The embedded model, protected, measured, served and asked on the page; this screenshot is the one in the docs."""
    source = Path(str(files("cloister"))) / "embedded" / "olmoe"
    if not (source / "model.safetensors").exists():
        pytest.skip("the embedded model is not here")
    cloister.protect(source, tmp_path / "out", base="public:cloister-embedded", name="cloister-embedded")
    gateway = start_gateway(tmp_path / "out" / "client", start_server(tmp_path / "out" / "server"))
    page = browser.new_page(viewport={"width": 1280, "height": 800})
    page.goto(gateway.url)
    page.wait_for_selector("#trust.warning")
    for question in ("Who art thou, and whence comest thou?", "Tell me of the sea."):
        page.fill("#prompt", question)
        page.keyboard.press("Enter")
        page.wait_for_selector(".assistant.running")
        page.wait_for_selector(".assistant:not(.running) .cost")
        until(lambda: not page.query_selector(".running"))
    assert all(message.inner_text().strip() for message in page.query_selector_all(".assistant .text"))
    assert "%" in page.inner_text("#trust-text") and not page.query_selector(".failure")
    page.wait_for_timeout(600)
    _save(page, "chat-page.png")
    page.close()


def test_an_answer_at_the_limit_says_so(page: Any) -> None:
    page.fill("#tokens", "11")
    page.focus("#prompt")
    page.keyboard.type("What is mercy?")
    page.keyboard.press("Enter")
    page.wait_for_selector(".assistant:not(.running)")
    assert page.inner_text(".assistant .text") == "The quality"
    assert "token limit" in page.inner_text(".assistant")


def test_stop_with_the_keyboard(page: Any, served: tuple[Gateway, StandIn]) -> None:
    _, standin = served
    standin.set(delay=0.2)
    page.keyboard.type("Slowly, please")
    page.keyboard.press("Enter")
    until(lambda: page.evaluate("document.querySelector('.assistant .text').textContent.length > 1"))
    page.keyboard.press("Escape")
    page.wait_for_selector(".assistant:not(.running)")
    assert "stopped" in page.inner_text(".assistant")
    until(lambda: standin.seen("cancelled"))
    until(lambda: page.evaluate("document.querySelector('#entries').textContent.includes('cancelled')"))


def test_markup_stays_text(browser: Any, page: Any, served: tuple[Gateway, StandIn]) -> None:
    attack = "<img src=x onerror=\"document.title='owned'\"><b>bold</b>"
    page.keyboard.type(attack)
    page.keyboard.press("Enter")
    page.wait_for_selector(".assistant:not(.running)")
    assert page.inner_text(".user .text") == attack
    assert page.title() == "Cloister" and page.query_selector("#messages img, #messages b") is None


def test_a_failure_is_told(page: Any, served: tuple[Gateway, StandIn]) -> None:
    _, standin = served
    standin.set(error_after=5)
    page.keyboard.type("Hello")
    page.keyboard.press("Enter")
    page.wait_for_selector(".failure")
    assert "out of memory" in page.inner_text(".failure")


def _save(page: Any, name: str) -> None:
    folder = Path(os.environ.get("CLOISTER_ARTEFACTS", ARTEFACTS))
    folder.mkdir(parents=True, exist_ok=True)
    page.screenshot(path=str(folder / name))
