"""Checks of what vitmods relies on, for authors of changes, norms and stems; its own tests run the same ones.

`check_change(MyChange())`, `check_norm("mine")` and `check_stem("mine")` return, or raise AssertionError with the
promise that does not hold and where. Each takes a few seconds on a CPU and needs no data.
"""

import copy
import dataclasses
import pickle
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatch
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from vitmods.adapters.apply import apply
from vitmods.changes import REGISTRY, Change, parse_changes
from vitmods.layers.norms import NORMS
from vitmods.layers.norms.contract import NormKind
from vitmods.layers.stems import STEMS, Stem, StemSize, patchify
from vitmods.model.config import ViTConfig
from vitmods.model.vit import ViT
from vitmods.util.errors import UserError

GRID = {"num_heads": 2, "grid_size": (2, 4), "prefix_tokens": 1}
"""what a norm may ask of the model, in its checks"""
DIM = 8
BFLOAT16_STEP = torch.finfo(torch.bfloat16).eps


def check_change(change: Change | str, config: ViTConfig | None = None) -> None:
    """Check a change with its settings, on a small ViT.

    Args:
        change: `MyChange(scale=2)`, or as in the shell: "mychange(scale=2)".
        config: of a ViT that the change alters; None: two blocks with patches of 4 pixels, images of 8.

    Raises AssertionError for a promise that does not hold, and UserError where `vm.apply` refuses the change.
    """
    for one in parse_changes(change) if isinstance(change, str) else (change,):
        case = ChangeCase(one, config)
        _run(f"The change '{one}'", CHANGE_CHECKS, case)
        _run(f"A model with the change '{one}'", GRAPH_CHECKS, case.changed, case.images)


def check_norm(kind: str | NormKind, **options: Any) -> None:
    """Check a registered norm with options of its own. Raises AssertionError for a promise that does not hold."""
    case = NormCase(NORMS[kind] if isinstance(kind, str) else kind, options)
    _run(f"The norm '{case.kind.name}'", NORM_CHECKS, case)


def check_stem(kind: str | type[Stem], size: StemSize | None = None, **slots: Any) -> None:
    """Check a registered stem of images.

    Args:
        kind: its name in `STEMS`, or its class.
        size: image, patch, channels and width; None: 32 x 48 pixels in patches of 16, 2 channels, width 32.
        slots: what its constructor gets, such as `norm_layer`.

    Raises AssertionError for a promise that does not hold, and UserError for a stem of sequences.
    """
    module = STEMS[kind] if isinstance(kind, str) else kind
    if module.sequences:
        raise UserError(f"check_stem checks stems that read images, and {module.__name__} reads sequences of tokens.")
    _run(
        f"The stem '{module.title}'", STEM_CHECKS, StemCase(module, size or StemSize((32, 48), (16, 16), 2, 32), slots)
    )


Check = Callable[..., None]


def _run(what: str, checks: Mapping[str, Check], *case: Any) -> None:
    for promise, check in checks.items():
        try:
            check(*case)
        except UserError:
            raise
        except Exception as error:
            kind = "" if isinstance(error, AssertionError) else f"{type(error).__name__}: "
            raise AssertionError(f"{what} breaks a promise, {promise}. {kind}{error}") from error


def _require(holds: object, message: str) -> None:
    if not holds:
        raise AssertionError(message)


def _refused(call: Callable[[], object], error: type[Exception], message: str) -> None:
    try:
        call()
    except error:
        return
    raise AssertionError(message)


def _facts(owner: object, names: tuple[str, ...], documented: type) -> None:
    for name in names:
        value = getattr(owner, name, "")
        _require(value.strip() == value != "", f"The fact '{name}' is missing, or begins or ends with a space.")
    url = getattr(owner, "url", "")
    _require(not url or url.startswith("https://"), f"url is an address that begins with https://, not '{url}'.")
    doc = vars(documented).get("__doc__") or ""
    _require(doc and not doc.startswith(f"{documented.__name__}("), f"{documented.__name__} needs a docstring.")


def _same_copies(module: nn.Module, fresh: nn.Module, inputs: Tensor) -> None:
    expected, state = module.eval()(inputs), copy.deepcopy(module.state_dict())
    fresh.load_state_dict(state)
    for other in (pickle.loads(pickle.dumps(module)), copy.deepcopy(module), fresh):
        _require(torch.equal(other.eval()(inputs), expected), "A copy has other outputs.")
        _require(str(other) == str(module), f"A copy is called {other}, not {module}.")
    for name, value in module.state_dict().items():
        _require(torch.equal(value, state[name]), f"Evaluation moves {name}.")


