"""Maps the tensors of a foreign model to ours, so that nothing is missing or left over.

Also infers what a file of tensors does not contain: the size of the images and the number of heads.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from math import isqrt

import torch
from torch import Tensor

from vitmods.model.names import SIZES
from vitmods.util.errors import UserError
from vitmods.util.text import Printed, first_of, plural

_BLOCK = re.compile(r"((?:blocks|layers?|encoder_layer|encoderblock)[._])\d+")
LEFTOVERS = {
    r"(.*\.)?(mask_token|mask(ed)?_embed\w*)(\.weight)?": "stands for masked patches, which a plain forward pass lacks",
    r"(.*\.)?position_ids": "numbers the positions",
    r"(.*\.)?relative_position_index": "numbers the offsets of tokens",
    r"(.*\.)?num_batches_tracked": "norms here do not count batches",
    r"(.*\.)?rope(_embed)?\.(freqs_cos|freqs_sin|periods)": "is computed here, and was compared",
    r"(.*\.)?bias_mask": "leaves the biases of keys out",
    r"(\w+\.)?decoder.*": "of the decoder of pre-training",
    r"(\w*predictor|local_cls_norm).*": "of pre-training",
    r"(\w+_)?head\.\w+\..*|\w+_head\..*|projectors?\..*": "of a head of pre-training",
    r"logit_(scale|bias)": "scales what images and texts have in common",
}
"""Names of tensors that a plain ViT does not read -> why. They are left out where no other tensor needs them."""
OUTSIDE = "outside the model's "


@dataclass(frozen=True)
class Layout:
    """How a foreign library stores one of our tensors: ``read`` makes ours, ``write`` is the inverse where needed.

    Parts of one foreign tensor are joined along ``dim``, in the order of ours."""

    read: Callable[..., Tensor]
    write: Callable[[Tensor], tuple[Tensor, ...]] | None = None
    dim: int = 0


def part_of(read: Callable[[Tensor], Tensor], dim: int = 0) -> Layout:
    """Ours is a part of a foreign tensor."""
    return Layout(read, lambda x: (x,), dim)


SAME = Layout(lambda x: x, lambda x: (x,))
TRANSPOSED = Layout(lambda x: x.T, lambda x: (x.T,))
STACKED = Layout(lambda *parts: torch.cat(parts), lambda x: x.chunk(3))
"""Query, key and value are separate tensors there; ours is one with the three below each other."""
WITHOUT_KEYS = Layout(lambda q, v: torch.cat([q, torch.zeros_like(q), v]), lambda x: x.chunk(3)[::2])
"""Biases of queries and values alone. One of the keys, zero here, adds the same to all logits of a query."""

Kinds = Mapping[str, tuple[str, Layout]]
"""Tensor of our module ("weight", "bias") -> ending of its foreign name, and how it is stored there."""
Table = Mapping[str, str | tuple[tuple[str, ...], Kinds]]
"""The names of a library: our tensor or module -> the foreign one, or foreign modules and their tensors. ``*`` is
the number of a block. Names that are not in it are the same there."""

HEADS: Kinds = {
    "weight": (".weight", Layout(lambda a, b: torch.cat([a, b], 1) / 2, lambda x: (2 * x).chunk(2, 1))),
    "bias": (".bias", Layout(lambda a, b: (a + b) / 2, lambda x: (x, x))),
}
"""The mean of a head on the class token and one on the distillation token, which is one head on both tokens."""
DISTILLED: Table = {"reg_token": "dist_token", "head": (("head", "head_dist"), HEADS)}
"""Names of a distilled DeiT."""


def packed_gate(mlp: str, packed: str) -> Table:
    """The names of a SwiGLU whose gate is the first half of one linear map."""
    halves = {"fc1_g": part_of(lambda x: x.chunk(2)[0]), "fc1_x": part_of(lambda x: x.chunk(2)[1])}
    kinds = ("weight", "bias")
    return {f"{mlp}.{n}": ((packed,), {kind: (f".{kind}", half) for kind in kinds}) for n, half in halves.items()}


@dataclass(frozen=True)
class Row:
    """One of our tensors, by name, and the foreign tensors that it is made of."""

    ours: str
    theirs: tuple[str, ...]
    layout: Layout = SAME


def rows_of(names: Iterable[str], table: Table) -> list[Row]:
    """Pair our tensors with the foreign ones that a library's table names."""
    rows: list[Row] = []
    for name in names:
        parts: tuple[str, ...]
        block = re.match(r"blocks\.(\d+)\.", name)
        pattern = f"blocks.*.{name[block.end() :]}" if block else name
        module, _, kind = pattern.rpartition(".")
        entry = table.get(pattern) or table.get(module, name)
        if isinstance(entry, str):
            parts, layout, ending = (entry,), SAME, f".{kind}" if pattern not in table and module in table else ""
        else:
            parts, (ending, layout) = entry[0], entry[1][kind]
        number = block[1] if block else "*"
        rows.append(Row(name, tuple(part.replace("*", number) + ending for part in parts), layout))
    return rows


