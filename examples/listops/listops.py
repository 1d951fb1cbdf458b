"""A small study of sequences: does Dynamic Token Normalization, or BatchNorm, help a Transformer on ListOps?

python examples/listops/listops.py [FOLDER]
"""

import sys
from pathlib import Path

import vitmods as vm

DATA = "listops:generated?min_length=3&max_length=16&train=2000&val=200&test=300"


def main(out: Path) -> None:
    study = vm.Study(
        arms={"dtn": "dtn(norms=both)", "batch": "norm(kind=batch)"},
        data=DATA,
        task="sequence_classification",
        recipe=vm.recipes.listops(steps=75).with_(dropout=0.0),
        seeds=2,
    )
    answer = study.run(out, workers=1, cost_seconds=0)
    print(answer)
    print(answer.report())
    expressions = out / "expressions.txt"
    expressions.write_text("[MAX 2 9 4 ]\n[MIN 7 [MAX 3 5 ] ]\n")
    for found in vm.predict(out / "trials" / "dtn" / "seed0", expressions, top=1):
        print("line", found["image"].rpartition(":")[2], "is", found["predicted"][0])


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "runs/listops"))
