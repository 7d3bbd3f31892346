"""How FedSAP's prototypes predict by squared distance and by cosine: `python benchmarks/fedsap_metric.py RUN...`.

In the unlabelled phase clients return prototypes of length 1 (Eq. 14); their mean over clients is shorter the less they
agree. Of each finished run the mean accuracy over clients is printed by nearest prototype in both metrics, with the server's
prototypes and with each client's own.
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
        _, federation = build(resolve(None, read_settings(folder)))
        checkpoint.load(federation, folder / "checkpoint")
        engine = getattr(federation.engine, "inner", federation.engine)
        data, shared = federation.data, federation.state.bank
        assert shared is not None
        right = {(whose, metric): 0.0 for whose in ("server's", "own") for metric in ("squared", "cosine")}
        for client, own in enumerate(data.clients):
            engine.skeleton.load(engine.state(client).weights)
            x, y = own.labelled.take()
            bank = PrototypeBank.from_embeddings(engine.skeleton.outputs(x).embedding, y, data.num_classes)
            samples, labels = own.test.take()
            z = engine.skeleton.outputs(samples).embedding
            for whose, metric in right:
                among = (shared if whose == "server's" else bank).restricted(own.classes)
                right[whose, metric] += float((among.nearest(z, metric) == labels).float().mean()) / len(data.clients)
        lengths = shared.means.norm(dim=-1)[shared.known]
        shown = ", ".join(f"{whose} by {metric} {value:.2%}" for (whose, metric), value in right.items())
        print(
            f"{Path(name).name}, round {federation.round}: {shown}; lengths {lengths.min():.2f} to {lengths.max():.2f}"
        )


if __name__ == "__main__":
    main(sys.argv[1:])
