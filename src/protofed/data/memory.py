"""Data in memory, in the forms that people have it in: arrays, data frames, torch's and Hugging Face's data sets, and a
list or mapping of one of these for each site."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, SequentialSampler, Subset, TensorDataset
from torch.utils.data import Dataset as TorchDataset

from ..errors import ProtofedError
from .own import images_of_splits
from .sources import IN_MEMORY, described, register, sources
from .table import Table, checked, frame_columns, is_frame
from .tabular import NONE, TableSource, stacked
from .types import Dataset, SampleKind

ARRAYS, OPTIONAL = ("x_train", "y_train", "x_test", "y_test"), ("group_train", "group_test", "class_names")
FORMS = (
    "expected a tuple (x, y), (x, y, site) or (x_train, y_train, x_test, y_test), a data frame, a torch or Hugging Face "
    "data set, or a list or mapping of one of these for each site"
)


def as_dataset(data: Any, **options: Any) -> Dataset:
    """Make a data set of data in memory, scaled as that of a file is.

    Args:
        data: A tuple of arrays `(x, y)`, `(x, y, site)` or `(x_train, y_train, x_test, y_test)`; a pandas or polars frame
            with a column `label` and, if there are sites, `site`; a torch `Dataset` or `DataLoader` of pairs `(x, y)`; a
            Hugging Face `Dataset` or `DatasetDict`; a tuple of two such sets, for training and testing; or a list or
            mapping of one of these for each site. A `Dataset` is returned as it is.
        **options: `label`, `site`, `split`, `classes`, `drop` and `missing`, which say what the columns of a table are;
            `kind`, what a sample is; and what all sources have, such as `standardise` and `limit_train`.

    Returns:
        The data set. `as_dataset(frame, label="quality", standardise="site")`
    """
    if isinstance(data, Dataset) and not options:
        data.check()
        return data
    return sources.make(IN_MEMORY, {"content": data, **options}).load()


@dataclass(frozen=True)
class Arrays:
    """The arrays of a data set before its labels are numbered; `names` are those of the classes, where they are known."""

    x: np.ndarray
    y: Any
    x_test: np.ndarray | None = None
    y_test: Any = None
    site: Any = None
    site_test: Any = None
    names: tuple[str, ...] = ()


@register(IN_MEMORY)
@dataclass(frozen=True, kw_only=True)
class Memory(TableSource):
    """What is given in Python: arrays, data frames, data sets of torch and Hugging Face, for all sites or for each."""

    content: Any
    kind: SampleKind = "auto"

    def load(self) -> Dataset:
        """The data set, with the settings that it was made with."""
        given = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "content"}
        defaults = {f.name: f.default for f in fields(self)}
        return replace(super().load(), options={k: v for k, v in given.items() if v != defaults[k]})

    def read(self) -> Dataset:
        content = self._content(self.content, "data")
        data = self._finished(content, IN_MEMORY) if isinstance(content, Arrays) else content
        if isinstance(data, Mapping):
            data = self.dataset(data, IN_MEMORY)
        return data if self.kind == "auto" else replace(data, kind=self.kind)

    def _content(self, data: Any, where: str) -> Arrays | Table | Dataset:
        """What was given as arrays before labels are numbered, as a table, or as the data set it is."""
        if isinstance(data, Mapping) and {"x_train", "y_train"} <= set(data) <= {*ARRAYS, *OPTIONAL}:
            arrays = _of_tuple(tuple(data[key] for key in ARRAYS if key in data), where)
            names = tuple(map(str, data.get("class_names", ())))
            return replace(arrays, site=data.get("group_train"), site_test=data.get("group_test"), names=names)
        if _is_hugging_face(data):
            return self._hugging_face(data, where)
        if isinstance(data, Mapping) or (isinstance(data, list) and data):
            return self._sites(data if isinstance(data, Mapping) else {f"site {k}": d for k, d in enumerate(data)})
        if isinstance(data, Dataset):
            return data
        if isinstance(data, tuple):
            return self._tuple(data, where)
        if is_frame(data):
            return frame_columns(data, where)
        if isinstance(data, TorchDataset | DataLoader):
            return _of_torch(data, where, self.label)
        if _is_array(data):
            raise ProtofedError(f"{where} is {described(data)} alone, without labels; {FORMS}")
        raise ProtofedError(f"{where} is {described(data)}; {FORMS}")

    def _tuple(self, data: tuple[Any, ...], where: str) -> Arrays | Table | Dataset:
        if data and all(_is_array(part) for part in data):
            return _of_tuple(data, where)
        if data and is_frame(data[0]) and len(data) in (2, 3, 4) and _is_array(data[1]):
            return self._frame_and_labels(data, where)
        if len(data) != 2:
            raise ProtofedError(f"{where} is a tuple of {', '.join(map(described, data)) or 'nothing'}; {FORMS}")
        train, test = (self._content(part, f"{where}[{k}]") for k, part in enumerate(data))
        if isinstance(train, Mapping) and isinstance(test, Mapping):
            return self.parts({"train": train, "test": test}, where)
        arrays, arrays_test = _as_arrays(train), _as_arrays(test)
        if arrays is None or arrays_test is None or arrays.x_test is not None:
            raise ProtofedError(f"{where} is a tuple of {', '.join(map(described, data))}; {FORMS}")
        if arrays.names != arrays_test.names:
            arrays, arrays_test = _named(arrays), _named(arrays_test)
        return replace(arrays, x_test=arrays_test.x, y_test=arrays_test.y, site_test=arrays_test.site)

    def _frame_and_labels(self, data: tuple[Any, ...], where: str) -> Table:
        """A frame of features with its labels beside it: `(frame, y)`, `(frame, y, site)` or with a test part."""
        if len(data) == 3 and self.site == NONE:
            raise ProtofedError(f"{where} is a tuple of three, with sites, and site is none")
        parts = [data[:2], data[2:]] if len(data) == 4 else [data[:2]]
        tables: list[dict[str, Any]] = []
        for frame, y in parts:
            columns = dict(frame_columns(frame, where))
            if self.label in columns:
                raise ProtofedError(f"{where}: labels are given beside a frame that has a column {self.label!r} too")
            tables.append({**columns, self.label: _array(y)})
        if len(data) == 3:
            tables[0][self.site] = _array(data[2])
        named = [checked(table, where) for table in tables]
        return named[0] if len(named) == 1 else self.parts(dict(zip(("train", "test"), named, strict=True)), where)

    def _hugging_face(self, data: Any, where: str) -> Arrays | Table:
        """The splits `train` and `test` of a data set in memory; images are found by their type, all else is a table."""
        splits = dict(data) if isinstance(data, Mapping) else {"train": data}
        if "train" not in splits:
            raise ProtofedError(f"{where}: no split 'train'; found {', '.join(map(str, splits)) or 'nothing'}")
        parts = [splits[name] for name in ("train", "test") if name in splits]
        features = parts[0].features
        label = self.label if self.label in features else None
        if any(type(feature).__name__ == "Image" for feature in features.values()):
            site = self.site if self.site in features else None
            images, labels, names, sites = images_of_splits(parts, None, label, site, None, where)
            test = {} if len(parts) == 1 else {"x_test": images[1], "y_test": labels[1], "site_test": sites[1]}
            return Arrays(images[0], labels[0], site=sites[0], names=names, **test)
        tables = {}
        for name, part in zip(("train", "test"), parts, strict=False):
            columns = {column: part[column][:] for column in part.features}
            words = getattr(features.get(self.label), "names", None)
            if words:
                columns[self.label] = [None if y is None or y < 0 else words[y] for y in columns[self.label]]
            tables[name] = checked(columns, where)
        return tables["train"] if len(tables) == 1 else self.parts(tables, where)

    def _sites(self, sites: Mapping[Any, Any]) -> Arrays | Table | Dataset:
        """One data set for each site: their rows together, with the site of each."""
        contents = {str(name): self._content(data, f"data of {str(name)!r}") for name, data in sites.items()}
        if not contents:
            raise ProtofedError(f"data is empty; {FORMS}")
        if all(isinstance(content, Mapping) for content in contents.values()):
            if self.site == NONE:
                raise ProtofedError("data is given for each site, and site is none")
            return stacked(contents, self.site, "data")  # type: ignore[arg-type]
        arrays = {name: _as_arrays(content) for name, content in contents.items()}
        if wrong := [name for name, entry in arrays.items() if entry is None]:
            raise ProtofedError(
                f"data of {wrong[0]!r} is a table and others are arrays; expected one form for all sites"
            )
        return self._together({name: entry for name, entry in arrays.items() if entry is not None})

    def _together(self, sites: Mapping[str, Arrays]) -> Dataset:
        first, reference = next(iter(sites.items()))
        for name, entry in sites.items():
            if entry.site is not None:
                raise ProtofedError(f"data of {name!r} has sites of its own, and is the data of one site")
            if entry.x.shape[1:] != reference.x.shape[1:] or (entry.x.dtype == np.uint8) != (
                reference.x.dtype == np.uint8
            ):
                own, other = (f"{e.x.shape[1:]} of {e.x.dtype}" for e in (entry, reference))
                raise ProtofedError(
                    f"data of {name!r}: a sample has shape {own}, one of {first!r} {other}; they must be alike"
                )
        if len({entry.names for entry in sites.values()}) > 1:
            sites = {name: _named(entry) for name, entry in sites.items()}
            names: tuple[str, ...] = ()
        else:
            names = reference.names
        entries = list(sites.values())
        joined = Arrays(_joined([e.x for e in entries]), _joined([_array(e.y) for e in entries]), names=names)
        ids = torch.from_numpy(np.repeat(np.arange(len(entries)), [len(e.x) for e in entries]))
        ids_test: Tensor | None = None
        tested = [(k, e.x_test, _array(e.y_test)) for k, e in enumerate(entries) if e.x_test is not None]
        if tested:
            joined = replace(joined, x_test=_joined([x for _, x, _ in tested]), y_test=_joined([y for *_, y in tested]))
            ids_test = torch.from_numpy(np.repeat([k for k, *_ in tested], [len(x) for _, x, _ in tested]))
        data = self._finished(joined, IN_MEMORY)
        return replace(data, group_train=ids, group_test=ids_test, group_names=tuple(sites))

    def _finished(self, arrays: Arrays, name: str) -> Dataset:
        """The data set of some arrays, with labels numbered."""
        if self.classes:
            arrays = _named(arrays)
        parts = [y for y in (arrays.y, arrays.y_test) if y is not None]
        labels, names = parts, arrays.names
        if not names:
            labels, names = self.numbered(parts, [f"{name}: y_train", f"{name}: y_test"][: len(parts)])
        return Dataset.from_arrays(
            arrays.x,
            labels[0],
            arrays.x_test,
            labels[1] if len(labels) > 1 else None,
            class_names=names,
            group_train=arrays.site,
            group_test=arrays.site_test,
            name=name,
            kind=self.kind,
        )


# --- arrays -----------------------------------------------------------------------------------------------------------
def _is_array(data: Any) -> bool:
    """Whether an object is an array, a tensor, a column of a frame, or a plain list of numbers or words."""
    if isinstance(data, list):
        return all(
            isinstance(v, str | bool | int | float | list | tuple | np.ndarray | np.generic | Tensor) for v in data[:9]
        )
    return isinstance(data, np.ndarray | Tensor) or type(data).__name__ in ("Series", "Index")


def _array(data: Any) -> np.ndarray:
    if isinstance(data, Tensor):
        return data.detach().cpu().numpy()
    if hasattr(data, "to_numpy"):
        return data.to_numpy()
    return np.asarray(data)


def _of_tuple(parts: tuple[Any, ...], where: str) -> Arrays:
    """Arrays `(x, y)`, `(x, y, site)` or `(x_train, y_train, x_test, y_test)`."""
    if len(parts) not in (2, 3, 4):
        raise ProtofedError(f"{where} is a tuple of {len(parts)} arrays; {FORMS}")
    try:
        arrays = [_array(part) for part in parts]
    except ValueError:
        raise ProtofedError(f"{where}: lists of different lengths in it; expected arrays") from None
    for k in range(0, len(arrays) - 1, 2):
        if arrays[k].ndim < 2 or len(arrays[k]) != len(arrays[k + 1]):
            shapes = ", ".join(str(array.shape) for array in arrays)
            raise ProtofedError(f"{where} is a tuple of arrays of shape {shapes}; expected x [n, ...] and then y [n]")
    if len(arrays) == 3:
        return Arrays(arrays[0], arrays[1], site=arrays[2])
    return Arrays(arrays[0], arrays[1], *arrays[2:])  # type: ignore[arg-type]


def _as_arrays(content: Arrays | Table | Dataset) -> Arrays | None:
    """Arrays, also of a data set that was made before; None of a table."""
    if isinstance(content, Dataset):
        x_test, y_test = (None if part is None else part.numpy() for part in (content.x_test, content.y_test))
        return Arrays(content.x_train.numpy(), content.y_train.numpy(), x_test, y_test, names=content.class_names)
    return content if isinstance(content, Arrays) else None


def _named(arrays: Arrays) -> Arrays:
    """The arrays with the classes' names as labels, where the names are known."""
    if not arrays.names:
        return arrays
    names = np.asarray(arrays.names)
    y_test = None if arrays.y_test is None else names[_array(arrays.y_test)]
    return replace(arrays, y=names[_array(arrays.y)], y_test=y_test, names=())


