import json
import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.parametrize("extent", ["few", pytest.param("all", marks=pytest.mark.long)])
def test_a_trial_killed_anywhere_ends_in_the_same_bits(extent, tmp_path):
    driver = Path(__file__).with_name("kill_driver.py")
    command = [sys.executable, str(driver), str(tmp_path), extent]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1800, check=False)
    assert done.returncode == 0, done.stderr
    results = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(results) >= {"few": 6, "all": 14}[extent]
    assert [result["case"] for result in results if not result["killed"]] == [], "the kill did not happen"
    assert [result["case"] for result in results if not result["same"]] == [], done.stderr
