"""What a study gives to a paper in LaTeX: files that compile without errors and fit a column."""

import dataclasses
import re
import shutil
import subprocess

import pytest

from vitmods.cli import main
from vitmods.papers import TABLES
from vitmods.report.citations import References
from vitmods.report.manuscript import paragraphs
from vitmods.report.paper import latex, methods_in_latex, write_paper
from vitmods.study import Answer
from vitmods.study.questions import Question
from vitmods.util import latex as of_latex
from vitmods.util.errors import UserError
from vitmods.util.latex import breaking, tabular, tex

pytestmark = pytest.mark.usefixtures("short_clocks")

DESIGNS = ["plain", "sweep", "bases", "factorial", "tuned", "folds", "until decided"]
HOSTILE = {
    0: "a_50%-of & $x^2$ {#1} ~\\end",
    1: "AVeryLongNameWithoutAnySignThatCouldBreakALine" * 2,
    2: '数据 «été» Łódź `tick` "q" <|> --arms Ωmega',
    3: "placement(attn=pre+post,mlp=pre+post,reading=branch)",
}


def compiled(folder):
    """Compile main.tex as a reader does; returns errors, boxes that are too wide, and citations without an entry."""
    if shutil.which("pdflatex") is None or shutil.which("bibtex") is None:
        pytest.skip("pdflatex and bibtex are not installed")
    once = ["pdflatex", "-interaction=nonstopmode", "-no-shell-escape", "main"]
    draft = [*once[:-1], "-draftmode", "main"]
    for command in (draft, ["bibtex", "main"], draft, once):
        subprocess.run(command, cwd=folder, capture_output=True, check=False, timeout=60)
    log, cited = ((folder / f"main.{kind}").read_text(errors="replace") for kind in ("log", "blg"))
    assert (folder / "main.pdf").stat().st_size > 10_000
    return re.findall(r"^!.*|Overfull.*|.*undefined.*|.*too large.*", log, re.M) + re.findall(r".*rror.*--.*", cited)


def made(synthetic, **options):
    return synthetic.make_answer("study", evaluations=3, **options)


def of_table(answer):
    return dataclasses.replace(answer, command="vitmods paper run dpn-table1")


def alone(answer):
    """Return a study of base alone."""
    nothing = dataclasses.replace(answer.decision, effects={})
    questions = {"base": Question("arm", "differences to base", {"": {}}, against="base")}
    return dataclasses.replace(answer, arms=(), decision=nothing, questions=questions)


MADE = {
    "alone": lambda synthetic: alone(made(synthetic, arms=1)),
    "failed": lambda synthetic: made(synthetic, arms=10, diverge=[(1, 0), (1, 1), (-1, 2)]),
    "hostile": lambda synthetic: made(synthetic, arms=4, rename=HOSTILE),
    "one seed": lambda synthetic: made(synthetic, arms=2, seeds=1),
    "table": lambda synthetic: of_table(made(synthetic, arms=3, seeds=3)),
    "unfinished": lambda synthetic: made(synthetic, arms=2, missing=[(0, 4), (1, 3), (1, 4)]),
    "without images": lambda synthetic: made(synthetic, arms=3, per_image=False),
}


REPEATS = ("bases", "folds", "until decided", "alone", "one seed", "unfinished", "without images")
"""whose files are built of the same parts as those of others"""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.long] * (name in REPEATS)) for name in (*DESIGNS, *MADE)]
)
def test_the_files_compile_and_fit(name, request, synthetic, tmp_path):
    answer = MADE[name](synthetic) if name in MADE else Answer.load(request.getfixturevalue("finished")(name))
    folder = write_paper(answer, tmp_path / "paper")
    table = (folder / "table.tex").read_text()
    shown = [question for question in answer.questions.values() if question.is_shown]
    assert table.count(r"\begin{table}") == (len(shown) or 1)
    for file in ("table.tex", "methods.tex", "refs.bib"):
        assert (folder / file).read_text().isascii()
    assert not compiled(folder)


def test_a_table_that_is_too_wide_is_noticed(synthetic, tmp_path, monkeypatch):
    monkeypatch.setattr(of_latex, "LINE", 400.0)
    assert any("Overfull" in line for line in compiled(write_paper(MADE["failed"](synthetic), tmp_path)))


def cells(table, label):
    """The cells of the row of an arm, without what breaks lines."""
    (row,) = [line for line in table.splitlines() if line.removeprefix(FLUSH).startswith(f"{label} &")]
    plain = re.sub(r"\\raggedright\\hspace\{0pt\}|\\allowbreak\{\}|\\tabularnewline", "", row).replace("~", " ")
    return [cell.strip() for cell in plain.split("&")]


FLUSH = r"\raggedright\hspace{0pt}"


