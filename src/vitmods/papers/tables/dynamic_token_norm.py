"""Shao et al.: Dynamic Token Normalization Improves Vision Transformers."""

from dataclasses import replace

from vitmods.papers.table import Claim, Paper, Tables, TableStudy

PAPER = Paper(
    "dtn",
    "Dynamic Token Normalization Improves Vision Transformers",
    "Shao et al., ICLR 2022",
    "https://arxiv.org/abs/2112.02624",
    claims=(
        Claim("abstract", "gains of 0.5 to 1.2 points of top-1 on ImageNet over LayerNorm", ("table1", "table2")),
        Claim("abstract", "gains of 1.2 to 1.4 box AP on COCO", ("table11",), slip="those of Table 11 are 1.3 and 1.4"),
        Claim(
            "abstract",
            "gains of 2.3 to 3.9 in mCE on ImageNet-C",
            ("table6",),
            slip="Table 6 and section B.2 have 2.2 for ViT-S",
        ),
        Claim("abstract", "gains of 0.5 to 0.8 in Long ListOps", ("table4",)),
        Claim("sections 1 and 4.1", "ViT-S* gains 1.1 with 5.4 % more FLOPs", ("table1",)),
        Claim("section 4.3", "started as truncated normal noise ViT-T* has 72.7, by equation 7 73.2", ("table5",)),
        Claim(
            "section B.2",
            "ImageNet-R: 30.7 with ViT-S and 32.7 with ViT-S*, 1.5 and 3.0 above LayerNorm",
            ("imagenet-r",),
        ),
        Claim("section B.4", "PVT-Tiny gains 1.4 AP in detection and 1.2 in segmentation", ("table11",)),
        Claim(
            "Table 10",
            "LeViT-128S has 76.7 with its own norm",
            ("table10b", "table12"),
            slip="76.6 in Table 12: two baselines",
        ),
        Claim(
            "Table 7b",
            "a norm has 2C + 3H parameters",
            ("table1",),
            slip="the 2H lambdas and the H biases of the released code are not counted",
        ),
    ),
)
_MODELS = {"ViT-S": "S/16", "ViT-S*": "S*/16"}
_SEQUENCE = {
    "BN": "bn=replace(batchnorm)",
    "IN": "in=replace(instancenorm)",
    "GN": "gn=replace(groupnorm)",
    "ScaleNorm": "scale=replace(scalenorm)",
    "DTN": "dtn=replace(dtn)",
}
_DTN = TableStudy(arms={"DTN": "dtn"}, base="LN", bases=_MODELS, recipe="dtn", options="--accumulate 4")
_FOREIGN = replace(_DTN, arms={"DTN": "dtn=replace(dtn)"})
_LEVIT = (
    "LeViT has BatchNorms and no LayerNorm, and where DTN goes is not stated: `vitmods compare --base timm:levit_128s "
    "--arms 'dtn=replace(dtn,heads=4)' --recipe levit` replaces the norm at the end of each attention"
)
_TABLES = Tables(
    PAPER, {"data": "ImageNet-1k", "unit": "top-1, %", "scale": "300 epochs; neither runs nor ± are stated"}
)

