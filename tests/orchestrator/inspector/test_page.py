"""The page in a real browser: what it shows, by mouse, by keyboard and to those who do not see, and how fast."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.generated_run import Run, generate
from tests.orchestrator.inspector.pages import Served, served

CHROMIUM = Path("/usr/bin/chromium")
FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
BEGAN = 1.75e9
sync_api: Any = pytest.importorskip("playwright.sync_api", reason="needs Playwright for Python")
pytestmark = pytest.mark.skipif(not CHROMIUM.exists(), reason=f"needs {CHROMIUM}: apt-get install chromium")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=str(CHROMIUM), args=FLAGS)
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def troubled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    directory = tmp_path_factory.mktemp("page") / "run"
    generate(8, 2, 12, BEGAN, trouble=True).write(directory)
    with served(directory) as one:
        yield one


@pytest.fixture
def page(browser: Any, troubled: Served) -> Iterator[Any]:
    with opened(browser, troubled) as page:
        yield page


class opened:
    """A page that has shown its first window. On leaving it must have complained of nothing and asked no one else."""

    def __init__(self, browser: Any, served: Served, **options: Any) -> None:
        self._context = browser.new_context(viewport={"width": 1440, "height": 900}, **options)
        self._served = served
        self.complaints: list[str] = []
        self.asked: list[str] = []

    def __enter__(self) -> Any:
        page = self._context.new_page()
        page.on("console", lambda message: self.complaints.append(message.text))
        page.on("pageerror", lambda error: self.complaints.append(str(error)))
        page.on("request", lambda request: self.asked.append(request.url))
        page.goto(self._served.url)
        page.wait_for_selector("#transitions tbody tr")
        return page

    def __exit__(self, kind: Any, *_: Any) -> None:
        self._context.close()
        if kind is None:
            assert self.complaints == []
            assert [url for url in self.asked if not url.startswith(self._served.address)] == []


def text(page: Any, selector: str) -> str:
    return " ".join(page.locator(selector).inner_text().split())


def colours(page: Any, selector: str = "#lanes") -> int:
    """How many colours a canvas shows in its middle."""
    return page.locator(selector).evaluate(
        """canvas => new Set(new Uint32Array(canvas.getContext("2d").getImageData(
             canvas.width * .2, 0, canvas.width * .6, canvas.height).data.buffer)).size"""
    )


def said(page: Any, words: str) -> None:
    sync_api.expect(page.locator("#said")).to_contain_text(words)


def test_the_first_line_says_what_is_live(page: Any) -> None:
    facts = text(page, "#facts")
    assert "actor on all 8 ranks, at the end" in facts
    assert "Published actor 2.12" in facts
    assert "1 aborted" in facts
    assert text(page, "#status") == "done"
    assert colours(page) > 20


def test_the_token_is_not_in_the_address(page: Any, troubled: Served) -> None:
    assert page.url == f"{troubled.address}/"
    assert page.evaluate("document.cookie") == ""


def test_pointing_at_a_lane_says_what_it_held_and_where_that_came_from(page: Any) -> None:
    box = page.locator("#lanes").bounding_box()
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + 120)
    page.wait_for_selector("#moment .holds")
    card = text(page, "#moment")
    for word in ("actor/3", "digest", "from", "tier copy", "transition"):
        assert word in card


def test_each_trouble_says_its_reason_and_leads_to_its_place(page: Any) -> None:
    assert "ECC" in text(page, "#trouble")
    assert "qwen3-grpo/engine/0 and 1 more stale" in text(page, "#trouble")
    page.get_by_role("button", name="actor/5 poisoned").click()
    page.wait_for_selector("#moment .reason")
    assert "ECC" in text(page, "#moment .reason")
    said(page, "actor/5: poisoned")
    assert page.locator("#whole").is_enabled()


def test_the_keyboard_goes_to_lanes_moments_and_windows(page: Any) -> None:
    page.keyboard.press("Tab")
    assert text(page, ":focus").startswith("Skip the picture")
    page.focus("#lanes")
    assert page.locator("#lanes").evaluate("canvas => getComputedStyle(canvas).outlineStyle") == "solid"
    page.keyboard.press("ArrowDown")
    said(page, "actor/0:")
    page.keyboard.press("ArrowDown")
    said(page, "actor/1:")
    before = text(page, "#moment .holds")
    page.keyboard.press("ArrowLeft")
    sync_api.expect(page.locator("#moment .holds")).not_to_have_text(before)
    page.keyboard.press("+")
    sync_api.expect(page.locator("#whole")).to_be_enabled()
    page.keyboard.press("Home")
    sync_api.expect(page.locator("#whole")).to_be_disabled()


def test_the_tables_hold_the_same_and_follow_window_and_ranks(page: Any) -> None:
    assert page.locator("#ranks-now tbody tr").count() == 8
    assert page.locator("#engines-now tbody tr").count() == 2
    whole = text(page, "#page-of")
    page.fill("#filter", "2-3")
    sync_api.expect(page.locator("#page-of")).not_to_have_text(whole)
    sync_api.expect(page.locator("#transitions tbody")).not_to_contain_text("actor/5")
    page.click("#older")
    sync_api.expect(page.locator("#page-of")).to_contain_text("101 to 200")


def test_a_wrong_choice_of_ranks_is_answered_in_words(browser: Any, troubled: Served) -> None:
    one = opened(browser, troubled)
    with one as page:
        page.fill("#filter", "two")
        sync_api.expect(page.locator("#filter-wrong")).to_contain_text("neither a rank nor a range")
        page.fill("#filter", "")
        sync_api.expect(page.locator("#filter-wrong")).to_be_hidden()
        assert all("400" in complaint for complaint in one.complaints)
        one.complaints.clear()


def test_every_control_has_a_name_and_the_page_one_heading(page: Any) -> None:
    assert page.locator("h1").count() == 1
    named = page.locator("button, input, #lanes, [role=region]").evaluate_all(
        "all => all.filter(one => !(one.ariaLabel || one.innerText || one.labels?.length)).length"
    )
    assert named == 0
    assert page.locator("html").get_attribute("lang") == "en"


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_words_can_be_read_in_light_and_dark(browser: Any, troubled: Served, scheme: str) -> None:
    with opened(browser, troubled, color_scheme=scheme) as page:
        contrasts = page.evaluate(
            """() => {
              const style = getComputedStyle(document.documentElement);
              const light = name => [1, 3, 5]
                .map(at => parseInt(style.getPropertyValue("--" + name).trim().slice(at, at + 2), 16) / 255)
                .map(c => c <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4)
                .reduce((sum, c, i) => sum + c * [0.2126, 0.7152, 0.0722][i], 0);
              const contrast = (a, b) => (Math.max(light(a), light(b)) + .05) / (Math.min(light(a), light(b)) + .05);
              return ["ink", "muted", "bad", "good", "busy", "accent"].flatMap(word =>
                ["ground", "surface"].map(under => [word, under, contrast(word, under)]));
            }"""
        )
        assert [c for c in contrasts if c[2] < 4.5] == []


def test_nothing_moves_for_those_who_asked_for_that(browser: Any, tmp_path: Path) -> None:
    generate(2, 1, 2, BEGAN, trouble=False, ended=False, pid=os.getpid()).write(tmp_path / "run")
    name = "getComputedStyle(document.getElementById('status'), '::before').animationName"
    with served(tmp_path / "run") as live:
        for wish, animation in (("reduce", "none"), ("no-preference", "breathe")):
            with opened(browser, live, reduced_motion=wish) as page:
                assert text(page, "#status") == "running"
                assert page.evaluate(name) == animation


def test_a_run_is_followed_while_it_goes_on(browser: Any, tmp_path: Path) -> None:
    began = time.time() - 60
    run = generate(2, 1, 2, began, trouble=False, ended=False, pid=os.getpid())
    run.write(tmp_path / "run")
    with served(tmp_path / "run") as live, opened(browser, live) as page:
        assert "Published actor 1.2" in text(page, "#facts")
        grow(run, tmp_path / "run")
        sync_api.expect(page.locator("#facts")).to_contain_text("actor 1.3")
        said(page, "actor 1.3 published")
        page.click("#follow")
        sync_api.expect(page.locator("#follow")).to_have_attribute("aria-pressed", "true")
        run.ranks[1].poison(time.time(), "RuntimeError: lost its memory")
        append(run, tmp_path / "run")
        sync_api.expect(page.locator("#facts")).to_contain_text("actor/1 is poisoned")
        said(page, "actor/1 poisoned: while switching: RuntimeError: lost its memory")


def grow(run: Run, run_dir: Path) -> None:
    run.rollout(2, save=False)
    run.publish()
    append(run, run_dir)


def append(run: Run, run_dir: Path) -> None:
    """Write what the journals do not hold yet, as a run does."""
    journals = {"driver": run.driver, "fleet": run.fleet}
    journals |= {f"actor-{index}": rank.journal for index, rank in enumerate(run.ranks)}
    for name, journal in journals.items():
        path = run_dir / "journal" / f"{name}.jsonl"
        written = len(path.read_text().splitlines())
        with path.open("a") as file:
            file.writelines(f"{line}\n" for line in journal.lines[written:])
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in run.metrics))


@pytest.mark.prove
def test_512_ranks_and_100_000_transitions_are_interactive(browser: Any, tmp_path: Path) -> None:
    if os.getloadavg()[0] > 2 * (os.cpu_count() or 1):
        pytest.skip("says how fast the page is, and this machine is busy with other things")
    generate(512, 16, 24, BEGAN, trouble=True).write(tmp_path / "run")
    with served(tmp_path / "run") as big:
        summary = json.loads(big.get("/api/summary")[2])  # the journals are read when the run starts, not by a visitor
        assert summary["ranks"] == 512
        with opened(browser, big) as page:
            assert int(text(page, "#page-of").split()[4].rstrip(",")) >= 100_000
            drawn = page.evaluate("performance.getEntriesByName('drawn')[0].startTime")
            box = page.locator("#lanes").bounding_box()
            page.mouse.move(box["x"] + box["width"] / 2, box["y"] + 300)
            page.evaluate("performance.clearMeasures()")
            for _ in range(6):
                page.mouse.wheel(0, -240)
                page.wait_for_timeout(700)
            took = page.evaluate("performance.getEntriesByName('window').map(one => one.duration)")
        print(f"lanes drawn after {drawn:.0f} ms, zooms took {[round(one) for one in took]} ms")
        assert drawn < 2000
        assert len(took) >= 6
        assert sorted(took)[len(took) // 2] < 100