def _gradients(model: nn.Module, inputs: Tensor) -> list[Tensor]:
    model.zero_grad()
    torch.manual_seed(2)
    out = model(inputs)
    out.float().square().sum().backward()
    return [out.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


def _all_learn(module: nn.Module, inputs: Tensor) -> None:
    inputs = inputs.clone().requires_grad_()
    module(inputs).sin().sum().backward()
    for name, given in [("The input", inputs), *module.named_parameters()]:
        if given.requires_grad:
            _require(given.grad is not None and given.grad.any(), f"{name} gets no gradient: it reaches no output.")
            _require(given.grad is None or given.grad.isfinite().all(), f"{name} has a gradient of NaN.")


# Models as graphs: of one change, or of several together.


def compiles(model: nn.Module, inputs: Tensor, backend: str = "eager") -> None:
    torch._dynamo.reset()  # the recompile limit counts over all models of this process
    try:
        expected = _gradients(copy.deepcopy(model), inputs)  # a copy, since training moves what some norms keep
        compiled: Any = torch.compile(model, fullgraph=True, backend=backend)
        for a, b in zip(_gradients(compiled, inputs), expected, strict=True):
            torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-4)
    finally:
        torch._dynamo.reset()


def exports(model: nn.Module, inputs: Tensor) -> None:
    model.eval()
    with torch.no_grad():
        program = torch.export.export(model, (inputs,))
        torch.testing.assert_close(program.module()(inputs), model(inputs), atol=1e-5, rtol=1e-5)


def is_one_graph(module: nn.Module, inputs: Tensor) -> None:
    """What torch.compile makes without a break, and torch.export exports, in evaluation."""
    torch._dynamo.reset()
    compiled: Any = torch.compile(module, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(inputs), module(inputs))
    torch._dynamo.reset()
    exports(module, inputs)


def traces(model: nn.Module, inputs: Tensor) -> None:
    trace: Any = torch.jit.trace
    trace(copy.deepcopy(model).train(), inputs, check_trace=False)  # as TensorBoard's add_graph does
    traced, other = trace(model.eval(), inputs, check_trace=False), inputs.flip(0) + 0.1
    torch.testing.assert_close(traced(other), model(other), atol=1e-5, rtol=1e-5)


def differentiates_twice(model: nn.Module, inputs: Tensor) -> None:
    model, x, step = copy.deepcopy(model).double().eval(), inputs.double(), 1e-7
    if getattr(model, "reg_token", None) is not None:  # near 0 a norm is too steep for differences
        nn.init.normal_(typing.cast(Tensor, model.reg_token))
    names = [name for name, _ in model.named_parameters()]
    values = (x, *(p.detach() for p in model.parameters()))
    generator = torch.Generator().manual_seed(2)
    along = tuple(torch.randn(v.shape, dtype=v.dtype, generator=generator) * 0.1 for v in values)

    def loss(x: Tensor, *parameters: Tensor) -> Tensor:
        y: Tensor = torch.func.functional_call(model, dict(zip(names, parameters, strict=True)), (x,))
        return (y * torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view_as(y)).sum()

    def gradient(sign: int) -> tuple[Tensor, ...]:
        moved = [(v + sign * step * d).requires_grad_() for v, d in zip(values, along, strict=True)]
        return torch.autograd.grad(loss(*moved), moved)

    with sdpa_kernel(SDPBackend.MATH):
        expected = [(a - b) / (2 * step) for a, b in zip(gradient(1), gradient(-1), strict=True)]
        hvp: Any = torch.autograd.functional.hvp
        by_autograd = hvp(loss, values, along)[1]
        by_func = torch.func.jvp(torch.func.grad(loss, tuple(range(len(values)))), values, along)[1]
    for a, b, c in zip(by_autograd, by_func, expected, strict=True):
        torch.testing.assert_close(a, c, atol=2e-5 * max(1.0, float(c.abs().max())), rtol=0)
        torch.testing.assert_close(b, a, atol=1e-9 * max(1.0, float(a.abs().max())), rtol=0)


GRAPH_CHECKS: dict[str, Check] = {
    "torch.compile makes one graph of it": compiles,
    "torch.export exports it": exports,
    "torch.jit.trace traces it": traces,
    "second derivatives are those of its gradients": differentiates_twice,
}


