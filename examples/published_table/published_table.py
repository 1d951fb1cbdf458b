"""Reproduce Dual PatchNorm's ablations (its Table 6) on handwritten digits, and compare them with the paper's."""

import sys

import vitmods as vm


def compare(out: str) -> None:
    """Train Dual PatchNorm and its six ablations in a very small ViT with two pixels a patch side."""
    # "?": a plain ViT. The paper's, with a layer of representation, needs more than four epochs to learn.
    study = vm.Study("mu2/2?", "paper:dpn-table6", "digits", vm.recipes.digits(epochs=4), seeds=2)
    result = study.run(out, cost_seconds=0)
    print(result)  # the verdicts against base, and the comparison with the paper
    print(f"Report: {result.report()}")


if __name__ == "__main__":  # a study starts processes, which import this file
    compare(sys.argv[1] if len(sys.argv) > 1 else "runs/published-table")
