"""`vitmods changes`: what can be compared; `vitmods diff`: what an arm alters in a model."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import tyro

from vitmods.cli.options import parse, rows_and_columns
from vitmods.util.errors import UserError


@dataclass(frozen=True)
class Changes:
    """List the design changes: what each does, its paper, what it preserves, its cost and its published gain.

    preserves: function - the changed model computes the same at first; weights - it keeps the old weights, its outputs
    differ; nothing - it may alter weights. Combine changes with +, set their options in parentheses.

    examples:
      vitmods changes
      vitmods changes dtn
      vitmods diff --base S/16 --arm "dpn(before=false)+rms"
    """

    name: Annotated[str | None, tyro.conf.Positional] = None
    """one change or short form; None: all"""
    json: bool = False
    """print JSON, for programs"""


@dataclass(frozen=True)
class DiffOptions:
    """Show what changes alter in a model: modules, parameters, FLOPs, what is preserved, papers. Nothing is trained.

    examples:
      vitmods diff --base S/16 --arm dpn+rms
      vitmods diff --base Ti/4 --img-size 32 --num-classes 10 --arm "placement(attn=post,mlp=post)"
    """

    arm: Annotated[str, tyro.conf.arg(name="arm")]
    """changes, joined by +; `vitmods changes` lists them"""
    base: str = "S/16"
    """the model that is changed: Ti/16, S/16, B/16, S36/16 (36 deep), or timm:NAME, torchvision:NAME, hf:FOLDER
    with their own classes"""
    img_size: tuple[int, ...] = (224,)
    """image side, or rows and columns, in pixels"""
    in_chans: int = 3
    """channels of an image"""
    num_classes: int = 1000
    """classes of the head"""


def main(arguments: Sequence[str]) -> int:
    """Run `vitmods changes`; returns the exit code."""
    options = parse(Changes, arguments, "changes")
    from vitmods.changes import REGISTRY

    selected = [change_named(options.name)] if options.name else list(REGISTRY.values())
    described = [describe(kind) for kind in selected]
    if options.json:
        print(json.dumps(described[0] if options.name else described, indent=1))
        return 0
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console()
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 2, 1, 0))
    table.add_column("change", no_wrap=True)
    table.add_column("what it does, paper, cost, published gain")
    for change in described:
        name = Text(change["name"], style="bold")
        for short in change["short_forms"]:
            name.append(f"\n{short}", style="dim")
        record = Text.assemble(
            (change["title"], "bold"), f": {change['summary']}\n",
            (f"{change['paper']} {change['url']}\n", "dim"),
            ("slots     ", "cyan"), f"{', '.join(change['slots'])}\n",
            ("preserves ", "cyan"), f"{change['preserves']}\n",
            ("cost      ", "cyan"), f"{change['cost']}\n",
            ("published ", "cyan"), change["published"],
        )  # fmt: skip
        settings = [
            setting if value in (None, "") else f"{setting}={str(value).lower()}"
            for setting, value in change["settings"].items()
        ]
        if settings:
            record.append("\noptions   ", style="cyan")
            record.append(", ".join(settings))
        table.add_row(name, record)
    console.print(table)
    console.print("`vitmods paper` lists the papers' tables, line-ups of several arms.", style="dim")
    return 0


def change_named(name: str) -> Any:
    """Find a change's class by its name or a short form. Raises UserError, naming the nearest, for other names."""
    from vitmods.changes import REGISTRY
    from vitmods.study.arms import find_line_up

    if line_up := find_line_up(name):
        raise UserError(f"{name} is a line-up of several changes: `vitmods paper show {line_up.name}`.")
    return next((kind for kind in REGISTRY.values() if name in kind.short_forms), None) or REGISTRY[name]


def describe(kind: Any) -> dict[str, Any]:
    """Describe a change for people and programs."""
    from vitmods.changes import Change

    try:
        change = kind()
    except ValueError:  # its defaults change nothing
        change = kind(**(kind.example or next(iter(kind.short_forms.values()))))
    record = Change.describe(change)  # of the change as a whole, where a variant describes itself
    slots = sorted(map(str, change.claims))
    return {**record, "slots": slots, "settings": kind.settings(), "short_forms": list(kind.short_forms)}


def show_diff(arguments: Sequence[str]) -> int:
    """Run `vitmods diff`; returns the exit code."""
    options = parse(DiffOptions, arguments, "diff")
    import torch

    from vitmods.adapters.apply import apply
    from vitmods.adapters.diff import diff
    from vitmods.adapters.files import LIBRARIES, open_model
    from vitmods.changes import parse_changes
    from vitmods.model.vit import vit
    from vitmods.study.arms import refuse_line_ups

    refuse_line_ups(options.arm)
    changes = parse_changes(options.arm)
    torch.manual_seed(0)
    size = rows_and_columns(options.img_size)
    if options.base.partition(":")[0] in LIBRARIES:
        base = open_model(options.base, size)
    else:
        base = vit(options.base, img_size=size, in_chans=options.in_chans, num_classes=options.num_classes)
    print(diff(base, apply(base, *changes)))
    return 0
