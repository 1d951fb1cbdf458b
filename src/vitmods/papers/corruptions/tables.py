"""Severities 1 to 5 of every corruption, as published for images of 32, 64 and 224 pixels.

The numbers are those of the authors' scripts for CIFAR-10-C, Tiny ImageNet-C and ImageNet-C (Hendrycks and Dietterich,
"Benchmarking Neural Network Robustness to Common Corruptions and Perturbations", ICLR 2019, arXiv:1903.12261). Lengths
are in pixels, amounts in parts of the full range; elastic_transform's are in sides of the image.
"""

Strength = tuple[float, ...]
Severities = tuple[Strength, ...]


def _amounts(*values: float) -> Severities:
    return tuple((value,) for value in values)


_ELASTIC = 244 / 224  # the published script has 244 where it means the side of its images, 224

_AT_32: dict[str, Severities] = {
    "gaussian_noise": _amounts(0.04, 0.06, 0.08, 0.09, 0.10),
    "shot_noise": _amounts(500, 250, 100, 75, 50),
    "impulse_noise": _amounts(0.01, 0.02, 0.03, 0.05, 0.07),
    "defocus_blur": ((0.3, 0.4), (0.4, 0.5), (0.5, 0.6), (1, 0.2), (1.5, 0.1)),
    "glass_blur": ((0.05, 1, 1), (0.25, 1, 1), (0.4, 1, 1), (0.25, 1, 2), (0.4, 1, 2)),
    "motion_blur": ((6, 1), (6, 1.5), (6, 2), (8, 2), (9, 2.5)),
    "zoom_blur": ((1.06, 0.01), (1.11, 0.01), (1.16, 0.01), (1.21, 0.01), (1.26, 0.01)),
    "snow": (
        (0.1, 0.2, 1, 0.6, 8, 3, 0.95),
        (0.1, 0.2, 1, 0.5, 10, 4, 0.9),
        (0.15, 0.3, 1.75, 0.55, 10, 4, 0.9),
        (0.25, 0.3, 2.25, 0.6, 12, 6, 0.85),
        (0.3, 0.3, 1.25, 0.65, 14, 12, 0.8),
    ),
    "frost": ((1, 0.2, 0.2), (1, 0.3, 0.2), (0.9, 0.4, 0.2), (0.85, 0.4, 0.2), (0.75, 0.45, 0.2)),
    "fog": ((0.2, 3), (0.5, 3), (0.75, 2.5), (1, 2), (1.5, 1.75)),
    "brightness": _amounts(0.05, 0.1, 0.15, 0.2, 0.3),
    "contrast": _amounts(0.75, 0.5, 0.4, 0.3, 0.15),
    "elastic_transform": ((0, 0, 0.08), (0.05, 0.2, 0.07), (0.08, 0.06, 0.06), (0.1, 0.04, 0.05), (0.1, 0.03, 0.03)),
    "pixelate": _amounts(0.95, 0.9, 0.85, 0.75, 0.65),
    "jpeg_compression": _amounts(80, 65, 58, 50, 40),
    "speckle_noise": _amounts(0.06, 0.1, 0.12, 0.16, 0.2),
    "gaussian_blur": _amounts(0.4, 0.6, 0.7, 0.8, 1),
    "spatter": (
        (0.62, 0.1, 0.7, 0.7, 0.5, 0),
        (0.65, 0.1, 0.8, 0.7, 0.5, 0),
        (0.65, 0.3, 1, 0.69, 0.5, 0),
        (0.65, 0.1, 0.7, 0.69, 0.6, 1),
        (0.65, 0.1, 0.5, 0.68, 0.6, 1),
    ),
    "saturate": ((0.3, 0), (0.1, 0), (1.5, 0), (2, 0.1), (2.5, 0.2)),
}

