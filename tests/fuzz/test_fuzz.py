"""The short form of `make fuzz`: hostile input gives a value or a UserError."""

import pytest
from hypothesis import HealthCheck, given, settings

from vitmods.util.errors import UserError

from .families import FAMILIES, run

COUNTS = {"expressions": 100, "recipes": 60, "configs": 100, "files": 120}


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