_TABLES.add(
    "table1",
    "ViTs with LayerNorm and DTN",
    where="Table 1",
    keys=2,
    printed="""
        model  | norm | heads | width | FLOPs (G) | params (M) | top-1 | top-5
        ViT-T  | LN   | 3     | 192   | 1.26      | 5.7        | 72.2  | 91.3
        ViT-T* | LN   | 4     | 192   | 1.26      | 5.7        | 72.3  | 91.4
        ViT-T* | DTN  | 4     | 192   | 1.40      | 5.7        | 73.2  | 91.7
        ViT-S  | LN   | 6     | 384   | 4.60      | 22.1       | 79.9  | 95.0
        ViT-S  | DTN  | 6     | 384   | 4.88      | 22.1       | 80.6  | 95.3
        ViT-S* | LN   | 9     | 432   | 5.77      | 27.8       | 80.6  | 95.2
        ViT-S* | DTN  | 9     | 432   | 6.08      | 27.8       | 81.7  | 95.8
        ViT-B  | LN   | 12    | 768   | 17.58     | 86.5       | 81.8  | 95.9
        ViT-B  | DTN  | 12    | 768   | 18.13     | 86.5       | 82.3  | 96.0
        ViT-B* | LN   | 16    | 768   | 17.58     | 86.5       | 81.7  | 95.8
        ViT-B* | DTN  | 16    | 768   | 18.13     | 86.5       | 82.5  | 96.1
    """,
    notes=(
        "The released code's page has 1.26 G for ViT-T* with DTN, and top-5 95.0 for ViT-B* with LN.",
        "The FLOPs fit DTN before attention alone, as here; the released code has it before the MLP too.",
    ),
    study=replace(
        _DTN,
        bases={"ViT-T*": "T*/16", "ViT-S": "S/16", "ViT-S*": "S*/16", "ViT-B": "B/16", "ViT-B*": "B*/16"},
        row="{base}, {arm}",
        column="top-1",
        differs=("the rate is the paper's; as its code trains: --recipe 'dtn(released=true)'",),
    ),
)
_TABLES.add(
    "table2",
    "PVT and Swin",
    where="Table 2",
    keys=2,
    printed="""
        model     | norm | top-1 | top-5 | FLOPs (G)
        PVT-Tiny  | LN   | 75.1  | 92.3  | 1.90
        PVT-Tiny  | DTN  | 76.3  | 93.1  | 2.05
        PVT-Small | LN   | 79.9  | 95.0  | 3.80
        PVT-Small | DTN  | 80.8  | 95.6  | 4.15
        Swin-T    | LN   | 81.2  | 95.5  | 4.51
        Swin-T    | DTN  | 81.9  | 96.0  | 5.09
    """,
    notes=("PVT's own authors give 79.8 for PVT-Small.",),
    study=replace(
        _FOREIGN,
        bases={"Swin-T": "timm:swin_tiny_patch4_window7_224"},
        recipe="swin",
        row="{base}, {arm}",
        column="top-1",
        differs=(
            "PVT: --base hf:FOLDER, with a folder of Hugging Face's PVT, and --recipe pvt",
            "statistics across tokens are exact here; pooled as there: dtn=replace(dtn(pool=(4,2,1,1)))",
        ),
    ),
)
_TABLES.add(
    "table3",
    "Kinds of norm",
    where="Table 3",
    also="norms",
    printed="""
        model  | LN   | BN   | IN   | GN   | SN   | ScaleNorm | PowerNorm | DTN
        ViT-S  | 79.9 | 77.3 | 77.7 | 78.3 | 80.1 | 80.0      | 79.8      | 80.6
        ViT-S* | 80.6 | 77.2 | 77.6 | 79.5 | 81.0 | 80.6      | 80.4      | 81.7
    """,
    notes=(
        "All norms of the blocks change, with base's eps and the parameters of the released code: a gain for each "
        "channel in ScaleNorm, a group for each head in GroupNorm and PowerNorm, PowerNorm's warm-up of 3,000 batches, "
        "SwitchableNorm with its batch branch. RMSNorm is not in that table; it begins on the same weights.",
    ),
    study=replace(
        _DTN,
        arms={
            "BN": "batch=batchnorm",
            "IN": "instance=instancenorm",
            "GN": "group=groupnorm",
            "SN": "switchable=switchnorm",
            "ScaleNorm": "scale=scalenorm",
            "PowerNorm": "power=powernorm",
            "DTN": "dtn",
        },
        beside=("rms=norm(kind=rms,exact=false)",),
    ),
)
_TABLES.add(
    "table4",
    "Long ListOps",
    where="Table 4",
    data="Long ListOps",
    unit="accuracy, %",
    scale="sequences of up to 2,000 symbols, 5,000 steps",
    printed="""
        model       | LN   | BN   | IN   | GN   | ScaleNorm | DTN
        Transformer | 36.4 | 29.2 | 22.7 | 28.2 | 36.6      | 37.0
        BigBird     | 36.7 | 36.7 | 36.3 | 36.8 | 36.9      | 37.5
        Reformer    | 37.3 | 37.2 | 37.0 | 37.4 | 37.3      | 37.8
    """,
    notes=(
        "How DTN's kernel is built on sequences is not described: here from the squared distance and the distance.",
    ),
    study=replace(
        _DTN,
        arms=_SEQUENCE,
        bases={
            "Transformer": "LRA-512",
            "BigBird": "hf-text:big_bird?hidden_size=512&num_hidden_layers=6&num_attention_heads=8"
            "&intermediate_size=1024",
            "Reformer": "hf-text:reformer?hidden_size=512&num_attention_heads=8&feed_forward_size=1024",
        },
        task="sequence_classification",
        own="listops:generated",
        data="listops:generated?min_length=500&max_length=2000&train=96000&val=2000&test=2000",
        recipe="listops",
        img_size=0,
        options="--dropout None",
        differs=(
            "Hugging Face's models know no dropout of a recipe and have their own: without it all three run together",
            "at a small scale: --base LRA-64, and smaller sizes behind the names of the others",
        ),
    ),
)
_TABLES.add(
    "table5",
    "Parts of DTN",
    where="Table 5",
    printed="""
        model  | LN   | IN   | (c)  | (d)  | DTN
        ViT-S* | 80.6 | 77.6 | 81.2 | 81.3 | 81.7
    """,
    notes=(
        "IN: lambda 0, P = 1/T. (c): lambda 0, P learned. (d): lambda 0.5, P learned. In DTN both are learned. The arm "
        "late is LN with DTN's late class token.",
    ),
    study=replace(
        _DTN,
        arms={
            "IN": "in=dtn(trade_off=0,kernel=uniform)",
            "(c)": "c=dtn(trade_off=0)",
            "(d)": "d=dtn(trade_off=0.5)",
            "DTN": "dtn",
        },
        beside=("late=dtn(trade_off=1)", "noise=dtn(init=noise)"),
        bases={"ViT-S*": "S*/16"},
        differs=("IN is in the ten blocks where DTN is; that of Table 3 is in all",),
    ),
)
_TABLES.add(
    "table6",
    "ImageNet-C",
    where="Table 6",
    data="ImageNet-C",
    unit="error, %",
    keys=2,
    printed="""
        arch   | norm | mean | gauss | shot | impulse | defocus | glass | motion | zoom | snow | frost | fog | bright | contrast | elastic | pixel | jpeg
        Res-50 | BN   | 76.7 | 80    | 82   | 83      | 75 ?    | 89    | 78     | 80   | 78 ? | 75    | 66  | 57     | 71       | 85      | 77    | 77
        ViT-S  | LN   | 42.8 | 40    | 42   | 42      | 50      | 60    | 46     | 57   | 43   | 38    | 39  | 25     | 36       | 44      | 42    | 38
        ViT-S  | DTN  | 40.6 | 39    | 40   | 40      | 49      | 58    | 44     | 54   | 40   | 36    | 34  | 24     | 32       | 43      | 39    | 35
        ViT-S* | LN   | 41.9 | 40    | 42   | 42      | 51      | 59    | 45     | 56   | 41 ? | 37    | 36  | 25     | 34       | 44      | 39    | 36
        ViT-S* | DTN  | 38.0 | 36    | 37   | 37      | 45      | 55    | 41     | 54   | 36   | 35    | 31  | 23     | 30       | 41      | 34    | 33
    """,  # noqa: E501
    notes=(
        "Headed mCE. The ViTs' numbers are plain means of errors: 642 / 15 is ViT-S's 42.8. ResNet-50's is divided by "
        "AlexNet's errors, as mCE is defined: that row compares with no other.",
    ),
    study=replace(
        _DTN,
        row="{base}, {arm}",
        column="mean",
        metric="mean_corruption_error",
        differs=("corruptions are computed on the test images; on ImageNet-C itself: `vitmods evaluate`",),
    ),
)
_TABLES.add(
    "imagenet-r",
    "ImageNet-R",
    where="section B.2",
    data="ImageNet-R",
    printed="""
        model  | LN   | DTN
        ViT-S  | 29.2 | 30.7
        ViT-S* | 29.7 | 32.7
    """,
    notes=("LN's are DTN's minus the gains that the text states, 1.5 and 3.0.",),
    needs=("It is an evaluation: `vitmods evaluate TRIAL --data imagenet-r:FOLDER` of trials of dtn-table1.",),
)
_TABLES.add(
    "table7",
    "Pre-training without labels (DINO)",
    where="Table 7a",
    unit="linear evaluation, top-1, %",
    scale="20 to 100 epochs",
    keys=2,
    printed="""
        model  | norm | 20   | 40   | 60   | 80   | 100
        ViT-S  | LN   | 58.8 | 67.2 | 70.1 | 72.8 | 74.0
        ViT-S* | LN   | 58.5 | 68.3 | 71.3 | 74.0 | 74.7
        ViT-S* | DTN  | 58.9 | 68.8 | 72.0 | 74.4 | 75.2
    """,
    notes=("The text calls it supervised contrastive learning; the caption and the numbers are DINO's.",),
    needs=("A task that learns without labels (DINO).",),
)
_TABLES.add(
    "table8",
    "Number of blocks with DTN",
    where="Table 8",
    printed="""
        model  | 0    | 4    | 6    | 8    | 10
        ViT-S* | 80.6 | 81.2 | 81.4 | 81.5 | 81.7
    """,
    study=replace(
        _DTN,
        arms={str(count): f"blocks{count}=dtn(blocks={count})" for count in (4, 6, 8, 10)},
        base="0",
        bases={"ViT-S*": "S*/16"},
        differs=("a base of fewer than 11 blocks has no room for the last arms",),
    ),
)
_TABLES.add(
    "table9",
    "Larger models",
    where="Table 9",
    keys=2,
    printed="""
        model     | norm | top-1 | params (M) | FLOPs (G)
        PVT-Large | LN   | 81.7  | 61.4       | 9.8
        PVT-Large | DTN  | 82.3  | 61.4       | 10.5
        Swin-S    | LN   | 83.0  | 50         | 8.7
        Swin-S    | DTN  | 83.5  | 50         | 9.4
        PVTv2-B3  | LN   | 83.2  | 45.2       | 6.9
        PVTv2-B3  | DTN  | 83.7  | 45.2       | 7.4
    """,
    study=replace(
        _FOREIGN,
        bases={"Swin-S": "timm:swin_small_patch4_window7_224", "PVTv2-B3": "timm:pvt_v2_b3"},
        recipe="swin(size=S)",
        row="{base}, {arm}",
        column="top-1",
        differs=("PVT-Large: --base hf:FOLDER", "of PVTs: --recipe 'pvt(size=large)'"),
    ),
)
_TABLES.add(
    "table10",
    "Positions in attention and in the norm",
    where="Table 10a",
    printed="""
        method                 | ViT-S* | PVT-Tiny
        LN + MHSA              | 80.6   | 75.1
        LN + MHSA with Eqn 6   | 80.8   | 75.4
        DTN without RPE + MHSA | 81.4   | 75.9
        DTN + MHSA             | 81.7   | 76.3
    """,
    notes=(
        "How P enters attention is not stated: here by ConViT's gate.",
        "What P is in DTN without relative positions is not stated: here all tokens count alike, P = 1 / T.",
    ),
    study=replace(
        _DTN,
        arms={
            "LN + MHSA with Eqn 6": "gpsa",
            "DTN without RPE + MHSA": "dtn-no-rpe=dtn(kernel=uniform)",
            "DTN + MHSA": "dtn",
        },
        base="LN + MHSA",
        bases={"ViT-S*": "S*/16"},
        row="{arm}",
        column="{base}",
    ),
)
_TABLES.add(
    "table10b",
    "Models with relative positions of their own",
    where="Table 10b",
    printed="""
        model      | LN   | DTN
        Swin-S     | 83.0 | 83.5
        LeViT-128S | 76.7 | 77.3
    """,
    study=replace(
        _FOREIGN,
        bases={"Swin-S": "timm:swin_small_patch4_window7_224"},
        recipe="swin(size=S)",
        row="{base}",
        differs=(_LEVIT,),
    ),
)
_TABLES.add(
    "table11",
    "Detection and segmentation on COCO",
    where="Table 11",
    data="COCO 2017",
    unit="AP, %",
    scale="PVT's 1x schedule",
    keys=2,
    printed="""
        backbone  | norm | AP   | AP50 | AP75 | APS  | APM  | APL  | APb  | APb50 | APb75 | APm    | APm50 | APm75
        PVT-Tiny  | LN   | 36.7 | 56.9 | 38.9 | 22.6 | 38.8 | 50.0 | 36.7 | 59.2  | 39.3  | 35.1 ? | 56.7  | 37.3
        PVT-Tiny  | DTN  | 38.0 | 58.7 | 40.4 | 22.7 | 41.2 | 50.9 | 38.1 | 60.7  | 41.0  | 36.3   | 57.9  | 38.7
        PVT-Small | LN   | 40.4 | 61.3 | 43.0 | 25.0 | 42.9 | 55.7 | 40.4 | 62.9  | 43.8  | 37.8 ? | 60.1  | 40.3
        PVT-Small | DTN  | 41.8 | 62.9 | 44.6 | 26.4 | 45.3 | 56.0 | 41.7 | 64.5  | 44.3  | 39.0   | 61.2  | 41.8
    """,
    notes=(
        "AP to APL: RetinaNet. APb and APm: boxes and masks of Mask R-CNN.",
        "The two uncertain cells are lost in the text that we read; they are PVT's own published numbers.",
    ),
    study=replace(
        _FOREIGN,
        bases={"PVT-Tiny": "timm:pvt_v2_b0"},
        row="{base}, {arm}",
        column="AP",
        task="detection",
        own="coco:path/to/images",
        data="coco:path/to/coco",
        recipe="coco_1x",
        img_size=800,
        options="",
        differs=(
            "the base is the smallest PVTv2; PVT-Tiny and -Small: --base hf:FOLDER",
            "Mask R-CNN's columns: --task instance_segmentation",
            "begins with new weights where the base does not say ?pretrained=1",
        ),
    ),
)
_TABLES.add(
    "table12",
    "Swin, LeViT and T2T",
    where="Table 12",
    keys=2,
    printed="""
        model      | norm | FLOPs (G) | params (M) | top-1
        Swin-T     | LN   | 4.5       | 29         | 81.2
        Swin-T     | DTN  | 5.1       | 29         | 81.9
        Swin-S     | LN   | 8.7       | 50         | 83.0
        Swin-S     | DTN  | 9.4       | 50         | 83.5
        LeViT-128S | LN   | 0.305     | 7.8        | 76.6
        LeViT-128S | DTN  | 0.320     | 7.8        | 77.3
        T2T-ViTt-14 | LN  | 6.1       | 21.5       | 81.7
        T2T-ViTt-14 | DTN | 6.4       | 21.5       | 82.4
    """,
    notes=("LeViT's FLOPs are printed in millions: 305 and 320.",),
    study=replace(
        _DTN,
        bases={"T2T-ViTt-14": "T2T-14"},
        recipe="deit",
        row="{base}, {arm}",
        column="top-1",
        differs=("Swin: paper:dtn-table2 and dtn-table9", _LEVIT, "T2T-ViT's own training is not here: DeiT's"),
    ),
)
