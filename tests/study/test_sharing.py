"""How many trials share a GPU, by rows of trials that are only as fast as a table says."""

import itertools

import pytest

from vitmods.recipes import Recipe
from vitmods.study.arms import Arm
from vitmods.study.cells import Cell, Trial
from vitmods.study.executors import sharing
from vitmods.study.executors.sharing import Sharing

CELLS = [Cell(Arm(name), {}, Recipe()) for name in ("base", "slow")]


class Machine:
    """GPUs on which the second cell takes twice as long, and each look finds a row more; each 20 rows end a trial."""

    def __init__(self, gpus, most, speeds):
        self.speeds, self.told, self.running, self.steps = speeds, [], [], {}
        self.queue = (Trial(CELLS[number % 3 // 2], number) for number in itertools.count())
        self.sharing = Sharing(gpus, most, self.row, lambda limit, line: self.told.append((limit, line)))
        self.gpus = gpus

    def row(self, trial):
        step = self.steps[trial]
        if not step:
            return {}
        if step % 7 == 0:
            return {"step": step, "split": "val"}
        speed = self.speeds[-(-len(self.running) // self.gpus)] / (1 + CELLS.index(trial.cell))
        return {"step": step, "images_per_s": speed if step > 1 else 1.0}

    def run(self, looks=200):
        for _ in range(looks):
            self.running = [trial for trial in self.running if self.steps[trial] < 20]
            while len(self.running) < self.sharing.limit:
                self.running.append(next(self.queue))
                self.steps[self.running[-1]] = 0
            self.sharing.look(self.running)
            for trial in self.running:
                self.steps[trial] += 1
        return self.sharing.on_each


@pytest.mark.parametrize("gpus", [1, 2])
@pytest.mark.parametrize(
    ("most", "speeds", "on_each", "gains"),
    [
        (4, {1: 100, 2: 90, 4: 80}, 4, ["1.8", "1.8"]),
        (4, {1: 100, 2: 60, 4: 28}, 2, ["1.2", "0.93"]),
        (4, {1: 100, 2: 52}, 1, ["1"]),
        (3, {1: 100, 2: 95, 3: 90}, 3, ["1.9", "1.4"]),
        (2, {1: 100, 2: 80}, 2, ["1.6"]),
        (1, {1: 100}, 1, []),
    ],
)
def test_as_many_trials_share_a_gpu_as_are_worth_it(monkeypatch, tmp_path, gpus, most, speeds, on_each, gains):
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", str(tmp_path))
    machine = Machine(gpus, most, speeds)
    assert machine.run() == on_each
    lines = [line for _, line in machine.told if line]
    assert [line.split(" are ")[1].split()[0] for line in lines] == gains
    assert all("MPS, which lets them compute at the same time, does not run" in line for line in lines)
    assert not most > 1 or machine.told[-1][0] == on_each * gpus
    (tmp_path / "control").touch()
    assert sharing.mps_runs()


def test_nothing_is_concluded_before_all_are_at_work_nor_from_rows_that_began_before():
    machine = Machine(1, 4, {1: 100, 2: 90, 4: 80})
    assert machine.run(looks=3) == 1, "no row, the first, and one that may have begun before the others were at work"
    assert machine.run(looks=1) == 2
