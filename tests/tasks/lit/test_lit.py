"""LiT against arrays of big_vision, retrieval against slow loops, and tiny trials on colored squares."""

import csv
import json
import re
import sys
from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from PIL import Image
from safetensors.torch import load_file

import vitmods as vm
from vitmods.data.sources import open_source
from vitmods.recipes import RECIPES, Recipe
from vitmods.study.checkpoints import open_trial
from vitmods.study.evaluate import evaluate
from vitmods.study.executors import StudyOptions
from vitmods.tasks import TASKS
from vitmods.tasks.base import make_task
from vitmods.tasks.classification import sigmoid_cross_entropy
from vitmods.tasks.lit.model import learn_tokenizer
from vitmods.tasks.lit.sources import Captions
from vitmods.tasks.lit.task import Lit, ranks, sigmoid_loss, softmax_loss
from vitmods.train import Processes, RunOptions, train_trial
from vitmods.util.errors import UserError

from ...data.support import encoded, write_tar

COLORS = {"red": (220, 30, 30), "green": (30, 200, 40), "blue": (40, 50, 220), "yellow": (230, 220, 40)}
PLACES = {"left": (0, 0), "right": (0, 8), "low": (8, 4)}
SMALL = {"text_width": 32, "text_depth": 1, "text_heads": 2, "text_mlp": 64, "text_length": 8, "vocabulary": 400}
CPU = RunOptions("cpu", progress=False, tensorboard=False)


def square(color, place, noise):
    pixels = np.random.default_rng(noise).integers(0, 60, (16, 16, 3), dtype=np.uint8)
    top, left = PLACES[place]
    pixels[top : top + 8, left : left + 8] = COLORS[color]
    return Image.fromarray(pixels)


PIXELS = encoded(square("red", "left", 0))


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    """pairs.jsonl with 5 images of each color and place, 3 of them for training; classes/ with one folder a color"""
    root = tmp_path_factory.mktemp("pairs")
    (root / "images").mkdir()
    lines = []
    for number, (color, place, copy) in enumerate(product(COLORS, PLACES, range(5))):
        square(color, place, number).save(root / "images" / f"{number}.png")
        captions = [f"a {color} square, {place}", f"{place}: {color}"]
        split = ("train", "train", "train", "val", "test")[copy]
        lines.append({"image": f"images/{number}.png", "captions": captions, "split": split, "group": str(number)})
        (root / "classes" / color).mkdir(parents=True, exist_ok=True)
        square(color, place, number + 1000).save(root / "classes" / color / f"{number}.png")
    (root / "pairs.jsonl").write_text("\n".join(map(json.dumps, lines)))
    return root


def recipe(epochs=2, batch_size=12, **options) -> Recipe:
    return RECIPES["small_lit"](epochs, batch_size=batch_size).with_(**{**SMALL, **options})


def made(spec, settings, **options):
    task = make_task("lit", settings)
    images = task.load_data(str(spec), img_size=16, in_chans=3, augment=settings.augment, **options)
    torch.manual_seed(0)
    return task.wrap(vm.vit("mu2/4", img_size=16, num_classes=0), 1), task, images


def test_the_losses_are_big_visions(golden):
    g, close = golden("bv_losses"), {"atol": 1e-10, "rtol": 0}
    inputs = [g[name].requires_grad_() for name in ("zimg", "ztxt", "t")]
    loss = softmax_loss(*inputs)
    loss.backward()
    for actual, name in zip((loss, *(x.grad for x in inputs)), ("contrastive", "grad_zimg", "grad_ztxt", "grad_t")):
        torch.testing.assert_close(actual.detach(), g[name], **close)
    torch.testing.assert_close(sigmoid_cross_entropy(g["logits"], g["labels"]).mean(), g["sigmoid_xent"], **close)
    images, texts = g["zimg"].detach(), g["ztxt"].detach()
    signs = 2 * torch.eye(5, dtype=torch.double) - 1
    expected = -torch.nn.functional.logsigmoid(signs * (images @ texts.T * 7 - 2)).sum() / 5
    torch.testing.assert_close(sigmoid_loss(images, texts, torch.tensor(7.0), torch.tensor(-2.0)), expected)


