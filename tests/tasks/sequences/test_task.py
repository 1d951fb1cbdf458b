"""Sequences of tokens: Long ListOps as data, and the whole way from its text to a report."""

import csv
import json
import random
from pathlib import Path

import numpy as np
import pytest
import torch

import vitmods as vm
from vitmods.recipes import RECIPES, Recipe
from vitmods.recipes.schedule import lr_at, resolve
from vitmods.study.cells import Trial
from vitmods.study.store import StudyFolder
from vitmods.study.trial import TrialRunner, trial_scores
from vitmods.tasks import SequenceClassification
from vitmods.tasks.sequences.data import load_sequences
from vitmods.tasks.sequences.sources import OPERATIONS, VOCABULARY, TooLong, expression
from vitmods.train import RunOptions, train_trial
from vitmods.train.optim import make_optimizer
from vitmods.util.errors import UserError

SPEC = "listops:generated?train=96&val=24&test=40&min_length=5&max_length=30"


HF = {
    "big_bird": "hidden_size=16&num_hidden_layers=1&num_attention_heads=2&intermediate_size=32&block_size=2"
    "&num_random_blocks=1",
    "reformer": "hidden_size=16&num_attention_heads=2&attention_head_size=8&feed_forward_size=32"
    "&attn_layers=['lsh','local']&lsh_attn_chunk_length=4&local_attn_chunk_length=4&num_buckets=4",
}
BASES = {"ours": "LRA-64", **{name: f"hf-text:{name}?{options}" for name, options in HF.items()}}


def load(spec=SPEC, longest=29, **options):
    return load_sequences(spec, img_size=(1, longest), in_chans=16, **options)


def text_of(tokens):
    return " ".join(VOCABULARY[t - 1] for t in tokens if t)


def value_of(words):
    """The value of an expression, computed from its text."""
    stack = []
    for word in words.split():
        if word != "]":
            stack.append(word if word in OPERATIONS else int(word))
            continue
        values = []
        while not isinstance(stack[-1], str):
            values.append(stack.pop())
        rule = {"[MIN": min, "[MAX": max, "[MED": lambda v: int(np.median(v)), "[SM": lambda v: sum(v) % 10}
        stack.append(rule[stack.pop()](values))
    (value,) = stack
    return value


def test_the_generator_draws_as_long_range_arenas_and_gives_up_what_grows_too_long():
    goldens = np.load(Path(__file__).parents[2] / "golden" / "listops_examples.npz")
    rng, seen, examples = random.Random(1234), set(), []
    while len(examples) < len(goldens["target"]):
        tokens, value = expression(rng)
        if 20 < len(tokens) < 400 and tuple(tokens) not in seen:
            seen.add(tuple(tokens))
            examples.append((text_of(tokens).replace("]", "X"), value, len(tokens)))
    expected = [goldens[name].tolist() for name in ("tokens_joined", "target", "length")]
    assert [list(column) for column in zip(*examples, strict=True)] == expected
    rng, lengths = random.Random(0), set()
    for _ in range(300):
        try:
            lengths.add(len(expression(rng, 12)[0]))
        except TooLong:
            lengths.add(13)
    assert {12, 13} <= lengths <= set(range(14))


def test_generated_sequences():
    dataset = load()
    assert {name: len(split) for name, split in dataset.splits.items()} == {"train": 96, "val": 24, "test": 40}
    texts = [text_of(split.store.sequences[i]) for split in dataset.splits.values() for i in range(len(split))]
    assert len(set(texts)) == len(texts)
    assert all(5 < len(text.split()) < 30 for text in texts)
    labels = [int(label) for split in dataset.splits.values() for label in split.labels]
    assert labels == [value_of(text) for text in texts]
    assert dataset.summary()["lengths"]["longest"] == 29
    again, other = load(), load(f"{SPEC}&seed=1")
    assert again.summary()["fingerprint"] == dataset.summary()["fingerprint"] != other.summary()["fingerprint"]


