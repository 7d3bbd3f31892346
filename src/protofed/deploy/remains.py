"""What a run leaves to a site: its model, the federation's prototypes, and a classifier with which it can predict."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

from .. import disk, wire
from ..classifier.core import Classifier
from ..classifier.gather import design_of, gather
from ..classifier.store import CLASSIFIER, save
from ..errors import ProtofedError
from ..federation.checkpoint import write_tensors
from ..federation.choose import EngineInputs
from ..federation.engine import Downloads
from ..federation.site import Site

log = logging.getLogger("protofed")

README = """# What the run {run} left at {name}, after round {round}

- `model.safetensors`: the weights of `{model}`, as this site would use them.
- `prototypes.safetensors`: the federation's class prototypes, `means [classes, dim]` and `counts [classes]`, where the
  method shares some. A class with count 0 is not known.
- `round-*.safetensors`: this site's state after its last rounds, with which it goes on.
{classifier}"""
USE = """- `classifier.safetensors`: all of it to predict with: network, classes, prototypes, and the scaling of this site's
  samples. The training data is not needed:

      protofed predict {place} new.csv --out predictions.csv
      protofed export {place} --out model.onnx

  or in Python `protofed.classifier.load("classifier.safetensors").predict(x).classes`.
"""


@dataclass(frozen=True)
class Remains:
    """What a run leaves to a site, in its folder of the run.

    Attributes:
        place: The folder.
        name: The site's name.
        model: The site's network, as a setting is written.
        inputs: What the site's engine was made of.
        candidates: The classes that the nearest prototype is chosen among.
    """

    place: Path
    name: str
    model: str
    inputs: EngineInputs
    candidates: str

    def write_prototypes(self, received: wire.Bundle) -> None:
        """Write the prototypes that the site was sent last."""
        if received.bank is not None:
            bank = {"means": received.bank.means, "counts": received.bank.counts}
            write_tensors(self.place / "prototypes.tmp", lambda: iter(bank.items()))
            (self.place / "prototypes.tmp").replace(self.place / "prototypes.safetensors")

    def write_model(self, site: Site, downloads: Downloads, received: wire.Bundle, round: int) -> None:
        """Write the model that the site would use after a round, and the classifier that it is a part of.

        Args:
            site: The site, whose states are those after the round.
            downloads: The message by which it would predict.
            received: The same message, decoded.
            round: The round.
        """
        weights, states = dict(received.weights), site.engine.states
        if site.client in states:
            weights = {**weights, **states[site.client].weights}
        weights = weights or dict(site.engine.start)
        write_tensors(self.place / "model.tmp", lambda: iter(sorted(weights.items())))
        (self.place / "model.tmp").replace(self.place / "model.safetensors")
        use = USE.format(place=self.place) if self._write_classifier(site, downloads) else ""
        about = {"run": self.place.name, "name": self.name, "model": self.model, "round": round}
        disk.write_atomically(self.place / "README.md", README.format(**about, classifier=use).encode())

    def _write_classifier(self, site: Site, downloads: Downloads) -> bool:
        """Write what a simulated run would keep of this client; False, with a warning, where it cannot be written."""
        inputs = self.inputs
        spec = inputs.models[inputs.owner[site.client]]
        _, learnt = next(gather(site.engine, downloads, (spec,), inputs.data, self.candidates))
        try:
            save(Classifier(design_of(inputs.method, inputs.data), learnt), self.place / CLASSIFIER)
        except ProtofedError as error:
            log.warning("%s: no classifier is left: %s", self.name, error)
            return False
        return True
