"""All registered changes with their variants, found in the registry, so that a new file in changes/ is covered too."""

import dataclasses
import functools
import itertools
import typing

import pytest
import torch

import vitmods as vm
from vitmods.changes import REGISTRY
from vitmods.changes.compose import edit
from vitmods.changes.norm import kinds
from vitmods.testing import CHANGE_CHECKS, ChangeCase
from vitmods.util.errors import UserError

# Variants that setting one field at a time does not reach.
MORE = [
    "norm(kind=rms,exact=false)",
    "dpn(before=false,after=false,after_position=true)",
    "dpn(before=false,after=false,after_position=true,class_token=true)",
    "placement(attn=pre+post,mlp=post)",
    "placement(attn=post,mlp=post,reading=branch)",
    "layerscale(init=1.0)",
    "norm(kind=scale,gain=scalar)",
    "norm(kind=switchable,batch=false)",
    "stem(kind=levit,norm=layer)",
    "stem(kind=hmlp,norm=none)",
    "stem(kind=linear,norm=batch,gelu=true)",
    "swiglu(hidden=40)",
    "qknorm(norm=rms)",
    "rope(base=1000,absolute=false)",
    "valueresidual(first=0)",
    "gate(per=head,start=open)",
    "dpn(before=whiten)",
    "size(wider=0.5,deeper=2)",
    "prompts(3,deep=true)",
]


OF_KINDS = {  # what the settings of a change are nothing to
    "it leaves the old model alone",
    "gradient checkpointing changes nothing",
    "copies are the model",
    "test_training_mode_device_and_frozen_parameters_are_those_of_the_model",
    "test_diff_and_documentation",
}


def base_config():
    return vm.ViTConfig.from_name("mu2/4", img_size=8, num_classes=5)


def _values(kind, field):
    hint = typing.get_type_hints(kind)[field.name]
    if hint is bool:
        return [not field.default]
    return [v for v in typing.get_args(hint) if v != field.default] if typing.get_origin(hint) is typing.Literal else []


def variants(kind):
    """The change as it is, its short forms, each kind of norm, and each bool and choice by itself; those that do
    something on the base."""
    single = [{f.name: v} for f in dataclasses.fields(kind) for v in _values(kind, f)]
    if kind is vm.Norm:
        single += [{"kind": name} for name in kinds()]
    for fields in itertools.chain([{}], kind.short_forms.values(), single):
        try:
            change = kind(**fields)
            edit(base_config(), [change])
        except UserError:
            continue
        yield change


@functools.cache
def find_all():
    changes = [change for kind in REGISTRY.values() for change in variants(kind)]
    changes += [change for text in MORE for change in vm.parse_changes(text)]
    return tuple(dict.fromkeys(changes))


def _fit(changes):
    """Whether they go into one model in this order and each alters it beside the others."""
    try:
        together = edit(base_config(), changes)
        return all(edit(base_config(), [*changes[:i], *changes[i + 1 :]]) != together for i in range(len(changes)))
    except UserError:
        return False


@functools.cache
def find_different():
    """One of each kind of module, and two kinds of norm: tests/layers has the others."""
    found = {}
    for change in find_all():
        kind = getattr(change, "kind", None) if not isinstance(change, vm.Norm) else change.kind in ("rms", "batch")
        if kind is not False:
            found.setdefault((type(change), kind, str(getattr(change, "before", None))), change)
    return tuple(found.values())


@functools.cache
def find_together(norms=True):
    """All of them in few models, for what compiles, exports or traces, which is slow. Without norms: one of each
    kind of module that compiles by itself."""
    models = []
    for change in find_all() if norms else find_different():
        taker = next((changes for changes in reversed(models) if _fit([*changes, change])), None)
        if taker is None:
            models.append([change])
        else:
            taker.append(change)
    return tuple(map(tuple, models))


def pytest_generate_tests(metafunc):
    if {"promise", "change"} <= {*metafunc.fixturenames}:
        pairs = [(p, c) for p in CHANGE_CHECKS for c in (find_different() if p in OF_KINDS else find_all())]
        metafunc.parametrize(("promise", "change"), pairs, ids=str)
    elif "change" in metafunc.fixturenames:
        of_kinds = metafunc.function.__name__ in OF_KINDS
        metafunc.parametrize("change", find_different() if of_kinds else find_all(), ids=str)
    if "together" in metafunc.fixturenames:
        alone = [pytest.param((change,), marks=pytest.mark.long) for change in find_all()]
        models = find_together(
            norms=metafunc.function.__name__ not in ("test_it_is_one_graph", "test_it_exports", "test_it_traces")
        )
        metafunc.parametrize("together", [*models, *alone], ids=lambda changes: "+".join(map(str, changes)))


@pytest.fixture
def all_changes():
    return find_all()


@pytest.fixture
def all_together():
    return find_together()


_case = functools.cache(ChangeCase)


@pytest.fixture
def case(change):
    return _case(change)


@pytest.fixture
def base():
    return ChangeCase(REGISTRY["dpn"]()).base


@pytest.fixture
def changed(case):
    """The base with the change."""
    return case.changed


@pytest.fixture
def images():
    return torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(1))
