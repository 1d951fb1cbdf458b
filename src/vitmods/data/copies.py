"""Near copies: images that show another one mirrored, encoded anew, resized, brightened or slightly cropped.

Of each image the index of a store has a look: a gray thumbnail of SIDE x SIDE values with mean 0. A few low frequencies
of two looks find candidates. Mirroring negates the odd ones across, so two products compare an image with another and
its mirror. A candidate is a copy if, moved and scaled by a little, it leaves little of the other unexplained: little in
absolute terms, and in comparison with images of the set that are merely similar (scans of one form, handwritten
digits). Looks without detail (flat images, a line on white) say too little and match nothing.
"""

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from vitmods.data.threads import cores, in_order

Floats = NDArray[np.float32]

SIDE = 16
MOST_PAIRS = 1 << 30  # compared, at about 5e7 a second; of larger sets evenly spaced images are searched for
_SAMPLES = 256  # pixels of a side that are read; of larger images equally spaced rows and columns
_FLAT = 2.0  # standard deviation in gray levels, below which a look carries nothing
_PARTS, _CANDIDATES = 32, 4  # the most similar image of each part; so many of these are compared in detail
_OTHERS = 24  # the rank of the similarity that images have which are no copies
_UNEXPLAINED, _OF_OTHERS, _SURE = 0.3, 0.3, 0.06  # largest share of the deviation, and of that of others
_PLAIN, _DETAILED = 8.0, 20.0  # effective number of frequencies: of less is never, of more always a copy to be told
_LIMITS, _STEP = (1.0, 0.8, 0.6, 0.4, 0.2), 1.5  # of unlikeness, tried in turn
_BLOCK = 256  # images that are searched for at once
_SHIFT = 1.2  # cells that a border may move, which is 7.5 %

_K = np.arange(SIDE)
_COSINES = np.cos(np.pi / SIDE * (_K + 0.5) * _K[:, None]).astype(np.float32) * np.float32(np.sqrt(2 / SIDE))
_COSINES[0] /= np.sqrt(2)  # orthonormal
_FREQUENCY = np.hypot(*np.meshgrid(_K, _K)).astype(np.float32)
_SOFT = np.exp(-0.5 * (_FREQUENCY * np.pi * 0.5 / SIDE) ** 2)  # blurs by half a cell, so that looks can be moved
_LOW = (_FREQUENCY > 0) & (_FREQUENCY < 6)
_ODD = np.broadcast_to(_K % 2 == 1, (SIDE, SIDE))[_LOW]  # change their sign in a mirror


def _averages(gray: Floats) -> Floats:
    """The mean (SIDE, W) of each of SIDE equal stretches of rows (H, W), with parts of rows."""
    ends = np.linspace(0, len(gray), SIDE + 1)
    whole = ends.astype(np.int64)
    sums = np.concatenate([np.zeros_like(gray[:1]), np.cumsum(gray, 0)])[whole]
    sums += (ends - whole)[:, None].astype(np.float32) * gray[np.minimum(whole, len(gray) - 1)]
    return np.diff(sums, axis=0) * np.float32(SIDE / len(gray))


