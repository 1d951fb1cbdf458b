"""`vitmods base`: base alone, as the reference of later studies."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

from vitmods.cli.compare import Compare, make_study, run
from vitmods.cli.options import announce, expected_folder, parse, readable_folder, with_key
from vitmods.study.budget import make_budget
from vitmods.study.executors.processes import start_template_early
from vitmods.util.errors import UserError
from vitmods.util.registry import plugin_options
from vitmods.util.text import plural

COMMON = "data base from task img-size recipe epochs seeds budget metric workers device out dry-run"
"""options that --help shows"""


@dataclass(frozen=True)
class Base(Compare):
    """Train a model without changes on many seeds; report its spread, learning curve and time.

    Studies of the same images and recipe in folders next to it reuse its trials, so that they train arms alone.

    examples:
      vitmods base --data path/to/images --base Ti/16 --seeds 16
      vitmods compare --data path/to/images --base Ti/16 --arms dpn     (then: base is known from 16 trials)
    """

    seeds: int | None = 16
    """number of trials"""

    def __post_init__(self) -> None:
        """Raise UserError for options of arms."""
        if self.settings.until_decided or self.max_seeds is not None:
            raise UserError("`vitmods base` decides nothing: set the number of trials with --seeds.")
        of_arms = self.arms, self.pretrain, self.pretrain_data, self.match, self.retrain, self.pilot, self.confirm
        if any(of_arms) or len(self.base) > 1 or self.settings.design or self.settings.sweep or self.settings.tune:
            raise UserError("`vitmods base` trains one model: arms and stages are options of `vitmods compare`.")
        super().__post_init__()


def main(arguments: Sequence[str]) -> int:
    """Run `vitmods base`; returns the exit code."""
    options = parse(Base, arguments, "base", COMMON)
    options = replace(options, start=with_key(options.start, options.key))
    data, base = options.dataset.data, Path(options.start).name if options.start else "".join(options.base)
    if not options.quiet:
        what = f"Training base{f' ({base})' if base else ''} on {data}, {plural(options.seeds or 0, 'seed')}"
        announce(what, expected_folder(options.out, data, base, "base"))
    machine = replace(options.options, progress=not options.quiet)
    with nullcontext() if options.dry_run else start_template_early(machine):
        machine.check_here()
        study = make_study(options, budget=make_budget(options.budget) if options.budget else None, alone=True)
        usual = "" if options.start else str(study.settings.fixed["base"])
        out = options.out or readable_folder(data, base or usual, "base")
        command = shlex.join(["vitmods", "base", *arguments, *plugin_options()])
        return run(study, options, out, {"options": machine, "command": command})
