"""The corruptions once more, image by image in NumPy, SciPy, Pillow and Matplotlib, written from the definitions
with nothing in mind but that they are right. An image is uint8 (C, H, W); `draw` gives the random numbers."""

import io

import numpy as np
from matplotlib.colors import hsv_to_rgb, rgb_to_hsv
from PIL import Image
from scipy import ndimage

LAST_DIGITS = 1e-6


def levels(x):
    return (np.clip(x, 0, 1) * 255 + LAST_DIGITS).astype(np.uint8)


def blurred(x, sigma, mode="nearest", truncate=4.0):
    return np.stack([ndimage.gaussian_filter(c, sigma, mode=mode, truncate=truncate) if sigma else c for c in x])


def gray(x):
    return x[:1] if len(x) == 1 else np.tensordot([0.299, 0.587, 0.114], x, 1)[None]


def gaussian_noise(x, c, draw):
    return levels(x / 255 + draw.normal(*x.shape) * c[0])


def shot_noise(x, c, draw):
    return levels(draw.poisson(x / 255 * c[0]) / c[0])


def impulse_noise(x, c, draw):
    chance = draw.uniform(*x.shape)
    return np.where(chance < c[0] / 2, 0, np.where(chance < c[0], 255, x)).astype(np.uint8)


def speckle_noise(x, c, draw):
    return levels(x / 255 * (1 + draw.normal(*x.shape) * c[0]))


def gaussian_blur(x, c, draw):
    return levels(blurred(x / 255, c[0]))


def disk(radius, soft):
    half, reach = (8, 1) if radius <= 8 else (radius, 2)
    y, x = np.mgrid[-half : half + 1, -half : half + 1]
    inside = (x * x + y * y <= radius * radius).astype(float)
    near = np.exp(-(np.arange(-reach, reach + 1) ** 2) / (2 * soft * soft))
    return ndimage.correlate(inside / inside.sum(), np.outer(near, near) / near.sum() ** 2, mode="mirror")


def defocus_blur(x, c, draw):
    return levels(np.stack([ndimage.correlate(channel, disk(*c), mode="mirror") for channel in x / 255]))


def glass_blur(x, c, draw):
    sigma, reach, rounds = c[0], int(c[1]), int(c[2])
    x = levels(blurred(x / 255, sigma))
    height, width = x.shape[1:]
    for _ in range(rounds):
        down, right = draw.integers(-reach, reach, 2, height - 2 * reach, width - 2 * reach)
        for h in range(height - reach, reach, -1):
            for w in range(width - reach, reach, -1):
                i, j = h - reach - 1, w - reach - 1
                x[:, h, w] = x[:, h + down[i, j], w + right[i, j]]
    return levels(blurred(x / 255, sigma))


def smeared(x, radius, sigma, degrees):
    angle = np.radians(float(degrees))
    steps = np.arange(2 * int(np.ceil(radius)) + 1)
    weights = np.exp(-(steps**2) / (2 * sigma**2))
    total = np.zeros(x.shape)
    rows, columns = np.arange(x.shape[1]), np.arange(x.shape[2])
    for step, weight in zip(steps, weights / weights.sum()):
        row = np.clip(rows + int(np.ceil(step * np.sin(angle) - 0.5)), 0, x.shape[1] - 1)
        column = np.clip(columns + int(np.ceil(step * np.cos(angle) - 0.5)), 0, x.shape[2] - 1)
        total += weight * x[:, row][:, :, column]
    return total.round()


def motion_blur(x, c, draw):
    return smeared(x.astype(float), *c, draw.uniform(low=-45, high=45)).astype(np.uint8)


def zoomed(x, factor):
    height, width = x.shape[1:]
    h, w = int(np.ceil(height / factor)), int(np.ceil(width / factor))
    top, left = (height - h) // 2, (width - w) // 2
    x = ndimage.zoom(x[:, top : top + h, left : left + w], (1, factor, factor), order=1)
    top, left = (x.shape[1] - height) // 2, (x.shape[2] - width) // 2
    return x[:, top : top + height, left : left + width]


def zoom_blur(x, c, draw):
    x = x / 255
    factors = np.arange(1, *c)
    return levels((x + sum(zoomed(x, factor) for factor in factors)) / (len(factors) + 1))


