"""FSDP2: a transformer sharded over processes, watched as one, with checkpoints that another number of ranks can load.

    torchrun --standalone --nproc-per-node 2 examples/with_fsdp2.py
    torchrun --standalone --nproc-per-node 2 examples/with_fsdp2.py --epochs 6 --resume runs/fsdp2/epoch-3
    torchrun --standalone --nproc-per-node 8 examples/with_fsdp2.py --bf16 --width 1024 --blocks 12 --epochs 30

On CPUs the processes communicate by gloo, on GPUs by NCCL, with one process per GPU. Records, checkpoints and page.html
are written under --out. Needs the extra "lab".
"""

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn import functional
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import steradian as st


def main(args: argparse.Namespace, device: torch.device) -> None:
    """Train, watch, and write the page; every rank calls this."""
    torch.manual_seed(args.seed)  # the same weights on every rank
    train, test = digits()
    model = Transformer(args.width, args.blocks).to(device)

    # 1. Find the rows while the weights are whole, with the same batch on every rank.
    groups = st.find_groups(model, train.tensors[0][:16].to(device))

    # 2. Shard. This replaces the parameters by new ones …
    precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16) if args.bf16 else MixedPrecisionPolicy()
    for block in model.blocks:
        fully_shard(block, mp_policy=precision)
    fully_shard(model, mp_policy=precision)

    # 3. … so get the rows of the new ones. An optimizer made from the old ones would update weights that nobody uses.
    groups = groups.of(model)
    optimizer = st.optim.Adam(groups.param_groups(), lr=args.lr, weight_decay=1e-3, without="ab")

    first_epoch = load(args.resume, model, optimizer) if args.resume else 0
    sampler = DistributedSampler(train, seed=args.seed, drop_last=True)
    loader = DataLoader(train, batch_size=args.batch // dist.get_world_size(), sampler=sampler, drop_last=True)
    run = args.out / "adam-ab"
    # Every rank observes the rows that it holds, and rank 0 records all of them. So all ranks must start and stop the
    # watch, and call summary, together. Adam counts its steps, so step numbers continue after a checkpoint.
    with st.watch(optimizer, groups, to=run, config={"ranks": dist.get_world_size()}) as watch:
        for epoch in range(first_epoch, args.epochs):
            sampler.set_epoch(epoch)
            for images, labels in loader:
                loss = functional.cross_entropy(model(images.to(device)), labels.to(device))
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                watch.log(loss=loss)  # of rank 0's part of the batch
            accuracy = accuracy_of(model, test, device)
            watch.log({"test accuracy": accuracy})
            tell(f"epoch {epoch + 1}: loss {loss.item():.4f}, test accuracy {100 * accuracy:.1f} %")
            save(args.out / f"epoch-{epoch + 1}", model, optimizer, epoch + 1)

    tell(f"\n{groups}\n\n{watch.summary()}\n")  # the watch has stopped, so nothing is gathered
    if dist.get_rank() == 0:
        # The same as `steradian report RUN --out PAGE`, which also takes several runs and compares them.
        tell(f"The page: {st.report([run], args.out / 'page.html')}")
    # A rank that ends right after a collective may be aborted by gloo's threads, which still hold its tensors.
    dist.barrier()


def save(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer, epochs: int) -> None:
    """Each rank writes its shards of the weights and of the optimizer's state."""
    weights, state = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": state, "epochs": epochs}, checkpoint_id=folder)


def load(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Each rank reads its shards. Call it before the watch starts, since torch takes a step to fill an empty state."""
    weights, state = get_state_dict(model, optimizer)
    saved = {"model": weights, "optimizer": state, "epochs": 0}
    dcp.load(saved, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=saved["model"], optim_state_dict=saved["optimizer"])
    return saved["epochs"]


class Block(nn.Module):
    """Attention and an MLP; queries and keys are normalized head by head, so that each head is a row."""

    def __init__(self, width: int, heads: int = 4) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.query_norm, self.key_norm = nn.RMSNorm(width // heads), nn.RMSNorm(width // heads)
        self.query, self.key, self.value, self.out = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.heads = heads

    def forward(self, x: Tensor) -> Tensor:
        """(batch, tokens, width) → the same."""
        h = self.norm1(x)
        q, k, v = (
            project(h).unflatten(-1, (self.heads, -1)).transpose(1, 2) for project in (self.query, self.key, self.value)
        )
        attended = functional.scaled_dot_product_attention(self.query_norm(q), self.key_norm(k), v)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


class Transformer(nn.Module):
    """Patches of 2 × 2 pixels, blocks, and a head that compares by cosine, so that each class is a row."""

    def __init__(self, width: int, blocks: int) -> None:
        super().__init__()
        self.patches = nn.Conv2d(1, width, 2, stride=2)
        self.positions = nn.Parameter(torch.randn(16, width) / 2)
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        self.classes = nn.Parameter(torch.randn(10, width) / width**0.5)

    def forward(self, images: Tensor) -> Tensor:
        """Logits."""
        x = self.patches(images).flatten(2).transpose(1, 2) + self.positions
        for block in self.blocks:
            x = block(x)
        return 10 * functional.normalize(x.mean(1), dim=-1) @ functional.normalize(self.classes, dim=-1).T


def digits() -> tuple[TensorDataset, TensorDataset]:
    """scikit-learn's 1,797 digits of 8 × 8 pixels, which come with it: (train, test)."""
    found = load_digits()
    images = torch.tensor(found.images, dtype=torch.float32).unsqueeze(1)
    data = TensorDataset((images - images.mean()) / images.std(), torch.tensor(found.target))
    return TensorDataset(*data[:1440]), TensorDataset(*data[1440:])


@torch.no_grad()
def accuracy_of(model: nn.Module, data: TensorDataset, device: torch.device) -> float:
    """The share of images that are classified correctly; all ranks must call it together."""
    images, labels = data.tensors
    return (model(images.to(device)).argmax(1).cpu() == labels).float().mean().item()


def tell(text: str) -> None:
    """Print on rank 0."""
    if dist.get_rank() == 0:
        print(text, flush=True)


def arguments() -> argparse.Namespace:
    """What can be chosen."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch", type=int, default=64, help="of all ranks together")
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--width", type=int, default=64, help="a multiple of 8")
    parser.add_argument("--blocks", type=int, default=2)
    parser.add_argument("--bf16", action="store_true", help="compute in bfloat16, with float32 weights")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("runs/fsdp2"))
    parser.add_argument("--resume", type=Path, help="a checkpoint to continue from, such as runs/fsdp2/epoch-3")
    return parser.parse_args()


if __name__ == "__main__":
    chosen = arguments()
    if torch.cuda.is_available():
        here = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(here)
        dist.init_process_group("nccl", device_id=here)
    else:
        here = torch.device("cpu")
        dist.init_process_group("gloo")
    try:
        main(chosen, here)
        dist.barrier()  # rank 0 writes the page: no rank leaves before the others are done
    finally:
        dist.destroy_process_group()
