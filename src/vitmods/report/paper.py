"""The files of a study for a paper in LaTeX: its table, methods, references, and a document that shows them."""

from __future__ import annotations

import re
from collections.abc import Container, Mapping
from pathlib import Path

from vitmods.report import text
from vitmods.report.citations import Citation, References
from vitmods.report.manuscript import bibtex, paragraphs, references
from vitmods.report.page import SECTIONS
from vitmods.stats.tables import seeds, verdict_cell
from vitmods.stats.verdict import Effect
from vitmods.study.answer import VIEWS, Answer
from vitmods.study.questions import Question
from vitmods.util.errors import UserError
from vitmods.util.latex import breaking, tabular
from vitmods.util.limits import read_bytes
from vitmods.util.remote import write_output
from vitmods.util.text import listing, plural

NOTE = "% Written by vitmods: do not edit, `vitmods report FOLDER --paper OUT` writes it again.\n"
MAIN = r"""% Yours to edit: vitmods writes this file only where there is none.
\documentclass[twocolumn]{article}
\usepackage[numbers]{natbib}
\usepackage{url}
\begin{document}
\section*{Methods}
\input{methods}
\input{table}
{\sloppy\bibliographystyle{plainnat}\bibliography{refs}}
\end{document}
"""


@VIEWS.register("paper")
def write_paper(answer: Answer, folder: str | Path) -> Path:
    """Write table.tex, methods.tex, refs.bib, and main.tex, which shows them, if there is none; returns the folder.

    Raises:
        UserError: a file cannot be written, or one of these names is not of vitmods.
    """
    out = Path(folder)
    files = {"table.tex": latex(answer), "methods.tex": methods_in_latex(answer), "refs.bib": bibtex(answer)}
    for path in (out / name for name in files):
        if path.exists() and not read_bytes(path, "text").startswith(NOTE.encode()):
            raise UserError(f"{path} is not a file that vitmods wrote: give --paper another folder, or move it away.")
    for name, content in files.items():
        write_output(out / name, f"{NOTE}{content}\n".encode())
    if not (out / "main.tex").exists():
        write_output(out / "main.tex", MAIN.encode())
    return out


def methods_in_latex(answer: Answer) -> str:
    """Format the methods as paragraphs."""
    known = references(answer)
    body = "\n\n".join(_in_latex(paragraph, known) for paragraph in paragraphs(answer))
    body = body.replace("We used vitmods", r"We used vitmods~\cite{vitmods}", 1)
    return f"{{\\emergencystretch=3em\n{body}\\par}}"


def _in_latex(marked: str, known: References) -> str:
    """Render a text with marks of citations: `(LayerScale; [@...])` as `(LayerScale~\\cite{...})`."""

    def form(key: str, citation: Citation) -> str:
        return rf"\cite{{{key}}}"

    rendered = known.render(marked, _escape, form).replace(r"}; \cite{", ",")
    return re.sub(r" \((\\cite\{[^}]*\})\)", r"~\1", rendered).replace(r"; \cite{", r"~\cite{")


def _escape(words: str) -> str:
    """Escape a text whose code is between backticks."""
    parts = [breaking(part) for part in words.split("`")]
    if len(parts) % 2 == 0:  # one is a letter of its own
        return breaking(words)
    return "".join(rf"\texttt{{{part}}}" if i % 2 else part for i, part in enumerate(parts))


@VIEWS.register("latex")
def latex(answer: Answer) -> str:
    """Format each question of a study as a table that fits a column, base first, with a caption; without packages."""
    shown = [name for name, question in answer.questions.items() if question.is_shown]
    sections = [section.published(answer) for section in SECTIONS.values()]
    published, note = next((column for column in sections if column[0]), ({}, ""))
    return "\n\n".join(_table(answer, name, published, note) for name in shown or [*answer.questions][:1])


