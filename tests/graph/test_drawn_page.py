"""The HTML page of a plan in a real browser; skipped where there is no Chromium."""

from __future__ import annotations

import os
import shutil
from typing import TYPE_CHECKING, Any

import pytest

from fxshard.drawing import ORDER_MEANING
from tests.drawn import drawn, dropping

if TYPE_CHECKING:
    from collections.abc import Iterator

sync_api = pytest.importorskip("playwright.sync_api", reason="playwright drives the browser: pip install playwright")
CHROMIUM = os.environ.get("CHROMIUM") or next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None
)
pytestmark = pytest.mark.skipif(
    CHROMIUM is None, reason="no Chromium: install one (apt-get install chromium) or name it in CHROMIUM"
)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with sync_api.sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield started
        started.close()


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("pages")
    saved = {stage: drawn().save(folder / f"{stage}.html", stage=stage, title="a net") for stage in ("global", "local")}
    saved["dropping"] = dropping().save(folder / "dropping.html", memory=False)
    return {name: path.as_uri() for name, path in saved.items()}


@pytest.fixture
def page(browser: Any, pages: dict[str, str]) -> Iterator[Any]:
    """Return the page of the global graph."""
    yield from opened(browser, pages["global"])


def opened(browser: Any, address: str, **options: Any) -> Iterator[Any]:
    """Yield a page; what it complains about in the console, or asks of a network, fails the test."""
    shown = browser.new_page(viewport={"width": 1400, "height": 900}, **options)
    complaints: list[str] = []
    shown.on("console", lambda message: complaints.append(message.text))
    shown.on("pageerror", lambda error: complaints.append(str(error)))
    shown.on("request", lambda request: complaints.append(request.url) if request.url != address else None)
    shown.goto(address)
    yield shown
    shown.close()
    assert complaints == []


def box(page: Any, key: str) -> Any:
    return page.locator(f'#view [data-id="{key}"]')


def details(page: Any) -> str:
    return str(page.locator("#details").inner_text())


def test_it_draws_modules_and_values(page: Any) -> None:
    assert page.locator("#view .module").count() >= 1
    assert page.locator("#view .wire").count() > 5
    assert page.locator("#view .box.gathered").count() == 1
    assert page.locator("#legend li").count() == 6
    assert "Memory of this rank" in page.locator("#memory").inner_text()
    places = page.eval_on_selector_all("#view .box", "all => all.map(e => e.getBoundingClientRect().toJSON())")
    for i, a in enumerate(places):
        for b in places[:i]:
            apart = (
                a["right"] <= b["left"] or b["right"] <= a["left"] or a["bottom"] <= b["top"] or b["bottom"] <= a["top"]
            )
            assert apart, (a, b)


def test_a_click_shows_the_details(page: Any) -> None:
    box(page, "n:conv2d").click()
    said = details(page)
    assert "aten.conv2d.default" in said
    assert "2x4x24x64" in said
    assert "2x4x24x16" in said
    assert "[S(3; 0,16,32,48,64)]" in said
    assert "backward, gradient" in said
    assert "tests/drawn.py" in said
    page.keyboard.press("Escape")
    assert "The whole plan" in details(page)


def test_a_gather_has_its_reason(page: Any) -> None:
    page.keyboard.press("0")
    page.locator("#view .box.gathered").click()
    (reason,) = drawn().report.reasons
    assert reason in details(page)


def test_modules_open_and_close(page: Any) -> None:
    module, inside = box(page, "c:stages.0"), box(page, "n:conv2d_1")
    was_open = module.get_attribute("aria-expanded") == "true"
    module.dblclick(position={"x": 20, "y": 12})
    assert inside.count() == (0 if was_open else 1)
    assert box(page, "c:stages.0").get_attribute("aria-expanded") == str(not was_open).lower()
    while box(page, "c:stages").get_attribute("aria-expanded") == "true":
        page.locator("#less").click()
    assert box(page, "c:stages.0").count() == 0
    for _ in range(4):
        page.locator("#more").click()
    assert inside.count() == 1