def group_blocks(lines: Iterable[str]) -> list[str]:
    """Lines that differ in the number of a block alone become one."""
    counts = Counter(_BLOCK.sub(r"\1*", line) for line in lines)
    return [f"{line}  ({count}x)" if count > 1 else line for line, count in counts.items()]


@dataclass(frozen=True)
class Coverage(Printed):
    """The account of every tensor of a foreign model; prints as a table."""

    source: str
    rows: tuple[Row, ...]
    left_out: tuple[tuple[str, str], ...] = ()
    """(foreign tensor, why it takes no part)"""
    assumed: tuple[str, ...] = ()
    """settings that the source does not contain"""
    choice: str = ""
    """of several models in a file, which was read though nobody asked, and what else is there"""

    def __str__(self) -> str:
        went = group_blocks([f"{' + '.join(row.theirs)} -> {row.ours}" for row in self.rows])
        omitted = group_blocks([f"left out: {_part(name, why)} ({why})" for name, why in self.left_out])
        count = len({name for row in self.rows for name in row.theirs})
        head = f"{self.source}: {count} tensors read, {len(self.left_out)} left out, none missing"
        chosen = [f"chosen: {self.choice}"] * bool(self.choice)
        return "\n".join([head, *chosen, *went, *omitted, *(f"assumed: {setting}" for setting in self.assumed)])

    @property
    def summary(self) -> str:
        """What was chosen and what was left out, in a sentence; empty if all of the source is the model."""
        parts = dict[str, dict[str, None]]()
        for name, why in self.left_out:
            words = _part(name, why).split(".")
            label = ".".join(words) if OUTSIDE in why else words[0 if why.startswith("of ") else -1]
            parts.setdefault(why, {})[label] = None
        listed = "; ".join(f"{first_of([*names])} ({why})" for why, names in parts.items())
        left_out = [f"{plural(len(self.left_out), 'tensor')} left out: {listed}"] * bool(parts)
        said = [self.choice] * bool(self.choice) + left_out
        return f"Of {self.source} {'; '.join(said)}." if said else ""


def _part(name: str, why: str) -> str:
    """What is said of a tensor that is left out: its name, or the part of the file that it is in."""
    _, is_outside, place = why.partition(OUTSIDE)
    if not is_outside:
        return name
    shared = max(
        end for end in range(len(place) + 1) if end == 0 or (name.startswith(place[:end]) and place[end - 1] in "./")
    )
    return name[:shared] + re.split("[./]", name[shared:])[0]


def read_tensors(
    source: str,
    rows: Iterable[Row],
    theirs: Mapping[str, Tensor],
    left_out: Mapping[str, str] | None = None,
    assumed: Iterable[str] = (),
) -> tuple[dict[str, Tensor], Coverage]:
    """Our tensors from the foreign ones, and the account of all of them.

    ``left_out`` names foreign tensors that take no part, with the reason; `LEFTOVERS` does too. Raises UserError that
    lists what is missing and what is left over.
    """
    rows, left_out = tuple(rows), dict(left_out or {})
    wanted = {name for row in rows for name in row.theirs}
    missing = sorted(wanted - theirs.keys())
    surplus = sorted(theirs.keys() - wanted - left_out.keys())
    left_out |= {n: why for n in surplus for known, why in LEFTOVERS.items() if re.fullmatch(known, n)}
    surplus = [name for name in surplus if name not in left_out]
    problems = [
        f"{what}: {', '.join(group_blocks(names))}"
        for what, names in (("missing", missing), ("without a place here", surplus))
        if names
    ]
    if problems:
        way = " Merge LoRA before saving (peft: merge_and_unload)." if any("lora_" in name for name in surplus) else ""
        raise UserError(f"{source} cannot be read exactly. Tensors {'; tensors '.join(problems)}.{way}")
    weights = {row.ours: row.layout.read(*(theirs[name] for name in row.theirs)) for row in rows}
    return weights, Coverage(source, rows, tuple(left_out.items()), tuple(assumed))