class ChangeCase:
    """A change, a small base whose gains and biases are those of a trained model, and two images."""

    def __init__(self, change: Change, config: ViTConfig | None = None) -> None:
        self.change = change
        self.config = config or ViTConfig.from_name("mu2/4", img_size=8, num_classes=5)
        self.images = torch.randn(
            2, self.config.in_chans, *self.config.img_size, generator=torch.Generator().manual_seed(1)
        )

    @cached_property
    def _base(self) -> ViT:
        torch.manual_seed(0)
        model = ViT(self.config)
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1:
                nn.init.normal_(parameter, mean=float("norm" in name and name.endswith("weight")), std=0.1)
        return model

    @cached_property
    def _changed(self) -> ViT:
        torch.manual_seed(3)
        return apply(self.base, self.change)

    @property
    def base(self) -> ViT:
        """A copy."""
        return copy.deepcopy(self._base)

    @property
    def changed(self) -> ViT:
        """A copy of base with the change."""
        return copy.deepcopy(self._changed)


def _parts(model: nn.Module) -> list[tuple[str, object]]:
    own: list[tuple[str, object]] = [(name, p.shape) for name, p in model.named_parameters()]
    return own + [(name, repr(m)) for name, m in model.named_modules() if not list(m.children())]


def _change_facts(case: ChangeCase) -> None:
    kind = type(case.change)
    _facts(kind, ("name", "title", "paper", "url", "summary", "cost", "published"), kind)
    _require(kind.summary.endswith("."), "summary is a sentence: end it with a period.")
    for name in (kind.name, *kind.short_forms):
        plain = name == name.lower() and name.replace("_", "").replace("-", "").isalnum()
        _require(plain, f"The shell cannot write the name '{name}': use small letters, digits, - and _.")
    _require(REGISTRY.get(kind.name) is kind, f"The name '{kind.name}' belongs to another change.")


def _is_a_value(case: ChangeCase) -> None:
    change = case.change
    spaced = str(change).replace("(", " ( ").replace(",", " , ").replace("=", " = ")
    for text in (str(change), f"  {spaced}  "):
        _require(parse_changes(text) == (change,), f"'{text}' in the shell is {parse_changes(text)}.")
    _require(pickle.loads(pickle.dumps(change)) == change, "Pickled and unpickled it is another one.")
    _require(hash(copy.deepcopy(change)) == hash(change), "A copy has another hash.")
    frozen = "Its fields can be set: use @dataclass(frozen=True)."
    _refused(lambda: setattr(change, "whatever", 1), dataclasses.FrozenInstanceError, frozen)
    _require(change.edit(case.config) == change.edit(case.config), "edit gives another config the second time.")
    _require(change.claims, "fills is empty: name the slots that it fills (vitmods.model.slots.Slot).")


def _alters_as_declared(case: ChangeCase) -> None:
    change, base, changed = case.change, case.base, case.changed
    trains_only = change.acts_in == "training"
    _require(changed.vit_config != base.vit_config, "edit returns the config as it was.")
    _require(_parts(changed) != _parts(base) or trains_only, "The model has the same modules as before.")
    _require(changed.changes == (change,), f"The model says that its changes are {changed.changes}.")
    with torch.no_grad():
        old, new = base.eval()(case.images), changed.eval()(case.images)
    moved = float((old - new).abs().max() / old.abs().max())
    if change.preserves == "function":
        _require(moved <= 1e-5, f"It preserves the function, but outputs move by {moved:.1g}: preserve 'weights'.")
    else:
        _require(moved > 1e-4, "Outputs stay the same: let it preserve 'function'.")
    weights, before = changed.state_dict(), base.state_dict()
    dropped = change.drops(base.vit_config, changed.vit_config)
    for name, value in before.items():
        if any(fnmatch(name, pattern) for pattern in dropped):
            continue
        if change.preserves != "weights":
            _require(name in weights, f"The weight {name} is lost, and drops does not name it.")
        else:
            kept = any(value.shape == other.shape and torch.equal(value, other) for other in weights.values())
            _require(kept, f"It preserves weights, and the values of {name} are lost.")
    if trains_only:
        _require(change.preserves == "function", "A change that acts in training alone preserves 'function'.")
        same = weights.keys() == before.keys() and all(torch.equal(weights[name], before[name]) for name in before)
        _require(same, "It acts in training alone, and the weights differ.")
        old, new, again = (_gradients(model.train(), case.images)[0] for model in (base, changed, changed))
        _require(float((old - new).abs().max()) > 1e-4, "In training the outputs are those of base.")
        _require(torch.equal(new, again), "Random numbers are not those of torch.manual_seed.")


