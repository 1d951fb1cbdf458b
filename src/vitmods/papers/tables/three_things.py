"""Touvron et al.: Three things everyone should know about Vision Transformers."""

from vitmods.papers.table import Claim, Paper, Tables, TableStudy

PAPER = Paper(
    "tt",
    "Three things everyone should know about Vision Transformers",
    "Touvron, Cord, El-Nouby, Verbeek & Jégou, ECCV 2022",
    "https://arxiv.org/abs/2203.09795",
    claims=(
        Claim("section 3.3", "with 36 and 60 blocks two branches are best; more are generally no better", ("figure1",)),
        Claim(
            "section 3.3",
            "with 24 blocks Ti and S are better in sequence, B is level, L better in parallel",
            ("figure2",),
        ),
        Claim("section 3.3", "L of 24 blocks without LayerScale has 83 % after 300 epochs", ("table3-l24",)),
        Claim("section 3.3", "with LayerScale sequential and parallel models are about level", ("table2",)),
        Claim(
            "section 3.3",
            "deeper models, in sequence or parallel, are better than wider ones of their cost",
            ("table3", "table3-l24"),
        ),
        Claim(
            "section 4",
            "at 384 px attention alone is within 0.1, a standard deviation, of full fine-tuning on val and V2",
            ("table5",),
            slip="S loses 0.2 and 0.3 on val; with SGD S loses 0.3 on V2 and L 0.5; B gains 0.3 on V2 (Table 5)",
        ),
        Claim(
            "section 4",
            "fine-tuning attention takes 10 % less memory and time, and stores a third of the weights",
            ("table5",),
        ),
        Claim("section 4", "on Cars and Flowers attention alone is in most cases better than all", ("table6",)),
        Claim(
            "section 5",
            "hMLP adds less than 1 % to the FLOPs of B, with 17.73 G, and gains 0.3 and with BeiT 0.4",
            ("table7",),
        ),
        Claim(
            "Figure 6",
            "the convolutional stem takes 7.5 % more FLOPs",
            ("table7",),
            slip="19.07 G are 8.5 % more than 17.58 G (Table 7)",
        ),
        Claim(
            "section 5",
            "the hMLP stem starts with patches of 2 x 2",
            ("table7",),
            slip="the released code, and the 17.73 G of Table 7, start with 4 x 4",
        ),
    ),
)
_TABLES = Tables(PAPER, {"data": "ImageNet-1k", "unit": "top-1, %"})
_ONE = "one seed"
_DEEP = (
    "drop path and rate of deeper models are not stated: those of their width are taken, of each base its own, as in "
    "--recipe 'a2(model=Ti/16)'"
)
_BEST = "Two branches are best in all three, and S20x3 is about as good as S30x2; more are generally no better."
_V2 = "val is the data's own; V2's column: `vitmods evaluate TRIAL --data imagenet-v2:FOLDER` of each trial"
_MEMORY = "The text says that memory at inference grows with the square of the width, and not with the depth."

