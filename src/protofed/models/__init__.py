"""Models by name. Each returns `(embedding, logits)`; `base` explains how to add one.

```python
model = models.build("cnn", (1, 28, 28), num_classes=10, embedding=32)
models.register_module("mine", lambda shape, classes: MyNetwork(shape, classes))
```
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from ..errors import ProtofedError
from ..registry import coerce
from .base import Classifier, Levels, ModelSpec, Output, adapt, parameter_count, register, register_module, registry
from .cnn import CNN
from .convnet import LargeConvNet4, MiddleConvNet4, TinyConvNet4
from .dropout_cnn import DropoutCNN
from .efficientnet import EfficientNetLite0, EfficientNetLite1, EfficientNetLite2
from .googlenet import GoogLeNet
from .mlp import MLP
from .mobilenet import MobileNetV2
from .projection import Projected, Projection, project
from .resnet import ResNet18
from .resnet9 import ResNet8, ResNet9
from .sensing import GRU, BiLSTM, LeNet, ViT
from .text import Bert
from .wideresnet import WideResNet

__all__ = [
    "CNN",
    "GRU",
    "MLP",
    "Bert",
    "BiLSTM",
    "Classifier",
    "DropoutCNN",
    "EfficientNetLite0",
    "EfficientNetLite1",
    "EfficientNetLite2",
    "GoogLeNet",
    "LargeConvNet4",
    "LeNet",
    "Levels",
    "MiddleConvNet4",
    "MobileNetV2",
    "ModelSpec",
    "Output",
    "Projected",
    "Projection",
    "ResNet8",
    "ResNet9",
    "ResNet18",
    "TinyConvNet4",
    "ViT",
    "WideResNet",
    "adapt",
    "available",
    "build",
    "default_for",
    "make",
    "parameter_count",
    "project",
    "register",
    "register_module",
    "registry",
]

STANDARD_INPUT, STANDARD_CLASSES = (3, 32, 32), 10


def available() -> dict[str, int | None]:
    """The models with their number of parameters, with default settings, for images of 3×32×32 and 10 classes.

    Returns:
        the number by name; None for a model that cannot be built for that input.
    """
    counts: dict[str, int | None] = {}
    for name in registry.names():
        try:
            with torch.device("meta"):  # shapes only, without memory and random numbers
                counts[name] = parameter_count(build(name, STANDARD_INPUT, STANDARD_CLASSES))
        except Exception:
            counts[name] = None
    return counts


def default_for(sample_shape: Sequence[int], tokens: bool = False) -> str:
    """The model that is used where none is named.

    Args:
        sample_shape: the shape of one sample.
        tokens: whether samples are token ids of text.

    Returns:
        `bert` for tokens, `cnn` for images of at least 16×16, else `mlp`.

    >>> default_for((3, 32, 32)), default_for((64,))
    ('cnn', 'mlp')
    """
    if tokens:
        return "bert"
    return "cnn" if len(sample_shape) == 3 and min(sample_shape[1:]) >= 16 else "mlp"


def make(model: str | ModelSpec, sample_shape: Sequence[int], **options: Any) -> ModelSpec:
    """A model's settings.

    Args:
        model: the name (`"auto"` chooses by the samples' shape), or settings.
        sample_shape: the shape of one sample.
        **options: settings that replace the defaults, or those of the given settings.

    Returns:
        the settings.

    >>> make("mlp", (64,), embedding=32).embedding
    32
    """
    if isinstance(model, str):
        return registry.make(default_for(sample_shape) if model == "auto" else model, options)
    if not options:
        return model
    if isinstance(model, Projected):
        return dataclasses.replace(model, model=make(model.model, sample_shape, **options))
    current = {f.name: getattr(model, f.name) for f in dataclasses.fields(model) if f.init}  # type: ignore[arg-type]
    return coerce(type(model), current | options, f"model {model.name!r}")


def build(model: str | ModelSpec, sample_shape: Sequence[int], num_classes: int, **options: Any) -> nn.Module:
    """The network for samples of one shape. Its random numbers come from torch's global generator: seed it before.

    Args:
        model: the name, or settings.
        sample_shape: the shape of one sample.
        num_classes: the number of classes.
        **options: as in `make`.

    Returns:
        the network.

    >>> build("mlp", (64,), 10, embedding=32).dim
    32
    """
    shape = tuple(int(n) for n in sample_shape)
    if not shape or min(shape) < 1:
        raise ProtofedError(f"cannot build a model for samples of shape {list(shape)}; expected positive sizes")
    if num_classes < 1:
        raise ProtofedError(f"cannot build a model for {num_classes} classes; expected at least 1")
    return make(model, shape, **options).build(shape, num_classes)
