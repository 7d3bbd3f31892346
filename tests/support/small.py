"""A small federation: a data set that is learnt in seconds, and settings for it."""

import torch

from protofed import methods
from protofed.data import Dataset

SMALL = {
    "clients": 5,
    "rounds": 3,
    "partition": "n-way",
    "way": 2,
    "shot": 8,
    "model": "mlp",
    "embedding": 5,
    "hidden": [7],
    "batch": 4,
    "engine": "loop",
    "layout": "contiguous",
    "threads": 1,
    "workers": 1,
}
AT_SERVER = [name for name in methods.available() if methods.get(name).teacher is not None]


def blobs(classes=4, per_class=40, features=6, seed=0, test_per_class=10):
    """A small, learnable data set: Gaussian blobs."""
    g = torch.Generator().manual_seed(seed)
    centres = 3 * torch.randn(classes, features, generator=g)

    def draw(n):
        y = torch.arange(classes).repeat_interleave(n)
        return centres[y] + torch.randn(len(y), features, generator=g), y

    (x_train, y_train), (x_test, y_test) = draw(per_class), draw(test_per_class)
    return Dataset.from_arrays(x_train, y_train, x_test, y_test, num_classes=classes, name="blobs")


def labels_for(method):
    """Settings without which a method whose server trains on samples has none."""
    return {"labels": "server", "server_labels": 12} if method in AT_SERVER else {}
