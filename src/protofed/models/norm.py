"""Batch norm that runs as a stack of clients."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F


class BatchNorm2d(nn.BatchNorm2d):
    """PyTorch's, without counting batches.

    With a fixed momentum nothing reads the count, and counting in place is an error under `vmap` and `grad` where the
    count is not among the stacked buffers. Its key stays, as published files have it.
    """

    def forward(self, x: Tensor) -> Tensor:
        return F.batch_norm(
            x,
            self.running_mean,
            self.running_var,
            self.weight,
            self.bias,
            self.training,
            self.momentum or 0.0,
            self.eps,
        )