def snow(x, c, draw):
    flakes = zoomed(draw.normal(1, *x.shape[1:]) * c[1] + c[0], c[2])
    flakes[flakes < c[3]] = 0
    flakes = smeared(levels(flakes).astype(float), c[4], c[5], draw.uniform(low=-135, high=-45)) / 255
    x = x / 255
    x = c[6] * x + (1 - c[6]) * np.maximum(x, gray(x) * 1.5 + 0.5)
    return levels(x + flakes + np.rot90(flakes, 2, (1, 2)))


def frost(x, c, draw, textures):
    """textures: five uint8 (C, H', W'), at the scale they are laid on."""
    texture = textures[int(draw.integers(0, 5))]
    top, left = (int(u * (n - m)) for u, n, m in zip(draw.uniform(2), texture.shape[1:], x.shape[1:]))
    cut = texture[:, top : top + x.shape[1], left : left + x.shape[2]]
    return (np.clip(c[0] * x + c[1] * cut, 0, 255) + LAST_DIGITS).astype(np.uint8)


def plasma(noise, decay):
    side = round((len(noise) + 1) ** 0.5)
    map_ = np.zeros((side, side))
    amount, used, step = 1.0, 0, side
    while step >= 2:
        half = step // 2
        corner = np.arange(0, side, step)
        middle = corner + half
        for rows, columns, near in (
            (middle, middle, ((-half, -half), (-half, half), (half, -half), (half, half))),
            (corner, middle, ((-half, 0), (half, 0), (0, -half), (0, half))),
            (middle, corner, ((-half, 0), (half, 0), (0, -half), (0, half))),
        ):
            around = sum(map_[np.ix_((rows + y) % side, (columns + x) % side)] for y, x in near)
            fraction = noise[used : used + len(corner) ** 2].reshape(len(corner), -1)
            map_[np.ix_(rows, columns)] = around / 4 + amount * fraction
            used += len(corner) ** 2
        step, amount = half, amount / decay**2
    map_ -= map_.min()
    return map_ / map_.max()


def fog(x, c, draw):
    side = 2 ** int(np.ceil(np.log2(max(x.shape[1:]))))
    map_ = plasma(draw.uniform(side * side - 1, low=-1.0), c[1])[: x.shape[1], : x.shape[2]]
    x = x / 255
    return levels((x + c[0] * map_) * x.max() / (x.max() + c[0]))


def in_hsv(channel, change):
    """A corruption that changes one channel of hue, saturation and value."""

    def corrupt(x, c, draw):
        hsv = rgb_to_hsv(np.broadcast_to(x / 255, (3, *x.shape[1:])).transpose(1, 2, 0))
        hsv[..., channel] = np.clip(change(hsv[..., channel], *c), 0, 1)
        return levels(hsv_to_rgb(hsv).transpose(2, 0, 1)[: len(x)])

    return corrupt


brightness = in_hsv(2, lambda value, added: value + added)
saturate = in_hsv(1, lambda saturation, factor, added: saturation * factor + added)


def contrast(x, c, draw):
    x = x / 255
    means = x.mean((1, 2), keepdims=True)
    return levels((x - means) * c[0] + means)


def elastic_transform(x, c, draw):
    height, width = x.shape[1:]
    amount, sigma, jitter = (part * min(height, width) for part in c)
    half, center = min(height, width) // 3, np.array([width // 2, height // 2])
    points = np.array([center + half, [center[0] + half, center[1] - half], center - half])
    to = points + draw.uniform(3, 2, low=-jitter, high=jitter)
    # (x, y) = origin + s (first edge) + t (second edge), before and after alike
    edges, to_edges = (points[1:] - points[0]).T, (to[1:] - to[0]).T
    row, column = np.mgrid[:height, :width].astype(float)
    places = np.stack([column.ravel(), row.ravel()]) - to[0][:, None]
    x_from, y_from = edges @ np.linalg.inv(to_edges) @ places + points[0][:, None]
    moved = [ndimage.map_coordinates(c, [y_from, x_from], order=1, mode="mirror") for c in x / 255]
    moved = np.stack(moved).reshape(x.shape)
    fields = blurred(draw.uniform(2, height, width, low=-1.0), sigma, "reflect", 3) * amount
    places = [row + fields[1], column + fields[0]]
    return levels(np.stack([ndimage.map_coordinates(c, places, order=1, mode="reflect") for c in moved]))


