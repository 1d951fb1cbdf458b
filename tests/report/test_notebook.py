"""What a notebook shows of results: by the formatter of notebooks, and at length by a kernel of its own."""

import nbformat
import pytest
from IPython.core.formatters import DisplayFormatter
from nbclient import NotebookClient

SETUP = """
import timm, vitmods as vm
from vitmods.study.answer import Answer
answer = Answer.load({folder!r})
old = timm.create_model("vit_tiny_patch16_224", img_size=16, patch_size=8, depth=1, num_classes=3)
"""
CELLS = {
    "answer": ("answer", ["<svg", "<table>", "<td>dpn</td>"]),
    "the table of a decision": ("answer.decision", ["<th>verdict</th>", "</table>"]),
    "report": ("answer.report({out!r} + '/report.html')", ["<iframe srcdoc", "&lt;!doctype html&gt;"]),
    "report as a figure": ("answer.report({out!r} + '/report.svg')", ["<svg"]),
    "report as an image": ("answer.report({out!r} + '/report.png')", ["data:image/png;base64,iVBOR"]),
    "diff": ("vm.diff(old, vm.apply(old, vm.LayerScale(), in_place=True))", ["<pre>changes", "layerscale"]),
    "what is trained": ("vm.train_only(old, 'attention')", ["trained", "attention"]),
    "replaced norms": ("vm.replace_norms(old, vm.Norm('scale'))", ["<pre>", "norm1"]),
    "dry run": (
        "vm.Study('mu1/4', ['rms'], 'digits', seeds=2).dry_run(out={out!r} + '/study')",
        ["<pre> arm", "trials to run"],
    ),
}


@pytest.fixture
def places(finished, tmp_path):
    return {"folder": str(finished("plain")), "out": str(tmp_path)}


def check(name, shown):
    for part in CELLS[name][1]:
        assert part.lower() in shown.lower(), (name, part, shown[:500])


@pytest.mark.usefixtures("short_clocks")
def test_results_are_shown_as_tables_and_plots(places):
    names = {}
    exec(SETUP.format(**places), names)
    for name, (code, _) in CELLS.items():
        shown, _ = DisplayFormatter().format(eval(code.format(**places), names))
        check(name, shown["text/html"])


@pytest.mark.long
def test_a_notebook_shows_tables_and_plots(places):
    cells = [SETUP.format(**places), *(code.format(**places) for code, _ in CELLS.values())]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(code) for code in cells])
    NotebookClient(notebook, timeout=120).execute()
    for cell, name in zip(notebook.cells[1:], CELLS, strict=True):
        (shown,) = (out["data"]["text/html"] for out in cell.outputs if out["output_type"] == "execute_result")
        check(name, shown)
