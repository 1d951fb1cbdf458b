"""A study that runs until it is decided: trials that no look counts, which free workers had begun, change nothing."""

import pytest

from vitmods.recipes import plain
from vitmods.study import Answer, Study
from vitmods.study.cells import Trial
from vitmods.study.settings import Settings
from vitmods.study.store import StudyFolder
from vitmods.study.trial import TrialRunner
from vitmods.train import RunOptions, checkpoint

pytestmark = pytest.mark.usefixtures("short_clocks")
OPTIONS = {"workers": 1, "device": "cpu", "cost_seconds": 0, "progress": False}


def test_what_a_spare_trial_gave_is_in_no_number_and_its_checkpoint_goes(tmp_path, draw_images):
    images = draw_images(tmp_path / "pets", ["train"], count=30)
    recipe = plain(epochs=2).with_(batch_size=16)
    study = Study("mu/4", ["dpn", "rms"], images, recipe=recipe, seeds=6, until_decided=True, margin=60.0)
    decided = study.run(tmp_path / "out", **OPTIONS)
    assert decided.complete
    folder = StudyFolder(tmp_path / "out")
    settings = Settings.from_dict(folder.known_facts().settings)
    (looked,) = {len([*folder.path.glob(f"trials/{arm.name}/*/result.json")]) for arm in settings.every_arm}
    assert looked < 6
    runner = TrialRunner(folder, settings.measure, RunOptions(device="cpu"))
    before = Answer.load(folder.path)
    for cell in settings.cells:
        runner(Trial(cell, looked))
    (rests,) = (folder.trial(Trial(settings.cell("dpn"), seed)) for seed in [5] if seed > looked)
    rests.mkdir(parents=True)
    for name in (checkpoint.NAME, checkpoint.PREVIOUS):
        (rests / name).write_bytes(b"of a trial that was stopped")
    after = Answer.load(folder.path)
    assert after.to_dict() == before.to_dict()
    assert repr(after) == repr(before)
    assert after.to_csv() == before.to_csv()
    again = study.run(folder.path, **OPTIONS)
    assert again.to_dict() == before.to_dict()
    assert not [*folder.path.rglob("checkpoint*")]