def _leaves_base_alone(case: ChangeCase) -> None:
    base = case.base
    before, config, parts = copy.deepcopy(base.state_dict()), base.vit_config, _parts(base)
    new = apply(base, case.change)
    with torch.no_grad():
        for parameter in new.parameters():
            parameter.add_(1)
    for name, value in base.state_dict().items():
        _require(torch.equal(value, before[name]), f"The models share the weight {name}: carry a copy.")
    _require((base.vit_config, _parts(base), base.changes) == (config, parts, ()), "The model before is another one.")


def _learns(case: ChangeCase) -> None:
    changed, images = case.changed, case.images
    exact = _gradients(changed, images)
    with torch.autocast("cpu", torch.bfloat16):
        rough = _gradients(changed, images)
    _require(rough[0].dtype == torch.bfloat16, f"Under autocast the output is {rough[0].dtype}.")
    off, scale = float((rough[0].float() - exact[0]).abs().max()), float(exact[0].abs().max())
    _require(off < 0.05 * scale + 0.01, f"Under autocast the output is off by {off:.2g}, of {scale:.2g}.")
    finite = all(gradient.isfinite().all() and gradient.dtype == torch.float32 for gradient in rough[1:])
    _require(finite, "Under autocast gradients are not finite numbers of float32.")
    with torch.no_grad():  # what starts at 0, such as a gate, hides what is behind it
        for parameter in changed.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.02)
    changed.zero_grad()
    _all_learn(changed, images)
    new = apply(case.base.bfloat16(), case.change)
    found = {p.dtype for p in new.parameters()} | {new(images.bfloat16()).dtype}
    _require(found == {torch.bfloat16}, f"Of a model in bfloat16, weights and outputs are {found}.")


def _checkpoints(case: ChangeCase) -> None:
    plain, again = case.changed, case.changed
    again.set_grad_checkpointing()
    pairs = zip(_gradients(plain, case.images), _gradients(again, case.images), strict=True)
    _require(all(torch.equal(a, b) for a, b in pairs), "Gradients differ with set_grad_checkpointing.")
    for (name, a), b in zip(plain.named_buffers(), again.buffers(), strict=True):
        _require(torch.equal(a, b), f"The buffer {name} differs with set_grad_checkpointing: it is counted twice.")


def _model_copies(case: ChangeCase) -> None:
    changed, config = case.changed, case.changed.vit_config
    _same_copies(changed, ViT(config), case.images)
    _require(copy.deepcopy(changed).changes == changed.changes, "A copy forgets its changes.")
    _require(ViTConfig.from_json(config.to_json()) == config, "The config is another one after to_json and from_json.")


CHANGE_CHECKS: dict[str, Check] = {
    "its facts are filled in": _change_facts,
    "it is a value that the shell can write": _is_a_value,
    "it alters the model as it declares": _alters_as_declared,
    "it leaves the old model alone": _leaves_base_alone,
    "every parameter learns, in half precision too": _learns,
    "gradient checkpointing changes nothing": _checkpoints,
    "copies are the model": _model_copies,
}


@dataclass(frozen=True)
class NormCase:
    """A kind of norm with options of its own, over tokens of 8 images with one prefix token and 2 x 4 patches."""

    kind: NormKind
    options: Mapping[str, Any]

    def fresh(self, affine: bool = True) -> nn.Module:
        return self.kind.factory(1e-5, affine, self.options, **GRID)(DIM)

    def trained(self, affine: bool = True) -> nn.Module:
        torch.manual_seed(0)
        norm = self.fresh(affine)
        for name, parameter in norm.named_parameters():
            nn.init.normal_(parameter, float(name == "weight"), 0.2)
        return norm

    @property
    def tokens(self) -> Tensor:
        return torch.randn(8, 9, DIM, generator=torch.Generator().manual_seed(1))