def look_of(image: NDArray[np.uint8]) -> NDArray[np.int8]:
    """The look (SIDE^2,) of decoded pixels (C, H, W), as large as int8 allows; zeros of flat and tiny images."""
    step_y, step_x = (1 + (side - 1) // _SAMPLES for side in image.shape[1:])
    gray = image[:, ::step_y, ::step_x].sum(0, dtype=np.uint16).astype(np.float32) / len(image)
    if min(gray.shape) >= SIDE:
        cells = _averages(_averages(gray).T).T
        cells -= cells.mean()
        if cells.std() >= _FLAT:
            return np.rint(cells * (127 / np.abs(cells).max())).astype(np.int8).ravel()
    return np.zeros(SIDE * SIDE, np.int8)


class _Looks:
    """Looks (n, SIDE^2) ready to be compared. detail: the effective number of frequencies, which natural images weight
    by their inverse; even, odd: low frequencies, together of length 1."""

    def __init__(self, looks: NDArray[np.int8]) -> None:
        waves = _COSINES @ looks.reshape(-1, SIDE, SIDE).astype(np.float32) @ _COSINES.T
        power = (waves * _FREQUENCY).reshape(len(looks), -1) ** 2
        self.detail = power.sum(1) ** 2 / np.maximum((power**2).sum(1), 1e-9)
        self.soft: Floats = _COSINES.T @ (waves * _SOFT) @ _COSINES
        low = waves[:, _LOW] * _FREQUENCY[_LOW] ** 0.25
        low /= np.maximum(np.linalg.norm(low, axis=1, keepdims=True), 1e-6)
        self.even, self.odd = np.ascontiguousarray(low[:, ~_ODD]), np.ascontiguousarray(low[:, _ODD])


def near_copies(looks: NDArray[np.int8], of: NDArray[np.int8]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Find the images (q, SIDE^2) that are near copies of others (n, SIDE^2): their positions (m,), in order, and those
    of the most similar other. Memory grows with q + n."""
    from threadpoolctl import threadpool_limits

    ours, known = np.flatnonzero(looks.any(1)), np.flatnonzero(of.any(1))
    if not len(ours) or not len(known):
        return np.empty(0, np.int64), np.empty(0, np.int64)
    others = _Looks(of[known])

    def search(start: int) -> NDArray[np.float64]:
        block = ours[start : start + _BLOCK]
        i, j, unlike = _matches(_Looks(looks[block]), others)
        return np.stack([block[i], known[j], unlike])

    with threadpool_limits(1):  # many small products: threads of their own would wait for each other
        found: Iterable[NDArray[np.float64]] = in_order(search, range(0, len(ours), _BLOCK), cores())
        mine, match, unlike = np.concatenate(list(found), axis=1)
    # Copies differ from images that are merely similar by a valley. Without it (handwritten digits) the higher the
    # limit, the more pairs come with every step.
    least = next((x for x in _LIMITS if (unlike < x).sum() >= ((unlike >= x) & (unlike < x * _STEP)).sum()), 0.0)
    chosen = unlike < least
    return mine[chosen].astype(np.int64), match[chosen].astype(np.int64)


def _matches(mine: _Looks, others: _Looks) -> tuple[NDArray[np.int64], NDArray[np.int64], Floats]:
    """Positions in mine (m,), the most similar other of each, and how unlike they are: a copy is below 1."""
    # The best of each of several interleaved parts costs one pass. Neighbors, such as copies by their names, are in
    # different parts; images of middling rank are then those that are similar without being copies.
    parts, count = min(_PARTS, len(others.even)), np.arange(len(mine.even))
    best, score = np.empty((parts, len(count)), np.int64), np.empty((parts, len(count)), np.float32)
    for part in range(parts):
        scores = mine.odd @ others.odd[part::parts].T
        np.abs(scores, out=scores)
        scores += mine.even @ others.even[part::parts].T
        place = scores.argmax(1)
        best[part], score[part] = place * parts + part, scores[count, place]
    order = np.argsort(-score, axis=0)
    apart = np.sqrt(np.maximum(1 - np.minimum(np.take_along_axis(score, order, 0), 1) ** 2, 0))
    similar = apart[min(_OTHERS, parts) - 1]
    rank, i = np.nonzero(apart[:_CANDIDATES] < np.maximum(0.85 * similar, 0.3))
    j = best[order[rank, i], i]
    a, b = mine.soft[i], others.soft[j]
    mirrored = (mine.odd[i] * others.odd[j]).sum(1) < 0
    b[mirrored] = b[mirrored, :, ::-1]
    rest = np.minimum(_unexplained(a, b, 1), _unexplained(b, a, 1))
    near = np.flatnonzero(rest < 2 * _UNEXPLAINED)
    rest[near] = np.minimum(_unexplained(a[near], b[near], 3), _unexplained(b[near], a[near], 3))
    detail = np.minimum(mine.detail[i], others.detail[j])
    told = np.clip((detail - _PLAIN) / (_DETAILED - _PLAIN), 1e-6, 1)
    unlike = rest / np.minimum(_UNEXPLAINED * told, np.maximum(_OF_OTHERS * similar[i], 1e-6))
    unlike[(rest < _SURE) & (told == 1)] = 0
    order = np.lexsort((rest, unlike, i))
    found, first = np.unique(i[order], return_index=True)
    return found, j[order][first], unlike[order][first]


def _unexplained(a: Floats, b: Floats, steps: int) -> Floats:
    """The share of b's deviation (m,) that a (m, SIDE, SIDE) leaves when it is moved and scaled along both axes, and in
    brightness and contrast, to fit: steps of Gauss and Newton."""
    scale = ((_K - (SIDE - 1) / 2) / (SIDE / 2)).astype(np.float32)
    target = b.reshape(len(b), SIDE * SIDE, 1) - b.mean((1, 2)).reshape(-1, 1, 1)
    total = np.maximum((target**2).sum((1, 2)), 1e-9)
    moved, left = np.zeros((2, 2, len(a), 1), np.float32), np.ones(len(a), np.float32)
    for _ in range(steps + 1):
        places = np.clip(_K + moved[:, 0] + moved[:, 1] * scale, 0, SIDE - 1)[..., None]
        rows, columns = np.maximum(1 - np.abs(places - _K), 0).astype(np.float32)
        view = rows @ a @ columns.transpose(0, 2, 1)
        dy, dx = np.gradient(view, axis=(1, 2))
        basis = np.stack([view, dy, dy * scale[:, None], dx, dx * scale], 1).reshape(len(a), 5, SIDE * SIDE)
        basis -= basis.mean(2, keepdims=True)
        squares = (basis @ basis.transpose(0, 2, 1)).astype(np.float64)
        squares += np.eye(5) * (1e-3 * squares + 1e-6)
        weights = np.linalg.solve(squares, (basis @ target).astype(np.float64)).astype(np.float32)
        rest = target - basis.transpose(0, 2, 1) @ weights
        left = np.minimum(left, (rest**2).sum((1, 2)) / total)
        contrast = np.where(np.abs(weights[:, :1]) > 0.2, weights[:, :1], 1)
        moves = (weights[:, 1:] / contrast).reshape(-1, 2, 2).transpose(1, 2, 0)[..., None]
        moved = np.clip(moved + moves, -_SHIFT, _SHIFT)
    return np.sqrt(left)