def test_the_table_has_base_scores_verdicts_costs_and_what_the_paper_prints(synthetic):
    answer = of_table(made(synthetic, arms=1, seeds=16))
    table, effect = latex(answer), answer["dpn"]
    score, base = (answer.metric.number(mean) for mean in (answer.arms[0].mean, answer.base_mean))
    low, high = effect.interval
    assert cells(table, "arm") == ["arm", "score", "effect", "verdict", "train", "paper"]
    assert cells(table, "base") == ["base", base, "", "", "1.00", ""]
    assert cells(table, "dpn")[:3] == ["dpn", score, f"+{effect.effect:.2f} [+{low:.2f}, +{high:.2f}]"]
    assert cells(table, "dpn")[3:] == [f"helps, expect {effect.expects}", "1.00", "+1.9, +1.4, +1.4, +1.1, +0.7"]
    caption = re.search(r"\\caption\{(.*)\}", table)[1].replace(r"\allowbreak{}", "")
    where = f"Paper: Dual PatchNorm, {TABLES['dpn-table1'].where}~\\cite{{kumar2023dual}}: differences in top-1, \\%"
    for words in (
        "Ti/4 on cifar10.",
        "Effects are differences to base, in points",
        "16 seeds.",
        where,
        "of S/32; Ti/16",
    ):
        assert words in caption, (words, caption)
    assert "paper" not in cells(latex(made(synthetic, arms=1)), "arm")


def test_names_wrap_and_what_cannot_fit_gets_smaller():
    rows = [("placement(attn=pre+post,mlp=pre+post)", "+1.00 [−10.00,\xa0+12.00]", "open")]
    table = tabular(("arm", "effect", "verdict"), rows)
    assert r"\footnotesize" in table
    assert r"+1.00 [$-$10.00,~+12.00]" in table
    assert r"pre+\allowbreak{}post" in tabular(("arm", "b"), [(rows[0][0] * 2, "x")])
    wide = tabular([f"column{i}" for i in range(9)], [["+1.00 [−10.00,\xa0+12.00]"] * 9])
    assert r"\tiny" in wide
    assert "~" not in wide
    assert breaking("a-b placement(attn=pre)") == r"a-b placement(\allowbreak{}attn=\allowbreak{}pre)"


@pytest.mark.parametrize(
    ("text", "escaped"),
    [
        (r"a_1 $x^2$ {50 %} ~\b", r"a\_1 \$x\^{}2\$ \{50 \%\} \textasciitilde{}\textbackslash{}b"),
        ("Šidák, Köpf & Łódź", r"{\v{S}}id{\'{a}}k, K{\"{o}}pf \& {\L}{\'{o}}d{\'{z}}"),
        ("−1 ± 2 × 3 ≤ α", r"$-$1 $\pm$ 2 $\times$ 3 $\le$ $\alpha$"),
        ("--arms <a> 数", r"-{}-arms \textless{}a\textgreater{} \textbackslash{}u6570"),
    ],
)
def test_text_becomes_ascii_that_latex_reads(text, escaped):
    assert tex(text) == escaped


def test_methods_have_one_content_in_two_forms(synthetic):
    answer = made(synthetic, arms=4)
    text, rendered = answer.to_methods(), methods_in_latex(answer)
    for words in (
        r"dpn (Dual PatchNorm~\cite{kumar2023dual})",
        r"(\texttt{placement(\allowbreak{}attn=\allowbreak{}post,\allowbreak{}mlp=\allowbreak{}post)}; Placement",
        r"We used vitmods~\cite{vitmods} 0.1.0 with PyTorch 2.11.0~\cite{paszke2019pytorch}",
        r"AdamW~\cite{loshchilov2019decoupled} with learning rate",
        r"$\pm$0.5 points",
    ):
        assert words in rendered, (words, rendered)
    assert "[@" not in text + rendered
    assert rendered.count("\n\n") == 3
    known = References(answer, " ".join(paragraphs(answer)))
    cited = {key for keys in re.findall(r"\\cite\{([^}]*)\}", rendered) for key in keys.split(",")}
    assert cited == {*known.by_key, "vitmods"}
    assert {*re.findall(r"^@\w+\{(.*),$", answer.to_bibtex(), re.MULTILINE)} == cited


def test_the_command_keeps_files_of_others(synthetic, tmp_path, monkeypatch, capsys):
    answer = made(synthetic, arms=1)
    monkeypatch.setattr("vitmods.study.Answer.load", lambda folder, reference: answer)
    out = tmp_path / "paper"
    assert main(["report", "study", "--paper", str(out)]) == 0
    assert "pdflatex main" in capsys.readouterr().out
    assert sorted(path.name for path in out.iterdir()) == ["main.tex", "methods.tex", "refs.bib", "table.tex"]
    (out / "main.tex").write_text("mine")
    (out / "table.tex").write_text((out / "table.tex").read_text() + "old")
    assert answer.paper(out) == out
    assert (out / "main.tex").read_text() == "mine"
    assert not (out / "table.tex").read_text().endswith("old")
    (out / "refs.bib").write_text("@misc{mine}")
    with pytest.raises(UserError, match=r"refs\.bib is not a file that vitmods wrote"):
        answer.paper(out)
    assert main(["report", "study", "--paper", str(out), "--latex"]) == 2
    assert "give one" in capsys.readouterr().err
