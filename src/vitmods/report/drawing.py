"""Draw a model's stem and block from its config, with differences to base marked.

Three columns: the path through the model, the attention branch, the MLP branch. Empty slots are not drawn; a slot that
only base fills is struck out.
"""

from __future__ import annotations

import html
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup

from vitmods.layers import NORMS, STEMS

POSITIONS = {"learn": "+ position", **dict.fromkeys(("sincos2d", "sincos2d_centered", "sincos1d"), "+ position, fixed")}
ACTIVATIONS = {"gelu": "GELU", "gelu_tanh": "tanh GELU"}
POOLS = {"token": "class token", "avg": "mean of tokens", "map": "attention pool", "none": "all tokens"}

MODULES = "modules"  # key of a config that only lists the modules of a model
COLUMN, GAP, BOX, STEP, TOP = 124, 14, 22, 31, 26
FONT, BOLD = 11.5, 140  # pixels; bold text of n letters fits into a box at BOLD / n pixels
Config = Mapping[str, Any]


@dataclass(frozen=True)
class Box:
    """A step of a column."""

    slot: str
    text: str
    kind: str = "part"  # "part", "slot", "add"
    state: str = "same"  # "same", "added", "changed", "removed"


def draw(config: Config, base: Config | None = None, name: str = "model") -> Markup:
    """Return the SVG element of a model, without marks if `base` is None or has no config.

    A model that no ViTConfig describes gets a table of its modules, or of those that differ from base.
    """
    if MODULES in config:
        return _module_table(config, (base or {}).get(MODULES, {}), name)
    if base is not None and MODULES in base:
        base = None
    columns = [
        _column(build(config), build(base) if base else None)
        for build in (_through, lambda c: list(_branch(c, "attn")), lambda c: list(_branch(c, "mlp")))
    ]
    height, width = TOP + STEP * max(map(len, columns)) + 4, 3 * COLUMN + 2 * GAP
    depth, first = config.get("depth", ""), config.get("first_blocks")
    times = f"{first['count']} of {depth} ×" if first else f"{depth} ×"
    times += f" {config['parallel']}" if config.get("parallel", 1) > 1 else ""
    heads = ("model", f"attention, {times}", f"MLP, {times}")
    body = "".join(
        _draw_column(column, i * (COLUMN + GAP), head, residual=i > 0)
        for i, (column, head) in enumerate(zip(columns, heads))
    )
    marks = {"same": "", "added": " (new)", "changed": " (changed)", "removed": " (removed)"}
    words = [", ".join(box.text + marks[box.state] for box in column) for column in columns]
    label = f"{name}. Model: {words[0]}. Attention branch: {words[1]}. MLP branch: {words[2]}."
    label = html.escape(label, quote=True)
    return Markup(f'<svg class="drawing" viewBox="0 0 {width} {height}" role="img" aria-label="{label}">{body}</svg>')


def _module_table(config: Config, before: Mapping[str, str], name: str) -> Markup:
    """Return a table of the modules, or of those that differ from base's."""
    modules = {where: what for where, what in config[MODULES].items() if before.get(where) != what}
    gone = [where for where in before if where not in config[MODULES]]
    rows = [
        f"<tr><td><code>{html.escape(where)}</code></td><td>{html.escape(what)}</td></tr>"
        for where, what in modules.items()
    ]
    rows += [f"<tr><td><del>{html.escape(where)}</del></td><td>removed</td></tr>" for where in gone]
    what = "Modules that differ from base" if before else "Modules"
    note = f"Not drawn: {html.escape(str(config['class']))} is not a vitmods ViT."
    if not rows:
        return Markup(f'<p class="note">{note} Its modules are the same as base&#39;s.</p>')
    head = '<thead><tr><th scope="col">module</th><th scope="col">type</th></tr></thead>'
    label = html.escape(f"Modules of {name}", quote=True)
    return Markup(
        f'<p class="note">{note}</p><details{" open" if before else ""}><summary>{what}</summary>'
        f'<div class="scroll" tabindex="0" role="region" aria-label="{label}">'
        f'<table class="compact modules">{head}<tbody>{"".join(rows)}</tbody></table></div></details>'
    )


def _column(boxes: list[Box], base: list[Box] | None) -> list[Box]:
    """Mark boxes that differ from base's; removed ones keep base's place."""
    if base is None:
        return boxes
    before = {box.slot: box for box in base}
    now = {box.slot for box in boxes}
    marked = []
    for box in boxes:
        old = before.get(box.slot)
        state = "added" if old is None else "same" if old.text == box.text else "changed"
        marked.append(Box(box.slot, box.text, box.kind, state))
    for i, box in enumerate(base):
        if box.slot not in now:
            earlier = {b.slot for b in base[:i]}
            place = max((k + 1 for k, b in enumerate(marked) if b.slot in earlier), default=0)
            marked.insert(place, Box(box.slot, box.text, box.kind, "removed"))
    return marked