_AT_64: dict[str, Severities] = {
    "gaussian_noise": _amounts(0.04, 0.08, 0.12, 0.15, 0.18),
    "shot_noise": _amounts(250, 100, 50, 30, 15),
    "impulse_noise": _amounts(0.01, 0.02, 0.05, 0.08, 0.14),
    "defocus_blur": ((0.5, 0.6), (1, 0.1), (1.5, 0.1), (2.5, 0.01), (3, 0.1)),
    "glass_blur": ((0.1, 1, 1), (0.5, 1, 1), (0.6, 1, 2), (0.7, 2, 1), (0.9, 2, 2)),
    "motion_blur": ((10, 1), (10, 1.5), (10, 2), (10, 2.5), (12, 3)),
    "zoom_blur": ((1.06, 0.01), (1.11, 0.01), (1.16, 0.01), (1.21, 0.01), (1.26, 0.01)),
    "snow": (
        (0.1, 0.2, 1, 0.6, 8, 3, 0.8),
        (0.1, 0.2, 1, 0.5, 10, 4, 0.8),
        (0.15, 0.3, 1.75, 0.55, 10, 4, 0.7),
        (0.25, 0.3, 2.25, 0.6, 12, 6, 0.65),
        (0.3, 0.3, 1.25, 0.65, 14, 12, 0.6),
    ),
    "frost": ((1, 0.3, 0.3), (0.9, 0.4, 0.3), (0.8, 0.45, 0.3), (0.75, 0.5, 0.3), (0.7, 0.55, 0.3)),
    "fog": ((0.4, 3), (0.7, 3), (1, 2.5), (1.5, 2), (2, 1.75)),
    "brightness": _amounts(0.1, 0.2, 0.3, 0.4, 0.5),
    "contrast": _amounts(0.4, 0.3, 0.2, 0.1, 0.05),
    "elastic_transform": (
        (0, 0, 0.08),
        (0.05, 0.3, 0.06),
        (0.1, 0.08, 0.06),
        (0.1, 0.03, 0.03),
        (0.16, 0.03, 0.02),
    ),
    "pixelate": _amounts(0.9, 0.8, 0.7, 0.6, 0.5),
    "jpeg_compression": _amounts(65, 58, 50, 40, 25),
    "speckle_noise": _amounts(0.15, 0.2, 0.25, 0.3, 0.35),
    "gaussian_blur": _amounts(0.5, 0.75, 1, 1.25, 1.5),
    "spatter": (
        (0.62, 0.1, 0.7, 0.7, 0.6, 0),
        (0.65, 0.1, 0.8, 0.7, 0.6, 0),
        (0.65, 0.3, 1, 0.69, 0.6, 0),
        (0.65, 0.1, 0.7, 0.68, 0.6, 1),
        (0.65, 0.1, 0.5, 0.67, 0.6, 1),
    ),
    "saturate": ((0.3, 0), (0.1, 0), (2, 0), (5, 0.1), (30, 0.2)),
}

_AT_224: dict[str, Severities] = {
    "gaussian_noise": _amounts(0.08, 0.12, 0.18, 0.26, 0.38),
    "shot_noise": _amounts(60, 25, 12, 5, 3),
    "impulse_noise": _amounts(0.03, 0.06, 0.09, 0.17, 0.27),
    "defocus_blur": ((3, 0.1), (4, 0.5), (6, 0.5), (8, 0.5), (10, 0.5)),
    "glass_blur": ((0.7, 1, 2), (0.9, 2, 1), (1, 2, 3), (1.1, 3, 2), (1.5, 4, 2)),
    "motion_blur": ((10, 3), (15, 5), (15, 8), (15, 12), (20, 15)),
    "zoom_blur": ((1.11, 0.01), (1.16, 0.01), (1.21, 0.02), (1.26, 0.02), (1.31, 0.03)),
    "snow": (
        (0.1, 0.3, 3, 0.5, 10, 4, 0.8),
        (0.2, 0.3, 2, 0.5, 12, 4, 0.7),
        (0.55, 0.3, 4, 0.9, 12, 8, 0.7),
        (0.55, 0.3, 4.5, 0.85, 12, 8, 0.65),
        (0.55, 0.3, 2.5, 0.85, 12, 12, 0.55),
    ),
    "frost": ((1, 0.4, 1), (0.8, 0.6, 1), (0.7, 0.7, 1), (0.65, 0.7, 1), (0.6, 0.75, 1)),
    "fog": ((1.5, 2), (2, 2), (2.5, 1.7), (2.5, 1.5), (3, 1.4)),
    "brightness": _amounts(0.1, 0.2, 0.3, 0.4, 0.5),
    "contrast": _amounts(0.4, 0.3, 0.2, 0.1, 0.05),
    "elastic_transform": (
        (_ELASTIC * 2, _ELASTIC * 0.7, _ELASTIC * 0.1),
        (_ELASTIC * 2, _ELASTIC * 0.08, _ELASTIC * 0.2),
        (_ELASTIC * 0.05, _ELASTIC * 0.01, _ELASTIC * 0.02),
        (_ELASTIC * 0.07, _ELASTIC * 0.01, _ELASTIC * 0.02),
        (_ELASTIC * 0.12, _ELASTIC * 0.01, _ELASTIC * 0.02),
    ),
    "pixelate": _amounts(0.6, 0.5, 0.4, 0.3, 0.25),
    "jpeg_compression": _amounts(25, 18, 15, 10, 7),
    "speckle_noise": _amounts(0.15, 0.2, 0.35, 0.45, 0.6),
    "gaussian_blur": _amounts(1, 2, 3, 4, 6),
    "spatter": (
        (0.65, 0.3, 4, 0.69, 0.6, 0),
        (0.65, 0.3, 3, 0.68, 0.6, 0),
        (0.65, 0.3, 2, 0.68, 0.5, 0),
        (0.65, 0.3, 1, 0.65, 1.5, 1),
        (0.67, 0.4, 1, 0.65, 1.5, 1),
    ),
    "saturate": ((0.3, 0), (0.1, 0), (2, 0), (5, 0.1), (20, 0.2)),
}

SEVERITIES = (1, 2, 3, 4, 5)
TABLES = {32: _AT_32, 64: _AT_64, 224: _AT_224}


def table_side(side: int) -> int:
    """Which table serves images of this short side: that of the nearest published size, by ratio (up to 45: 32; up to
    119: 64; else 224)."""
    return min(TABLES, key=lambda table: max(side / table, table / side))


def strength(name: str, severity: int, side: int) -> Strength:
    """The numbers of one corruption at severity 1 to 5 for images of this short side, in pixels."""
    return TABLES[table_side(side)][name][severity - 1]