def test_the_search_finds_a_folded_node(page: Any) -> None:
    while page.locator("#view .module").count():
        page.locator("#less").click()
    page.locator("#canvas").focus()
    page.keyboard.press("/")
    page.keyboard.type("conv2d_3")
    assert page.locator("#found li").count() == 1
    page.keyboard.press("Enter")
    assert box(page, "n:conv2d_3").get_attribute("aria-selected") == "true"
    assert "stages.1.conv1" in details(page)
    seen = box(page, "n:conv2d_3").bounding_box()
    assert 0 < seen["x"] < 1000
    assert 60 < seen["y"] < 900
    page.keyboard.press("/")
    page.keyboard.type("no such thing")
    assert "Nothing is called so" in page.locator("#found").inner_text()
    page.keyboard.press("Escape")
    assert page.locator("#found").is_hidden()


def test_the_keys_go_everywhere(page: Any) -> None:
    page.locator("#canvas").focus()
    chosen = page.locator('#view [aria-selected="true"]')
    page.keyboard.press("ArrowDown")
    assert chosen.get_attribute("aria-label").startswith("input, placeholder")
    page.keyboard.press("End")
    assert chosen.get_attribute("data-id") == "n:output"
    page.keyboard.press("Home")
    while chosen.get_attribute("data-id") != "c:stages":
        page.keyboard.press("ArrowDown")
    before = chosen.get_attribute("aria-expanded")
    page.keyboard.press("Enter")
    assert chosen.get_attribute("aria-expanded") != before
    if before == "true":
        page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    assert chosen.get_attribute("data-id") == "c:stages.0"
    page.keyboard.press("ArrowLeft")
    page.keyboard.press("ArrowLeft")
    assert chosen.get_attribute("data-id") == "c:stages"
    assert page.locator("#canvas").get_attribute("aria-activedescendant") == "box c:stages"
    page.keyboard.press("?")
    assert page.locator("#keys").is_visible()
    page.keyboard.press("Escape")
    page.keyboard.press("Escape")
    assert chosen.count() == 0


def test_the_picture_moves_and_zooms(page: Any) -> None:
    def camera() -> str:
        return str(page.locator("#view").get_attribute("transform"))

    first = camera()
    page.mouse.move(200, 300)
    page.mouse.wheel(0, -400)
    page.wait_for_function("was => document.getElementById('view').getAttribute('transform') !== was", arg=first)
    zoomed = camera()
    page.mouse.down()
    page.mouse.move(260, 340)
    page.mouse.up()
    assert zoomed.split("scale")[1] == camera().split("scale")[1]
    assert zoomed != camera()


@pytest.mark.parametrize(("scheme", "ground"), [("light", "rgb(255, 255, 255)"), ("dark", "rgb(17, 22, 29)")])
def test_it_is_as_dark_as_the_system_until_told(browser: Any, pages: dict[str, str], scheme: str, ground: str) -> None:
    for page in opened(browser, pages["global"], color_scheme=scheme):
        colour = "getComputedStyle(document.body).backgroundColor"
        assert page.evaluate(colour) == ground
        page.locator("#theme").click()
        assert page.evaluate(colour) != ground


def test_a_local_graph_has_its_communication_as_boxes(browser: Any, pages: dict[str, str]) -> None:
    for page in opened(browser, pages["local"]):
        page.locator("#canvas").focus()
        page.keyboard.press("/")
        page.keyboard.type("halo_exchange_default")
        page.keyboard.press("Enter")
        assert page.locator("#view .communication").count() >= 1
        assert "2 msg" in details(page)


def test_the_order_of_draws_is_dashed(browser: Any, pages: dict[str, str]) -> None:
    for page in opened(browser, pages["dropping"]):
        dashed = "all => all.map(e => getComputedStyle(e).strokeDasharray !== 'none')"
        while page.locator("#view .module").count():
            page.locator("#less").click()
        wires = page.eval_on_selector_all("#view .wire", dashed)
        assert sorted(wires) == [False, False, False, False, False, True]  # the values go from box to box
        assert page.locator("#legend li").count() == 7
        assert ORDER_MEANING in page.locator("#legend").inner_text()
