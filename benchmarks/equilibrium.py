"""How well `st.equilibrium` predicts the angles of a training under a cosine schedule, layer by layer.

    python benchmarks/equilibrium.py

A small network with BN is trained on noisy labels. From the recorded slopes ‖∇L(u)‖, and without them, the angles of
all steps are predicted and compared with the recorded medians over the last 80 % of the training, except for its last
2 %. Prints a table and writes results/bench-equilibrium.json. It takes a minute on a CPU.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import steradian as st

from harness import Table, write

STEPS, MEMORY = 2000, 50
MAKE: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD-M": lambda groups: torch.optim.SGD(groups, lr=0.2, momentum=0.9, weight_decay=5e-3),
    "AdamW": lambda groups: torch.optim.AdamW(groups, lr=1e-2, weight_decay=0.2),
    "Adam, L2": lambda groups: torch.optim.Adam(groups, lr=1e-2, weight_decay=2e-3),
}


def network() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 16, 3, bias=False),
        nn.BatchNorm2d(16), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(64, 10),
    )  # fmt: skip


def compare(name: str, table: Table) -> None:
    torch.manual_seed(0)
    model, images, labels = network(), torch.randn(256, 3, 8, 8), torch.randint(10, (256,))
    groups = st.find_groups(model, images[:16])
    optimizer = MAKE[name](groups.param_groups())
    start = {found.name: found.radius for found in st.equilibrium(st.optim.Angular(groups.param_groups()), groups)}
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    rates = []
    with st.watch(optimizer, groups, every=1) as watch:
        for _ in range(STEPS):
            chosen = torch.randint(256, (32,))
            noisy = torch.where(torch.rand(32) < 0.5, torch.randint(10, (32,)), labels[chosen])
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(images[chosen]), noisy).backward()
            rates.append(optimizer.param_groups[0]["lr"])
            optimizer.step()
            schedule.step()
    records = watch.records()
    records = records[records.statistic == "median"]

    def recorded(group: str, quantity: str) -> Tensor:
        chosen = records[(records.group == group) & (records.quantity == quantity)].sort_values("step")
        return torch.tensor(chosen.value.to_numpy(dtype="float64"))

    layers = [group.names[0] for group in groups.groups]
    slopes = {layer: smooth(recorded(layer, "radius") * recorded(layer, "gradient_norm")) for layer in layers}
    fresh = MAKE[name](groups.param_groups())
    known = st.equilibrium(fresh, groups, rates=rates, slopes=slopes, radius=start)
    blind = st.equilibrium(fresh, groups, rates=rates, radius=start)
    span = slice(STEPS // 5, STEPS - STEPS // 50)
    for layer, one, other in zip(layers, known, blind, strict=True):
        angle = recorded(layer, "angle")[span]
        errors = [100 * (found.angle[span] / angle - 1).abs().median().item() for found in (one, other)]
        table.add(name, layer, angle.median().item(), *errors)


def smooth(slopes: Tensor) -> Tensor:
    """Root mean square over the last steps: single gradients are noisy."""
    means = slopes.square().unfold(0, MEMORY, 1).mean(1).sqrt()
    return torch.cat([means[:1].expand(MEMORY - 1), means])


if __name__ == "__main__":
    table = Table("optimizer", "layer", "median angle", "error % with slopes", "error % without")
    for name in MAKE:
        compare(name, table)
    write("bench-equilibrium", table)