def test_ranks_are_those_of_slow_loops(monkeypatch):
    monkeypatch.setattr("vitmods.tasks.lit.task.CHUNK", 3)
    torch.manual_seed(0)
    images, texts = torch.randn(8, 4), torch.randn(6, 4)
    texts[5] = texts[4]
    correct = [(i, i % 5) for i in range(8)] + [(0, 5), (3, 1)]

    def slow(similarity, pairs):
        for i, row in enumerate(similarity):
            right = {other for one, other in pairs if one == i}
            best = max(row[other] for other in right)
            yield 1 + sum(value >= best for other, value in enumerate(row) if other not in right)

    actual, s = ranks(images, texts, torch.tensor(correct)), (images @ texts.T).tolist()
    assert actual.of_images.tolist() == list(slow(s, correct))
    assert actual.of_texts.tolist() == list(slow(zip(*s), [(text, image) for image, text in correct]))
    equal = ranks(torch.ones(8, 4), torch.ones(6, 4), torch.tensor(correct))
    assert equal.of_images.min() >= 5, "equal embeddings must not be hits"
    assert equal.of_texts.min() >= 6


def test_equal_captions_and_images_count_as_correct(tmp_path):
    rows = []
    for name, color, text, group in (("a", "red", "one", "1"), ("b", "red", "two", "1"), ("c", "blue", "one", "2")):
        square(color, "left", 0).save(tmp_path / f"{name}.png")
        split = "test" if group == "1" else "train"
        rows.append({"image": f"{name}.png", "captions": [text], "group": group, "split": split})
    (tmp_path / "p.jsonl").write_text("\n".join(map(json.dumps, rows)))
    _, _, images = made(f"pairs:{tmp_path}/p.jsonl", recipe())
    first, second = next(images.eval_batches("test", 8)).targets
    assert (first.texts, second.texts) == (("one",), ("two",))
    assert set(first.of_copies) == set(second.of_copies) == {"one", "two"}
    assert images.splits["test"].groups == ("1", "1")


def test_all_classes_of_a_set_are_ranked(tmp_path):
    """Images of one class are no easier than the others' names make them."""
    for color in COLORS:
        for split in ("train", "val") if color == "red" else ("train",):
            (tmp_path / split / color).mkdir(parents=True)
            for number in range(4):
                image = square(color, "left", number + 10 * (split == "val"))
                image.save(tmp_path / split / color / f"{number}.png")
    prompts = ("a {} square", "{}")
    model, task, images = made(tmp_path, recipe(batch_size=4, prompts=prompts))
    task.fit(model, images)
    embedded = model.eval().embed_images(next(images.eval_batches("val", 8)).inputs)
    names = sorted(COLORS)
    vectors = [model.embed_texts(model.text.encode([prompt.format(name) for prompt in prompts])) for name in names]
    similarity = embedded @ torch.stack([torch.nn.functional.normalize(v.sum(0), dim=0) for v in vectors]).T
    red = names.index("red")
    places = (similarity >= similarity[:, red : red + 1]).sum(1)
    measured = task.evaluate(model, images.eval_batches("val", 8))
    for k in (1, 5):
        assert measured.per_image[f"text_r{k}"].tolist() == (places <= k).tolist()
    scale = float(model.scale().detach())
    loss = torch.nn.functional.cross_entropy(similarity * scale, torch.full((4,), red))
    assert measured.metrics["loss"] == pytest.approx(float(loss.detach()), rel=1e-5)
    assert measured.metrics["loss"] > 0.1


