"""An independent, naive federation: nn.Module copies and plain loops, sharing nothing with protofed but seeds and data.

Written from the papers' equations, to hold the library against. Only what must be equal by definition is taken from
protofed: the initial model, the split, and the order of batches.
"""

import copy

import torch
import torch.nn.functional as F

from protofed import seeds
from protofed.experiment.build import build
from protofed.schedules import ramp


def class_means(model, x, y):
    model.eval()
    with torch.no_grad():
        z = model(x)[0]
    return {int(c): torch.stack([z[i] for i in range(len(y)) if y[i] == c]).mean(0) for c in y.unique()}


def epoch(n, batch, generator):
    order = torch.randperm(n, generator=generator)
    chunks = [order[i : i + batch] for i in range(0, n, batch)]
    if len(chunks) > 1 and len(chunks[-1]) == 1:
        last = chunks.pop()
        chunks[-1] = torch.cat([chunks[-1], last])
    return chunks


def sample_loss(kind, model, x, y, protos, round, start_weights):
    """The loss of a batch, sample by sample."""
    z, logits = model(x)
    loss = sum(F.cross_entropy(logits[i], y[i]) for i in range(len(y))) / len(y)
    known = [i for i in range(len(y)) if int(y[i]) in protos]
    if kind == "fedprox":
        loss = loss + 0.01 / 2 * sum(((p - start_weights[n]) ** 2).sum() for n, p in model.named_parameters())
    if kind in ("fedproto", "fedsap") and known:
        weight = 1.0 if kind == "fedproto" else ramp("linear", 1, 3, 0.7)(round)
        loss = loss + weight * sum(((z[i] - protos[int(y[i])]) ** 2).mean() for i in known) / len(known)
    if kind == "fedsap" and known:
        names = sorted(protos)
        total = 0.0
        for i in known:
            scores = torch.stack([32 * F.cosine_similarity(z[i], protos[c], dim=0) for c in names])
            total = total - F.log_softmax(scores, 0)[names.index(int(y[i]))]
        loss = loss + total / len(known)
    return loss


def naive(kind, settings, rounds):
    """Client models (and the global one) after `rounds` rounds."""
    settings, federation = build(settings)
    g, data = settings.general, federation.data
    first = federation.engine.skeleton.module
    first.load_state_dict(federation.engine.start, strict=False)
    averaged = kind in ("fedavg", "fedprox")
    models = [copy.deepcopy(first) for _ in data.clients]
    server = copy.deepcopy(first)
    protos = {}
    for t in range(1, rounds + 1):
        reports = []
        for i, client in enumerate(data.clients):
            if averaged:
                models[i] = copy.deepcopy(server)
            model = models[i]
            begin = {n: p.detach().clone() for n, p in model.named_parameters()}
            x, y = client.labelled.take()
            optimiser = torch.optim.SGD(model.parameters(), g.lr, momentum=g.momentum)
            model.train()
            stream = torch.Generator().manual_seed(seeds.derive(g.seed, "batches", i, t))
            for _ in range(g.epochs):
                for rows in epoch(len(y), g.batch, stream):
                    optimiser.zero_grad()
                    sample_loss(kind, model, x[rows], y[rows], protos, t, begin).backward()
                    optimiser.step()
            reports.append((class_means(model, x, y), torch.bincount(y, minlength=data.num_classes)))
        if averaged:
            sizes = [len(c.labelled) for c in data.clients]
            state = {
                k: sum(n * m.state_dict()[k] for n, m in zip(sizes, models, strict=True)) / sum(sizes)
                for k in server.state_dict()
            }
            server.load_state_dict(state)
        else:
            protos = {}
            for c in {c for means, _ in reports for c in means}:
                holders = [(means[c], float(n[c]) if kind == "fedproto" else 1.0) for means, n in reports if c in means]
                protos[c] = sum(n * p for p, n in holders) / sum(n for _, n in holders)
    return models, server, protos
