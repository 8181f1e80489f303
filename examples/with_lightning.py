"""Lightning: rows are found where the optimizer is made, and one callback watches all weights.

    python examples/with_lightning.py
    python examples/with_lightning.py --epochs 6 --resume                   # continues from Lightning's checkpoint
    python examples/with_lightning.py --accelerator gpu --devices 2 --precision bf16-mixed --epochs 30

It writes the records, Lightning's checkpoint and page.html under --out. Needs the extras "lab" and "lightning".
"""

import argparse
from pathlib import Path

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import steradian as st
from steradian.watching.callbacks.lightning import WatchCallback


class Classifier(pl.LightningModule):
    """A small network with BN; nothing in it depends on the watch."""

    def __init__(self, lr: float = 1e-2, without: str = "ab") -> None:
        super().__init__()
        self.save_hyperparameters()  # also saved with the watched run
        self.network = nn.Sequential(
            *(nn.Conv2d(1, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU()),
            *(nn.Conv2d(16, 32, 3, padding=1, stride=2, bias=False), nn.BatchNorm2d(32), nn.ReLU()),
            *(nn.Flatten(), nn.Linear(512, 10)),
        )
        self.example_input_array = torch.randn(16, 1, 8, 8)

    def forward(self, images: Tensor) -> Tensor:
        """Logits."""
        return self.network(images)

    def configure_optimizers(self) -> dict:
        """Find the rows here: the model is on its device and not wrapped yet."""
        self.groups = st.find_groups(self, self.example_input_array.to(self.device))
        params = self.groups.param_groups(weight_decay=5e-4, rest={"weight_decay": 0.0})
        optimizer = st.optim.Adam(params, lr=self.hparams.lr, without=self.hparams.without)
        return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)}

    def training_step(self, batch: list[Tensor], k: int) -> Tensor:
        """The loss, which the callback records with each step."""
        images, labels = batch
        return nn.functional.cross_entropy(self(images), labels)

    def validation_step(self, batch: list[Tensor], k: int) -> None:
        """The accuracy, for Lightning's own loggers."""
        images, labels = batch
        self.log("accuracy", (self(images).argmax(1) == labels).float().mean(), prog_bar=True)


def main() -> None:
    """Train, watch, and write the page."""
    args = arguments()
    pl.seed_everything(args.seed, verbose=False)
    train, test = digits()
    run = args.out / f"adam-{args.without}"
    # `WatchCallback(to=run)` is enough: all weights are watched, and rows are those of the optimizer's param groups.
    # With the groups the page also says which layer makes them invariant. `to=["loggers", run]` sends the numbers to
    # the trainer's loggers as well.
    watching = WatchCallback(lambda module: module.groups, to=run, every=5)  # often, since there are few steps
    checkpoint = ModelCheckpoint(args.out, filename="last", enable_version_counter=False)
    trainer = pl.Trainer(
        max_epochs=args.epochs,
        accelerator=args.accelerator,
        devices=args.devices,
        precision=args.precision,
        callbacks=[watching, checkpoint],
        default_root_dir=args.out,
        logger=False,
        enable_progress_bar=args.progress,
        enable_model_summary=False,
    )
    trainer.fit(
        Classifier(args.lr, args.without),
        DataLoader(train, batch_size=args.batch, shuffle=True, drop_last=True),
        DataLoader(test, batch_size=len(test)),
        ckpt_path=args.out / "last.ckpt" if args.resume else None,
    )
    if trainer.is_global_zero:
        print(trainer.lightning_module.groups, "\n")
        print(f"{watching.watch.summary()}\n")
        print(f"Validation accuracy {100 * trainer.callback_metrics['accuracy']:.1f} %")
        # The same as `steradian report RUN --out PAGE`, which also takes several runs and compares them.
        print(f"The page: {st.report([run], args.out / 'page.html')}")


def digits() -> tuple[TensorDataset, TensorDataset]:
    """scikit-learn's 1,797 digits of 8 × 8 pixels, which come with it: (train, test)."""
    found = load_digits()
    images = torch.tensor(found.images, dtype=torch.float32).unsqueeze(1)
    data = TensorDataset((images - images.mean()) / images.std(), torch.tensor(found.target))
    return TensorDataset(*data[:1440]), TensorDataset(*data[1440:])


def arguments() -> argparse.Namespace:
    """What can be chosen."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--lr", type=float, default=1e-2)
    parser.add_argument("--without", default="ab", help='the phenomena to take out of Adam: "", "a", "ab", "abc", …')
    parser.add_argument("--accelerator", default="cpu", help="cpu, gpu or auto")
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--precision", default="32-true", help="32-true, bf16-mixed, 16-mixed, …")
    parser.add_argument("--progress", action="store_true", help="show Lightning's progress bar")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("runs/lightning"))
    parser.add_argument("--resume", action="store_true", help="continue from the checkpoint in --out")
    return parser.parse_args()


if __name__ == "__main__":
    main()
