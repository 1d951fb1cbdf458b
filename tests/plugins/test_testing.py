"""The checks for authors of plugins pass what is right, and find what is broken, each in its own way."""

import sys
from dataclasses import dataclass, replace
from fractions import Fraction

import pytest
import torch
from torch import nn

from vitmods.changes import Change
from vitmods.layers.norms import NORMS, norm_kind
from vitmods.layers.stems import STEMS, LinearStem
from vitmods.model.slots import NormConfig, Slot
from vitmods.testing import check_change, check_norm, check_stem
from vitmods.util import registry
from vitmods.util.errors import UserError

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit", "ignore::torch.jit.TracerWarning")
FACTS = {"title": "A norm", "paper": "ours", "url": "https://example.org", "how": "as it likes", "published": "none"}


@pytest.fixture(autouse=True)
def forgotten():
    """What a test of this file registers is forgotten after it."""
    yield
    for known in registry._registries:
        for name in [name for name, entry in known._entries.items() if entry.module == __name__]:
            known.remove(name)


@pytest.mark.slow
def test_the_example_and_a_norm_keep_all_promises(load):
    load("patch_statistics", "my_norm")
    check_change("patch_statistics")
    check_stem("patch_statistics")
    check_norm("peak", power=0.5)


def make_change(**attributes):
    """A norm on the output of each MLP, with something else instead."""
    facts = {"name": "scratch", "title": "Scratch", "paper": "ours", "url": "https://example.org"}
    facts |= {"summary": "Adds a norm.", "cost": "little", "published": "none", "__doc__": "A norm on each MLP."}
    facts |= {"__module__": __name__, "__qualname__": "Scratch", "fills": frozenset({Slot.MLP_BRANCH})}
    facts["edit"] = lambda self, config: config.with_(mlp=replace(config.mlp, branch=NormConfig("layer")))
    kind = dataclass(frozen=True)(type("Scratch", (Change,), facts | attributes))
    sys.modules[__name__].Scratch = kind  # where pickle looks for it
    return kind()


def another_each_time(self, config, seen=[]):  # noqa: B006
    seen.append(1)
    return config.with_(mlp=replace(config.mlp, branch=NormConfig("layer", eps=1e-5 * len(seen))))


CHANGES = {
    "a summary without an end": ({"summary": "Adds a norm"}, "end it with a period"),
    "no title": ({"title": ""}, "The fact 'title' is missing"),
    "a name with a blank": ({"name": "scratch it"}, "The shell cannot write the name"),
    "nothing is filled": ({"fills": frozenset()}, "fills is empty"),
    "outputs that move": ({"preserves": "function"}, "function|outputs"),
    "no edit": ({"edit": lambda self, config: config}, "changes nothing"),
    "lost weights": ({"carry": lambda self, weights, old, new: {}}, "weight"),
    "another config each time": ({"edit": another_each_time}, "another config the second time"),
    "training that changes nothing": ({"acts_in": "training"}, "acts in training alone"),
}  # fmt: skip


@pytest.mark.parametrize("broken", CHANGES)
def test_a_broken_change_is_found(broken):
    attributes, words = CHANGES[broken]
    with pytest.raises((AssertionError, UserError), match=f"(?i){words}"):
        check_change(make_change(**attributes))


class Norm(nn.Module):
    """A token divided by its root mean square."""

    token_wise = image_wise = True

    def __init__(self, dim: int, eps: float = 1e-6) -> None:
        if not eps > 0:
            raise ValueError("eps must be positive")
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(dim))
        self.reset_parameters()

    def reset_parameters(self):
        nn.init.ones_(self.weight)

    def root(self, x):
        return (x.square().mean(-1, keepdim=True) + self.eps).sqrt()

    def forward(self, x):
        wide = x if x.dtype == torch.float64 else x.float()
        return (wide / self.root(wide) * self.weight).to(x.dtype)


class InHalf(Norm):
    def forward(self, x):
        return (x / self.root(x)).cumsum(-1).diff(dim=-1, prepend=torch.zeros_like(x[..., :1])) * self.weight.to(
            x.dtype
        )


class OtherType(Norm):
    def forward(self, x):
        return super().forward(x).float()


class NaNs(Norm):
    def root(self, x):
        return x.std(-1, keepdim=True)