def _joined(parts: Sequence[Any]) -> np.ndarray:
    """Arrays one after another; labels of which some are words and others numbers stay what they are."""
    if len({np.asarray(part).dtype.kind in "UO" for part in parts}) > 1:
        return np.concatenate([np.asarray(part, object) for part in parts])
    return np.concatenate(parts)


# --- torch and Hugging Face -------------------------------------------------------------------------------------------
def _is_hugging_face(data: Any) -> bool:
    return type(data).__module__.partition(".")[0] == "datasets" and type(data).__name__ in ("Dataset", "DatasetDict")


def _of_torch(data: Any, where: str, label: str) -> Arrays:
    """The samples of a torch data set or of a loader, in the order of the data set and without any shuffling."""
    if isinstance(data, DataLoader):
        sampler = data.sampler
        if isinstance(data.dataset, IterableDataset) or not isinstance(sampler, RandomSampler | SequentialSampler):
            indices = getattr(sampler, "indices", None)
            if indices is None:
                return _of_items(_unbatched(data, where), where, label)
            data = Subset(data.dataset, sorted(int(i) for i in indices))
        else:
            data = data.dataset
    if isinstance(data, TensorDataset):
        if len(data.tensors) != 2:
            raise ProtofedError(
                f"{where} is a TensorDataset of {len(data.tensors)} tensors; expected two, samples and labels"
            )
        x, y = (_array(tensor) for tensor in data.tensors)
        return Arrays(x, y)
    items = iter(data) if isinstance(data, IterableDataset) else (data[i] for i in range(len(data)))
    arrays = _of_items(items, where, label)
    names = getattr(data, "classes", None)
    return replace(arrays, names=tuple(map(str, names))) if isinstance(names, list | tuple) else arrays


