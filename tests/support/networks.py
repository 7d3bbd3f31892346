"""What every network must do."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, stack_module_state, vmap
from torch.nn import functional as F

from protofed import models


def count(name: str, shape: tuple[int, ...], classes: int, **options: object) -> int:
    """How many parameters a network has, without making them."""
    with torch.device("meta"):
        return models.parameter_count(models.build(name, shape, classes, **options))


def assert_stack_equals_loop(
    nets: Sequence[nn.Module], x: Tensor, y: Tensor, *, atol: float = 1e-8, rtol: float = 1e-6, **call: Any
) -> None:
    """Outputs, gradients and running statistics of a stack of clients under vmap are those of each client by itself.

    Args:
        nets: One network for each client; they are trained here.
        x: The clients' samples, `[clients, batch, ...]`.
        y: Their classes, `[clients, batch]`.
        atol: How far values may be apart; gradients ten times as far relatively, and a hundred times absolutely.
        rtol: The same as a share of the value.
        call: What a network is called with beside the samples, as `levels=True`.
    """
    params, buffers = stack_module_state(nets)  # type: ignore[arg-type]
    params = {k: v.detach() for k, v in params.items()}
    running = {k: v for k, v in buffers.items() if v.is_floating_point()}  # counts of batches do not travel
    skeleton = copy.deepcopy(nets[0]).train()

    def loss_of(output: Any, y: Tensor) -> Tensor:
        others = (part.square().mean() for part in output if part is not output.logits)
        return F.cross_entropy(output.logits, y) + sum(others)

    def step(p: dict[str, Tensor], b: dict[str, Tensor], x: Tensor, y: Tensor) -> tuple[Tensor, tuple]:
        own = {k: v.clone() for k, v in b.items()}
        output = functional_call(skeleton, {**p, **own}, (x,), call)
        return loss_of(output, y), (output, own)

    for _ in range(2):  # twice: the second step reads the running statistics the first one wrote
        grads, (output, running) = vmap(grad(step, has_aux=True))(params, running, x, y)
    for i, net in enumerate(nets):
        for _ in range(2):
            net.zero_grad()
            alone = net.train()(x[i], **call)
            loss_of(alone, y[i]).backward()
        for stacked, single in zip(output, alone, strict=True):
            torch.testing.assert_close(stacked[i], single, atol=atol, rtol=rtol)
        for key, parameter in net.named_parameters():
            torch.testing.assert_close(grads[key][i], parameter.grad, atol=100 * atol, rtol=10 * rtol, msg=key)
        for key, value in net.named_buffers():
            if value.is_floating_point():
                torch.testing.assert_close(running[key][i], value, atol=atol, rtol=rtol, msg=key)


def assert_fits_a_small_batch(model: nn.Module) -> tuple[Tensor, Tensor]:
    """Fifteen steps from scratch, with finite gradients everywhere, lower the loss. Returns the batch, x and y."""
    y = torch.arange(8) % 4
    x = torch.randn(8, 3, 32, 32) + 2 * torch.randn(4, 3, 1, 1)[y]  # each class has a colour
    optimiser = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    losses = []
    for _ in range(15):
        optimiser.zero_grad()
        loss = F.cross_entropy(model(x).logits, y)
        loss.backward()
        assert all(p.grad is not None and bool(p.grad.isfinite().all()) for p in model.parameters())
        optimiser.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.7 * losses[0]
    return x, y


def draw_statistics(model: nn.Module) -> None:
    """Batch norms get random statistics and weights, which show whether they are used."""
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.running_mean.normal_()  # type: ignore[union-attr]
            module.running_var.uniform_(0.5, 2)  # type: ignore[union-attr]
            nn.init.normal_(module.weight)
            nn.init.normal_(module.bias)