def test_a_damaged_or_missing_cache_is_made_again(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    first = load().summary()["fingerprint"]
    (kept,) = (tmp_path / "vitmods").glob("listops-*.npz")
    kept.write_bytes(b"no archive")
    assert load().summary()["fingerprint"] == first
    assert kept.stat().st_size > 100


def test_batches_are_padded_to_their_longest_and_repeat():
    dataset = load(workers=2)
    batches = list(dataset.train_batches(seed=3, epoch=1, batch_size=10))
    assert len(batches) == dataset.steps_per_epoch(10) == 9
    for batch in batches:
        lengths = (batch.inputs > 0).sum(1)
        assert batch.inputs.dtype == torch.int64
        assert batch.inputs.shape == (10, lengths.max())
        assert all((row[:n] > 0).all() for row, n in zip(batch.inputs, lengths, strict=True))
        assert [value_of(text_of(row.tolist())) for row in batch.inputs] == batch.targets.tolist()
    later = next(dataset.train_batches(seed=3, epoch=1, batch_size=10, start=4))
    torch.testing.assert_close(vars(later), vars(batches[4]))
    assert not torch.equal(next(dataset.train_batches(seed=3, epoch=2, batch_size=10)).index, batches[0].index)
    index = torch.cat([batch.index for batch in dataset.eval_batches("val", 7)])
    assert index.tolist() == list(range(24))
    cut = load(longest=9)
    assert next(cut.eval_batches("test", 40)).inputs.shape == (40, 9)
    assert any("longer than 9 tokens" in text for text in cut.summary()["warnings"])


def write(folder, name, rows):
    with open(folder / f"basic_{name}.tsv", "w", newline="") as file:
        csv.writer(file, delimiter="\t").writerows([("Source", "Target"), *rows])


@pytest.fixture
def folder(tmp_path):
    """As Long Range Arena writes it."""
    for name in ("train", "val", "test"):
        rows = [(f"( ( ( [MAX {a} ) {b} ) ] )", max(a, b)) for a in range(10) for b in range(10) if a != b]
        write(tmp_path, name, {"train": rows[:60], "val": rows[60:75], "test": rows[75:]}[name])
    return tmp_path


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([("( [MAX 2 ) ]", 2), ("( [MUL 2 ) ]", 2)], r"train.tsv, line 3: '\[MUL' is not a token"),
        ([("2", 12)], "1 line cannot be used:\n.*line 2: it needs an expression in the column Source"),
        ([("2", 12)] * 30, r"(?s)30 lines cannot be used:.* line 21: .*and 10 more"),
        ([("2", 1), ("", 1), ("2 a", 1)],
         r"2 lines cannot be used:\n.*train.tsv, line 3: .*\n.*line 4: 'a' is not a token"),
        ([("()", 1)], "tokens are missing"),
        (b"Source\tTarget\n\xff\xfe\t1\n", "basic_train.tsv, line 2: .* is not a token"),
        (b"Source\tTarget\n" + b"2" * 200_000 + b"\t2\n", r"basic_train.tsv cannot be read as a CSV file in UTF-8: "),
    ],
)  # fmt: skip
def test_lines_and_files_that_are_none_are_named(folder, rows, words):
    if isinstance(rows, bytes):
        (folder / "basic_train.tsv").write_bytes(rows)
    else:
        write(folder, "train", rows)
    with pytest.raises(UserError, match=words):
        load(f"listops:{folder}", 4)


@pytest.mark.parametrize(
    ("spec", "options", "words"),
    [
        ("listops:generated?max_length=51", {}, "max_length must exceed min_length"),
        ("listops:generated?train=many", {}, "train is a whole number"),
        ("listops:generated?train=0", {}, "at least 1 each"),
        ("listops:generated?length=3", {}, "unknown option"),
        ("listops:nowhere", {}, "cannot be read"),
        ("listops:nowhere?seed=1", {}, "only for listops:generated"),
        (SPEC, {"img_size": (2, 9)}, "img_size of sequences"),
        (SPEC, {"in_chans": 3}, "has 16 tokens with padding"),
        ("digits", {}, "does not hold sequences of tokens"),
    ],
)
def test_what_cannot_be_is_refused(spec, options, words):
    with pytest.raises(UserError, match=words):
        load_sequences(spec, **{"img_size": (1, 29), "in_chans": 16, **options})


def test_images_and_sequences_are_not_taken_for_each_other(tmp_path):
    with pytest.raises(UserError, match="--task sequence_classification"):
        vm.Study(base="Ti/4", arms=["dtn"], data=SPEC, recipe=RECIPES["plain"]()).run(tmp_path, workers=1)
    with pytest.raises(UserError, match="reads images, and the task needs sequences"):
        SequenceClassification().wrap(vm.vit("mu2/2", img_size=8), 10)
    with pytest.raises(UserError, match="the recipe sets crop, flip, eval_crop of images"):
        SequenceClassification.from_recipe(Recipe())
    SequenceClassification.from_recipe(SequenceClassification.fitted(Recipe()))


