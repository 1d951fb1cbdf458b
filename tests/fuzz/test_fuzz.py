"""The short form of `make fuzz`: hostile input gives a value or a UserError."""

import pytest
from hypothesis import HealthCheck, given, settings

from vitmods import Recipe, ViTConfig
from vitmods.adapters import load
from vitmods.study.store import slug
from vitmods.util.errors import UserError

from .families import FAMILIES, VIT, run

COUNTS = {"expressions": 100, "recipes": 60, "configs": 100, "files": 120, "models": 300}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_value_or_a_user_error(family):
    @settings(
        max_examples=COUNTS[family],
        deadline=None,
        database=None,
        derandomize=True,
        suppress_health_check=list(HealthCheck),
    )
    @given(FAMILIES[family][0])
    def read(value):
        run(family, value)

    read()


@pytest.mark.parametrize(
    "fields", [{"resize_range": []}, {"randaugment": []}, {"randaugment": [2, 9, 9]}, {"crop_scale": [10**400, 1]}]
)
def test_recipes_that_failed_once(fields):
    with pytest.raises(UserError):
        Recipe.from_dict({"augment": fields})


def test_numbers_and_names_that_failed_once():
    with pytest.raises(UserError):
        ViTConfig.from_dict({**VIT, "mlp_dim": 10**400})
    assert slug("\ud800").startswith("arm-")


@pytest.mark.parametrize(
    ("raised", "found"), [(UserError, None), (KeyError, KeyError), (RecursionError, RecursionError)]
)
def test_any_other_error_fails(raised, found, monkeypatch):
    def read(value):
        raise raised("x")

    monkeypatch.setitem(FAMILIES, "expressions", (FAMILIES["expressions"][0], read))
    if found is None:
        assert run("expressions", "dpn") is None
    else:
        with pytest.raises(found):
            run("expressions", "dpn")


def test_a_pickle_that_takes_from_an_empty_stack_failed_once(tmp_path):
    (tmp_path / "f.pth").write_bytes(b"\x80\x02R.")
    with pytest.raises(UserError, match=r"f\.pth cannot be read; it may be damaged"):
        load(tmp_path / "f.pth")
