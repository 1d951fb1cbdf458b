"""Fine-tuning of trained weights by the recipe `finetune` and by a grid of rates and layer decays, beside the linear
probe and the nearest neighbors of the frozen weights.

    python benchmarks/finetune_rates.py BACKBONE DATA --pixels 70 --steps 90 600 --out rates.json

One trial for each setting, seed and number of steps, on one thread; top-1 on the test images. A setting is
`FIELD=VALUE,...` of the recipe, as in `train=head,lr=3e-3`; `default` is the recipe itself. What OUT holds already is
not trained again.
"""

import argparse
import json
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from paired import one_thread

from vitmods.cli.train import run_trial
from vitmods.evals.protocols import run_protocols
from vitmods.study.cells import ImageOptions
from vitmods.study.checkpoints import Checkpoint
from vitmods.study.defaults import RecipeChoice
from vitmods.study.fixed import fixed_settings
from vitmods.study.settings import Settings, make_seeds
from vitmods.study.store import StudyFolder
from vitmods.study.trial import TrialRunner, base_config, build_model
from vitmods.train.options import RunOptions

GRID = [f"lr={lr},layer_decay={decay}" for lr in ("1e-5", "5e-5", "1e-4", "3e-4") for decay in ("none", "0.7")]
NEVER = 10**6  # epochs between evaluations


def overrides(setting: str) -> dict[str, Any]:
    """`lr=1e-4,train=head` as fields of a recipe; empty for `default`."""
    if setting == "default":
        return {}
    pairs = (pair.partition("=")[::2] for pair in setting.split(","))
    read = {"train": str, "head_start": str}
    return {name: None if text == "none" else read.get(name, float)(text) for name, text in pairs}


def settings_for(backbone: str, data: str, pixels: int, batch: int, steps: int, setting: str, seed: int) -> Settings:
    choice = RecipeChoice("finetune", {"steps": steps, "batch_size": batch, **overrides(setting)})
    fixed, _, _ = fixed_settings(None, data, choice, ImageOptions(img_size=pixels), start=backbone)
    return Settings(fixed, (), make_seeds([seed]))


def frozen(settings: Settings, machine: RunOptions) -> dict[str, float]:
    """Accuracy of what learns from the features of the frozen weights."""
    runner = TrialRunner(StudyFolder(Path(tempfile.gettempdir()) / "none"), settings.measure, machine)
    (cell,) = settings.cells
    dataset = runner.dataset(cell)
    config = base_config(cell, dataset.num_classes)
    model = build_model(config, cell.arm, settings.seeds[0], cell.start, cell.recipe)
    model = model.to(machine.device)
    results = run_protocols(
        model, dataset, ("probe", "knn"), split="test", batch_size=64, device=torch.device(machine.device)
    )
    return {name: result.metrics[name] for name, result in results.items()}


def trained(settings: Settings, machine: RunOptions) -> float:
    """Top-1 of a trial on the test images."""
    out = Path(tempfile.mkdtemp())
    try:
        run_trial(settings, machine, out)
        runner = TrialRunner(StudyFolder(out), settings.measure, machine)
        model = Checkpoint.open(str(out)).model.to(machine.device)
        dataset = runner.dataset(settings.cells[-1])
        result = run_protocols(
            model, dataset, ["top1"], split="test", batch_size=64, device=torch.device(machine.device)
        )
        return float(result["top1"].metrics["top1"])
    finally:
        shutil.rmtree(out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("backbone", help="a trial's folder, a file of weights, or a Hugging Face folder")
    parser.add_argument("data", nargs="+")
    parser.add_argument("--pixels", type=int, default=70)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--steps", type=int, nargs="+", default=[90, 600])
    parser.add_argument("--settings", nargs="+", default=["default", *GRID])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path, default=None, help="JSON file")
    options = parser.parse_args()
    one_thread()
    machine = RunOptions(device=options.device, checkpoint_minutes=None, tensorboard=False, eval_every_epochs=NEVER)
    machine = RunOptions(**{**vars(machine), "progress": False})
    results: dict[str, Any] = json.loads(options.out.read_text()) if options.out and options.out.exists() else {}

    def record(key: str, value: Any, seconds: float) -> None:
        results[key] = value
        print(f"{key}: {value} ({seconds:.0f} s)", flush=True)
        if options.out:
            options.out.write_text(json.dumps(results, indent=1))

    for data in options.data:
        case = f"{Path(options.backbone).name} {Path(data).name}"
        if f"{case} frozen" not in results:
            start = time.perf_counter()
            first = settings_for(options.backbone, data, options.pixels, options.batch, 1, "default", 0)
            record(f"{case} frozen", frozen(first, machine), time.perf_counter() - start)
    for steps in options.steps:
        for setting in options.settings:
            for data in options.data:
                for seed in options.seeds:
                    key = f"{Path(options.backbone).name} {Path(data).name} {steps} {setting} seed{seed}"
                    if key in results:
                        continue
                    start = time.perf_counter()
                    chosen = settings_for(options.backbone, data, options.pixels, options.batch, steps, setting, seed)
                    record(key, trained(chosen, machine), time.perf_counter() - start)


if __name__ == "__main__":
    main()
