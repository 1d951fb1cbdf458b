"""Mistakes are refused in one paragraph that says what to do, before anything is read, trained or written."""

import json
import os
import re
import shlex
import subprocess
import sys

import pytest

EARLY = r"""
compar                                             -> Did you mean 'compare'?
--color                                            -> --color
compare --epoch 3                                  -> option --epoch. Did you mean --epochs?
compare --seeds three                              -> --seeds
compare --design factoral                          -> Did you mean 'factorial'?
compare --recipe plane                             -> Did you mean 'plain'?
compare --recipe augreg(levle=light1)              -> Did you mean 'level'?
compare --margin -1                                -> margin is how much worse an arm may be
compare --img-size 8 8 8                           -> img_size is one side or two
compare --sweep lrr=1,2                            -> Did you mean 'lr'
train --from runs/pets                             -> There is no option --from
apply dpn                                          -> `vitmods diff --arm dpn` shows
compare --model Ti/16                              -> Did you mean --base?
compare --devices 2                                -> Did you mean --devices-per-trial?
train --devices-per-trial 2                        -> Did you mean --devices?
finetune --model x --devices-per-trial 2           -> adapts weights on several devices
compare dpn rms                                    -> dpn is a change: write --arms dpn.
diff dpn                                           -> Changes follow --arm: write --arm dpn.
finetune --data digits                             -> Say what is adapted: --model
finetune --model x --limit-trian 9                 -> --limit-trian
report runs/pets --out answer.gif                  -> must end with .html, .svg, .pdf or .png
report runs/pets --bibtex --out answer.pdf         -> files: give one of them
report runs/pets --bibtex --latex                  -> files: give one of them
compare photos --data digits                       -> The images are given twice
evidence                                           -> Give folders of studies
recipe                                             -> vitmods recipe show NAME
recipe a2                                          -> vitmods recipe show NAME
recipe show                                        -> recipe show
recipe show a2 --modle B/16                        -> --model
"""
"""that are refused before torch is imported"""
SLIPS = r"""
list                                               -> `vitmods changes` lists the changes
Comapre                                            -> Did you mean 'compare'?
run                                                -> Did you mean 'compare'?
eval runs/x                                        -> Did you mean 'evaluate'?
analyze runs/x                                     -> Did you mean 'analyse'?
datasets                                           -> Did you mean 'data'?
tables                                             -> Did you mean 'paper'?
plot runs/x                                        -> Did you mean 'report'?
benchmark                                          -> Did you mean 'bench'?
fine_tune                                          -> Did you mean 'finetune'?
pack                                               -> Did you mean `vitmods data pack`?
version                                            -> Did you mean `vitmods --version`?
models                                             -> `vitmods compare --base NAME`
gallery                                            -> docs/gallery.md
frobnicate                                         -> Known: analyse, base
train --pretrained                                 -> `vitmods finetune --model WEIGHTS` starts from trained weights.
train --checkpoint x.pth                           -> `vitmods finetune --model WEIGHTS` starts from trained weights.
train --model Ti/16                                -> option --model. Did you mean --base?
compare --pretrained                               -> Did you mean --from?
compare --lr=1e-3 --Epoch=3                        -> Did you mean --epochs?
compare --epochs=ten                               -> --epochs needs a whole number, not 'ten'.
compare --steps 1e3                                -> --steps needs a whole number, not '1e3'.
compare --batch 64                                 -> Did you mean --batch-size?
compare --bs 64                                    -> Did you mean --batch-size?
compare --dryrun                                   -> Did you mean --dry-run?
compare --dry                                      -> Did you mean --dry-run?
compare --gpu 0                                    -> Did you mean --device?
compare --cuda                                     -> Did you mean --device cuda?
compare --fp16                                     -> Did you mean --precision fp16-mixed?
compare --precision fp16                           -> --precision cannot be 'fp16'. Did you mean 'fp16-mixed'?
compare --optimizer adm                            -> --optimizer cannot be 'adm'. Did you mean 'adamw'?
compare --dataset photos                           -> Did you mean --data?
compare digits dpn rms                             -> Changes follow --arms: write --arms dpn rms.
train dpn                                          -> dpn is a change: write --arm dpn.
improve dpn                                        -> dpn is a change: write --candidates dpn.
improve digits --arms dpn                          -> Did you mean --candidates?
improve digits dpn rms                             -> Changes follow --candidates: write --candidates dpn rms.
bench --weights a                                  -> There is no option --weights. `vitmods bench --help`
compare digits 3                                   -> '3' cannot stand alone: a value follows its option.
compare --data digits --epochs                     -> --epochs needs a value.
pretrain dino                                      -> dino is a task: write --task dino.
compare --arm dpn                                  -> Did you mean --arms?
compare --changes dpn                              -> Did you mean --arms?
compare --seed 3                                   -> Did you mean --seeds?
compare --num_seeds 3                              -> Did you mean --seeds?
compare --output runs/x                            -> Did you mean --out?
compare --out-dir runs/x                           -> Did you mean --out?
compare --learning-rate 1e-3                       -> Did you mean --lr?
compare --wd 0.1                                   -> Did you mean --weight-decay?
compare --image-size 64                            -> Did you mean --img-size?
compare --num-workers 4                            -> Did you mean --workers?
compare --resume                                   -> Re-running the same command resumes.
compare --verbose                                  -> Progress is printed unless --quiet is given.
compare --overwrite                                -> name another folder by --out
compare --frobnicate 3                             -> option --frobnicate. `vitmods compare --help` shows
report runs/x --format latex                       -> Give --latex, --markdown
report runs/x --pdf                                -> Did you mean --out answer.pdf?
report                                             -> Missing: PATH the study's folder or address.
predict runs/x photo.png --devices 2               -> Did you mean --device?
export runs/x --onnx                               -> Did you mean --to onnx?
export runs/x --format onnx                        -> Did you mean --to?
diff --arms dpn                                    -> Did you mean --arm?
bench dpn                                          -> vitmods bench --help
recipes deit                                       -> `vitmods recipe show NAME` shows one.
train --lr ten                                     -> --lr
"""
"""words of other tools, and what people type at a shell: each names what is meant, or nothing"""
BEFORE_IMAGES = r"""
compare --max-seeds 8                              -> --max-seeds needs --until-decided
compare --max-seeds 40 --until-decided --data digits -> 32
compare --until-decided --seeds 8                  -> set --max-seeds, not --seeds
base --until-decided                               -> set the number of trials with --seeds
base --confirm                                     -> trains one model
compare --confirm                                  -> --confirm needs --design factorial
compare --runs 8                                   -> --runs needs --design factorial
compare --retrain best --pilot                     -> drop --dry-run, --pilot and --budget
compare --retrain best --budget 2h                 -> drop --dry-run, --pilot and --budget
compare --sweep lr=0.1                             -> two values or more
compare --sweep lr                                 -> lr
compare --tune lrr=1e-3                            -> Did you mean 'lr'
compare --tune lr=1e-3,0.001                       -> lr
compare --tune lr=1e-3 --tune lr=1e-2              -> lr
compare --tuning-seeds 2                           -> --tune
compare --folds 1                                  -> folds must be at least 2
compare --seeds 0                                  -> at least one seed
compare --epochs 0                                 -> epochs must be at least 1
compare --mean 0.5 0.4 --data digits               -> mean
compare --device cup                               -> cup
compare --device cuda:99 --dry-run                 -> cuda:99
compare --data-workers -1                          -> workers
compare --log wandbb                               -> Did you mean 'wandb'
compare --metric briar                             -> Did you mean 'brier'
compare --metric accuracy                          -> Unknown metric 'accuracy'. Did you mean 'top1'?
compare --metric fewshot5 --shots 1                -> shots
compare --limit-val 0                              -> limit_val
compare --task detectoin                           -> Unknown task 'detectoin'. Did you mean 'detection'?
compare --arms                                     -> needs an arm besides base
compare --arms dpn rsm                             -> Unknown change 'rsm'. Did you mean 'rms'? `vitmods changes` lists
compare --arms nroms                               -> Did you mean 'norm'?
compare --arms dpn x=dpn                           -> dpn
compare --arms layernorm_scale                     -> Did you mean 'layernormscaling'?
compare --arms post=placment(attn=post)            -> Did you mean 'placement'?
compare --arms dpn(befor=false)+rms                -> 'dpn' does not have the setting 'befor'. Did you mean 'before'?
compare --arms replace(layernrom)                  -> Did you mean 'layernorm'?
compare --arms paper:dpn-tabel6                    -> Did you mean 'dpn-table6'? `vitmods paper` lists all.
compare --arms paper:dpn-table6 paper:dpn-table1   -> one of paper:dpn-table6 and paper:dpn-table1
compare --base Q/16                                -> is not the name of a ViT
compare --budget soon                              -> soon
compare --budget 2                                 -> The budget 2 does not have a unit
compare --data pets/imgaes                         -> Did you mean pets/images?
compare nowhere                                    -> The folder nowhere does not exist
train nowhere --arm dpn                            -> The folder nowhere does not exist
compare --data digits --out /proc/no/such --epochs 1 -> /proc/no/such
compare --from runs/pest                           -> Did you mean runs/pets?
train --seed -1                                    -> Seeds are whole numbers
train --recipe augrge                              -> augreg
train --arm dpn+rsm                                -> Did you mean 'rms'?
finetune --model no                                -> There is no checkpoint 'no'
finetune --from runs/pest/trials --data digits     -> Did you mean runs/pets/trials?
diff --arm norms                                   -> several arms of a study
diff --arm paper:dpn-table6                        -> several arms of a study
diff --arm=dnp                                     -> Did you mean 'dpn'?
diff --base Z/16 --arm dpn                         -> S/16
changes dnt                                        -> Did you mean 'dtn'?
changes norms                                      -> line-up
evaluate                                           -> Name at least one checkpoint
evaluate runs/pets --protocol calibrate            -> Did you mean 'calibration'?
evaluate runs/pest/trials                          -> Did you mean runs/pets/trials?
analyse runs/pets --figures kernel                 -> Did you mean 'kernels'?
report /no/such/folder                             -> /no/such/folder
report runs/pest                                   -> Did you mean runs/pets?
predict runs/pets pets/imagse                      -> Did you mean pets/images?
export runs/pest/trials --out x                    -> Did you mean runs/pets/trials?
data /no/such/folder                               -> /no/such/folder
data pets/imgaes                                   -> Did you mean pets/images?
paper rum dpn-table6                               -> paper run TABLE
paper run                                          -> Name a table
paper run dpn-table6 --arms dpn                    -> compare --arms paper:TABLE dpn
paper run dpn-tabel6                               -> Did you mean 'dpn-table6'?
paper run dpn-table6 --data pets/imgaes            -> Did you mean pets/images?
paper run dpn-table2                               -> JFT-4B is not public
paper run tt-table5                                -> add --from, weights trained at 224 px
paper run dpn-table3 --from vit_tiny_patch16_224   -> lacks weights of dpn
paper show dpn-tabel6                              -> Did you mean 'dpn-table6'?
recipe show deti                                   -> Did you mean 'deit'?
recipe show a2 --model Q/16                        -> is not the name of a ViT
recipe show deit --model Q/16                      -> is not the name of a ViT
recipe show a2(layerscal=true)                     -> Did you mean 'layerscale'
recipe show a2(model=S/16) --model B/16            -> differ: leave one out
recipe show a2 --data-size 100                     -> batch of 2048 images is more than the 100
recipe show augreg --data-size 5000                -> warmup_epochs
"""
BEFORE_TRAINING = r"""
compare --margin 200                               -> does not exclude any difference
compare --margin inf                               -> does not exclude any difference
compare --steps 20 --epochs 3                      -> epochs and steps both set the length
compare --steps 50 --sweep epochs=5,10             -> do not depend on epochs
compare --tune lr=1e-4,1e-3 --sweep lr=1e-4,1e-3   -> lr is both tuned and swept over
compare --tune momentum=0.8,0.9                    -> momentum has no effect with the optimizer adamw
compare --optimizer sgd --beta1 0.8                -> beta1 has no effect with the optimizer sgd
compare --step-at 0.5 0.9                          -> step_at has no effect with the schedule
compare --sweep poly_power=0.5,0.9                 -> poly_power has no effect with the schedule
compare --arms dpn rms --design factorial --family 10 -> family is for studies of arms
compare --recipe dino_small                        -> add --task dino
compare --task dino --recipe beit_small            -> add --task beit
compare --metric miou                              -> does not measure miou
compare --base mu1/2 --tune train=attention,layer_scale -> layer_scale
compare --base mu1/2 --task multilabel --tune loss=sigmoid,softmax -> softmax
compare --base mu1/2 --arms x=placement(attn=post,mlp=post) --recompute -> Arm x:
compare --base mu1/2 --metric fewshot25 --sweep limit_train=300,80 -> 25 shots need
compare --base mu1/2 --sweep limit_train=5000,6000 -> the same
compare --base timm:test_vit --img-size 32 --patch-drop 0.5 -> patch_drop
"""