def test_the_recipe_is_long_range_arenas():
    recipe = RECIPES["listops"]()
    length = resolve(recipe, 96_000)
    for step in (0, 1, 500, 1000, 1001, 4999):
        expected = 0.05 * min(1.0, step / 1000) / max(step, 1000) ** 0.5
        assert lr_at(length, step) == pytest.approx(expected)
    optimizer = make_optimizer(vm.vit("LRA-64", img_size=(1, 9), in_chans=16), recipe)
    assert {group["weight_decay"] for group in optimizer.param_groups} == {0.1}
    assert optimizer.param_groups[0]["betas"] == (0.9, 0.98)


def test_training_learns_what_can_be_learned_from_long_range_arenas_files(folder, tmp_path):
    dataset, recipe = load(f"listops:{folder}", 4), RECIPES["listops"](150, batch_size=20).with_(dropout=0.0, lr=5e-3)
    assert [len(split) for split in dataset.splits.values()] == [60, 15, 15]
    assert text_of(dataset.splits["train"].store.sequences[0]) == "[MAX 0 1 ]"
    assert dataset.splits["train"].labels[0] == 1
    torch.manual_seed(0)
    model = vm.vit("LRA-64", img_size=(1, 4), in_chans=16, num_classes=10, **recipe.model.to_config())
    task, options = SequenceClassification.from_recipe(recipe), RunOptions("cpu", tensorboard=False)
    result = train_trial(model, task, dataset, recipe, out=tmp_path / "trial", options=options)
    rows = [json.loads(line) for line in (tmp_path / "trial" / "metrics.jsonl").read_text().splitlines()]
    assert [row["top1"] for row in rows if row["split"] == "train"][-1] > 0.9
    assert result["metrics"]["top1"] > 0.3


@pytest.mark.parametrize(
    ("base", "arm"), [("ours", "dtn"), ("big_bird", "replace(batchnorm)"), ("reformer", "replace(dtn)")]
)
def test_a_trial_that_is_broken_off_ends_in_the_same_weights(tmp_path, ends_in_the_same_bits, base, arm):
    recipe = RECIPES["listops"](6, batch_size=12).with_(dropout=0.1 if base == "ours" else None)
    sizes = {"img_size": (1, 29), "in_chans": 16}
    study = vm.Study(BASES[base], [arm], SPEC, recipe, task="sequence_classification", **sizes)
    runner, trial = TrialRunner(StudyFolder(tmp_path), study.settings.measure), Trial(study.settings.cells[1], 0)
    ends_in_the_same_bits(lambda out: runner.train(trial, out), tmp_path, "test", 4)


def test_from_the_command_line_to_the_report(tmp_path, said, refused, short_clocks):
    out, trial, lines = tmp_path / "study", tmp_path / "study/trials/dtn/seed0", tmp_path / "expressions.txt"
    command = f"compare --data {SPEC} --task sequence_classification --recipe listops(steps=4,batch_size=12) --arms dtn"
    command = [*command.split(), "--seeds", 1, "--workers", 1, "--out", out]
    assert "96 train, 24 val, 40 test" in said("", *command, "--dry-run").out
    said("", *command, "--cost-seconds", 0.1)
    scores = trial_scores(trial, "test")
    assert {"top1", "nll", "ids"} <= scores.keys()
    assert len(scores["ids"]) == 40
    assert "table of tokens" in (out / "report.html").read_text()

    lines.write_text("[MAX 2 9 [MIN 4 7 ] 0 ]\n\n( ( [SM 2 ) 3 ) ]\n")
    rows = json.loads(said(f"predict {trial} {lines} --format json").out)
    assert [row["image"] for row in rows] == [f"{lines}:1", f"{lines}:3"]
    assert all(abs(sum(row["probabilities"].values())) <= 1.0001 for row in rows)
    lines.write_text("[MAX 2 nine ]\n")
    assert "'nine' is not a token" in refused(f"predict {trial} {lines}")

    evaluated = json.loads(said(f"evaluate {trial} --protocol top1 calibration --json").out)
    assert evaluated["metrics"]["top1"] == pytest.approx(scores["top1"].mean())
    assert "images" in refused(f"evaluate {trial} --protocol corruptions")
    assert "Tokens: shortest" in said("data", SPEC).out
    assert "leave unreadable=skip out" in refused(
        "", *command[:-1], tmp_path / "x", "--unreadable", "skip", "--dry-run"
    )
