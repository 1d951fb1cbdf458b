"""Dual PatchNorm's ablations (its Table 6) again on handwritten digits, and the paper's numbers beside ours."""

import sys

import vitmods as vm
from vitmods.papers.line_up import published
from vitmods.study import Answer


def compare(out: str) -> None:
    """Two rows of the table, and the whole Dual PatchNorm, on a very small ViT with two pixels a patch side."""
    table = vm.papers.TABLES["dpn-table6"]
    wanted = {"Pre", "Post"}
    arms = ["dpn", *(text for label, text in table.study.arms.items() if label in wanted)]
    study = vm.Study("mu2/2", arms, "digits", vm.recipes.digits(epochs=4), seeds=2)
    study.run(out, cost_seconds=0)
    result = Answer.load(out, "dpn")  # the table's numbers are differences to Dual PatchNorm
    print(f"{table.paper.title}, {table.where}: {table.unit}")
    for name in ("pre", "post"):
        theirs = ", ".join(f"{one.text} ({one.where})" for one in published(table, name))
        print(f"{name}: here {result[name].effect:+.2f}, published {theirs}")
    print(f"Report: {result.report()}")


if __name__ == "__main__":  # a study starts processes, which import this file
    compare(sys.argv[1] if len(sys.argv) > 1 else "runs/published-table")
