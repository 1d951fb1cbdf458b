"""Kumar, Dehghani & Houlsby: Dual PatchNorm."""

from dataclasses import replace

from vitmods.papers.table import Claim, Paper, Tables, TableStudy

PAPER = Paper(
    "dpn",
    "Dual PatchNorm",
    "Kumar, Dehghani & Houlsby, TMLR 2023",
    "https://openreview.net/forum?id=jgMqve6Qhw",
    claims=(
        Claim(
            "abstract",
            "Dual PatchNorm often improves accuracy, and never hurts",
            ("table2", "table3"),
            slip="B/16 loses 0.3 in the longer training on JFT (Table 2, left); on VTAB B/32 loses in 4 and B/16 in 6 "
            "of the 17 tasks that we read for sure, by up to 12.8 and 14.2 (Table 3)",
        ),
        Claim(
            "section 5.2",
            "no placement of the norms of a block is significantly better than pre-norm",
            ("figure1",),
        ),
        Claim(
            "section 5.2",
            "NormFormer gains something with patches of 32, Dual PatchNorm in all five ViTs",
            ("figure1",),
        ),
        Claim(
            "section 5.3",
            "ImageNet-1k: B/16 gains 0.7, S/32 the most, 1.9, and the architectures 1.4 on average",
            ("table1",),
            slip="the five of AugReg gain 1.3 on average, with S/16+ 1.2 (Table 1)",
        ),
        Claim(
            "section 5.3",
            "DeiT's S/16 and B/16 gain 0.3 and 0.2; fine-tuned at 384 px B/16 gains 0.6, B/32 1.0",
            ("table1",),
        ),
        Claim(
            "section 5.3",
            "shorter trainings gain on average 1.7 on ImageNet-21k and 0.8 on JFT",
            ("table1-21k", "table2"),
        ),
        Claim(
            "section 5.3",
            "in the longer ones the best architecture gains 0.4 on ImageNet-21k and 0.5 on JFT",
            ("table1-21k", "table2"),
        ),
        Claim(
            "section 5.3",
            "in three cases it ties or loses: Ti/16 and S/32 on ImageNet-21k, B/16 on JFT",
            ("table1-21k", "table2"),
            slip="on ImageNet-21k S/16 ties; Ti/16 and S/32 gain 0.2 and 1.3 (Table 1, right)",
        ),
        Claim(
            "section 5.4",
            "fine-tuned from JFT are B/32 and B/16",
            ("table2-finetune",),
            slip="the larger model of the table, and of the sentence that follows, is L/16 (Table 2, right)",
        ),
        Claim(
            "section 7",
            "without learned gain and bias B/16 trains unstably; RMSNorm loses in B/32, S/32 and Ti/16",
            ("table6",),
        ),
        Claim(
            "Appendix A",
            "whitened patches by themselves can lose; a norm of the patches is enough",
            ("appendix-a",),
        ),
    ),
)
_AUGREG = {"S/32": "S/32", "Ti/16": "Ti/16", "B/32": "B/32", "S/16": "S/16", "B/16": "B/16"}
_PLACES = {
    "pre, post": "pre-post=placement(mlp=post)",
    "pre, pre+post": "pre-both=placement(mlp=pre+post)",
    "post, pre": "post-pre=placement(attn=post)",
    "post, post": "post-post=placement(attn=post,mlp=post)",
    "post, pre+post": "post-both=placement(attn=post,mlp=pre+post)",
    "pre+post, pre": "both-pre=placement(attn=pre+post)",
    "pre+post, post": "both-post=placement(attn=pre+post,mlp=post)",
    "pre+post, pre+post": "both-both=placement(attn=pre+post,mlp=pre+post)",
}
_DPN = TableStudy(arms={"DPN": "dpn"}, base="base", bases=_AUGREG, recipe="augreg", options="--accumulate 16")
_TABLES = Tables(PAPER, {"data": "ImageNet-1k", "unit": "top-1, %"})
_CI = "± is a 95 % interval"