def write_tensors(rows: Iterable[Row], ours: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the foreign tensors made from ours, contiguous; the inverse of ``read_tensors``."""
    written: dict[str, Tensor] = {}
    for row in rows:
        if row.layout.write is None:
            raise UserError(f"{' + '.join(row.theirs)} cannot be written back: {row.ours} has more values.")
        for name, part in zip(row.theirs, row.layout.write(ours[row.ours]), strict=True):
            written[name] = torch.cat([written[name], part], row.layout.dim) if name in written else part.contiguous()
    return written


Size = int | tuple[int, int] | None


def need(source: str, tensors: Mapping[str, Tensor], name: str, dimensions: int) -> Tensor:
    """A tensor that every file of this kind holds. Raises UserError without it or with another number of axes."""
    if name not in tensors:
        raise UserError(f"{source} cannot be read: the tensor {name} is missing.")
    if tensors[name].dim() != dimensions:
        raise UserError(
            f"{source} cannot be read: {name} has shape {tuple(tensors[name].shape)}, expected {dimensions} axes."
        )
    return tensors[name]


def count_blocks(source: str, names: list[str], before: str) -> int:
    """How many blocks there are with names such as ``before``, the block's number, and a dot or slash."""
    labels = {
        name.removeprefix(before).replace("/", ".").partition(".")[0] for name in names if name.startswith(before)
    }
    numbers = sorted(int(part) for part in labels if part.isdigit())
    if not numbers or numbers != list(range(len(numbers))):
        raise UserError(f"{source} cannot be read: its blocks are numbered {numbers}, expected 0, 1, 2 and so on.")
    return len(numbers)


def image_size(
    source: str, positions: int | None, prefix: int, patch: tuple[int, int], asked: Size
) -> tuple[tuple[int, int], bool]:
    """(rows, columns) of the images in pixels, and whether the ``prefix`` tokens have positions too.

    Without ``asked`` the patches form a square. Raises UserError when the number of positions allows no answer or
    two, or contradicts ``asked``.
    """
    if asked is not None:
        size = (asked, asked) if isinstance(asked, int) else (asked[0], asked[1])
        patches = (size[0] // patch[0]) * (size[1] // patch[1])
        if positions not in (None, patches, patches + prefix):
            raise UserError(
                f"{source} has {positions} positions, and img_size={size} needs {patches}"
                + (f" or {patches + prefix}" if prefix else "")
                + ": give the size that it was trained at, and call set_input_size afterwards."
            )
        return size, positions is not None and positions != patches
    if positions is None:
        raise UserError(
            f"{source} does not have learned positions, from which the size of its images would follow: give img_size."
        )
    sizes = []
    for on_prefix in (False, True) if prefix else (False,):
        patches = positions - prefix * on_prefix
        if patches > 0 and isqrt(patches) ** 2 == patches:
            sizes.append(((isqrt(patches) * patch[0], isqrt(patches) * patch[1]), on_prefix))
    if len(sizes) != 1:
        raise UserError(
            f"{source} has {positions} positions, which is {'no' if not sizes else 'more than one'} square of patches "
            f"with {prefix} tokens before them: give img_size, (rows, columns) in pixels."
        )
    return sizes[0]


def heads_of_width(source: str, width: int) -> int:
    """The number of heads in the published ViTs of this width. Raises UserError when there is none."""
    for size in ("Ti", "S", "B", "L", "H"):
        if SIZES[size][0] == width:
            return SIZES[size][3]
    raise UserError(
        f"{source} does not say how many heads it has, and no published ViT is {width} wide: give num_heads."
    )
