"""A study on a Ray cluster of two nodes, one of which is killed in the middle, against the same study in one process.

    python benchmarks/ray_study.py --data path/to/cifar10 --base mu6/4 --arms dpn rms layerscale --seeds 4

Both are studies as `vitmods compare` runs them; the cluster's nodes run on this machine, as in Ray's own tests.
What is compared: the weights' checksums, the metrics and scores of each image of every trial, and the effects.
"""

import argparse
import hashlib
import json
import os
import threading
import time
from pathlib import Path

import vitmods as vm
from vitmods.study.executors import ClusterOptions

HEALTH = {"period_ms": 500, "failure_threshold": 3, "timeout_ms": 1000}  # a lost node is seen within seconds


def trials(folder: Path) -> dict[str, object]:
    """Trial -> what it found, to the bit."""
    found = {}
    for path in sorted((folder / "trials").rglob("result.json")):
        result = json.loads(path.read_text())
        scores = hashlib.sha256(b"".join(file.read_bytes() for file in sorted(path.parent.glob("*.npz")))).hexdigest()
        found[str(path.parent.relative_to(folder))] = (result["status"], result["weights"], result["metrics"], scores)
    return found


def kill_when(folder: Path, begun: int, kill: object, said: dict[str, float]) -> None:
    """Kill the second node once so many trials are under way or finished."""
    while len(list((folder / "trials").rglob("metrics.jsonl"))) < begun:
        time.sleep(0.2)
    said["finished_when_killed"] = len(trials(folder))
    kill()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True)
    parser.add_argument("--base", default="mu6/4")
    parser.add_argument("--img-size", type=int, default=32)
    parser.add_argument("--arms", nargs="+", default=["dpn", "rms", "layerscale"])
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--limit-train", type=int, default=5000)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()

    study = vm.Study(
        base=options.base,
        arms=options.arms,
        data=options.data,
        img_size=options.img_size,
        limit_train=options.limit_train,
        recipe=vm.recipes.default(epochs=options.epochs),
        seeds=options.seeds,
    )
    quiet = {"cost_seconds": 0, "progress": False, "device": "cpu"}

    began = time.perf_counter()
    alone = study.run(options.out / "alone", workers=1, **quiet)
    seconds = {"one process": round(time.perf_counter() - began, 1)}

    for name, value in HEALTH.items():
        os.environ[f"RAY_health_check_{name}"] = str(value)
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    node, said = cluster.add_node(num_cpus=1), {}
    whole = (1 + len(options.arms)) * options.seeds
    folder = options.out / "ray"
    thread = threading.Thread(
        target=kill_when,
        args=(folder, whole // 2, lambda: cluster.remove_node(node, allow_graceful=False), said),
        daemon=True,
    )
    thread.start()
    began = time.perf_counter()
    try:
        together = study.run(folder, cluster=ClusterOptions("ray", cluster.address), **quiet)
    finally:
        cluster.shutdown()
    seconds["two nodes, one killed"] = round(time.perf_counter() - began, 1)

    print(together)
    print(json.dumps({
        "trials": len(trials(folder)),
        **said,
        "equal trials": sum(trials(folder)[name] == one for name, one in trials(options.out / "alone").items()),
        "equal effects": all(str(alone[arm]) == str(together[arm]) for arm in options.arms),
        "seconds": seconds,
    }))  # fmt: skip


if __name__ == "__main__":
    main()