def _through(config: Config) -> list[Box]:
    """From pixels to the head, with the blocks as one box."""
    size = config.get("patch_size", "?")
    rows, columns = size if isinstance(size, list | tuple) else (size, size)
    final = _norm("final_norm", config.get("final_norm"))
    pool = [Box("pool", POOLS.get(config.get("pool", "token"), str(config.get("pool"))))]
    reads_tokens = STEMS.get(config["stem"].get("kind")) is STEMS["tokens"]
    ends = [*(pool + final if config.get("norm_after_pool") else final + pool), Box("head", "head")]
    return [
        *([] if reads_tokens else [Box("patches", f"{rows} × {columns} patches")]),
        *_stem(config["stem"]),
        *([Box("position", POSITIONS[config["position"]])] if config.get("position", "learn") in POSITIONS else []),
        *_norm("position_norm", config.get("position_norm")),
        *([Box("patch_drop", "drops patches", "slot")] if config.get("patch_drop") else []),
        *_blocks(config),
        *(ends if config.get("num_classes", 1) else [*final, Box("head", "the task's modules")]),
    ]


def _stem(stem: Config) -> Iterator[Box]:
    kind = stem.get("kind", "linear")
    yield from _norm("stem.before", stem.get("before"))
    yield Box("linear", STEMS[kind].title if kind in STEMS else str(kind))
    if stem.get("inner"):
        yield Box("stem.inner", f"{_norm_text(stem['inner'])} inside", "slot")
    yield from _norm("stem.after", stem.get("after"))
    if stem.get("gelu"):
        yield Box("stem.gelu", "GELU", "slot")


def _blocks(config: Config) -> list[Box]:
    """All blocks as one box, or as two if the class and register tokens join between them."""
    depth, joins = config.get("depth", ""), config.get("prefix_from", 0)
    of = f" of {config['parallel']}" if config.get("parallel", 1) > 1 else ""
    if not joins:
        return [Box("blocks", f"{depth} blocks{of}")]
    token = "+ class token" if config.get("class_token", True) else "+ register tokens"
    first, others = (f"{count} block{'s' * (count != 1)}{of}" for count in (joins, depth - joins))
    return [Box("first", first), Box("prefix", token, "slot"), Box("blocks", others)]


def _branch(config: Config, which: str) -> Iterator[Box]:
    """One residual branch in the order of computation, of the first blocks if they differ from the others."""
    slots, attention = (config.get("first_blocks") or config)[which], which == "attn"
    yield from _norm(f"{which}.before", slots.get("before"))
    if attention and config.get("qk_norm"):
        yield Box("qk_norm", f"{_norm_text(config['qk_norm'])} on q, k", "slot")
    if attention and config.get("key_drop"):
        yield Box("key_drop", "drops keys", "slot")
    core = "attention + place" if config.get("positional") else "attention"
    mlps = {"mlp": f"linear, {ACTIVATIONS[config.get('activation', 'gelu')]}", "swiglu": "gated SiLU"}
    kind = str(config.get("mlp_kind", "mlp"))
    yield Box(f"{which}.core", core if attention else mlps.get(kind, kind))
    if attention and config.get("head_scale"):
        yield Box("head_scale", "scale of heads", "slot")
    yield from _norm(f"{which}.inner", slots.get("inner"))
    yield Box(f"{which}.out", "linear")
    yield from _norm(f"{which}.branch", slots.get("branch"))
    if config.get("layer_scale") is not None:
        yield Box(f"{which}.layer_scale", f"scale, {config['layer_scale']:g}", "slot")
    if not attention and config.get("residual_scale"):
        yield Box("residual_scale", "scale of the stream", "slot")
    yield Box(f"{which}.add", "+", "add")
    yield from _norm(f"{which}.after", slots.get("after"))


def _norm(slot: str, norm: Config | None) -> list[Box]:
    return [Box(slot, _norm_text(norm), "slot")] if norm else []


def _norm_text(norm: Config) -> str:
    kind = NORMS.get(norm["kind"])
    name = kind.title if kind else str(norm["kind"])
    return name if norm.get("affine", True) else f"{name}, fixed"


def _draw_column(boxes: list[Box], x: float, head: str, residual: bool) -> str:
    middle = x + COLUMN / 2
    bottom = TOP + STEP * (len(boxes) - 1) + BOX / 2
    parts = [f'<text class="head" x="{middle:g}" y="14">{html.escape(head)}</text>']
    parts.append(f'<path class="flow" d="M{middle:g} {TOP - 7}V{bottom + BOX / 2 + 8:g}"/>')
    for i, box in enumerate(boxes):
        y = TOP + STEP * i + BOX / 2
        if box.kind == "add" and residual:
            parts.append(f'<path class="flow" d="M{middle:g} {TOP - 4}H{x + 4:g}V{y:g}H{middle - 9:g}"/>')
        parts.append(_draw_box(box, x, y))
    return "".join(parts)


def _draw_box(box: Box, x: float, y: float) -> str:
    middle = x + COLUMN / 2
    if box.kind == "add":
        plus = f"M{middle - 5:g} {y:g}h10M{middle:g} {y - 5:g}v10"
        return f'<circle class="add" cx="{middle:g}" cy="{y:g}" r="9"/><path class="plus" d="{plus}"/>'
    text, width = html.escape(box.text), COLUMN - 24
    shape = f'<rect class="{box.kind}" x="{x + 12:g}" y="{y - BOX / 2:g}" width="{width:g}" height="{BOX}" rx="5"/>'
    bold = box.state in ("added", "changed")
    size = f' style="font-size: {BOLD / len(box.text):.1f}px"' if bold and len(box.text) > BOLD / FONT else ""
    return f'<g class="{box.state}">{shape}<text x="{middle:g}" y="{y + 4:g}"{size}>{text}</text></g>'
