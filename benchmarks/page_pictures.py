"""Pictures of the inspector's page, and how long it takes: `python -m benchmarks.page_pictures docs/img`.

A run of 8 ranks that goes on, and the generated one of 512 ranks and more than 100,000 transitions. Needs Chromium and
Playwright for Python.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from playwright.sync_api import Page, sync_playwright

from benchmarks.generated_run import generate
from tests.orchestrator.inspector.pages import served
from tests.orchestrator.inspector.test_page import CHROMIUM, FLAGS

SIZES = {"slots-8": (1440, 900), "slots-512": (1440, 1230)}


def main() -> None:
    out = Path(sys.argv[1])
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as directory, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=str(CHROMIUM), args=FLAGS)
        small, large = Path(directory) / "8", Path(directory) / "512"
        generate(8, 2, 20, time.time() - 308, trouble=True, ended=False, pid=os.getpid()).write(small)
        generate(512, 16, 24, time.time() - 600, trouble=True).write(large)
        for name, run_dir in (("slots-8", small), ("slots-512", large)):
            width, height = SIZES[name]
            with served(run_dir) as one:
                began = time.perf_counter()
                one.get("/api/summary")
                print(f"{name}: journals read in {time.perf_counter() - began:.2f} s")
                context = browser.new_context(viewport={"width": width, "height": height}, color_scheme="light")
                page = context.new_page()
                page.goto(one.url)
                page.wait_for_selector("#transitions tbody tr")
                drawn = page.evaluate("performance.getEntriesByName('drawn')[0].startTime")
                box = page.locator("#lanes").bounding_box()
                assert box is not None
                page.mouse.move(box["x"] + box["width"] * 0.62, box["y"] + (120 if name == "slots-8" else 300))
                page.wait_for_selector("#moment .holds")
                page.screenshot(path=str(out / f"{name}.png"))
                print(f"{name}: lanes drawn {drawn:.0f} ms after the address was opened; {zooms(page)}")
                context.close()
        browser.close()


def zooms(page: Page) -> str:
    """Ten steps of the wheel."""
    page.evaluate("performance.clearMeasures()")
    for turn in range(10):
        page.mouse.wheel(0, -240 if turn < 6 else 240)
        page.wait_for_timeout(500)
    took: list[Any] = json.loads(
        page.evaluate("JSON.stringify(performance.getEntriesByName('window').map(one => one.duration))")
    )
    return f"a zoom took {statistics.median(took):.0f} ms, at most {max(took):.0f}"


if __name__ == "__main__":
    main()