class OverTokens(Norm):
    def root(self, x):
        return (x.square().mean((1, 2), keepdim=True) + self.eps).sqrt()


class OverImages(Norm):
    token_wise = False

    def root(self, x):
        return (x.square().mean(keepdim=True, dim=(0, 1, 2)) + self.eps).sqrt()


class Unused(Norm):
    def __init__(self, dim: int, eps: float = 1e-6) -> None:
        super().__init__(dim, eps)
        self.extra = nn.Parameter(torch.zeros(dim))


class KeepsItsStart(Norm):
    def reset_parameters(self):
        if not hasattr(self, "made"):
            self.made = True
            nn.init.ones_(self.weight)


class Counts(Norm):
    def forward(self, x):
        return super().forward(x) if float(x.detach().flatten()[0]) < 1e9 else x


class AnyEps(Norm):
    def __init__(self, dim: int, eps: float = 1e-6) -> None:
        super().__init__(dim, abs(eps) or 1.0)


BROKEN_NORMS = {
    InHalf: "compute in float32",
    OtherType: "tokens it makes",
    NaNs: "NaN",
    OverTokens: "Say token_wise = False",
    OverImages: "Say image_wise = False",
    Unused: "extra gets no gradient",
    KeepsItsStart: "does not set weight to its start",
    Counts: "it is one graph",
    AnyEps: "eps=0.0 is accepted",
}


def test_a_plain_norm_is_right():
    norm_kind("plain_scratch", **FACTS, shorts=("plainscratch",))(Norm)
    check_norm("plain_scratch")


@pytest.mark.parametrize("norm", BROKEN_NORMS, ids=lambda norm: norm.__name__)
def test_a_broken_norm_is_found(norm):
    norm.__doc__ = "Broken."
    norm_kind("scratch", **FACTS, shorts=("scratchnorm",))(norm)
    with pytest.raises(AssertionError, match=BROKEN_NORMS[norm]):
        check_norm(NORMS["scratch"])


class Columns(LinearStem):
    def project(self, images):
        return super().project(images.transpose(2, 3).reshape(images.shape))


class Neighbors(LinearStem):
    def project(self, images):
        return super().project(images + images.mean((2, 3), keepdim=True))


class SaysSo(Neighbors):
    patch_wise = False

    def forward(self, images, keep=None, drawn=False):
        tokens = super().forward(images)
        return tokens if keep is None else tokens.gather(1, keep[..., None].expand(-1, -1, tokens.shape[-1]))


class WrongMacs(LinearStem):
    @classmethod
    def macs(cls, size):
        return int(Fraction(11, 10) * super().macs(size))


class KeepsOthers(LinearStem):
    def project_patches(self, patches):
        return super().project_patches(patches.flip(-1))


class AnySize(LinearStem):
    def _check(self, images):
        pass


class Lazy(LinearStem):
    def __init__(self, size, **slots):
        super().__init__(size, **slots)
        self.scale = nn.Parameter(torch.ones(size.embed_dim))


class AfterNorm(LinearStem):
    def finish(self, tokens):
        return super().finish(tokens) * 2


class NoFirst(LinearStem):
    first_layer = "embed"


class NoBias(LinearStem):
    def __init__(self, size, bias=True, **slots):
        super().__init__(size, **slots)


BROKEN_STEMS = {
    Columns: "moves the tokens",
    Neighbors: "say patch_wise = False",
    SaysSo: "keep is accepted",
    WrongMacs: "its products take",
    KeepsOthers: "selecting their tokens gives",
    AnySize: "Images of another size are accepted",
    Lazy: "scale gets no gradient",
    AfterNorm: "acts on its tokens after norm",
    NoFirst: "first_layer is 'embed'",
    NoBias: "bias=False leaves proj a bias",
}


@pytest.mark.parametrize("stem", BROKEN_STEMS, ids=lambda stem: stem.__name__)
def test_a_broken_stem_is_found(stem):
    stem.__doc__ = "Broken."
    STEMS.add("scratch", stem)
    with pytest.raises(AssertionError, match=BROKEN_STEMS[stem]):
        check_stem("scratch")


def test_stems_of_sequences_are_refused():
    with pytest.raises(UserError, match="reads sequences"):
        check_stem("tokens")
