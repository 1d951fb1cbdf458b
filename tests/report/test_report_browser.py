"""The report in a real headless Chromium: errors, overflow, contrast, dark mode and print."""

import dataclasses
import json
import re
import shutil
import subprocess

import pytest

from vitmods.report import write_report

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed (Debian package: chromium)")

FLAGS = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
         "--disable-background-networking", "--disable-component-update", "--host-resolver-rules=MAP * ~NOTFOUND",
         "--allow-file-access-from-files", "--enable-logging=stderr", "--hide-scrollbars"]  # fmt: skip
DARK = "--blink-settings=preferredColorScheme=0"

# The page itself allows no scripts, so another page holds it in a frame as wide as a phone, and measures it.
MEASURE = """<!doctype html><meta charset="utf-8"><body>
<iframe id="page" style="width:WIDTHpx;height:844px;border:0" src="PAGE"></iframe><script>
const luminance = c => { const [r, g, b] = c.map(v => (v /= 255) <= .03928 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4);
  return .2126 * r + .7152 * g + .0722 * b; };
const numbers = s => (s.match(/[\\d.]+/g) || []).map(Number);
addEventListener("load", () => {
  const page = document.getElementById("page").contentDocument, view = page.defaultView, root = page.documentElement;
  const ground = e => { for (; e; e = e.parentElement) { const c = numbers(view.getComputedStyle(e).backgroundColor);
    if (c.length == 3 || c[3] > 0) return c.slice(0, 3); } return [255, 255, 255]; };
  const pale = [], shown = e => e.getClientRects().length > 0;
  for (const e of page.querySelectorAll("body *")) {
    const own = [...e.childNodes].some(n => n.nodeType == 3 && n.textContent.trim());
    if (!own || !shown(e) || e.closest("svg.drawing")) continue;
    const style = view.getComputedStyle(e), color = numbers(e.namespaceURI.endsWith("svg") ? style.fill : style.color);
    const [a, b] = [luminance(color.slice(0, 3)), luminance(ground(e))].sort((x, y) => y - x);
    if ((a + .05) / (b + .05) < 4.5) pale.push(e.textContent.trim().slice(0, 40) + " " + color);
  }
  const crossed = page => { const svg = [...page.querySelectorAll("figure svg")].filter(shown)[0];
    const texts = [...svg.querySelectorAll("text")].map(t => t.getBoundingClientRect());
    const zeros = [...svg.querySelectorAll("path")].map(p => [p.getBoundingClientRect(), view.getComputedStyle(p)])
      .filter(([r, style]) => r.width < 1 && r.height > 4 && style.fill == "none").map(([r]) => r);
    return [zeros.length, zeros.filter(z => texts.some(t => t.left < z.left && z.left < t.right &&
      t.top + 3 < z.bottom && z.top < t.bottom - 3)).length]; };
  const svgs = [...page.querySelectorAll("svg")].filter(shown);
  const text = svgs.flatMap(s => [...s.querySelectorAll("text")]).map(t => t.getBoundingClientRect().height);
  const out = document.createElement("pre"); out.id = "measured";
  out.textContent = JSON.stringify({ overflow: root.scrollWidth - root.clientWidth, height: root.scrollHeight,
    headline: page.querySelector(".headline").getBoundingClientRect().bottom,
    plot: [...page.querySelectorAll("figure svg")].filter(shown)[0].getBoundingClientRect().top,
    crossed: crossed(page), beside: (() => { const table = page.querySelector("#verdicts .scroll");
      const right = e => e.getBoundingClientRect().right;
      return [...table.querySelectorAll("tbody td:nth-child(3)")].filter(c => right(c) > right(table) + 1)
        .map(c => c.textContent); })(),
    ground: ground(page.body), pale, svgs: svgs.length, smallest: Math.min(...text),
    cut: [...page.querySelectorAll("figure svg text")].filter(shown).filter(t => { const r = t.getBoundingClientRect();
      const box = t.closest("figure").getBoundingClientRect();
      return r.left < box.left - 2 || r.right > box.right + 2; }).map(t => t.textContent) });
  document.body.append(out);
});
</script>"""


def chromium(profile, *arguments):
    """Run Chromium once; (what it prints, the lines that pages wrote to the console)."""
    command = [CHROMIUM, *FLAGS, f"--user-data-dir={profile}", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    return done.stdout, [line for line in done.stderr.splitlines() if "CONSOLE" in line]


def measure(tmp_path, page, width, *flags):
    holder = tmp_path / "holder.html"
    holder.write_text(MEASURE.replace("PAGE", page.as_uri()).replace("WIDTH", str(width)), encoding="utf-8")
    dom, console = chromium(
        tmp_path / "profile", *flags, f"--window-size={width + 100},1000", "--dump-dom", holder.as_uri()
    )
    match = re.search(r'<pre id="measured">(.*?)</pre>', dom, flags=re.DOTALL)
    return json.loads(match[1].replace("&gt;", ">").replace("&lt;", "<").replace("&amp;", "&")), console


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


@pytest.mark.parametrize(("width", "flags"), [(390, ()), (390, (DARK,)), (1280, ())], ids=["phone", "dark", "desktop"])
def test_layout(page, tmp_path, width, flags):
    measured, console = measure(tmp_path, page, width, *flags)
    assert console == []
    assert measured["overflow"] <= 0
    assert measured["pale"] == []
    assert measured["cut"] == []
    assert (sum(measured["ground"]) < 150) == bool(flags)
    if width == 1280:
        assert measured["headline"] < 500
        assert measured["svgs"] == 1 + 3 * 10 + 11
    else:
        assert measured["plot"] < 844, "the headline and the first arms are on the first screen"
        assert measured["beside"] == [], "arm, verdict and effect are seen without scrolling"
        assert measured["crossed"] == [10, 0], "the line at zero does not run through the numbers"
        assert measured["smallest"] > 9, "text of plots can be read"


def test_the_measurement_itself_finds_faults(page, tmp_path):
    broken = tmp_path / "broken.html"
    text = page.read_text(encoding="utf-8").replace("--muted: #5a636e", "--muted: #c0c0c0")
    broken.write_text(
        text.replace("<main>", '<main><div style="width:900px">wide</div><img src="https://example.invalid/x">')
    )
    measured, console = measure(tmp_path, broken, 390)
    assert measured["overflow"] > 400
    assert measured["pale"]
    assert console, "the page's policy forbids outside images, and the console says so"


def test_print(page, tmp_path):
    """Print is light also where the screen is dark, and nothing folded is lost."""
    pdf = tmp_path / "report.pdf"
    chromium(tmp_path / "profile", DARK, "--no-pdf-header-footer", f"--print-to-pdf={pdf}", page.as_uri())
    data = pdf.read_bytes()
    assert data.startswith(b"%PDF")
    assert 6 <= len(re.findall(rb"/Type\s*/Page\b", data)) <= 20
    if shutil.which("pdftotext") is None:
        return
    text = subprocess.run(["pdftotext", "-layout", str(pdf), "-"], capture_output=True, text=True, check=True).stdout
    assert "Next steps" in text
    assert "Pairwise comparisons" in text
    assert "x" * 40 in text, "warnings are open in print"
    assert "vitmods compare" in text
