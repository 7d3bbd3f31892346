"""Classifiers for other programs: as safetensors, as an exported torch program or as ONNX, each run again and compared."""

from __future__ import annotations

import copy
import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from .. import disk
from ..errors import ProtofedError, unknown
from .core import Classifier, MixedOutputs, Outputs
from .store import load, save

TOLERANCE = 1e-5  # of an exported file's outputs, beside 1 and relative to larger ones
BATCHES = (1, 5)  # the sizes of the batches on which an exported file is compared


def export(classifier: Classifier, file: str | Path, format: str, samples: Tensor | None = None) -> float:
    """Write a classifier in a format of other programs, read the file again, run it, and compare the outputs with ours.

    Scaling and prototypes are in the file, and a batch may have any number of samples.

    Args:
        classifier: The classifier.
        file: The file to write.
        format: `"safetensors"` (for protofed), `"pt2"` (for PyTorch, without protofed) or `"onnx"`.
        samples: Raw samples for the comparison; None draws some.

    Returns:
        The largest difference of an output, beside 1 and relative to larger ones; above 1e-5 is an error, and no file is
        left.

    Example: `export(result.model(0), "model.onnx", "onnx")`
    """
    path = Path(file)
    if format not in FORMATS:
        raise unknown("format", format, FORMATS)
    if not path.parent.is_dir():
        raise ProtofedError(f"{path}: no such folder {path.parent}")
    write, read = FORMATS[format]
    x = example_samples(classifier) if samples is None else samples
    classifier = copy.deepcopy(classifier).cpu().eval().requires_grad_(False)
    temporary = path.with_name(f".{path.name}.tmp.{format}")
    try:
        with disk.writing(path), torch.no_grad(), _quiet():
            write(classifier, x, temporary)
            run = read(temporary)
            difference = max(_difference(run(batch), classifier(batch)) for n in BATCHES for batch in [_batch(x, n)])
            if difference > TOLERANCE:
                raise ProtofedError(f"{path}: the file's outputs differ from ours by {difference:.2g}; it was not kept")
            temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    return difference


def example_samples(classifier: Classifier, number: int = 8) -> Tensor:
    """Samples of the shape and the scale that a classifier was trained on, the same every time."""
    design, generator = classifier.design, torch.Generator().manual_seed(0)
    shape = (number, *design.sample_shape)
    if design.tokens:
        vocabulary = int(getattr(getattr(classifier.network, "encoder", None), "vocabulary", 100))
        return torch.randint(0, vocabulary, shape, generator=generator)
    x = torch.randn(shape, generator=generator)
    if classifier.mean is not None and classifier.std is not None:
        x = x * classifier.std.cpu() + classifier.mean.cpu()
    return x


def _batch(x: Tensor, size: int) -> Tensor:
    return x[torch.arange(size) % len(x)]


def _difference(theirs: Any, ours: Outputs | MixedOutputs) -> float:
    """The largest difference, beside 1 and relative to larger numbers; a flag or an infinity that differs is infinite."""
    worst = 0.0
    for name, a, b in zip(ours._fields, theirs, ours, strict=True):
        one, other = np.asarray(a, np.float64), b.numpy().astype(np.float64)
        if one.shape != other.shape or not np.array_equal(np.isfinite(one), np.isfinite(other)):
            return float("inf")
        finite = np.isfinite(other)
        gap = np.abs(one - other)[finite] / np.maximum(1, np.abs(other[finite]))
        if name != "unlike" and gap.size:
            worst = max(worst, float(gap.max()))
    return worst


@contextmanager
def _quiet() -> Iterator[None]:
    """Without the exporters' warnings and messages, which are about their own code."""
    loggers = [logging.getLogger(name) for name in ("torch.onnx", "torch.export", "onnxscript", "onnx_ir")]
    levels = [logger.level for logger in loggers]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for logger in loggers:
                logger.setLevel(logging.ERROR)
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


class Named(nn.Module):
    """A classifier whose outputs are a dict, which other programs can read without protofed."""

    def __init__(self, classifier: Classifier) -> None:
        super().__init__()
        self.classifier = classifier

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        """The outputs of raw samples, by name."""
        outputs: Outputs | MixedOutputs = self.classifier(x)
        return outputs._asdict()


def _program(classifier: Classifier, x: Tensor, format: str) -> torch.export.ExportedProgram:
    """The classifier as a graph that takes batches of any size."""
    try:
        sizes = {0: torch.export.Dim("batch", min=1)}
        return torch.export.export(Named(classifier).eval(), (x,), dynamic_shapes=(sizes,), strict=False)
    except Exception as error:  # a network of a person's own may do anything
        reason = " ".join(str(error).split())[:200]
        raise ProtofedError(
            f"network {classifier.model.name!r} cannot be exported as {format} ({type(error).__name__}: {reason}); "
            "--format safetensors always works"
        ) from None


def _write_pt2(classifier: Classifier, x: Tensor, file: Path) -> None:
    names = "\n".join(classifier.classes)
    torch.export.save(_program(classifier, x, "pt2"), file, extra_files={"classes.txt": names})


def _read_pt2(file: Path) -> Callable[[Tensor], Any]:
    module = torch.export.load(file).module()
    return lambda x: module(x).values()


def _write_onnx(classifier: Classifier, x: Tensor, file: Path) -> None:
    try:
        import onnx
        import onnxscript  # noqa: F401, which torch's exporter needs
    except ImportError:
        raise ProtofedError("ONNX needs further libraries: pip install 'protofed[export]'") from None
    program = _program(classifier, x, "onnx")
    try:
        made = torch.onnx.export(program, (), dynamo=True, input_names=["x"], verbose=False)
        assert made is not None
        graph = made.model.graph
        for value in (value for node in graph for value in node.outputs):
            value.name = f"{value.name}_" if value.name in MixedOutputs._fields else value.name
        for name, value in zip(MixedOutputs._fields, graph.outputs, strict=False):  # most methods have no `mix`
            value.name = name
        proto = made.model_proto
    except Exception as error:  # an operation that ONNX does not have
        reason = " ".join(str(error).split())[:200]
        raise ProtofedError(
            f"network {classifier.model.name!r} cannot be exported as onnx ({type(error).__name__}: {reason}); "
            "--format pt2 may do"
        ) from None
    onnx.helper.set_model_props(proto, {"classes": "\n".join(classifier.classes), "client": classifier.name})
    onnx.save(proto, file)


def _read_onnx(file: Path) -> Callable[[Tensor], Any]:
    try:
        import onnxruntime
    except ImportError:
        raise ProtofedError("ONNX needs further libraries: pip install 'protofed[export]'") from None
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(file, options, providers=["CPUExecutionProvider"])
    return lambda x: session.run(None, {"x": x.numpy()})


FORMATS: dict[str, tuple[Callable[[Classifier, Tensor, Path], None], Callable[[Path], Callable[[Tensor], Any]]]] = {
    "safetensors": (lambda classifier, x, file: save(classifier, file), lambda file: load(file)),
    "pt2": (_write_pt2, _read_pt2),
    "onnx": (_write_onnx, _read_onnx),
}
