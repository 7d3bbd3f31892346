"""Snapshots of the embedding space, projected to a plane that is the same for every round."""

from __future__ import annotations

import re
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from ..errors import ProtofedError

Projection = Literal["pca", "tsne"]
PROJECTIONS: tuple[Projection, ...] = ("pca", "tsne")
NAME = re.compile(r"round-(\d+)\.npz")
SIDE = 1000  # coordinates are whole numbers from 0 to this
MOST_SNAPSHOTS = 40
MOST_STARS = 400  # prototypes of one snapshot; where there are more, the mean over banks is shown
MOST_FITTED = 2500  # points of t-SNE, which takes minutes for many more
ALL_MATRICES = 30  # classes up to which every snapshot has its similarity matrix, not only the last


@dataclass(frozen=True)
class Snapshot:
    """Embeddings `z [n, d]` of class `y` at `client`, and the banks `prototypes [H, C, d]` with `known [H, C]`."""

    round: int
    z: np.ndarray
    y: np.ndarray
    client: np.ndarray
    prototypes: np.ndarray
    known: np.ndarray

    def mean_bank(self) -> tuple[np.ndarray, np.ndarray]:
        """The mean over banks of what they know, and which classes any of them knows."""
        weight = self.known[..., None].astype(float)
        means = (self.prototypes * weight).sum(axis=0) / np.maximum(weight.sum(axis=0), 1.0)
        return means, np.asarray(self.known.any(axis=0))

    def similarity(self) -> np.ndarray:
        """The cosine between prototypes `[C, C]`, NaN where a class is not known."""
        means, known = self.mean_bank()
        unit = means / np.maximum(np.linalg.norm(means, axis=1, keepdims=True), 1e-12)
        cosine = unit @ unit.T
        cosine[~known] = np.nan
        cosine[:, ~known] = np.nan
        return cosine


def read_snapshot(file: Path) -> Snapshot:
    """Read one snapshot, without embeddings and prototypes that are not finite.

    Args:
        file: A file `round-NUMBER.npz`.

    Returns:
        The snapshot. A file that is damaged or has other arrays is an error.
    """
    match = NAME.fullmatch(file.name)
    if match is None:
        raise ProtofedError(f"{file}: expected a name such as round-000010.npz")
    try:
        with np.load(file, allow_pickle=False) as stored:
            z, y, client = (np.asarray(stored[key]) for key in ("z", "y", "client"))
            prototypes, known = np.asarray(stored["prototypes"], dtype=np.float64), np.asarray(stored["known"])
    except KeyError as error:
        raise ProtofedError(f"{file}: expected z, y, client, prototypes and known; {error.args[0]}") from None
    except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
        raise ProtofedError(f"{file}: not readable ({error})") from None
    if prototypes.ndim == 2:
        prototypes, known = prototypes[None], known[None]
    shapes = (z.ndim == 2, y.shape == z.shape[:1], client.shape == z.shape[:1], prototypes.ndim == 3)
    if not all(shapes) or known.shape != prototypes.shape[:2]:
        raise ProtofedError(
            f"{file}: expected z [n, d], y [n], client [n], prototypes [C, d] or [H, C, d] and known like them; got z "
            f"{z.shape}, y {y.shape}, client {client.shape}, prototypes {prototypes.shape}, known {known.shape}"
        )
    z = z.astype(np.float64)
    finite = np.isfinite(z).all(axis=1)
    known = known.astype(bool) & np.isfinite(prototypes).all(axis=2)
    prototypes = np.where(known[..., None], prototypes, 0.0)
    return Snapshot(int(match[1]), z[finite], y[finite].astype(int), client[finite].astype(int), prototypes, known)


def read_snapshots(folder: Path) -> tuple[list[Snapshot], list[str]]:
    """Read the snapshots of a run.

    Args:
        folder: The run folder.

    Returns:
        The snapshots by round, evenly thinned to `MOST_SNAPSHOTS`, and notes of what could not be read.
    """
    files = sorted(file for file in (folder / "snapshots").glob("round-*.npz") if file.is_file())
    if len(files) > MOST_SNAPSHOTS:
        files = [files[i] for i in np.linspace(0, len(files) - 1, MOST_SNAPSHOTS).round().astype(int)]
    snapshots: list[Snapshot] = []
    notes: list[str] = []
    for file in files:
        try:
            snapshot = read_snapshot(file)
        except ProtofedError as error:
            notes.append(str(error))
            continue
        if snapshots and snapshot.z.shape[1] != snapshots[0].z.shape[1]:
            expected, dim = snapshots[0].z.shape[1], snapshot.z.shape[1]
            notes.append(
                f"{file}: expected embeddings of {expected} dimensions as in round {snapshots[0].round}, got {dim}"
            )
        elif len(snapshot.z) == 0:
            notes.append(f"{file}: it holds no finite embedding")
        else:
            snapshots.append(snapshot)
    return snapshots, notes


def thin(snapshots: Sequence[Snapshot], most: int) -> list[Snapshot]:
    """Reduce snapshots to at most `most` points each.

    Snapshots with the same number of points keep the same rows, so that a point can be followed over the rounds.
    """
    thinned = []
    for snapshot in snapshots:
        n = len(snapshot.z)
        rows = np.sort(np.random.default_rng(0).permutation(n)[:most])
        arrays = (snapshot.z[rows], snapshot.y[rows], snapshot.client[rows])
        thinned.append(Snapshot(snapshot.round, *arrays, snapshot.prototypes, snapshot.known))
    return thinned


@dataclass(frozen=True)
class Plane:
    """A snapshot in the plane: points `[n, 2]`, and stars with the columns x, y, class and bank."""

    snapshot: Snapshot
    points: np.ndarray
    stars: np.ndarray