def rows(*tables):
    return [tuple(re.split(" +-> ", line)) for table in tables for line in table.strip().splitlines()]


@pytest.fixture
def folders(tmp_path, monkeypatch):
    for folder in ("pets/images", "runs/pets/trials", "large"):
        (tmp_path / folder).mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(("line", "words"), rows(EARLY, SLIPS, BEFORE_IMAGES))
def test_mistakes_are_refused_before_anything_is_read_or_written(line, words, refused, folders, monkeypatch):
    before, more = sorted(folders.rglob("*")), []
    if line.startswith(("compare -", "train -")) and not re.search("--(data|from|epochs)( |$)", line):
        monkeypatch.setattr("vitmods.study.fixed.defaults_for", lambda data: pytest.fail("the images were listed"))
        more = ["--data", "large"]
    error = refused(line, *more)
    assert words in error
    assert len(error) > 40
    assert "Comparing" not in error
    assert "─" not in error
    assert "----" not in error
    assert sorted(folders.rglob("*")) == before


@pytest.mark.parametrize(("line", "words"), rows(BEFORE_TRAINING))
def test_what_cannot_be_compared_is_refused_before_training(line, words, refused, folders, monkeypatch):
    monkeypatch.setattr("vitmods.study.run._work", lambda *args: pytest.fail("it trains"))
    assert words in refused(line, "--device", "cpu")