_TABLES.add(
    "figure1",
    "Placements of the norms in a block",
    where="Figure 1",
    scale="AugReg, 93,000 steps, 3 runs or more",
    notes=(
        "The figure has points alone: of its arms no number is printed but Dual PatchNorm's (Table 1).",
        "The paper does not say whether post is LN(x + F(x)), as here, or x + LN(F(x)): reading=branch.",
    ),
    study=replace(
        _DPN,
        arms={**_PLACES, "NormFormer": "normformer", "Sub-LN": "subln", "DPN": "dpn"},
        base="pre, pre",
    ),
)
_TABLES.add(
    "table1",
    "ImageNet-1k with and without Dual PatchNorm",
    where="Table 1, left",
    scale=f"93,000 steps, 3 runs or more; {_CI}",
    keys=2,
    printed="""
        recipe          | arch  | base        | DPN
        AugReg          | S/32  | 72.1 ± 0.07 | 74.0 ± 0.09
        AugReg          | Ti/16 | 72.5 ± 0.07 | 73.9 ± 0.09
        AugReg          | B/32  | 74.8 ± 0.06 | 76.2 ± 0.07
        AugReg          | S/16  | 78.6 ± 0.32 | 79.7 ± 0.2
        tuned           | S/16+ | 79.7 ± 0.09 | 80.2 ± 0.03
        AugReg          | B/16  | 80.4 ± 0.06 | 81.1 ± 0.09
        DeiT            | S/16  | 80.1 ± 0.03 | 80.4 ± 0.06
        DeiT            | B/16  | 81.8 ± 0.03 | 82.0 ± 0.05
        AugReg, 384 px  | B/32  | 79.0 ± 0.00 | 80.0 ± 0.03
        AugReg, 384 px  | B/16  | 82.2 ± 0.03 | 82.8 ± 0.00
    """,
    study=replace(_DPN, row="AugReg, {base}", differs=("the rows of other recipes: --recipe better_plain, deit",)),
    needs=(
        "The 384 px rows begin with the trained weights: `vitmods compare --from STUDY --recipe high_res_finetune`.",
    ),
)
_TABLES.add(
    "table1-21k",
    "ImageNet-21k with and without Dual PatchNorm",
    where="Table 1, right",
    data="ImageNet-21k",
    unit="ImageNet-1k 25-shot top-1, %",
    scale=f"93,000 and 930,000 steps, one training, 3 few-shot seeds; {_CI}",
    printed="""
        arch  | 93k base    | 93k DPN     | 930k base   | 930k DPN
        Ti/16 | 52.2 ± 0.07 | 53.6 ± 0.07 | 61.0 ± 0.03 | 61.2 ± 0.03
        S/32  | 54.1 ± 0.03 | 56.7 ± 0.03 | 63.8 ± 0.00 | 65.1 ± 0.12
        B/32  | 60.9 ± 0.03 | 63.7 ± 0.03 | 72.8 ± 0.03 | 73.1 ± 0.07
        S/16  | 64.3 ± 0.15 | 65.0 ± 0.06 | 72.5 ± 0.1  | 72.5 ± 0.1
        B/16  | 70.8 ± 0.09 | 72.0 ± 0.03 | 78.0 ± 0.06 | 78.4 ± 0.03
    """,
    study=replace(
        _DPN,
        column="{epochs} {arm}",
        sweep={"epochs": {"93k": 3, "930k": 30}},
        data="wds:path/to/imagenet21k",
        recipe="augreg_21k",
        seeds=1,
        metric="fewshot25",
        options="--sweep steps=93000,930000 --accumulate 16",
        differs=("few-shot accuracy is of the same images, not of ImageNet-1k",),
    ),
    needs=("Trainings on ImageNet-21k that are measured on ImageNet-1k: `vitmods evaluate` measures them one by one.",),
)
_TABLES.add(
    "table2",
    "JFT-4B with and without Dual PatchNorm",
    where="Table 2, left",
    data="JFT-4B",
    unit="ImageNet-1k 25-shot top-1, %",
    scale=f"220,000 and 1.1M steps, one training, 3 few-shot seeds; {_CI}",
    printed="""
        arch | 220k base   | 220k DPN    | 1.1M base   | 1.1M DPN
        B/32 | 63.8 ± 0.03 | 65.2 ± 0.03 | 70.7 ± 0.1  | 71.1 ± 0.09
        B/16 | 72.1 ± 0.09 | 72.4 ± 0.07 | 76.9 ± 0.03 | 76.6 ± 0.03
        L/16 | 77.3 ± 0.00 | 77.9 ± 0.06 | 80.9 ± 0.03 | 81.4 ± 0.06
    """,
    notes=("The caption says 200K steps; the table and the text say 220K.",),
    needs=("JFT-4B is not public, and its learning rate is not stated: of other large sets `--recipe jft`.",),
)
_TABLES.add(
    "table2-finetune",
    "Fine-tuning on ImageNet-1k from JFT-4B",
    where="Table 2, right",
    scale=f"from 220,000 or 1.1M steps on JFT-4B; {_CI}",
    keys=3,
    printed="""
        arch | resolution | steps | base        | DPN
        B/32 | 224        | 220k  | 77.6 ± 0.06 | 78.3 ± 0.00
        B/32 | 384        | 220k  | 81.3 ± 0.09 | 81.6 ± 0.00
        B/32 | 224        | 1.1M  | 80.8 ± 0.1  | 81.3 ± 0.00
        B/32 | 384        | 1.1M  | 83.8 ± 0.03 | 84.1 ± 0.00
        L/16 | 224        | 220k  | 84.9 ± 0.06 | 85.3 ± 0.03
        L/16 | 384        | 220k  | 86.7 ± 0.03 | 87.0 ± 0.00
        L/16 | 224        | 1.1M  | 86.7 ± 0.03 | 87.1 ± 0.00
        L/16 | 384        | 1.1M  | 88.2 ± 0.00 | 88.3 ± 0.06
    """,
    needs=("Weights trained on JFT-4B, which is not public; of others: `vitmods compare --from STUDY`.",),
)
_TABLES.add(
    "table3",
    "VTAB-1k with and without Dual PatchNorm",
    where="Table 3",
    data="VTAB-1k, 1,000 training images a task",
    scale="from weights trained on ImageNet; mean of 3 seeds at the best of 3 learning rates",
    keys=2,
    printed="""
        group       | data set    | B/32   | B/32 DPN | B/16   | B/16 DPN
        Natural     | Caltech101  | 87.1   | 87.7     | 86.1   | 86.6
        Natural     | CIFAR-100   | 53.7   | 58.1     | 35.5   | 51.4
        Natural     | DTD         | 56.0   | 60.7     | 60.1   | 63.1
        Natural     | Flowers102  | 83.9   | 86.4     | 90.8   | 91.3
        Natural     | Pets        | 87.2   | 88.0     | 90.9   | 92.1
        Natural     | Sun397      | 32.0   | 35.4     | 33.9   | 32.5
        Natural     | SVHN        | 76.8   | 80.3     | 76.7   | 78.3
        Specialized | Camelyon    | 77.9   | 78.5     | 81.3   | 80.6
        Specialized | EuroSAT     | 94.8   | 95.0     | 95.9   | 95.8
        Specialized | Resisc45    | 78.2   | 81.6     | 81.2   | 83.5
        Specialized | Retinopathy | 71.2   | 70.3     | 74.7   | 73.3
        Structured  | Clevr-Count | 58.3   | 62.5     | 65.2   | 73.7
        Structured  | Clevr-Dist  | 52.6 ? | 55.5 ?   | 59.8 ? | 48.3 ?
        Structured  | DMLab       | 39.2 ? | 40.7 ?   | 39.7 ? | 41.0 ?
        Structured  | dSpr-Loc    | 71.3   | 60.8     | 72.1   | 72.4
        Structured  | dSpr-Ori    | 59.8   | 61.6     | 61.9   | 63.0
        Structured  | KITTI-Dist  | 73.6   | 73.4     | 81.3   | 80.6
        Structured  | sNORB-Azim  | 20.7   | 20.9     | 18.9   | 21.6
        Structured  | sNORB-Elev  | 47.2   | 34.4     | 50.4   | 36.2
    """,
    notes=(
        "Clevr-Dist and DMLab share a cell of the table that we read; which number is whose is not sure.",
        "Its rates are the best of three, of which the listing prints one, 3e-4. The other two here are ours.",
    ),
    study=TableStudy(
        arms={"B/16 DPN": "dpn"},
        base="B/16",
        bases={"B/16": "B/16"},
        start="a study's folder with weights of both arms, trained on ImageNet",
        data="vtab:dtd?root=path/to/vtab",
        recipe="vtab",
        row="Natural, DTD",
        options="--tune lr=3e-4,1e-3,3e-3 --tune-on val",
        differs=("one task at a time: --data vtab:TASK?root=FOLDER; --sweep takes no data sets",),
    ),
)
_TABLES.add(
    "table4",
    "Zero-shot ImageNet with a frozen image tower (LiT)",
    where="Table 4",
    data="image and text pairs",
    unit="zero-shot top-1, %",
    scale=f"towers of Table 2, 55,000 steps of the text tower; {_CI}",
    keys=2,
    printed="""
        arch | steps | base        | DPN
        B/32 | 220k  | 61.9 ± 0.12 | 63.0 ± 0.09
        B/32 | 1.1M  | 67.4 ± 0.07 | 68.0 ± 0.09
        L/16 | 220k  | 75.0 ± 0.11 | 75.4 ± 0.00
        L/16 | 1.1M  | 78.7 ± 0.05 | 78.7 ± 0.1
    """,
    needs=("A task that learns from images and texts.", "Image towers trained on JFT-4B, which is not public."),
)
_TABLES.add(
    "table5",
    "Segmentation of ADE20K with fewer images",
    where="Table 5",
    data="ADE20K",
    unit="mean IoU, %",
    scale="from weights trained on ImageNet, linear decoder at 512 px, 10 seeds",
    printed="""
        fraction | 1/16        | 1/8         | 1/4         | 1/2         | 1
        B/16     | 27.3 ± 0.09 | 32.6 ± 0.09 | 36.9 ± 0.13 | 40.8 ± 0.1  | 45.6 ± 0.08
        +DPN     | 28.0 ± 0.21 | 33.7 ± 0.11 | 38.0 ± 0.11 | 41.9 ± 0.09 | 46.1 ± 0.11
    """,
    study=TableStudy(
        arms={"+DPN": "dpn"},
        base="B/16",
        bases={"B/16": "B/16"},
        row="{arm}",
        column="{limit_train}",
        task="segmentation",
        sweep={"limit_train": {"1/16": 0.0625, "1/8": 0.125, "1/4": 0.25, "1/2": 0.5, "1": 1}},
        own="masks:path/to/images",
        data="ade20k:path/to/ade20k",
        recipe="ade20k",
        img_size=512,
        seeds=10,
        differs=(
            "begins with new weights; `--from STUDY`, of arms trained on ImageNet, in place of --base as published",
        ),
    ),
)
_TABLES.add(
    "table6",
    "Ablations of Dual PatchNorm",
    where="Table 6",
    unit="difference to Dual PatchNorm, points of top-1",
    scale="AugReg, 93,000 steps",
    printed="""
        variant        | B/16 | S/16 | B/32 | S/32 | Ti/16
        Pre            | -0.1 | 0.0  | -2.6 | -0.2 | -0.3
        Post           | 0.0  | -0.2 | -0.5 | -0.7 | -1.1
        Post PosEmb    | 0.0  | -0.1 | -0.4 | -0.9 | -1.1
        Only learnable | -0.8 | -0.9 | -1.2 | -1.6 | -1.6
        RMSNorm        | 0.0  | -0.1 | -0.4 | -0.5 | -1.7
        No learnable   | -0.5 | 0.0  | -0.2 | -0.1 | -0.1
    """,
    notes=(
        "The text speaks of accuracy gains; the numbers are differences to full Dual PatchNorm, as its sentences about "
        "them show: `vitmods report FOLDER --reference dpn` gives the same differences of a study.",
        "Whether the class token passes the norm of Post PosEmb is not stated: here it does not.",
    ),
    study=replace(
        _DPN,
        arms={
            "Pre": "pre=dpn(after=false)",
            "Post": "post=dpn(before=false)",
            "Post PosEmb": "post-posemb=dpn(before=false,after=false,after_position=true)",
            "Only learnable": "only-learnable=dpn(norm=only_learnable)",
            "RMSNorm": "rms=dpn(norm=rms)",
            "No learnable": "no-learnable=dpn(norm=no_learnable)",
        },
        beside=("dpn",),
        row="{arm}",
        column="{base}",
        reference="dpn",
    ),
)
_TABLES.add(
    "table7",
    "SUN397 from scratch",
    where="Table 7",
    data="SUN397",
    scale="the best of grids of learning rate, decay, dropout, then mixup and RandAugment; the last row 600 epochs",
    printed="""
        training       | B/32 base | B/32 DPN | B/16 base | B/16 DPN
        plain          | 41.4      | 47.5     | 45.6      | 51.8
        + augmentation | 48.3      | 50.7     | 58.7      | 63.0
        + train longer | 52.5      | 56.0     | 60.8      | 66.3
    """,
    study=replace(
        _DPN,
        bases={"B/32": "B/32", "B/16": "B/16"},
        row="plain",
        column="{base} {arm}",
        data="sun397:path/to/sun397",
        recipe="sun397",
        images=76_128,
        options="--tune lr=1e-3,3e-4,1e-4 --tune weight_decay=0.03,0.1 --tune dropout=0,0.1 --tune-on val",
        differs=(
            "of the first row; the others: --tune mixup=0,0.2,0.5 with RandAugment of magnitude 0, 5, 10 and 15",
            "the epochs of the first two rows are not stated",
        ),
    ),
)
_TABLES.add(
    "appendix-a",
    "Whitened patches",
    where="Appendix A",
    scale="not stated",
    notes=(
        "No number is printed, and no formula: here ZCA whitening, see docs/changes/dpn.md.",
        "The prototype had a norm right after the whitened patches; the norm alone was then found to be enough.",
    ),
    study=replace(
        _DPN,
        arms={
            "whitened patches": "whiten=dpn(before=whiten,after=false)",
            "the prototype": "whiten-norm=dpn(before=whiten_norm,after=false)",
            "the norm alone": "pre=dpn(after=false)",
            "DPN": "dpn",
        },
        base="pixels",
    ),
)