def _table(answer: Answer, name: str, published: Mapping[tuple[str, str], str], note: str) -> str:
    question, parts = answer.questions[name], text.columns_of(answer, name)
    table: list[dict[str, str] | str] = []
    for heading, rows in text.rows_of(answer, name).items():
        table += [heading] if heading else []
        for row in rows:
            arm, effect, cost, is_base = row.label, row.effect, row.cost, row.effect is None
            table.append(
                {
                    question.label: arm,
                    "score": text.score(answer.metric, row.mean),
                    "effect": _numbers(effect) if effect else "",
                    "verdict": verdict_cell(effect) if effect else "",
                    **{part.title: _numbers(found) for part, found in zip(parts, row.columns, strict=False)},
                    "seeds": seeds(effect) if effect else str(len(answer.seeds)),
                    "train": text.ratio(1.0 if is_base else cost.train_step.ratio if cost else None).rstrip("×"),
                    "params": text.ratio(1.0 if is_base else cost.params if cost else None).rstrip("×"),
                    "paper": published.get((heading, arm), ""),
                }
            )
    filled = [row for row in table if isinstance(row, dict)]
    of_arms = [row for row in filled if row["effect"]]
    titles = {title: {row.get(title, "") for row in of_arms or filled} for row in filled for title in row}
    alike = [title for title, cells in titles.items() if cells <= {"", "–"}]
    alike += ["seeds"] * (len(titles["seeds"]) == 1 and bool(of_arms)) + ["train"] * (not of_arms)
    alike += ["params"] * (titles["params"] == {"1.00"})
    titles = {title: cells for title, cells in titles.items() if title not in alike}
    body = [[row] if isinstance(row, str) else [row.get(title, "") for title in titles] for row in table]
    lines = [i for i, row in enumerate(body) if len(row) == 1 and i]
    caption = _caption(answer, question, titles) + [note] * ("paper" in titles)
    return "\n".join(
        [
            r"\begin{table}[t]",
            r"\centering",
            tabular([*titles], body, lines),
            rf"\caption{{{_in_latex(' '.join(filter(None, caption)), references(answer))}}}",
            rf"\label{{tab:{re.sub(r'[^a-z0-9]+', '-', name.lower())}}}",
            r"\end{table}",
        ]
    )


def _numbers(effect: Effect) -> str:
    """Format an effect whose interval stays on one line if it can."""
    return text.numbers(effect).replace(", ", ",\xa0")


def _caption(answer: Answer, question: Question, titles: Container[str]) -> list[str]:
    """Say in sentences what the columns are."""
    metric, unit = answer.metric, text.points(answer.metric)
    sentences = [f"{listing(answer.bases)} on {answer.data['name']}{f': {question.title}' if question.title else ''}."]
    if not answer.complete:
        ended = sum(trial.ended for trial in answer.trials)
        sentences.append(f"Not finished: {ended} of {plural(len(answer.trials), 'trial')} have ended.")
    if "score" in titles:
        spread = text.base_spread(answer)
        spread = f"; {answer.base.name}: {spread}" if spread else ""
        where = f"{' and '.join(answer.splits)}{'' if metric.higher_is_better else ', lower is better'}"
        sentences.append(f"Score: {metric.title} ({where}), mean over seeds{spread}.")
    if "effect" in titles:
        sentences.append(f"Effects are {question.meaning}{f', in{unit}' if unit else ''}, margin {answer.margin:g}.")
    if question is answer.headline:
        sentences.append(f"{text.brief_claim(answer)[:1].upper()}{text.brief_claim(answer)[1:]}")
        count = max((effect.n for effect in question.effects.values()), default=len(answer.seeds))
        sentences.append(f"{plural(count, 'seed')}." if question.against and "seeds" not in titles else "")
    if "train" in titles and (base := answer.base_cost):
        params = " and parameters" if "params" in titles else ""
        took = f"{text.short_time(base.train_step_s)} a step"
        took += f" and {text.count(base.params).strip()} parameters" if params else ""
        sentences.append(f"Costs: time of a training step{params}, relative to base ({took}).")
        sentences.append("" if params else "Parameters differ by less than 1 %.")
    return sentences