def test_many_mistakes_are_found_before_torch_is_imported(folders):
    script = """
import json, sys
from vitmods.cli import main
for line in json.loads(sys.argv[1]):
    code = main(line)
    heavy = {"torch", "torchvision", "timm", "scipy", "PIL"} & set(sys.modules)
    print(code, heavy)
"""
    lines = [shlex.split(line) for line, _ in rows(EARLY)]
    command = [sys.executable, "-c", script, json.dumps(lines)]
    shell = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert shell.stdout.splitlines() == ["2 set()"] * len(lines), shell.stderr


def test_without_torch_the_message_says_how_to_install_it(tmp_path):
    script = "import sys; sys.modules['torch'] = None; from vitmods.cli import main; sys.exit(main(sys.argv[1:]))"
    command = [sys.executable, "-c", script, "compare", "--dry-run"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 2
    assert "The package torch is not installed: pip install torch" in done.stderr
    assert "not foreseen" not in done.stderr


@pytest.mark.parametrize("name", ["a" * 4096, "a/" * 2048])
@pytest.mark.parametrize("command", ["data ", "report ", "evaluate ", "data wds:"])
def test_a_path_that_is_too_long_is_named(command, name, refused):
    assert refused(command + name)


def test_an_unwritable_place_is_one_error(tmp_path, refused):
    (tmp_path / "file").touch()
    assert "Cannot write" in refused("compare --base mu/4 --arms dpn --seeds 1", "--out", tmp_path / "file" / "study")


@pytest.mark.parametrize("encoding", ["ascii", "utf-8"])
def test_a_wrong_option_is_answered_in_a_sentence_whatever_the_terminal_draws(encoding):
    variables = {**os.environ, "PYTHONIOENCODING": encoding, "FORCE_COLOR": "1"}
    command = [sys.executable, "-m", "vitmods", "compare", "--foo", "3", "--max-seed", "4"]
    done = subprocess.run(command, capture_output=True, env=variables, timeout=60)
    said = done.stderr.decode()
    assert done.returncode == 2
    assert said.startswith("vitmods compare: There is no option --foo and --max-seed.")
    assert "--max-seeds" in said
    assert not re.search("[─│╭\x1b]", said)
