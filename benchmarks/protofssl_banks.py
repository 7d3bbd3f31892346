"""What ProtoFSSL's helper prototypes are worth beside others: `python benchmarks/protofssl_banks.py RUN...`.

A helper makes its prototypes with the model it has trained; they are used with the average of all. Of each finished run the
accuracy of the global model is printed by the helpers' prototypes, as the method predicts, and by prototypes that the global
model itself makes of the labelled samples of as many clients, and of all clients.
"""

from __future__ import annotations

import sys
from pathlib import Path

from protofed.bank import PrototypeBank
from protofed.experiment.build import build
from protofed.experiment.settings import resolve
from protofed.federation import checkpoint
from protofed.results.folder import read_settings


def main(folders: list[str]) -> None:
    for name in folders:
        folder = Path(name)
        settings, federation = build(resolve(None, read_settings(folder)))
        checkpoint.load(federation, folder / "checkpoint")
        engine = getattr(federation.engine, "inner", federation.engine)
        engine.skeleton.load({**engine.start, **federation.state.weights})
        data, method = federation.data, settings.method
        assert data.central_test is not None
        x, y = data.central_test.take()
        z = engine.skeleton.outputs(x).embedding

        def accuracy(banks: PrototypeBank) -> float:
            return float((method.predict.scores(z, banks).argmax(-1) == y).float().mean())  # noqa: B023

        made = []
        for client in data.clients:
            samples, labels = client.labelled.take()
            embedding = engine.skeleton.outputs(samples).embedding
            made.append(PrototypeBank.from_embeddings(embedding, labels, data.num_classes))
        helpers = federation.state.helpers
        several = PrototypeBank.stack(made)
        print(
            f"{Path(name).parent.name}/{Path(name).name}, round {federation.round}: by {len(helpers.counts)} helpers "
            f"{accuracy(helpers):.2%}, by the global model's prototypes of as many clients "
            f"{accuracy(several[: len(helpers.counts)]):.2%}, of all clients {accuracy(several):.2%}"
        )


if __name__ == "__main__":
    main(sys.argv[1:])
