"""timm: one of its networks, and its factory of optimizers, which takes the param groups of the rows.

    python examples/with_timm.py
    python examples/with_timm.py --model vit_tiny_patch16_224 --size 224 --opt lamb --lr 1e-3 --device cuda

The data are scikit-learn's digits, enlarged to --size. Records, the groups and page.html are written under --out. Needs
the extra "lab" and timm.
"""

import argparse
from pathlib import Path

import timm
import torch
from sklearn.datasets import load_digits
from timm.optim import create_optimizer_v2
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import steradian as st


def main() -> None:
    """Train, watch, and write the page."""
    args = arguments()
    torch.manual_seed(args.seed)
    data = digits(args.size)
    model = timm.create_model(args.model, pretrained=False, in_chans=1, num_classes=10).to(args.device)

    groups = st.find_groups(model, data[:8][0].to(args.device))
    groups.save(args.out / "groups.json")  # st.Groups.load("groups.json", model) spares the next run the proof
    print(groups, "\n")

    # timm decides by the shape of a parameter whether it has weight decay, this by what was proved: rows have it, and
    # there it sets the angle per step, and nothing else has. An optimizer of ours would take the same param groups.
    def group(model: nn.Module) -> list[dict]:
        return groups.of(model).param_groups(weight_decay=args.weight_decay, rest={"weight_decay": 0.0})

    optimizer = create_optimizer_v2(model, opt=args.opt, lr=args.lr, param_group_fn=group)

    run = args.out / args.opt
    with st.watch(optimizer, groups, to=run, every=5) as watch:  # often, since there are few steps
        for epoch in range(args.epochs):
            for images, labels in DataLoader(data, args.batch, shuffle=True, drop_last=True):
                optimizer.zero_grad()
                loss = nn.functional.cross_entropy(model(images.to(args.device)), labels.to(args.device))
                loss.backward()
                optimizer.step()
                watch.log(loss=loss)
            print(f"epoch {epoch + 1}: loss {loss.item():.4f}")
    print(f"\n{watch.summary()}\n")
    print(f"The page: {st.report([run], args.out / 'page.html')}")


def digits(size: int) -> TensorDataset:
    """scikit-learn's 1,797 digits of 8 × 8 pixels, enlarged."""
    found = load_digits()
    images = torch.tensor(found.images, dtype=torch.float32).unsqueeze(1)
    images = nn.functional.interpolate((images - images.mean()) / images.std(), size=size, mode="bilinear")
    return TensorDataset(images, torch.tensor(found.target))


def arguments() -> argparse.Namespace:
    """What can be chosen."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="test_resnet", help="any architecture of timm")
    parser.add_argument("--size", type=int, default=32, help="of the images")
    parser.add_argument("--opt", default="adamw", help="any optimizer of timm")
    parser.add_argument("--lr", type=float, default=1e-2)
    parser.add_argument("--weight-decay", type=float, default=0.05)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--device", default="cpu", help="cpu, cuda or cuda:1")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("runs/timm"))
    return parser.parse_args()


if __name__ == "__main__":
    main()