def as_pil(x):
    return Image.fromarray(x[0] if len(x) == 1 else x.transpose(1, 2, 0))


def from_pil(image):
    x = np.asarray(image)
    return x[None] if x.ndim == 2 else x.transpose(2, 0, 1)


def pixelate(x, c, draw):
    height, width = x.shape[1:]
    small = as_pil(x).resize((int(width * c[0]), int(height * c[0])), Image.Resampling.BOX)
    return from_pil(small.resize((width, height), Image.Resampling.BOX))


def jpeg_compression(x, c, draw):
    file = io.BytesIO()
    as_pil(x).save(file, "JPEG", quality=int(c[0]))
    return from_pil(Image.open(file))


def spatter(x, c, draw):
    liquid = blurred(draw.normal(1, *x.shape[1:]) * c[1] + c[0], c[2])[0]
    x = x / 255
    color = np.array([63, 42, 20] if c[5] else [175, 238, 238])[:, None, None] / 255
    color = color if len(x) == 3 else gray(color)
    if c[5]:
        cover = blurred((liquid > c[3]).astype(float)[None], c[4])
        cover[cover < 0.8] = 0
        return levels(x * (1 - cover) + color * cover)
    liquid[liquid < c[3]] = 0
    drops = levels(liquid).astype(int)
    near = ndimage.uniform_filter(np.minimum(chamfer(canny(drops)), 20), 3, mode="mirror")
    even = equalized((near + LAST_DIGITS).astype(int))
    relief = np.clip(ndimage.correlate(even, np.array([[-2, -1, 0], [-1, 1, 1], [0, 1, 2]]), mode="mirror"), 0, 255)
    shine = drops * np.rint(ndimage.uniform_filter(relief.astype(float), 3, mode="mirror"))
    shine = shine / shine.max() if shine.max() else shine
    return levels(x + shine * c[4] * color)


def canny(drops):
    smooth, slope = [1, 2, 1], [-1, 0, 1]
    dx = ndimage.correlate(drops, np.outer(smooth, slope), mode="nearest")
    dy = ndimage.correlate(drops, np.outer(slope, smooth), mode="nearest")
    strength = np.pad(abs(dx) + abs(dy), 1)
    ridge = np.zeros(drops.shape, dtype=bool)
    for y, x in zip(*np.nonzero(abs(dx) + abs(dy) > 50)):
        a, b = abs(int(dx[y, x])), abs(int(dy[y, x])) << 15
        here = strength[y + 1, x + 1]
        if b < a * 13573:
            ridge[y, x] = here > strength[y + 1, x] and here >= strength[y + 1, x + 2]
        elif b > a * 13573 + (a << 16):
            ridge[y, x] = here > strength[y, x + 1] and here >= strength[y + 2, x + 1]
        else:
            s = -1 if int(dx[y, x]) ^ int(dy[y, x]) < 0 else 1
            ridge[y, x] = here > strength[y, x + 1 - s] and here > strength[y + 2, x + 1 + s]
    parts, _ = ndimage.label(ridge, np.ones((3, 3)))
    strong = np.unique(parts[ridge & (abs(dx) + abs(dy) > 150)])
    return ridge & np.isin(parts, strong)


def chamfer(edge):
    """By one pass down and one pass up."""
    height, width = edge.shape
    near = np.full((height + 4, width + 4), 1e9)
    near[2:-2, 2:-2][edge] = 0
    back = {(0, -1): 1, (-1, 0): 1, (-1, -1): 1.4, (-1, 1): 1.4}
    back |= {(-1, -2): 2.1969, (-1, 2): 2.1969, (-2, -1): 2.1969, (-2, 1): 2.1969}
    for sign, ys, xs in (
        (1, range(2, height + 2), range(2, width + 2)),
        (-1, range(height + 1, 1, -1), range(width + 1, 1, -1)),
    ):
        for y in ys:
            for x in xs:
                ways = [near[y + sign * i, x + sign * j] + length for (i, j), length in back.items()]
                near[y, x] = min(near[y, x], *ways)
    return near[2:-2, 2:-2]


def equalized(values):
    counts = np.bincount(values.ravel(), minlength=256)
    lowest = values.min()
    if counts[lowest] == values.size:
        return values
    above = np.cumsum(counts) - counts[lowest]
    return np.rint(above.clip(0) * (255 / (values.size - counts[lowest])))[values].astype(int)