def test_captions_that_differ_in_case_and_white_space_are_one_text(folder, monkeypatch):
    model, task, images = made(f"pairs:{folder}/pairs.jsonl", recipe())
    task.fit(model, images)
    batch = next(images.eval_batches("val", 4))
    texts = ["a red  square", "A Red Square", " a red square\n", "blue"]
    right = [Captions((text,), of_copies=(text.upper(),)) for text in texts]
    embedded = []
    monkeypatch.setattr(Lit, "_embed", lambda self, model, entries: embedded.extend(entries) or torch.eye(2, 32))
    monkeypatch.setattr(model, "embed_images", lambda inputs: torch.eye(2, 32)[[0, 0, 0, 1]])
    measured = task.evaluate(model, [replace(batch, targets=right)])
    assert embedded == [("a red  square",), ("blue",)]
    assert measured.metrics["text_r1"] == measured.metrics["image_r1"] == 1
    assert task.constant_scores([replace(images.splits["val"], annotations=tuple(right * 3))], 1)["text_r1"] == 0.75


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ([{"image": "x.png", "captions": ["a"]}], "line 1: the image x.png is missing"),
        ([{"image": "0.png", "captions": ["a", " "]}], "line 1: 0.png has an empty caption, or none"),
        ([{"image": "0.png"}], "line 1: 0.png has an empty caption, or none"),
        ([{"image": "0.png", "captions": ["a"], "split": "some"}], "line 1: the split some is not train, val or test"),
        ([{"image": "0.png", "captions": ["a"], "group": "g"},
          {"image": "1.png", "captions": ["b"], "group": "g", "split": "test"}],
         "line 2: the group g is in test, and in train by line 1"),
        ([{"image": "0.png", "captions": ["a"]}, {"image": "0.png", "captions": ["b"], "split": "val"}],
         "line 2: 0.png has another split or group in line 1"),
        ([{"image": "0.png", "captions": ["a"], "split": "val"}], "does not name images of the split train"),
        ([["0.png"]], "line 1: not a JSON object"),
        ("{", "line 1: not a JSON object"),
        (b"\xff", "cannot be read as JSON Lines in UTF-8"),
    ],
)  # fmt: skip
def test_errors_name_the_file_and_the_line(tmp_path, lines, words):
    for name in ("0.png", "1.png"):
        square("red", "left", 0).save(tmp_path / name)
    text = lines if isinstance(lines, str | bytes) else "\n".join(map(json.dumps, lines))
    (tmp_path / "pairs.jsonl").write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(UserError, match=r"pairs\.jsonl") as error:
        open_source(f"pairs:{tmp_path}/pairs.jsonl")
    assert words in str(error.value)


def test_captions_as_pandas_writes_lists_and_a_column_that_is_not_known(tmp_path):
    square("red", "left", 0).save(tmp_path / "0.png")
    square("red", "left", 1).save(tmp_path / "1.png")
    rows = """image,{}\n0.png,"['a red square', ""it's red""]"\n1.png,[a] square\n"""
    (tmp_path / "pairs.csv").write_text(rows.format("text"))
    first, second = open_source(f"pairs:{tmp_path}/pairs.csv").splits["train"].annotations
    assert (first.texts, second.texts) == (("a red square", "it's red"), ("[a] square",))
    (tmp_path / "pairs.csv").write_text(rows.format("words"))
    with pytest.raises(
        UserError, match=r"Which column of .*pairs\.csv has the captions\? Add \?captions=COLUMN; it has image, w"
    ):
        open_source(f"pairs:{tmp_path}/pairs.csv")


