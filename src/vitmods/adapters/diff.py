"""Differences between two models: modules, parameters, costs, outputs."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from vitmods.adapters.apply import as_vit, preserved, verify
from vitmods.adapters.inputs import find_inputs
from vitmods.adapters.running import difference, run, tensors_of
from vitmods.adapters.surgery import parts_of, width_of
from vitmods.changes import Change
from vitmods.changes.insertions import After, Heads, OnBranch
from vitmods.model.flops import count_macs, count_params
from vitmods.model.vit import ViT
from vitmods.util.errors import UserError
from vitmods.util.text import Printed


@dataclass(frozen=True)
class Diff(Printed):
    """Differences between two models; prints as a table."""

    params: tuple[int, int]
    macs: tuple[int, int]
    added: tuple[str, ...]
    removed: tuple[str, ...]
    changed: tuple[str, ...]
    preserves: str
    drift: float
    """Largest difference of outputs on these images, relative to the largest output."""
    images: str
    changes: tuple[str, ...]
    papers: tuple[str, ...]
    advice: tuple[str, ...] = ()
    """the papers' advice against it in a model like this; in place, where it sits in post-norm blocks"""
    attentions: str = ""
    """in place, how many of the model's attentions were changed, and why the others were not"""
    in_place: str = ""
    """the class that a model of another library kept"""

    def to_dict(self) -> dict[str, Any]:
        values = {"flops" if field.name == "macs" else field.name: getattr(self, field.name) for field in fields(self)}
        return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}

    def __str__(self) -> str:
        rows = [
            ("changes", " + ".join(self.changes) or "none"),
            ("parameters", _compare(self.params, 1e6, "M")),
            ("multiply-adds", _compare(self.macs, 1e9, "G")),
            *((kind, names) for kind in ("added", "removed", "changed") for names in _group(getattr(self, kind))),
            ("preserves", f"{self.preserves} (outputs on {self.images} differ by {self.drift:.1e} of the largest)"),
            *((("in place", f"a {self.in_place} with the names of its weights"),) if self.in_place else ()),
            *((("attentions", self.attentions),) if self.attentions else ()),
            *(("paper", paper) for paper in self.papers),
            *(("advice", advice) for advice in self.advice),
        ]
        lines, last = [], ""
        for label, text in rows:
            lines.append(f"{'' if label == last else label:<14} {text}")
            last = label
        return "\n".join(lines)


def _compare(pair: tuple[int, int], unit: float, sign: str) -> str:
    old, new = pair
    return f"{old / unit:.2f} {sign} -> {new / unit:.2f} {sign}  ({new - old:+,}, x{new / old:.4f})"


def _group(names: Sequence[str]) -> list[str]:
    """The same module in every block becomes one line."""
    patterns = Counter(".".join("*" if part.isdigit() else part for part in name.split(".")) for name in names)
    return [f"{pattern}  ({count}x)" if count > 1 else pattern for pattern, count in patterns.items()]


def diff(old: nn.Module, new: nn.Module, images: torch.Tensor | None = None) -> Diff:
    """Compare ``new`` with ``old``: modules, parameters, multiply-adds, what was preserved, papers.

    Both are models that ``apply`` takes. ``images`` (B, in_chans, height, width), made as for training, are what the
    outputs are compared on; without them two random images are. ``print`` it for a table. Raises UserError for other
    models.
    """
    if hasattr(new, "vm_changes"):
        return _diff_in_place(old, new, images)
    before, after = as_vit(old), as_vit(new)
    changes = after.changes[len(before.changes) :]
    in_training = _in_training(before, after) if any(change.acts_in == "training" for change in changes) else ()
    return Diff(
        **_facts(before, after, changes, in_training),
        macs=(count_macs(before.vit_config), count_macs(after.vit_config)),
        drift=verify(before, after, images=images),
        images="random images" if images is None else f"{len(images)} given images",
        advice=tuple(f"{change}: {advice}" for change in changes if (advice := change.advice(after.vit_config))),
    )


