"""What `gpu_check.py` says of the machine, and the page of goals that it makes of its JSON.

python benchmarks/gpu_page.py runs/gpu-check/gpu_check-NAME.json
"""

import json
import platform
import shutil
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from vitmods.bench import device_name
from vitmods.data.threads import cores
from vitmods.study.executors.sharing import mps_runs

ROOT = Path(__file__).parents[1]
PACKAGES = ("vitmods", "torch", "triton", "timm", "torchvision", "numpy", "pillow")
ASKED = {
    "driver": "driver_version",
    "power_limit_w": "power.limit",
    "most_power_w": "power.max_limit",
    "sm_clock_mhz": "clocks.sm",
    "most_sm_clock_mhz": "clocks.max.sm",
    "memory_clock_mhz": "clocks.mem",
    "most_memory_clock_mhz": "clocks.max.mem",
    "temperature_c": "temperature.gpu",
    "compute_mode": "compute_mode",
    "mig": "mig.mode.current",
    "used_percent": "utilization.gpu",
}
"""nvidia-smi's names"""
LONGEST = 6000  # characters of a program's output


def machine(device: torch.device) -> dict[str, Any]:
    """What it was measured on; None where a program does not answer."""
    found = {
        "device": device_name(device),
        "cpu": device_name(torch.device("cpu")),
        "cores": cores(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "versions": {name: found for name in PACKAGES if (found := _version(name))},
        "commit": _output("git", "-C", str(ROOT), "rev-parse", "HEAD"),
        "changed_files": len((_output("git", "-C", str(ROOT), "status", "--porcelain") or "").splitlines()),
    }
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        asked = _output("nvidia-smi", f"--query-gpu={','.join(ASKED.values())}", "--format=csv,noheader,nounits")
        gpus = [dict(zip(ASKED, map(str.strip, row.split(",")), strict=False)) for row in (asked or "").splitlines()]
        found |= {
            "cuda": torch.version.cuda,
            "cudnn": torch.backends.cudnn.version(),
            "capability": list(torch.cuda.get_device_capability(device)),
            "gpu_memory": properties.total_memory,
            "multiprocessors": properties.multi_processor_count,
            "mps": mps_runs(),
            "gpus": gpus or torch.cuda.device_count(),
            "topology": _output("nvidia-smi", "topo", "-m"),
        }
    return found


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _output(*command: str) -> str | None:
    if shutil.which(command[0]) is None:
        return None
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()[:LONGEST] if done.returncode == 0 else None


def page(content: dict[str, Any]) -> str:
    """The goals with met or missed, and each table, in Markdown."""
    there = content["machine"]
    rows = [row for row in content["measured"] if "error" not in row]
    judged = [row for row in rows if row["met"] is not None]
    missed = [row["name"] for row in judged if not row["met"]]
    lines = [f"# GPU check: {there['device']}", ""]
    if content["rehearsal"]:
        lines += ["A rehearsal with tiny models: the numbers say nothing of a GPU.", ""]
    lines += [
        f"{len(judged) - len(missed)} of {len(judged)} goals are met. Tests: {content['tests']['summary']}",
        "",
        *_table(
            ["goal", "measured", "95 % interval", "asked for", "verdict"],
            [
                [
                    row["name"],
                    f"{row['value']:g}",
                    f"{row['low']:g} to {row['high']:g}",
                    row["goal"] or "–",
                    {True: "met", False: "**missed**", None: "not judged"}[row["met"]] if row["goal"] else "–",
                ]
                for row in rows
            ],
        ),
    ]
    for title, name in TABLES.items():
        table = content["tables"].get(name, [])
        failed = [row for row in table if "error" in row]
        if whole := [row for row in table if "error" not in row]:
            lines += [f"## {title}", "", *_table(list(whole[0]), [[_cell(row[key]) for key in row] for row in whole])]
        for reason in dict.fromkeys(row["error"] for row in failed):
            of = [" ".join(str(v) for k, v in row.items() if k != "error") for row in failed if row["error"] == reason]
            lines += [f"Not measured ({reason}): {'; '.join(of)}.", ""]
    errors = [row for row in content["measured"] if "error" in row]
    lines += [line for row in errors for line in (f"**{row['name']} failed**: {row['error']}", "")]
    lines += ["## Machine", "", *_table(["", ""], [[key, _cell(value)] for key, value in there.items()])]
    return "\n".join(lines)


TABLES = {
    "Training steps": "steps",
    "Trials at a time": "together",
    "Reading JPEG files": "reading",
    "Waits for the device": "waits",
}


def _cell(value: Any) -> str:
    if isinstance(value, dict):
        if {"ratio", "low", "high"} <= value.keys():
            return f"{value['ratio']:g} [{value['low']:g}, {value['high']:g}]"
        return ", ".join(f"{key} {_cell(inner)}" for key, inner in value.items())
    if isinstance(value, list):
        return "; ".join(map(_cell, value)) or "–"
    return "–" if value is None else f"{value:g}" if isinstance(value, float) else str(value)


def _table(head: list[str], rows: list[list[str]]) -> list[str]:
    cells = [[cell.replace("|", "\\|").replace("\n", "<br>") for cell in row] for row in [head, *rows]]
    lines = [f"| {' | '.join(row)} |" for row in cells]
    return [lines[0], f"|{' --- |' * len(head)}", *lines[1:], ""]


if __name__ == "__main__":
    print(page(json.loads(Path(sys.argv[1]).read_text())))
