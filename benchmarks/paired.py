"""Paired, interleaved timing: every variant once a round, in an order that turns, on one thread and the CPU's clock.

The ratio of a variant is the median over rounds of its time to the reference's in the same round. Neighbors on a
shared machine slow a whole round down, not one variant.
"""

import json
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch


def one_thread() -> None:
    torch.set_num_threads(1)


def paired(variants: dict[str, Callable[[], Any]], reference: str, rounds: int, repeats: int = 1) -> dict[str, Any]:
    """Median CPU seconds and ratio to ``reference`` (with quartiles) of each variant."""
    names = list(variants)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for name in names:
        variants[name]()
    for i in range(rounds):
        turn = names[i % len(names) :] + names[: i % len(names)]
        for name in turn if i % 2 else turn[::-1]:
            start = time.process_time()
            for _ in range(repeats):
                variants[name]()
            seconds[name].append((time.process_time() - start) / repeats)
    return {name: _summary(seconds[name], seconds[reference]) for name in names}


def _summary(times: list[float], reference: list[float]) -> dict[str, float]:
    ratios = sorted(a / b for a, b in zip(times, reference, strict=True))
    low, middle, high = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else [ratios[0]] * 3
    return {
        "seconds": statistics.median(times),
        "ratio": middle,
        "ratio_low": low,
        "ratio_high": high,
        "ratio_of_minima": min(times) / min(reference),
    }


def saved_bytes(model: torch.nn.Module, step: Callable[[], Any]) -> int:
    """Bytes of the distinct storages that autograd keeps between forward and backward, the model's own left out."""
    own = {p.untyped_storage().data_ptr() for p in [*model.parameters(), *model.buffers()]}
    seen: dict[int, int] = {}
    kept: list[torch.UntypedStorage] = []  # alive until counted: a freed address could be given out twice

    def pack(t: torch.Tensor) -> torch.Tensor:
        storage = t.untyped_storage()
        if storage.data_ptr() not in own:
            seen[storage.data_ptr()] = storage.nbytes()
            kept.append(storage)
        return t.detach()  # the graph holds this function and what it returns: with a graph of their own, for good

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        step()
    return sum(seen.values())


def machine() -> dict[str, Any]:
    """What a reader needs to compare with: processor, threads, versions."""
    cpu = next(
        (line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line),
        platform.processor(),
    )
    return {
        "cpu": cpu,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def report(name: str, results: dict[str, Any], out: Path | None) -> None:
    """Print as a table; write as JSON with the machine in the file's name."""
    for group, rows in results.items():
        print(group)
        for variant, row in rows.items():
            text = "  ".join(f"{k} {v:.4g}" for k, v in row.items())
            print(f"  {variant:<28} {text}")
    write(name, results, out)


def write(name: str, results: dict[str, Any], out: Path | None) -> None:
    """As JSON with the machine in the file's name; nothing without a folder."""
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        info = machine()
        slug = "-".join(info["cpu"].lower().replace("(r)", "").split()[:3])
        path = out / f"{name}-{slug}-{info['threads']}t.json"
        path.write_text(json.dumps({"machine": info, "results": results}, indent=1) + "\n")
        print(f"wrote {path}")
