"""Bring your own optimizer: what a watch records of any optimizer, and ten lines that make it record the rest.

    python examples/own_optimizer.py
    python examples/own_optimizer.py --device cuda --epochs 30

Signum, written here, is trained and watched twice. First as it is: the weights before and after a step give radius,
angle and update, but not the effective rate. Then with a reader that describes it as the generic step
x' = (1 − ηδ)x − η a ⊘ b, so that it is watched like Adam. Both runs are on one page under --out. Needs the extra "lab".
"""

import argparse
from collections.abc import Callable
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

import steradian as st
from steradian.scheme import Step, Taken, register


class Signum(torch.optim.Optimizer):
    """Steps by the sign of a momentum: m ← βm + ∇L, x ← (1 − ηδ)x − η sign(m). Replace it by your own optimizer."""

    def __init__(self, params, lr: float = 1e-3, momentum: float = 0.9, weight_decay: float = 0.0) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], Tensor] | None = None) -> None:
        """One step."""
        assert closure is None
        for group in self.param_groups:
            for param in (param for param in group["params"] if param.grad is not None):
                state = self.state[param]
                m = state.setdefault("momentum_buffer", torch.zeros_like(param))
                m.mul_(group["momentum"]).add_(param.grad)
                param.mul_(1 - group["lr"] * group["weight_decay"]).sub_(m.sign(), alpha=group["lr"])


def read_signum(taken: Taken) -> Step:
    """Signum as the generic step: a is the momentum, and the sign is a division by b = |a|."""
    a = taken.need("momentum_buffer")
    b = a.abs().clamp(min=torch.finfo(a.dtype).tiny)  # sign(0) = 0 = 0 / tiny
    return Step(a, b, taken.setting("lr"), decay=taken.setting("weight_decay"), beta=taken.setting("momentum"))


def train(run: Path, args: argparse.Namespace) -> None:
    """Train with Signum, and record its steps."""
    torch.manual_seed(args.seed)
    images, labels = digits(args.device)
    model = network().to(args.device)
    groups = st.find_groups(model, images[: args.batch])
    optimizer = Signum(model.parameters(), lr=1e-3, weight_decay=1e-2)
    # The phenomena of the paper are measured only on request. They need every step, so that all may be recorded.
    with st.watch(optimizer, groups, to=run, every=1, phenomena=True) as watch:
        for _ in range(args.epochs):
            for batch in torch.randperm(len(labels)).split(args.batch):
                loss = nn.functional.cross_entropy(model(images[batch]), labels[batch])
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                watch.log(loss=loss)
    # What is not recorded is listed with the reason: here, in `watch.missing` and on the page.
    print(f"{watch.summary()}\n")


def network() -> nn.Module:
    """Linear layers with BN: each of their rows lives on a sphere."""
    hidden = [(nn.Linear(size, 64, bias=False), nn.BatchNorm1d(64), nn.ReLU()) for size in (64, 64, 64)]
    return nn.Sequential(*(layer for layers in hidden for layer in layers), nn.Linear(64, 10))


def digits(device: str) -> tuple[Tensor, Tensor]:
    """scikit-learn's 1,797 digits of 8 × 8 pixels, which come with it."""
    found = load_digits()
    images = torch.tensor(found.data, dtype=torch.float32, device=device)
    return (images - images.mean()) / images.std(), torch.tensor(found.target, device=device)


def main() -> None:
    """Train without and with the reader, and compare both on one page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("runs/own-optimizer"))
    args = parser.parse_args()
    train(args.out / "signum", args)
    register(Signum)(read_signum)  # in your own code: @register(Signum) above the reader
    train(args.out / "signum-read", args)
    # The same as `steradian report RUN RUN --out PAGE`.
    print(f"The page: {st.report([args.out / 'signum', args.out / 'signum-read'], args.out / 'page.html')}")


if __name__ == "__main__":
    main()
