"""How large the gradient of each loss term is: `python benchmarks/gradient_norms.py OUT.json METHOD... key=value...`.

FedSAP's Eq. 6 says that the alignment term's gradient grows with the distance between embeddings and prototypes, and its
Fig. 2 that with a static weight it dominates cross-entropy in early rounds. After the broadcast of each round, before the
client's first step, the script takes each client's whole labelled set as one batch and records, as means over clients, the
norm of each term's gradient with respect to all trained parameters, with the weight the term has in that round
(`align`) and as it would be with weight 1 (`align at weight 1`), and the distance ‖z − p_y‖. Methods are named as in
`protofed compare`.
"""

from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path
from typing import Any

import torch

from protofed import losses
from protofed.experiment.build import build
from protofed.experiment.settings import combine, parse_pairs, resolve
from protofed.experiment.variants import parse_entries
from protofed.federation import Federation
from protofed.federation.local import with_memory
from protofed.models.skeleton import TrainingNetwork
from protofed.parts import Batch, bank_of


def norms(federation: Federation, client: int, round: int) -> dict[str, float]:
    """The gradient norm of each term for one client at the start of a round."""
    engine: Any = federation.engine
    message = federation.exchange.message(federation.state, client, round)
    state = engine.state(client)
    received = with_memory(message, state.memory)
    skeleton = engine.skeleton
    skeleton.load(federation.method.begin(state.weights, received))
    skeleton.module.train()
    x, y = federation.data.clients[client].labelled.take()
    batch = Batch(x, y, torch.ones(len(y)))
    network, params = TrainingNetwork(skeleton, skeleton.params), list(skeleton.params.values())
    terms = dict(engine.task.loss(network, batch, received, round).terms)
    z, bank = network(x).embedding, bank_of(received)
    terms["align at weight 1"] = losses.alignment(z, y, bank)
    found = {}
    for name, term in terms.items():
        gradient = torch.autograd.grad(term, params, retain_graph=True, allow_unused=True, materialize_grads=True)
        found[name] = float(torch.linalg.vector_norm(torch.stack([g.norm() for g in gradient])))
    known = bank.known[y]
    if bool(known.any()):
        found["distance"] = float((z[known] - bank.means[y[known]]).norm(dim=1).mean().detach())
    return found


def curve(method: str, given: dict[str, Any]) -> list[dict[str, float]]:
    """Means over clients for each round, with the accuracy after it where it was evaluated."""
    _, federation = build(resolve(method, {**given, "engine": "loop", "workers": 1}))
    rows: list[dict[str, float]] = []
    for round in range(1, federation.rounds + 1):
        each = [norms(federation, client, round) for client in range(len(federation.data.clients))]
        names = dict.fromkeys(name for row in each for name in row)
        row = {name: statistics.fmean(r[name] for r in each if name in r) for name in names}
        record = federation.step()
        row |= {name: value for name, value in record.metrics.items() if name.startswith("accuracy_")}
        rows.append({"round": round, **{name: float(f"{value:.5g}") for name, value in row.items()}})
    return rows


def main(out: Path, words: list[str]) -> None:
    entries = parse_entries([word for word in words if "=" not in word.partition("?")[0] or "?" in word], local=False)
    given = parse_pairs([word for word in words if "=" in word.partition("?")[0] and "?" not in word])
    result = {entry.label: curve(entry.method, combine(given, entry.settings)) for entry in entries}
    out.write_text(json.dumps({"settings": given, "rounds": result}, indent=1) + "\n")
    for label, rows in result.items():
        names = [name for name in rows[-1] if name != "round"]
        print(f"\n{label}\n\n| round | {' | '.join(names)} |\n{'| ---: ' * (len(names) + 1)}|")
        for row in rows:
            if row["round"] in (1, 2, 3, 5) or row["round"] % 10 == 0:
                print(f"| {row['round']:g} | {' | '.join(f'{row.get(n, 0):.3f}' for n in names)} |")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