def _diff_in_place(old: nn.Module, new: nn.Module, images: torch.Tensor | None) -> Diff:
    """Compare a model of another library with a copy that was changed in place. Multiply-adds are PyTorch's count."""
    given = getattr(new, "vm_example", None) if images is None else images
    inputs = find_inputs(old, given, width_of(old))
    if inputs is None:
        raise UserError(f"No input that a {type(old).__name__} runs on could be made: give images=.")
    macs, outputs = [], []
    for model in (old, new):
        with FlopCounterMode(display=False) as counter:  # which fails on views of parameters without gradients
            made = run(model, inputs, gradients=True)
        outputs.append([out.detach() for out in made if out.is_floating_point()])
        macs.append(counter.get_total_flops() // 2 // len(next(tensors_of(inputs))))
    before, after = (getattr(model, "vm_changes", ()) for model in (old, new))
    changes: tuple[Change, ...] = after[len(before) :]
    parts = [parts_of(values) for values in getattr(new, "vm_record", ())[len(before) :]]
    inserted = [list(change.insertions(part)) for change, part in zip(changes, parts, strict=True)]
    of_attention = [
        p for p, kinds in zip(parts, inserted, strict=True) if any(isinstance(i, OnBranch | Heads) for i in kinds)
    ]
    counts = [
        f"{len(p.attentions)} of {len(p.attentions) + len(p.others)} changed"
        + "".join(f"; {name}: {why}" for name, why in p.others)
        for p in of_attention
    ]
    return Diff(
        **_facts(old, new, changes),
        macs=(macs[0], macs[1]),
        drift=difference(*outputs),
        images=("a random input" if given is None else "the example")
        if images is None
        else f"{len(images)} given images",
        advice=tuple(
            f"{change}: in the post-norm blocks of this model it sits on the branches, before the norms of the sums"
            for change, part, kinds in zip(changes, parts, inserted, strict=True)
            if part.post_norm and any(isinstance(insertion, After) for insertion in kinds)
        ),
        attentions=" and ".join(dict.fromkeys(counts)),
        in_place=type(new).__name__,
    )


def _facts(
    old: nn.Module, new: nn.Module, changes: Sequence[Change], in_training: Sequence[str] = ()
) -> dict[str, Any]:
    """Compare modules and parameters, and describe the changes."""
    first, second = _leaves(old), _leaves(new)
    changed = [f"{n}: {first[n]} -> {second[n]}" for n in second if n in first and first[n] != second[n]]
    return {
        "params": (count_params(old), count_params(new)),
        "added": tuple(n for n in second if n not in first),
        "removed": tuple(n for n in first if n not in second),
        "changed": (*changed, *in_training),
        "preserves": preserved(changes),
        "changes": tuple(map(str, changes)),
        "papers": tuple(dict.fromkeys(change.describe()["paper"] for change in changes)),
    }


def _in_training(before: ViT, after: ViT) -> list[str]:
    """List settings of changes that act in training alone, which need not be modules."""
    names = [f.name for f in fields(before.vit_config) if f.name.endswith(("_drop", "_path"))]
    pairs = [(name, getattr(before.vit_config, name), getattr(after.vit_config, name)) for name in names]
    return [f"{name}: {old:g} -> {new:g} in training" for name, old, new in pairs if old != new]


def _leaves(model: nn.Module) -> dict[str, str]:
    """Modules without children that are not empty slots, and the model's own parameters: name -> what it is."""
    leaves = {n: f"Parameter{tuple(p.shape)}" for n, p in model.named_parameters(recurse=False)}
    modules = ((n, m) for n, m in model.named_modules() if not list(m.children()) or n == "patch_embed")
    return leaves | {
        n: type(m).__name__ if n == "patch_embed" else repr(m) for n, m in modules if not isinstance(m, nn.Identity)
    }