@pytest.mark.parametrize("form", ["pairs.csv", ""])
def test_a_group_stays_on_one_side_of_a_split_that_is_made(tmp_path, form):
    for i in range(60):
        (tmp_path / f"{i}.png").write_bytes(encoded(square("red", "left", i)))
    if form:
        with open(tmp_path / form, "w", newline="") as file:
            names = ["image", "caption", "group"]
            rows = ([f"{i}.png", f"text {i} {j}", str(i // 4)] for i in range(60) for j in range(2))
            csv.writer(file).writerows([names, *rows])
    else:
        for shard, numbers in (("a.tar", range(50)), ("b.tar", range(50, 60))):
            pairs = ((i, (tmp_path / f"{i}.png").read_bytes()) for i in numbers)
            members = [{f"{i}.png": raw, f"{i}.json": {"caption": f"text {i}", "group": i // 4}} for i, raw in pairs]
            write_shard(tmp_path / shard, {name: one for pair in members for name, one in pair.items()})
    _, _, images = made(f"pairs:{tmp_path}/{form}".rstrip("/"), recipe())
    groups = [set(split.groups) for split in images.splits.values()]
    assert len(groups) == 3
    assert len(set.union(*groups)) == sum(map(len, groups)) == 15
    assert len(images.splits["train"].annotations[0].texts) == (2 if form else 1)


def write_shard(path, members):
    raw = {name: one if isinstance(one, bytes) else json.dumps(one).encode() for name, one in members.items()}
    write_tar(path, raw)


def test_shards_are_the_pairs_of_a_file(folder, tmp_path):
    """The same images, captions, groups and splits, from KEY.json in some shards and KEY.txt in others."""
    shards = {}
    for number, line in enumerate(map(json.loads, (folder / "pairs.jsonl").read_text().splitlines())):
        key = f"{number:03d}"
        members = shards.setdefault(f"{line['split']}-{number % 2}.tar", {})
        members[f"{key}.png"] = (folder / line["image"]).read_bytes()
        members[f"{key}.json"] = {"captions": line["captions"], "group": line["group"], "width": 16}
    write_shard(tmp_path / "all" / "README.tar", {"note.txt": b"of nothing"})
    for name, members in shards.items():
        write_shard(tmp_path / "all" / name, members)
    _, _, expected = made(f"pairs:{folder}/pairs.jsonl", recipe())
    _, _, images = made(f"pairs:{tmp_path}/all?zero_shot={folder}/classes", recipe())
    assert images.summary()["warnings"][0] == "These shards do not name a split and were not used: README.tar."
    assert len(images.splits["test"].annotations) == 60
    pattern = f"pairs:{tmp_path}/all/{{train,val,test}}-{{0..1}}.tar"
    for spec in (pattern, f"{pattern}?captions=captions&stream=1"):
        _, _, images = made(spec, recipe())
        for split in ("train", "val", "test"):
            of_file, of_shards = next(expected.eval_batches(split, 60)), next(images.eval_batches(split, 60))
            order = sorted(range(len(of_shards)), key=lambda i: images.splits[split].ids[i].split(": ")[1])
            numbers = [int(Path(name).stem) for name in expected.splits[split].ids]
            by_number = sorted(range(len(of_file)), key=numbers.__getitem__)
            assert torch.equal(of_shards.inputs[order], of_file.inputs[by_number])
            assert [of_shards.targets[i] for i in order] == [of_file.targets[i] for i in by_number]
    write_shard(
        tmp_path / "txt" / "a.tar", {"1.png": PIXELS, "1.txt": "ein Häuschen\n".encode(), "1.json": {"width": 2}}
    )
    source = open_source(f"pairs:{tmp_path}/txt")
    assert source.splits["train"].annotations[0].texts == ("ein Häuschen",)


ONE = {"1.png": PIXELS, "1.txt": b"a"}


@pytest.mark.parametrize(
    ("shards", "options", "words"),
    [
        ({"train": {**ONE, "2.png": PIXELS}}, "", "2.png.*none: write KEY.txt, or KEY.json with 'captions'"),
        ({"train": {**ONE, "2.png": PIXELS, "2.txt": b" "}}, "", "train.tar: 2.png.*it has an empty caption"),
        ({"train": {**ONE, "2.png": PIXELS, "2.json": b"{"}}, "", "train.tar: 2.png.*its captions cannot be read"),
        ({"train": {**ONE, "2.png": PIXELS, "2.txt": b"\xff"}}, "", "train.tar: 2.png.*its captions cannot be read"),
        ({"train": {**ONE, "2.txt": b"a"}}, "", "train.tar: 2.*it is a caption without an image"),
        ({"train": ONE}, "?captions=text", "train.tar: 1.png.*none: write KEY.json with 'text'"),
        ({"train": ONE}, "?image=photo", "image is an option of files of pairs, not of shards"),
        ({"val": ONE}, "", "has shards of val, but none of train"),
        (
            {name: {"1.png": PIXELS, "1.json": {"caption": "a", "group": "g"}} for name in ("train", "val")},
            "",
            "group g is in train by train.tar: 1.png, and in val by val.tar: 1.png: move its images",
        ),
    ],
)  # fmt: skip
def test_errors_name_the_shard_and_the_remedy(tmp_path, shards, options, words):
    for name, members in shards.items():
        write_shard(tmp_path / f"{name}.tar", members)
    with pytest.raises(UserError) as error:
        made(f"pairs:{tmp_path}{options}", recipe())
    assert re.search(words, str(error.value), re.DOTALL)


def test_a_caption_is_drawn_by_seed_and_epoch(folder):
    _, _, images = made(f"pairs:{folder}/pairs.jsonl", recipe())
    texts = [
        next(images.train_batches(seed=seed, epoch=epoch, batch_size=36)) for seed, epoch in ((0, 0), (0, 0), (0, 1))
    ]
    drawn = [dict(zip(batch.index.tolist(), batch.targets)) for batch in texts]
    assert drawn[0] == drawn[1] != drawn[2]
    parts = [next(images.for_process(rank, 2).train_batches(seed=0, epoch=0, batch_size=36)) for rank in (0, 1)]
    assert drawn[0] == dict(pair for batch in parts for pair in zip(batch.index.tolist(), batch.targets))


def test_the_tokenizer_is_learned_and_encodes_any_text(folder):
    texts = ["a red square", "a blue square", "red"] * 3
    first, second = (learn_tokenizer(texts, 300) for _ in range(2))
    assert first.to_str() == second.to_str()
    assert len(first.encode("zebra ☃").ids) >= 8
    model, task, images = made(f"pairs:{folder}/pairs.jsonl", recipe())
    task.fit(model, images)
    tokens = model.text.encode(["a red square, left", "", "one two three four five six seven eight nine"])
    assert tokens.shape == (3, 8)
    assert (tokens[:, -1] == 1).all()
    assert tokens.min() == 1
    assert (tokens[1] == 1).all()
    padded = type(model.text.tokenizer).from_str(model.text.tokenizer.to_str())
    padded.enable_padding()
    padded.enable_truncation(2)
    padded.save(str(folder / "tokenizer.json"))
    again, task, _ = made(f"pairs:{folder}/pairs.jsonl", recipe(tokenizer=str(folder / "tokenizer.json")))
    task.fit(again, images)
    texts = ["red", "a red square, left"]
    assert torch.equal(again.text.encode(texts), model.text.encode(texts)), "as long as without padding and cutting"
    _, task, _ = made(f"pairs:{folder}/pairs.jsonl", recipe(tokenizer=str(folder / "tokenizer.json"), vocabulary=260))
    with pytest.raises(UserError, match="more than the vocabulary of 260"):
        task.fit(again, images)


@pytest.mark.parametrize("loss", ["softmax", "sigmoid"])
def test_a_trial_resumes_in_the_same_bits(tmp_path, folder, ends_in_the_same_bits, loss):
    settings, spec = recipe(loss=loss), f"pairs:{folder}/pairs.jsonl"

    def train(out):
        train_trial(*made(spec, settings), settings, out=out, options=CPU)

    ends_in_the_same_bits(train, tmp_path, "test", 4)
    rows = map(json.loads, (tmp_path / "whole/metrics.jsonl").read_text().splitlines())
    assert any({"loss", "text_r1", "image_r1", "scale"} <= row.keys() for row in rows if row["split"] == "train")
    trained, start = open_trial(tmp_path / "whole"), made(spec, settings)[0]
    for name, value in start.backbone.state_dict().items():
        assert torch.equal(value, trained.backbone.state_dict()[name]), "the image tower is frozen"
    assert trained.text.encode(["red"])[0, 0] > 1


def test_training_finds_texts_and_classes(tmp_path, folder):
    settings = recipe(40, frozen_image=False, prompts=("a {} square, left", "a {} square, low"))
    model, task, images = made(f"pairs:{folder}/pairs.jsonl?zero_shot={folder}/classes", settings)
    train_trial(model, task, images, settings, out=tmp_path, options=CPU)
    for split, metric in (("val", "text_r1"), ("test", "zero_shot")):
        measured = task.evaluate(model.eval(), images.eval_batches(split, 8))
        chance = task.constant_scores([images.splits[split]], 1)[metric]
        assert measured.metrics[metric] > 1.5 * chance > 0.1
        assert measured.per_image[metric].mean() == measured.metrics[metric]
    assert measured.metrics["zero_shot"] == measured.metrics["text_r1"]
    model.text.length = 3
    with pytest.warns(UserWarning, match="have the tokens of another: increase text_length"):
        task.evaluate(model, images.eval_batches("test", 8))


def test_a_study_starts_from_the_towers_of_another(tmp_path, folder):
    sizes, how = (
        {"img_size": 16, "in_chans": 3, "seeds": 2},
        StudyOptions("cpu", workers=1, progress=False, cost_seconds=0),
    )
    towers = vm.Study("mu2/4", ["dpn"], folder / "classes", RECIPES["plain"](1).with_(batch_size=16), **sizes)
    towers.run(tmp_path / "towers", options=how)
    captions = f"pairs:{folder}/pairs.jsonl"
    data = f"{captions}?zero_shot={folder}/classes"

    def study(base=None, arms=(), spec=data, start="towers", **options):
        start = start and tmp_path / start
        return vm.Study(base, arms, spec, recipe(1), task="lit", start=start, **{**sizes, **options})

    answer = study(metric="zero_shot").run(tmp_path / "lit", options=how)
    assert answer["dpn"].effect is not None
    for arm in ("base", "dpn"):
        weights = [load_file(tmp_path / name / f"trials/{arm}/seed1/model.safetensors") for name in ("towers", "lit")]
        assert all(torch.equal(value, weights[0][name]) for name, value in weights[1].items())
    numbers = evaluate(tmp_path / "lit/trials/dpn/seed0", data=f"{folder}/classes", split="train")[0]
    assert 0 <= numbers["intervals"]["zero_shot"][0] <= numbers["metrics"]["zero_shot"]
    chosen = study(seeds=1, answer_on="val").run(tmp_path / "val", options=how)
    assert chosen.splits == ("val",)
    assert chosen.base_mean is not None
    with pytest.raises(UserError, match="start from trained weights"):
        study("mu2/4", ["dpn"], start=None)
    for number, (options, message) in enumerate((
        ({"arms": ["rms"], "seeds": 3, "start": "towers/trials/base"}, "does not hold seed2"),
        ({"arms": ["patchdropout"], "start": "towers/trials/base"}, "The backbone is frozen"),
        ({"spec": captions, "metric": "zero_shot"}, "zero_shot needs test images with classes"),
    )):  # fmt: skip
        with pytest.raises(UserError, match=message):
            study(**options).run(tmp_path / f"refused{number}", options=how)


def work(rank, store, folder, out):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    train_both(folder, Path(out) / "two", Processes(rank, 2, rank))
    train_both(folder, Path(out) / "sharded", Processes(rank, 2, rank), shard=True)
    dist.destroy_process_group()


def train_both(folder, out, processes, shard=False):
    options = RunOptions("cpu", progress=False, tensorboard=False, shard=shard)
    for loss in ("sigmoid",) if shard else ("softmax", "sigmoid"):
        settings = recipe(loss=loss, frozen_image=loss == "sigmoid", optimizer="sgd", lr=0.1)  # Adam amplifies rounding
        trial = made(f"pairs:{folder}/pairs.jsonl", settings)
        train_trial(*trial, settings, out=out / loss, options=options, processes=processes)


@pytest.mark.forks
def test_two_processes_are_one(tmp_path, folder, imported):
    torch.set_num_threads(1)
    train_both(folder, tmp_path / "one", Processes())
    mp.start_processes(work, (str(tmp_path / "store"), str(folder), str(tmp_path)), nprocs=2, start_method="fork")
    trials = (("two", "softmax"), ("two", "sigmoid"), ("sharded", "sigmoid"))
    for (count, loss), name in product(trials, ("model", "task")):
        alone, together = (load_file(tmp_path / part / loss / f"{name}.safetensors") for part in ("one", count))
        assert alone.keys() == together.keys()
        for key, value in alone.items():
            torch.testing.assert_close(value, together[key], atol=1e-6, rtol=0, msg=f"{count} {loss} {key}")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"loss": "bce"}, "softmax and sigmoid"),
        ({"drop_path": 0.1}, "frozen, which ignores drop_path"),
        ({"accumulate": 2}, "does not read accumulate"),
        ({"prompts": ("no place",)}, "one {} for the name"),
    ],
)
def test_settings_without_effect_are_refused_and_a_missing_library_has_a_remedy(options, words, monkeypatch):
    with pytest.raises(UserError, match=words):
        make_task("lit", recipe(**options))
    assert TASKS["lit"].whole_batch
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(UserError, match=r"pip install 'vitmods\[tasks\]'"):
        learn_tokenizer(["a"], 300)