def project(snapshots: Sequence[Snapshot], how: Projection = "pca") -> tuple[list[Plane], str]:
    """Project all snapshots to one plane, which is fitted on all of them together.

    Args:
        snapshots: Snapshots of embeddings of the same dimension.
        how: `pca` or `tsne`.

    Returns:
        A plane for each snapshot, and a line that says what the axes are.
    """
    dim = snapshots[0].z.shape[1]
    banks = [_stars(snapshot, dim) for snapshot in snapshots]
    if how == "tsne":
        snapshots = thin(snapshots, max(20, MOST_FITTED // len(snapshots)))
    parts = [part for snapshot, (vectors, _) in zip(snapshots, banks, strict=True) for part in (snapshot.z, vectors)]
    ends = np.cumsum([len(part) for part in parts])[:-1]
    if how == "tsne":
        flat, axes_text = _tsne(np.concatenate(parts))
    else:
        flat, axes_text = _pca(np.concatenate([snapshot.z for snapshot in snapshots]), np.concatenate(parts))
    pieces = np.split(flat, ends)
    planes = []
    for i, snapshot in enumerate(snapshots):
        labels = banks[i][1]
        planes.append(Plane(snapshot, pieces[2 * i], np.concatenate([pieces[2 * i + 1], labels], axis=1)))
    return planes, axes_text


def _stars(snapshot: Snapshot, dim: int) -> tuple[np.ndarray, np.ndarray]:
    """The vectors `[m, d]` of known prototypes, and the class and bank of each; none where they have another dimension."""
    if snapshot.prototypes.shape[2] != dim:
        return np.zeros((0, dim)), np.zeros((0, 2))
    prototypes, known = snapshot.prototypes, snapshot.known
    if known.sum() > MOST_STARS:
        means, any_known = snapshot.mean_bank()
        prototypes, known = means[None], any_known[None]
    bank, label = np.nonzero(known)
    return prototypes[known], np.stack([label, bank], axis=1).astype(float)


def _pca(fitted: np.ndarray, placed: np.ndarray) -> tuple[np.ndarray, str]:
    """Project to the principal components of `fitted`, each with the sign that makes its largest entry positive."""
    centre = fitted.mean(axis=0)
    values, vectors = np.linalg.eigh(np.cov(fitted - centre, rowvar=False, bias=True).reshape(fitted.shape[1], -1))
    axes = vectors[:, ::-1][:, :2]
    axes = axes * np.sign(axes[np.abs(axes).argmax(axis=0), np.arange(axes.shape[1])])
    flat = (placed - centre) @ axes
    if flat.shape[1] == 1:
        flat = np.concatenate([flat, np.zeros_like(flat)], axis=1)
    share = values[::-1][:2].clip(0).sum() / max(values.clip(0).sum(), 1e-12)
    return flat, f"PCA over all snapshots: two axes, {100 * share:.0f} % of the variance"


def _tsne(placed: np.ndarray) -> tuple[np.ndarray, str]:
    from sklearn.manifold import TSNE

    if len(placed) < 5:
        raise ProtofedError(f"projection=tsne: expected at least 5 points, got {len(placed)}")
    perplexity = min(30.0, (len(placed) - 1) / 3)
    flat = TSNE(perplexity=perplexity, init="pca", random_state=0).fit_transform(placed.astype(np.float32))
    return flat.astype(np.float64), f"t-SNE over all snapshots together (perplexity {perplexity:.0f})"


def space(snapshots: Sequence[Snapshot], how: Projection, most: int) -> dict[str, Any]:
    """Make an embedding space as the page draws it: whole numbers in a square, with the same scale on both axes.

    Args:
        snapshots: The snapshots of a run.
        how: The projection, `pca` or `tsne`.
        most: The largest number of points of a snapshot.

    Returns:
        The frames of the space, one per snapshot, and what the axes are.
    """
    planes, axes_text = project(thin(snapshots, most), how)
    positions = np.concatenate([part for p in planes for part in (p.points, p.stars[:, :2])])
    low, high = positions.min(axis=0), positions.max(axis=0)
    scale = SIDE / max(float((high - low).max()), 1e-9)
    offset = (SIDE - scale * (high - low)) / 2

    def whole(points: np.ndarray) -> np.ndarray:
        return np.rint((points - low) * scale + offset).astype(int)

    banks = max(s.prototypes.shape[0] for s in snapshots)
    classes = max(max(int(s.y.max()) + 1 for s in snapshots), max(s.prototypes.shape[1] for s in snapshots))
    frames = []
    for i, (plane, full) in enumerate(zip(planes, snapshots, strict=True)):
        stars = np.concatenate([whole(plane.stars[:, :2]), plane.stars[:, 2:].astype(int)], axis=1)
        matrix = full.prototypes.shape[1] <= ALL_MATRICES or i == len(planes) - 1
        frames.append(
            {
                "round": full.round,
                "points": whole(plane.points).ravel().tolist(),
                "y": plane.snapshot.y.tolist(),
                "client": plane.snapshot.client.tolist(),
                "stars": stars.ravel().tolist(),
                "similarity": _percent(full.similarity()) if matrix else None,
            }
        )
    first = frames[0]
    if all(f["y"] == first["y"] and f["client"] == first["client"] for f in frames):
        for frame in frames[1:]:  # the same samples in every round: their classes and clients are written once
            frame["y"] = frame["client"] = None
    points, samples = len(planes[0].points), len(snapshots[0].z)
    about = f"{axes_text}; {points:,} of {samples:,} samples" if points < samples else axes_text
    return {"about": about, "banks": banks, "classes": classes, "frames": frames}


def _percent(matrix: np.ndarray) -> list[list[int | None]]:
    return [[None if np.isnan(v) else round(100 * float(v)) for v in row] for row in matrix]
