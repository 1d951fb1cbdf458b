"""A metric from outside the package, by a protocol of its own: how sure the model is."""

from vitmods.evals import PROTOCOLS, Protocol, ProtocolResult
from vitmods.tasks import Metric


def confidence(outputs):
    sure = outputs.logits.softmax(dim=1).max(dim=1).values.numpy()
    return ProtocolResult({"confidence": float(sure.mean())}, per_image={"confidence": sure})


METRIC = Metric("confidence", "confidence", "confidence")
PROTOCOLS.add("confidence", Protocol("confidence", "how sure it is", (METRIC,), confidence))
