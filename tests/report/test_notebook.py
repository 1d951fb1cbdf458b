"""What a notebook shows of results, run by a kernel of its own."""

import nbformat
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


def test_a_notebook_shows_tables_and_plots(finished, tmp_path):
    places = {"folder": str(finished("plain")), "out": str(tmp_path)}
    cells = [SETUP.format(**places), *(code.format(**places) for code, _ in CELLS.values())]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(code) for code in cells])
    NotebookClient(notebook, timeout=120).execute()
    for cell, (name, (_, expected)) in zip(notebook.cells[1:], CELLS.items(), strict=True):
        (shown,) = (out["data"]["text/html"] for out in cell.outputs if out["output_type"] == "execute_result")
        for part in expected:
            assert part.lower() in shown.lower(), (name, part, shown[:500])
