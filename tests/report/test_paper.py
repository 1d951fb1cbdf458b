"""What a study gives to a paper in LaTeX: files that compile without errors and fit a column."""

import dataclasses
import re
import shutil
import subprocess

import pytest

import vitmods as vm
from vitmods.cli import main
from vitmods.report.paper import latex, methods_in_latex, write_paper
from vitmods.util.latex import tex
from vitmods.study import Answer
from vitmods.util.errors import UserError

pytestmark = pytest.mark.usefixtures("short_clocks")

DESIGNS = ["plain", "sweep", "bases", "factorial", "tuned", "folds", "until decided"]
HOSTILE = {
    0: "a_50%-of & $x^2$ {#1} ~\\end",
    1: "AVeryLongNameWithoutAnySignThatCouldBreakALine" * 2,
    2: "数据 «été» Łódź `tick` \"q\" <|> --arms Ωmega",
    3: "placement(attn=pre+post,mlp=pre+post,reading=branch)",
}


def compiled(folder):
    """Compile main.tex as a reader does; returns the errors, boxes that are too wide, and citations without an entry."""
    if shutil.which("pdflatex") is None or shutil.which("bibtex") is None:
        pytest.skip("pdflatex and bibtex are not installed")
    once = ["pdflatex", "-interaction=nonstopmode", "-no-shell-escape", "main"]
    for command in (once, ["bibtex", "main"], once, once):
        subprocess.run(command, cwd=folder, capture_output=True, check=False, timeout=60)
    log, cited = ((folder / f"main.{kind}").read_text(errors="replace") for kind in ("log", "blg"))
    assert (folder / "main.pdf").stat().st_size > 10_000
    return re.findall(r"^!.*|Overfull.*|.*undefined.*|.*too large.*", log, re.M) + re.findall(r".*rror.*--.*", cited)


def answers(name, request, synthetic):
    if name in DESIGNS:
        return Answer.load(request.getfixturevalue("finished")(name))
    options = {
        "hostile": {"arms": 4, "rename": HOSTILE},
        "failed": {"arms": 10, "diverge": [(1, 0), (1, 1), (-1, 2)]},
        "unfinished": {"arms": 2, "missing": [(0, 4), (1, 3), (1, 4)]},
        "without images": {"arms": 3, "per_image": False},
        "table": {"arms": 3, "seeds": 3},
    }
    answer = synthetic.make_answer("study", evaluations=3, **options[name])
    return dataclasses.replace(answer, command="vitmods paper run dpn-table1") if name == "table" else answer


@pytest.mark.parametrize("name", [*DESIGNS, "hostile", "failed", "unfinished", "without images", "table"])
def test_the_files_compile_and_fit(name, request, synthetic, tmp_path):
    answer = answers(name, request, synthetic)
    folder = write_paper(answer, tmp_path / "paper")
    table = (folder / "table.tex").read_text()
    shown = [question for question in answer.questions.values() if question.is_shown]
    assert table.count(r"\begin{table}") == len(shown)
    assert table.isascii()
    assert not compiled(folder)
