"""The report in a real headless Chromium: errors, overflow, contrast, dark mode and print, as pages of the site."""

import dataclasses
import importlib.util
from pathlib import Path

import pytest

from vitmods.report import write_report

DRIVER = Path(__file__).parents[2] / "docs" / "site" / "browser.py"

FIRST_SCREEN = """(() => {
  const shown = e => e.getClientRects().length > 0, box = e => e.getBoundingClientRect(), all = q => [...document.querySelectorAll(q)];
  const svg = all("figure svg").find(shown), texts = [...svg.querySelectorAll("text")].map(box);
  const zeros = [...svg.querySelectorAll("path")].filter(p => getComputedStyle(p).fill == "none").map(box)
    .filter(r => r.width < 1 && r.height > 4);
  const table = document.querySelector("#verdicts .scroll");
  return { headline: box(document.querySelector(".headline")).bottom, plot: box(svg).top, svgs: all("svg").filter(shown).length,
    smallest: Math.min(...all("svg text").filter(shown).map(t => box(t).height)),
    crossed: [zeros.length, zeros.filter(z => texts.some(t => t.left < z.left && z.left < t.right &&
      t.top + 3 < z.bottom && z.top < t.bottom - 3)).length],
    beside: [...table.querySelectorAll("tbody td:nth-child(3)")].filter(c => box(c).right > box(table).right + 1).length };
})()"""  # noqa: E501


@pytest.fixture(scope="module")
def driver():
    spec = importlib.util.spec_from_file_location("site_browser", DRIVER)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    if (program := module.find()) is None:
        pytest.skip("Chromium is not installed (Debian package: chromium)")
    module.program = program
    return module


@pytest.fixture(scope="module")
def page(synthetic, tmp_path_factory):
    """Long words, long paths and many warnings are what breaks a phone's layout."""
    folder = tmp_path_factory.mktemp("browser")
    answer = synthetic.make_answer(
        folder,
        diverge=[(4, 1), (4, 2), (3, 0)],
        tuned=True,
        rename={0: "<script>alert(1)</script>", 2: "a_very_long_name_without_any_space_in_it_" * 3},
        classes=["a_long_class_name_without_a_space_" * 3, *"bcdefghij"],
    )
    answer = dataclasses.replace(
        answer,
        settings={**answer.settings, "data": "folder/" * 40},
        warnings=(*answer.warnings, "runs/" + "x" * 300),
        samples=tuple(synthetic.sample_images(answer.data["classes"])),
    )
    return write_report(answer)


def test_nothing_is_cut_off_pale_or_folded_on_any_screen_or_paper(driver, page):
    assert driver.problems(page.parent, driver.program, [page.name]) == []


def test_the_first_screen_has_the_verdicts(driver, page):
    with driver.browser(driver.program) as shown:
        shown.show(driver.STATES[0])
        shown.open(page.as_uri())
        desktop = shown.evaluate(FIRST_SCREEN)
        shown.show(next(state for state in driver.STATES if state.name == "phone"), height=844)
        phone = shown.evaluate(FIRST_SCREEN)
    assert desktop["headline"] < 500
    assert desktop["svgs"] == 1 + 3 * 10 + 11
    assert phone["plot"] < 844, "the headline and the first arms are on the first screen"
    assert phone["beside"] == 0, "arm, verdict and effect are seen without scrolling"
    assert phone["crossed"] == [10, 0], "the line at zero does not run through the numbers"
    assert phone["smallest"] > 9, "text of plots can be read"


def test_the_measurement_itself_finds_faults(driver, page, tmp_path):
    text = page.read_text(encoding="utf-8").replace("--muted: #5a636e", "--muted: #c0c0c0")
    wide = '<main><div style="width:900px">wide</div><img src="https://example.invalid/x">'
    (tmp_path / "broken.html").write_text(text.replace("<main>", wide))
    found = "\n".join(driver.problems(tmp_path, driver.program))
    for fault in ("wider than the window", "pale text", "Content Security Policy"):
        assert fault in found