_TABLES.add(
    "table1",
    "Baselines at 224 px",
    where="Table 1",
    scale=f"A2 recipe, {_ONE}; 300 epochs, or 400 with LayerScale",
    printed="""
        model     | depth | width | heads | params (M) | FLOPs (G) | speed (im/s) | 300 | 300 v2 | 400 LS | 400 LS v2
        ViT-Ti/16 | 12    | 192   | 3     | 5.7        | 1.3       | 3796         | 72.7 | 60.3  | 73.5   | 61.4
        ViT-S/16  | 12    | 384   | 6     | 22.1       | 4.6       | 1827         | 79.7 | 68.5  | 80.7   | 69.3
        ViT-B/16  | 12    | 768   | 12    | 86.6       | 17.6      | 799          | 82.2 | 71.2  | 82.7   | 72.2
        ViT-L/16  | 24    | 1024  | 16    | 304.4      | 61.6      | 277          | 83.0 | 72.4  | 84.0   | 73.7
    """,
    notes=(
        "The headings of the last columns were lost in the text that we read, and follow from the tables after it.",
    ),
    study=TableStudy(
        arms={"400 LS": "layerscale"},
        base="300",
        bases={"ViT-Ti/16": "Ti/16", "ViT-S/16": "S/16", "ViT-B/16": "B/16", "ViT-L/16": "L/16"},
        recipe="a2",
        options="--accumulate 8",
        differs=("both arms train equally long: LayerScale's gain is then not mixed with that of 100 epochs more",),
    ),
)
_TABLES.add(
    "figure1",
    "Two, three and four branches",
    where="Figure 1",
    scale=f"A2 recipe, 300 epochs, {_ONE}",
    notes=("The figure has points alone, no numbers; it has S36, S60 and B36.", _BEST),
    study=TableStudy(
        arms={"x2": "parallel", "x3": "parallel3=parallel(branches=3)", "x4": "parallel4=parallel(branches=4)"},
        base="x1",
        bases={"S36": "S36/16", "S60": "S60/16", "B36": "B36/16"},
        recipe="a2(model=S/16)",
        options="--accumulate 8",
        differs=(_DEEP,),
    ),
)
_TABLES.add(
    "figure2",
    "Branches against width, with 24 blocks",
    where="Figure 2",
    scale=f"A2 recipe, 300 epochs, {_ONE}; L with LayerScale",
    notes=("The figure has points alone, no numbers.",),
    study=TableStudy(
        arms={"x2": "parallel"},
        base="x1",
        bases={"Ti24": "Ti24/16", "S24": "S24/16", "B24": "B24/16", "L24": "L24/16"},
        recipe="a2(model=B/16)",
        options="--accumulate 8",
        differs=(
            "L has LayerScale there: --base L24/16 --arms layerscale parallel-layerscale=parallel+layerscale",
            _DEEP,
        ),
    ),
)
_TABLES.add(
    "figure3",
    "Branches against depth",
    where="Figure 3",
    scale=f"A2 recipe, 300 epochs, {_ONE}",
    notes=(
        "The figure has points alone, no numbers, and its depths are not in the text that we read: here those that the "
        "text and the tables name.",
    ),
    study=TableStudy(
        arms={"x2": "parallel"},
        base="x1",
        bases={name: f"{name}/16" for name in ("S24", "S36", "S48", "S60", "B24", "B36")},
        recipe="a2(model=S/16)",
        options="--accumulate 8",
        differs=(_DEEP,),
    ),
)
_TABLES.add(
    "table2",
    "36 blocks in sequence and 18 x 2 in parallel",
    where="Table 2",
    scale=f"A2 recipe, {_ONE}",
    keys=3,
    printed="""
        model | epochs | LS  | val  | v2
        B36x1 | 300    | no  | 82.9 | 72.2
        B36x1 | 300    | yes | 83.9 | 73.2
        B36x1 | 400    | no  | 83.4 | 72.5
        B36x1 | 400    | yes | 84.1 | 73.9
        B18x2 | 300    | no  | 83.3 | 72.4
        B18x2 | 300    | yes | 83.8 | 73.3
        B18x2 | 400    | no  | 83.4 | 73.1
        B18x2 | 400    | yes | 84.1 | 73.5
    """,
    study=TableStudy(
        arms={
            "B18x2, 300, no": "parallel",
            "B36x1, 300, yes": "layerscale",
            "B18x2, 300, yes": "parallel-layerscale=parallel+layerscale",
        },
        base="B36x1, 300, no",
        bases={"B36": "B36/16"},
        row="{arm}",
        column="val",
        recipe="a2(model=B/16)",
        options="--accumulate 8",
        differs=(
            "of the rows with 300 epochs; the others: --epochs 400",
            "drop path and rate of 36 blocks are not stated: B's are taken",
        ),
    ),
)
_TABLES.add(
    "table3",
    "More blocks against wider blocks",
    where="Table 3, upper half",
    scale=f"A2 recipe, 300 epochs, {_ONE}",
    printed="""
        model | params (M) | FLOPs (G) | memory (MB) | val         | v2
        B12x1 | 86.6       | 17.6      | 2077 (MEM)  | 82.2 ± 0.06 | 71.0 (MEM)
        S48x1 | 85.9       | 18.3      | 1361        | 82.3 (MEM)  | 72.0
        S24x2 | 85.9       | 18.3      | 1433        | 82.6 (MEM)  | 72.3
    """,
    notes=("Cells were lost in the text that we read.", _MEMORY),
    study=TableStudy(
        arms={"S24x2": "parallel", "B12x1": "b12=size(wider=2,deeper=0.25)"},
        base="S48x1",
        bases={"S48": "S48/16"},
        row="{arm}",
        column="v2",
        recipe="a2(model=S/16)",
        options="--accumulate 8",
        differs=("drop path and rate of 48 blocks are not stated: those of S are taken for all", _V2),
    ),
)
_TABLES.add(
    "table3-l24",
    "More blocks against wider blocks, large models",
    where="Table 3, lower half",
    scale=f"A2 recipe, 300 epochs, LayerScale, {_ONE}",
    printed="""
        model | params (M) | FLOPs (G) | memory (MB) | val        | v2
        L24x1, no LS | 304.4 | 61.6    | -           | 83.0       | 72.4
        L24x1 | 304.4      | 61.6      | 3788        | 83.4 (MEM) | 73.3
        B36x1 | 256.7      | 52.5      | 3071        | 83.9 ?     | 73.2
        B18x2 | 256.7      | 52.5      | 3217 (MEM)  | 83.8       | 73.3
    """,
    notes=(
        "The row without LayerScale is that of Table 1.",
        "Cells were lost in the text that we read; B36x1's 83.9 is that of Table 2.",
        _MEMORY,
    ),
    study=TableStudy(
        arms={
            "L24x1": "layerscale",
            "B36x1": "b36=size(wider=0.75,deeper=1.5)+layerscale",
            "B18x2": "b18x2=size(wider=0.75,deeper=1.5)+parallel+layerscale",
        },
        base="L24x1, no LS",
        bases={"L24": "L/16"},
        row="{arm}",
        column="v2",
        recipe="a2",
        options="--accumulate 8",
        differs=(_V2,),
    ),
)
_TABLES.add(
    "table4",
    "Throughput in sequence and in parallel",
    where="Table 4",
    data="noise",
    unit="images a second",
    scale="one V100",
    printed="""
        size | S18x2 seq | S18x2 par | S18x2 best | S18x2 gain (%) | B18x2 seq | B18x2 par | B18x2 best | B18x2 gain (%)
        1    | 44        | 61        | 61         | 38             | 42        | 61        | 61         | 45
        2    | 84        | 123       | 123        | 46             | 80        | 117       | 117        | 47
        4    | 168       | 245       | 245        | 46             | 155       | 187       | 187        | 21
        8    | 334       | 474       | 474        | 42             | 230       | 211       | 230        | 0
        16   | 569       | 518       | 569        | 0              | 266       | 231       | 266        | 0
        32   | 616       | 556       | 616        | 0              | 276       | 245       | 276        | 0
        64   | 647       | 575       | 647        | 0              | 286       | 248       | 286        | 0
    """,
    notes=("There the branches run as kernels side by side; here, as one block that has the heads of both.",),
    bench=(
        "--models apart:S18x2/16 fast:S18x2/16 apart:B18x2/16 fast:B18x2/16 --batch 1 2 4 8 16 32 64 --kind inference"
    ),
)
_TABLES.add(
    "table5",
    "Fine-tuning at 384 px: all, attention, or ffn",
    where="Table 5",
    scale=f"from 400 epochs at 224 px, {_ONE}",
    keys=2,
    printed="""
        model | trained | AdamW | SGD  | AdamW v2 | SGD v2
        ViT-S | full    | 82.7  | 82.6 | 72.5     | 72.5
        ViT-S | attn    | 82.5  | 82.3 | 72.4     | 72.2
        ViT-S | ffn     | 82.2  | 82.0 | 71.6     | 71.1
        ViT-B | full    | 84.3  | 84.3 | 73.7     | 74.0
        ViT-B | attn    | 84.3  | 84.2 | 74.0     | 73.9
        ViT-B | ffn     | 84.1  | 84.0 | 73.6     | 73.7
        ViT-L | full    | 85.5  | 85.4 | 75.5     | 75.6
        ViT-L | attn    | 85.5  | 85.3 | 75.4     | 75.1
        ViT-L | ffn     | 85.2  | 85.1 | 75.2     | 75.0
    """,
    study=TableStudy(
        arms={"attn": "attention", "ffn": "ffn"},
        base="full",
        bases={"ViT-S": "S/16", "ViT-B": "B/16", "ViT-L": "L/16"},
        row="{base}, {arm}",
        column="AdamW",
        start="weights trained at 224 px",
        recipe="finetune",
        img_size=384,
        images=1_281_167,
        differs=("rates and epochs are not stated: the recipe's; SGD's columns: --recipe finetune_sgd",),
    ),
)
_TABLES.add(
    "table6",
    "Transfer to other sets: all, attention, or ffn",
    where="Table 6",
    data="iNaturalist, CIFAR, Cars, Flowers",
    scale=f"from weights trained on ImageNet-1k, {_ONE}",
    keys=2,
    printed="""
        model | tuned | INAT-18 | INAT-19 | CIFAR-10 | CIFAR-100 | Cars | Flowers
        ViT-S | full  | 68.0    | 73.9    | 98.9     | 90.5      | 89.7 | 96.8
        ViT-S | attn  | 60.6    | 68.7    | 98.7     | 89.1      | 89.8 | 96.9
        ViT-S | ffn   | 64.4    | 72.5    | 98.9     | 90.1      | 88.3 | 96.1
        ViT-B | full  | 74.1    | 78.2    | 99.3     | 92.5      | 92.7 | 97.8
        ViT-B | attn  | 71.1    | 75.7    | 99.2     | 91.8      | 92.8 | 98.5
        ViT-B | ffn   | 73.3    | 77.3    | 99.3     | 92.1      | 88.9 | 97.5
        ViT-L | full  | 75.9    | 79.7    | 99.3     | 93.2      | 93.8 | 98.3
        ViT-L | attn  | 75.3    | 78.7    | 99.2     | 92.7      | 93.8 | 98.4
        ViT-L | ffn   | 75.4    | 79.3    | 99.2     | 93.0      | 93.0 | 97.6
    """,
    study=TableStudy(
        arms={"attn": "attention", "ffn": "ffn"},
        base="full",
        bases={"ViT-S": "S/16", "ViT-B": "B/16", "ViT-L": "L/16"},
        row="{base}, {arm}",
        column="Cars",
        start="weights trained on ImageNet-1k",
        data="cars:path/to/cars",
        recipe="transfer",
        images=8_144,
        differs=("rates and epochs are not stated: those of DeiT's author", "one set at a time: --data"),
    ),
)
_TABLES.add(
    "table7",
    "Stems",
    where="Table 7",
    scale="ViT-B, 300 epochs; BeiT: 300 epochs of pre-training and 100 of fine-tuning; ± over 5 seeds",
    keys=3,
    printed="""
        stem       | norm | NL   | FLOPs (G) | val          | v2   | BeiT+FT
        Linear B12 | -    | -    | 17.58     | 82.20 ± 0.06 | 71.0 | 83.05 ± 0.08
        Linear B12 | BN   | -    | 17.58     | 82.31        | 71.0 | 82.98
        Linear B12 | -    | GELU | 17.58     | 81.55        | 70.5 | 83.09
        Linear B12 | BN   | GELU | 17.58     | 82.38        | 70.7 | 82.99
        Linear B13 | -    | -    | 19.04     | 82.35 ± 0.12 | 71.3 | 83.26 ± 0.06
        Conv LeViT | BN   | GELU | 19.07     | 82.57        | 71.0 | 83.04
        Conv LeViT | LN   | GELU | 19.07     | 82.50        | 70.9 | 83.06
        Local      | -    | -    | 19.12     | 82.26        | 70.6 | 82.38
        hMLP       | BN   | GELU | 17.73     | 82.54 ± 0.09 | 71.5 | 83.43 ± 0.10
        hMLP       | LN   | GELU | 17.73     | 82.50 ± 0.07 | 71.0 | 83.24 ± 0.09
    """,
    notes=(
        "The depth and width of the local transformer's stem are not stated: here it costs B/16 as much as there.",
        "The table says GELU for the convolutional stem, as here; LeViT's own code has Hardswish.",
    ),
    study=TableStudy(
        arms={
            "Linear B12, BN, -": "linear-bn=stem(kind=linear,norm=batch)",
            "Linear B12, -, GELU": "linear-gelu=stem(kind=linear,gelu=true)",
            "Linear B12, BN, GELU": "linear-bn-gelu=stem(kind=linear,norm=batch,gelu=true)",
            "Linear B13, -, -": "b13=size(depth=13)",
            "Conv LeViT, BN, GELU": "levit",
            "Conv LeViT, LN, GELU": "levit-ln=stem(kind=levit,norm=layer)",
            "Local, -, -": "local",
            "hMLP, BN, GELU": "hmlp",
            "hMLP, LN, GELU": "hmlp-ln",
        },
        base="Linear B12, -, -",
        bases={"B12": "B/16"},
        row="{arm}",
        column="val",
        recipe="a2",
        seeds=5,
        options="--accumulate 8",
    ),
    needs=("BeiT's masked pre-training, for the last column.",),
)