def _norm_facts(case: NormCase) -> None:
    kind = case.kind
    _facts(kind, ("title", "paper", "url", "how", "published"), kind.module)
    _require(kind.least_tokens >= 1, "least_tokens is at least 1.")
    _require(bool(kind.shorts) == kind.replaces, "shorts are names for the shell, if the norm replaces others.")
    taken = set(kind.options) & {"dim", "eps", "affine", "device", "dtype", *kind.takes}
    _require(not taken, f"The options {', '.join(taken)} have names that mean something else.")


def _norm_half(case: NormCase) -> None:
    """Values near 20: squares and sums of half-precision numbers would be off by far more than one rounding."""
    pairs = ((torch.bfloat16, torch.float32), (torch.float16, torch.float32), (torch.bfloat16, torch.bfloat16))
    for dtype, weights in pairs:
        norm = case.trained().to(weights)
        x = (case.tokens * 0.1 + 20).to(dtype).requires_grad_()
        expected = copy.deepcopy(norm).double()(x.detach().double()).detach()
        y = norm(x)
        _require((y.dtype, y.shape) == (dtype, x.shape), f"Of {dtype} tokens it makes {y.dtype} of shape {y.shape}.")
        _require(expected.dtype == torch.float64, f"Of float64 tokens it makes {expected.dtype}.")
        off, most = float((y.detach().double() - expected).abs().max()), float(expected.abs().max())
        _require(off <= 3 * BFLOAT16_STEP * most, f"Of {dtype} tokens it is off by {off:.2g}: compute in float32.")
        y.float().square().sum().backward()
        learned = [p.grad for p in norm.parameters()]
        _require(
            x.grad is not None and x.grad.dtype == dtype and x.grad.isfinite().all(),
            f"Gradients of {dtype} tokens are not finite.",
        )
        typed = all(g is not None and g.isfinite().all() and g.dtype == weights for g in learned)
        _require(typed, f"Gradients of {weights} weights are not finite numbers of that type.")


def _norm_autocast(case: NormCase) -> None:
    """Matrix products, such as whitening's, are rounded; statistics are not."""
    norm, x = case.trained().eval(), case.tokens.requires_grad_()

    def found() -> list[Tensor]:
        return [norm(x), *torch.autograd.grad(norm(x).pow(3).sum(), [x, *norm.parameters()])]

    plain = found()
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(found(), plain, atol=0.05, rtol=0.05)
        _require(norm(x.bfloat16()).dtype == torch.bfloat16, "Under autocast the type of tokens changes.")


def _norm_constant(case: NormCase) -> None:
    """The variance of equal values is 0, not a little less."""
    norm: Any = case.trained()
    if hasattr(norm, "eps"):
        norm.eps = 1e-12
    for value in (0.0, 0.1, 1e3):
        x = torch.full_like(case.tokens, value, requires_grad=True)
        y = norm(x)
        y.sum().backward()
        finite = y.isfinite().all() and x.grad is not None and x.grad.isfinite().all()
        _require(finite, f"Tokens of {value} alone give NaN or infinity.")


def _norm_reads(case: NormCase) -> None:
    norm: Any = case.trained().train()
    kind, x, other = case.kind, case.tokens, case.tokens
    other[0, 5, 0] += 1
    moved = (norm(other) - norm(x)).abs().amax(-1) > 1e-6
    _require(moved[0, 5], "A token that changes has the same output.")
    others = bool(moved[0].sum() > 1)
    wanted = "token_wise = True" if not others else "token_wise = False"
    _require(others == (not kind.token_wise), f"Say {wanted}: a token {'moves' if others else 'leaves'} the others.")
    if kind.token_wise:
        _require(torch.equal(norm(x)[:, 1:3], norm(x[:, 1:3])), "Of fewer tokens it makes something else.")
    images = bool(moved[1:].any())
    wanted = "image_wise = True" if not images else "image_wise = False"
    image_wise = getattr(kind.module, "image_wise", False) or getattr(norm, "image_wise", False)
    _require(images == (not image_wise), f"Say {wanted}: an image {'moves' if images else 'leaves'} the others.")


def _norm_starts(case: NormCase) -> None:
    norm: Any = case.trained()
    if list(norm.parameters()):
        torch.manual_seed(2)
        fresh = case.fresh()
        torch.manual_seed(2)
        norm.reset_parameters()
        for (name, value), start in zip(norm.named_parameters(), fresh.parameters(), strict=True):
            _require(torch.equal(value, start), f"reset_parameters does not set {name} to its start.")
    with torch.device("meta"):
        shapes = case.fresh().bfloat16()
        _require(all(p.is_meta for p in shapes.parameters()), "Parameters are not on the default device.")
        try:
            shape = shapes(torch.empty(8, 9, DIM)).shape
        except (NotImplementedError, RuntimeError):  # an operation of PyTorch that has no form for shapes alone
            return
        _require(shape == (8, 9, DIM), f"Tokens (8, 9, {DIM}) become {tuple(shape)}.")


