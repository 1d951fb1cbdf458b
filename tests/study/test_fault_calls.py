"""A call of the operating system fails, whichever: one clear error or a failed trial, no rest of a file, and the study
completes when it is run again."""

import pytest

from . import faults


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    library = faults.build(tmp_path_factory.mktemp("library"))
    if library is None:
        pytest.skip("cc compiles the library that lets calls fail, on Linux")
    return library


def check(result, count):
    assert result["problems"] == []
    assert sum(result["outcomes"].values()) == count
    assert all(calls > 3 for calls in result["calls"].values())


def test_a_study_with_reuse_a_resumed_one_and_a_report_survive_calls_that_fail(library, tmp_path):
    result = faults.run(library, faults.spread(9), tmp_path / "root")
    check(result, 9)
    assert any("clear error" in outcome or "failed" in outcome for outcome in result["outcomes"])


@pytest.mark.long
def test_five_hundred_calls_that_fail(library, tmp_path):
    check(faults.run(library, faults.spread(500), tmp_path / "root"), 500)
