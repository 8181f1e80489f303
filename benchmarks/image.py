"""Time of mapping one step to the sphere, as a multiple of the step of torch.optim.Adam itself.

    python benchmarks/image.py

ResNet18's 20 convolutions, 11.2 million weights, filter rows. Prints a table and writes results/bench-image.json.
"""

import torch

from steradian.image import image_step
from steradian.scheme import read_step

from harness import Table, median_ms, write
from shapes import RESNET18


def main() -> None:
    torch.manual_seed(0)
    params = [torch.nn.Parameter(torch.randn(shape) * 0.05) for shape in RESNET18]
    for p in params:
        p.grad = torch.randn_like(p) * 1e-3
    before = [p.detach().clone() for p in params]
    optimizer = torch.optim.Adam(params, lr=1e-3, weight_decay=1e-4)
    optimizer.step()

    def scalars() -> None:
        """Every quantity per row, what a plot over training needs."""
        for x, p in zip(before, params, strict=True):
            image = image_step(x, read_step(optimizer, p, before=x))
            _ = image.effective_lr, image.angle, image.next_radius, image.nu, image.radial, image.direction_norm

    def rows() -> None:
        """The per-row quantities and the next direction as rows."""
        for x, p in zip(before, params, strict=True):
            image = image_step(x, read_step(optimizer, p, before=x))
            _ = image.effective_lr, image.angle, image.next_radius, image.nu, image.radial, image.next_direction

    base = median_ms(optimizer.step)
    table = Table("what", "ms", "× torch.optim.Adam")
    for name, work in (("per-row quantities", scalars), ("and next directions", rows)):
        ms = median_ms(work)
        table.add(name, ms, ms / base)
    table.add("torch.optim.Adam.step", base, 1.0)
    write("bench-image", table, weights=sum(p.numel() for p in params))


if __name__ == "__main__":
    main()