def _norm_folds(case: NormCase) -> None:
    """What folding for inference rests on."""
    if not case.kind.folds:
        return
    norm: Any = case.trained().eval()
    bare, x = case.trained(affine=False).eval(), case.tokens
    bare.load_state_dict({n: v for n, v in norm.state_dict().items() if n not in ("weight", "bias")})
    bias = getattr(norm, "bias", None)
    _require((bias is not None) == case.kind.biased, "It has a bias sometimes.")
    expected = bare(x) * norm.weight / case.kind.unit(DIM) + (0 if bias is None else bias)
    torch.testing.assert_close(norm(x), expected)


def _norm_refuses(case: NormCase) -> None:
    kind = case.kind
    for eps in (0.0, -1e-5) if "eps" in kind.arguments else ():
        make = partial(kind.factory(eps, True, case.options, **GRID), DIM)
        _refused(make, ValueError, f"eps={eps} is accepted: raise ValueError.")


NORM_CHECKS: dict[str, Check] = {
    "its facts are filled in": _norm_facts,
    "constant tokens stay finite": _norm_constant,
    "every parameter learns": lambda case: _all_learn(case.trained(), case.tokens),
    "half precision comes out as it goes in, with statistics in float32": _norm_half,
    "autocast changes nothing but products": _norm_autocast,
    "token_wise and image_wise say who reads whom": _norm_reads,
    "parameters start anew, on any device": _norm_starts,
    "copies are the norm": lambda case: _same_copies(case.trained(), case.fresh(), case.tokens),
    "it is one graph": lambda case: is_one_graph(case.trained().eval(), case.tokens),
    "a gain and a shift that fold are its last step": _norm_folds,
    "wrong settings are refused": _norm_refuses,
}


@dataclass(frozen=True)
class StemCase:
    """A stem of images with random weights, in float64."""

    module: Callable[..., Stem]
    size: StemSize
    slots: Mapping[str, Any]

    def fresh(self) -> Stem:
        torch.manual_seed(0)
        return self.module(self.size, **self.slots)

    def made(self) -> Stem:
        stem = self.fresh().double()
        for parameter in stem.parameters():
            nn.init.normal_(parameter, std=0.5)
        for name, buffer in stem.named_buffers():
            if "running" in name:
                nn.init.uniform_(buffer, 0.5, 1.5)
        return stem

    def images(self, count: int = 2, seed: int = 0) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        return torch.randn(count, self.size.in_chans, *self.size.img_size, dtype=torch.float64, generator=generator)


def _stem_facts(case: StemCase) -> None:
    stem = case.made()
    kind = type(stem)
    _facts(kind, ("title",), kind)
    _require(kind.published_norm in (None, "none", "batch", "layer"), f"published_norm is '{kind.published_norm}'.")
    names = dict(stem.named_modules())
    _require(stem.first_layer in names, f"first_layer is '{stem.first_layer}', and it has no module of that name.")
    _require("proj" in names and "norm" in names, "Name the last linear map proj and the slot after it norm.")


def _stem_shapes(case: StemCase) -> None:
    stem, (rows, columns), width = case.made().eval(), case.made().grid_size, case.size.embed_dim
    tokens = stem(case.images())
    wanted = (2, rows * columns, width)
    _require(tokens.shape == wanted, f"Two images become {tuple(tokens.shape)}, not (B, T, C) {wanted}.")
    stem.output_fmt = "NHWC"
    _require(torch.equal(stem(case.images()).flatten(1, 2), tokens), "NHWC is not the grid of the tokens.")
    stem.output_fmt = "NLC"
    larger = torch.cat([case.images()] * 2, dim=2)
    message = "Images of another size are accepted: leave forward to Stem, and define project."
    _refused(lambda: stem(larger), ValueError, message)
    stem.set_input_size(img_size=(larger.shape[2], larger.shape[3]))
    found = stem(larger).shape
    _require(found == (2, 2 * rows * columns, width), "set_input_size does not make the grid of larger images.")