def _unbatched(loader: Any, where: str) -> Iterable[Any]:
    for batch in loader:
        if loader.batch_sampler is None:  # batches are single items
            yield batch
            continue
        if not isinstance(batch, list | tuple) or len(batch) != 2:
            raise ProtofedError(f"{where}: a batch of the loader is {described(batch)}; expected a pair (x, y)")
        yield from zip(*batch, strict=True)


def _of_items(items: Iterable[Any], where: str, label: str) -> Arrays:
    """Samples and labels of items `(x, y)`, or of mappings with a label and one further entry."""
    xs: list[np.ndarray] = []
    ys: list[Any] = []
    for k, item in enumerate(items):
        if isinstance(item, Mapping) and label in item and len(item) == 2:
            item = next(value for key, value in item.items() if key != label), item[label]
        if not isinstance(item, list | tuple) or len(item) != 2:
            raise ProtofedError(f"{where}: item {k} is {described(item)}; expected a pair (x, y)")
        x = _array(item[0])
        if x.dtype == object or x.shape == ():
            raise ProtofedError(f"{where}: sample {k} is {described(item[0])}; expected an array, a tensor or an image")
        if xs and x.shape != xs[0].shape:
            raise ProtofedError(
                f"{where}: sample {k} has shape {x.shape}, sample 0 {xs[0].shape}; they must be the same"
            )
        xs.append(x)
        ys.append(item[1].item() if isinstance(item[1], Tensor | np.generic) and np.size(item[1]) == 1 else item[1])
    if not xs:
        raise ProtofedError(f"{where}: no samples in it")
    try:
        return Arrays(np.stack(xs), np.asarray(ys))
    except ValueError:
        raise ProtofedError(f"{where}: labels must be one number or word for each sample") from None
