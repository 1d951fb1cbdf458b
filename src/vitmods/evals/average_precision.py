"""Mean average precision of several labels an image, with that of each label."""

from vitmods.evals.base import PROTOCOLS, Protocol, ProtocolResult
from vitmods.evals.outputs import ModelOutputs
from vitmods.stats.width import fraction, mean_over_images
from vitmods.tasks.base import on_cpu
from vitmods.tasks.multilabel import MultiLabel, average_precisions, measured

METRICS = MultiLabel.metrics


def average_precision(outputs: ModelOutputs) -> ProtocolResult:
    """The protocol. The mean over labels has no interval, as it is not a mean over images. It leaves out labels
    without an image."""
    logits, targets, classes = outputs.logits, outputs.targets, outputs.dataset.classes
    metrics, columns = measured(logits, targets)
    of_label, per_image = average_precisions(logits, targets), on_cpu(columns)
    ranking = mean_over_images(per_image["ranking_precision"].astype("float64"))
    exact = per_image["exact_match"]
    intervals = {"exact_match": fraction(int(exact.sum()), len(exact))}
    return ProtocolResult(
        metrics=metrics,
        detail={
            "images": len(targets),
            "per_label": {
                name: {"images": int(targets[:, k].sum()), "average_precision": of_label.get(k)}
                for k, name in enumerate(classes)
            },
        },
        intervals=intervals
        if ranking is None
        else {"ranking_precision": (ranking[0], min(ranking[1], 1.0)), **intervals},
        per_image=per_image,
    )


PROTOCOLS.add(
    "average_precision",
    Protocol("average_precision", "how well labels sort images", METRICS, average_precision, target="labels"),
)