def _stem_reads(case: StemCase) -> None:
    stem, (rows, columns) = case.made().eval(), case.made().grid_size
    down, right = case.size.patch_size
    for patch in range(rows * columns):
        images, other = case.images(1), case.images(1)
        top, left = down * (patch // columns), right * (patch % columns)
        other[..., top : top + down, left : left + right] = case.images(1, seed=5)[..., :down, :right]
        moved = ((stem(images) - stem(other)).abs().amax((0, 2)) > 1e-12).nonzero().flatten().tolist()
        if stem.patch_wise:
            _require(moved == [patch], f"Patch {patch} moves the tokens {moved}: say patch_wise = False.")
        else:
            _require(patch in moved, f"Patch {patch} does not move its token, but {moved}: order them by rows.")


def _stem_keeps(case: StemCase) -> None:
    stem = case.made().eval()
    count = stem.num_patches
    for keep in ([[count - 1], [0]], [[*reversed(range(count))]] * 2, [[count - 1, 0], [1, 2]]):
        seen, images = torch.tensor(keep), case.images().requires_grad_()
        if not stem.patch_wise:
            message = "keep is accepted, although a token reads other patches: leave forward to Stem."
            return _refused(partial(stem, images, seen), UserError, message)
        leaves = [images, *stem.parameters()]
        selected = stem(images).gather(1, seen[..., None].expand(-1, -1, case.size.embed_dim))
        torch.testing.assert_close(stem(images, seen), selected, atol=1e-10, rtol=0)
        fast = torch.autograd.grad(stem(images, seen).sin().sum(), leaves)
        for a, b in zip(fast, torch.autograd.grad(selected.sin().sum(), leaves), strict=True):
            torch.testing.assert_close(a, b, atol=1e-10 * max(1.0, float(b.abs().max())), rtol=0)
        hidden = [i for i in range(count) if i not in keep[0]]
        _require(not patchify(fast[0], case.size.patch_size)[0, hidden].any(), "Hidden patches get a gradient.")


def _stem_half(case: StemCase) -> None:
    stem, images = case.fresh().eval(), case.images().float()
    with torch.no_grad():
        expected = stem(images)
        rough = copy.deepcopy(stem).bfloat16()(images.bfloat16())
    _require(rough.dtype == torch.bfloat16, f"Of bfloat16 images it makes {rough.dtype}.")
    error = float((rough.float() - expected).norm() / expected.norm())
    _require(error <= 0.1, f"In bfloat16 its tokens are {error:.0%} off those in float32.")
    with torch.device("meta"):
        shapes = case.fresh()
    _require(all(p.is_meta for p in shapes.parameters()), "Parameters are not on the default device.")


def _stem_counts(case: StemCase) -> None:
    stem = case.made().eval()
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH), torch.no_grad():
        stem(case.images(1))
    counted, said = counter.get_total_flops() // 2, type(stem).macs(case.size)
    _require(abs(said - counted) <= 0.02 * counted, f"macs says {said:,} for an image; its products take {counted:,}.")


def _stem_slots(case: StemCase) -> None:
    stem: Any = case.module(case.size, **{**case.slots, "bias": False, "norm_layer": nn.LayerNorm})
    _require(getattr(stem.proj, "bias", None) is None, "bias=False leaves proj a bias.")
    _require(isinstance(stem.norm, nn.LayerNorm), "norm_layer is not the norm of its tokens.")
    nn.init.zeros_(stem.norm.weight)
    nn.init.constant_(stem.norm.bias, 3.0)
    tokens = stem.eval()(case.images().float())
    _require(bool((tokens == 3).all()) or "gelu" in case.slots, "Something acts on its tokens after norm.")


STEM_CHECKS: dict[str, Check] = {
    "its facts are filled in": _stem_facts,
    "images become tokens of the grid": _stem_shapes,
    "patch_wise says which patches a token reads, and tokens are ordered by rows": _stem_reads,
    "every parameter learns": lambda case: _all_learn(case.made(), case.images()),
    "visible patches alone are what selecting their tokens gives": _stem_keeps,
    "half precision is near, and parameters start on any device": _stem_half,
    "copies are the stem": lambda case: _same_copies(case.made(), case.fresh().double(), case.images()),
    "it is one graph": lambda case: is_one_graph(case.fresh().eval(), case.images().float()),
    "macs are those of its products": _stem_counts,
    "its slots are filled": _stem_slots,
}
