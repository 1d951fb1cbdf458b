import json
import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def cases(tmp_path_factory):
    driver = Path(__file__).with_name("kill_driver.py")
    command = [sys.executable, str(driver), str(tmp_path_factory.mktemp("kill"))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1800, check=False)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()], done.stderr


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_trial_killed_anywhere_ends_in_the_same_bits(cases):
    results, errors = cases
    assert len(results) >= 14
    assert [result["case"] for result in results if not result["killed"]] == [], "the kill did not happen"
    assert [result["case"] for result in results if not result["same"]] == [], errors
