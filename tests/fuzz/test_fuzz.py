"""The short form of `make fuzz`: hostile input gives a value or a UserError."""

import pytest
from hypothesis import HealthCheck, given, settings

from .families import FAMILIES, run

COUNTS = {"expressions": 300, "recipes": 200, "configs": 300, "files": 400}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_value_or_a_user_error(family):
    @settings(max_examples=COUNTS[family], deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(FAMILIES[family][0])
    def read(value):
        run(family, value)

    read()
