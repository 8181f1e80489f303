"""A training loop of your own: find the spheres, step on them, watch all weights, write one page.

    python examples/plain_loop.py
    python examples/plain_loop.py --epochs 6 --resume                       # continues where the first one ended
    python examples/plain_loop.py --device cuda --precision fp16 --accumulate 2 --epochs 30

It writes the records, a checkpoint and page.html under --out. Needs the extra "lab".
"""

import argparse
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import steradian as st


def main() -> None:
    """Train, watch, and write the page."""
    args = arguments()
    torch.manual_seed(args.seed)
    train, test = digits()
    order = torch.Generator()
    loader = DataLoader(train, batch_size=args.batch, shuffle=True, drop_last=True, generator=order)
    model = network().to(args.device)

    # Which weights have a length without effect on the network: proved on the model, which is left unchanged.
    groups = st.find_groups(model, train.tensors[0][: args.batch].to(args.device))
    print(groups, "\n")

    # The param groups say which parameters are cut into rows. Filters are updated on their spheres, the rest by Adam.
    optimizer = st.optim.Adam(groups.param_groups(), lr=args.lr, weight_decay=5e-4, without=args.without)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.9)
    # Gradients of 16-bit floats vanish unless the loss is scaled up; bfloat16 has the range of float32.
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[args.precision]
    kind = torch.device(args.device).type
    scaler = torch.amp.GradScaler(kind, enabled=args.precision == "fp16")

    checkpoint, unfinished = args.out / "checkpoint.pt", args.out / "checkpoint.unfinished"
    first_epoch = first_step = 0
    parts = {"model": model, "optimizer": optimizer, "schedule": schedule, "scaler": scaler}
    if args.resume:
        saved = torch.load(checkpoint, map_location=args.device, weights_only=True)
        for name, part in parts.items():
            part.load_state_dict(saved[name])
        first_epoch, first_step = saved["epoch"], saved["step"]

    # `step` is the number of the first step. Adam counts its steps and does not need it; plain SGD keeps no count.
    run, config = args.out / f"adam-{args.without}".strip("-"), {name: str(value) for name, value in vars(args).items()}
    # Few steps, so one in five is observed; by default as many as cost 2 % of the time.
    with st.watch(optimizer, groups, to=run, step=first_step, config=config, every=5) as watch:
        for epoch in range(first_epoch, args.epochs):
            order.manual_seed(args.seed + epoch)  # a continued training gets the same batches
            for k, (images, labels) in enumerate(loader, start=1):
                with torch.autocast(kind, dtype, enabled=args.precision != "fp32"):
                    logits = model(images.to(args.device))
                    loss = nn.functional.cross_entropy(logits, labels.to(args.device))
                scaler.scale(loss / args.accumulate).backward()
                if k % args.accumulate and k < len(loader):
                    continue  # accumulating gradients is not a step and leaves no record
                scaler.step(optimizer)  # a step that the scaler skips leaves no record either
                scaler.update()
                optimizer.zero_grad()
                watch.log(loss=loss)  # not waited for
            schedule.step()
            accuracy = accuracy_of(model, test, args.device)
            watch.log({"test accuracy": accuracy})
            print(f"epoch {epoch + 1}: loss {loss.item():.4f}, test accuracy {100 * accuracy:.1f} %")
            state = {name: part.state_dict() for name, part in parts.items()}
            torch.save({**state, "epoch": epoch + 1, "step": watch.next_step}, unfinished)
            unfinished.replace(checkpoint)  # if killed while saving, the last checkpoint is still there

    # The last step, alerts if there are any, and what was not recorded.
    print(f"\n{watch.summary()}\n")
    # The same as `steradian report RUN --out PAGE`, which also takes several runs and compares them.
    print(f"The page: {st.report([run], args.out / 'page.html')}")


def network() -> nn.Module:
    """Two convolutions with BN, whose filters live on spheres, and a linear head, whose weights do not."""
    return nn.Sequential(
        *(nn.Conv2d(1, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU()),
        *(nn.Conv2d(16, 32, 3, padding=1, stride=2, bias=False), nn.BatchNorm2d(32), nn.ReLU()),
        *(nn.Flatten(), nn.Linear(512, 10)),
    )


def digits() -> tuple[TensorDataset, TensorDataset]:
    """scikit-learn's 1,797 digits of 8 × 8 pixels, which come with it: (train, test)."""
    found = load_digits()
    images = torch.tensor(found.images, dtype=torch.float32).unsqueeze(1)
    data = TensorDataset((images - images.mean()) / images.std(), torch.tensor(found.target))
    return TensorDataset(*data[:1440]), TensorDataset(*data[1440:])


@torch.no_grad()
def accuracy_of(model: nn.Module, data: TensorDataset, device: str) -> float:
    """The share of images that are classified correctly."""
    images, labels = data.tensors
    model.eval()
    predicted: Tensor = model(images.to(device)).argmax(1)
    model.train()
    return (predicted.cpu() == labels).float().mean().item()


def arguments() -> argparse.Namespace:
    """What can be chosen."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--accumulate", type=int, default=1, help="batches whose gradients make one step")
    parser.add_argument("--lr", type=float, default=1e-2)
    parser.add_argument("--without", default="abc", help='the phenomena to take out of Adam: "", "a", "ab", "abc", …')
    parser.add_argument("--precision", choices=["fp32", "bf16", "fp16"], default="fp32")
    parser.add_argument("--device", default="cpu", help="cpu, cuda or cuda:1")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("runs/plain-loop"))
    parser.add_argument("--resume", action="store_true", help="continue from the checkpoint in --out")
    return parser.parse_args()


if __name__ == "__main__":
    main()
