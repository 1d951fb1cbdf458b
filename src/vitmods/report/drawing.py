"""Draw a model's stem and block from its config, with differences to base marked.

Three columns: the path through the model, the attention branch, the MLP branch. Empty slots are not drawn; a slot that
only base fills is struck out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup

from vitmods.layers import NORMS, STEMS
from vitmods.report.templates import templates

POSITIONS = {"learn": "+ position", **dict.fromkeys(("sincos2d", "sincos2d_centered", "sincos1d"), "+ position, fixed")}
ACTIVATIONS = {"gelu": "GELU", "gelu_tanh": "tanh GELU", "quick_gelu": "quick GELU"}
POOLS = {
    "token": "class token", "avg": "mean of tokens", "map": "attention pool", "none": "all tokens",
    "prefix": "class and register tokens", "token+avg": "class token, mean of tokens",
}  # fmt: skip

MODULES = "modules"  # key of a config that only lists the modules of a model
Config = Mapping[str, Any]


@dataclass(frozen=True)
class Box:
    """A step of a column."""

    slot: str
    text: str
    kind: str = "part"  # "part", "slot", "add"
    state: str = "same"  # "same", "added", "changed", "removed"


def draw(config: Config, base: Config | None = None, name: str = "model") -> Markup:
    """Return the SVG element of a model, without marks if `base` is None or does not have a config.

    A model that no ViTConfig describes gets a table of its modules, or of those that differ from base.
    """
    macros: Any = templates().get_template("drawing.html").module
    if MODULES in config:
        before, now = (base or {}).get(MODULES, {}), config[MODULES]
        differing = {place: kind for place, kind in now.items() if before.get(place) != kind}
        gone = [place for place in before if place not in now]
        return Markup(macros.modules(name, config["class"], differing, gone, bool(before)))
    if base is not None and MODULES in base:
        base = None
    depth, first = config.get("depth", ""), config.get("first_blocks")
    times = f"{first['count']} of {depth} ×" if first else f"{depth} ×"
    times += f" {config['parallel']}" if config.get("parallel", 1) > 1 else ""
    parts: dict[str, Callable[[Config], list[Box]]] = {
        "model": _through,
        f"attention, {times}": lambda c: list(_branch(c, "attn")),
        f"MLP, {times}": lambda c: list(_branch(c, "mlp")),
    }
    columns = {head: _mark(boxes(config), boxes(base) if base else None) for head, boxes in parts.items()}
    marks = {"same": "", "added": " (new)", "changed": " (changed)", "removed": " (removed)"}
    words = [", ".join(box.text + marks[box.state] for box in column) for column in columns.values()]
    label = f"{name}. Model: {words[0]}. Attention branch: {words[1]}. MLP branch: {words[2]}."
    return Markup(macros.drawing(columns, label, name))


def _mark(boxes: list[Box], base: list[Box] | None) -> list[Box]:
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
        *([Box("registers", f"+ {config['reg_tokens']} registers", "slot")] if config.get("reg_tokens") else []),
        *([Box("prompts", f"+ {config['prompts']} prompts", "slot")] if config.get("prompts") else []),
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
    if config.get("norm_scale"):
        yield Box(f"{which}.norm_scale", "/ root of depth", "slot")
    if attention and not config.get("qkv_bias", True):
        yield Box("qkv_bias", "no bias of q, k, v", "slot")
    if attention and config.get("qk_norm"):
        yield Box("qk_norm", f"{_norm_text(config['qk_norm'])} on q, k", "slot")
    if attention and config.get("rope"):
        yield Box("rope", "turn q, k", "slot")
    if attention and config.get("key_drop"):
        yield Box("key_drop", "drops keys", "slot")
    if attention and config.get("value_mix"):
        yield Box("value_mix", "+ first values", "slot")
    core = "attention + place" if config.get("positional") else "attention"
    core += " + offsets" if config.get("rel_pos") else ""
    mlps = {"mlp": f"linear, {ACTIVATIONS[config.get('activation', 'gelu')]}", "swiglu": "gated SiLU"}
    kind = str(config.get("mlp_kind", "mlp"))
    yield Box(f"{which}.core", core if attention else mlps.get(kind, kind))
    if attention and config.get("head_scale"):
        yield Box("head_scale", "scale of heads", "slot")
    yield from _norm(f"{which}.inner", slots.get("inner"))
    if attention and config.get("gate", "none") != "none":
        yield Box("gate", f"gate of each {config['gate']}", "slot")
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
