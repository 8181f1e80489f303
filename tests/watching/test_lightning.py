"""A few steps through Lightning's own trainer."""

import numpy as np
import pytest
import torch
from torch import nn

import steradian as st
from steradian import watch
from steradian.watching.records import read_run

pl = pytest.importorskip("lightning.pytorch")
from steradian.watching.callbacks.lightning import WatchCallback  # noqa: E402

pytestmark = [
    # Lightning's advice to its users, and its own use of what others deprecate
    pytest.mark.filterwarnings("ignore::UserWarning:lightning.*"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]

BATCHES = 6


class Data(torch.utils.data.Dataset):
    def __init__(self):
        generator = torch.Generator().manual_seed(1)
        self.images = torch.randn(4 * BATCHES, 2, 6, 6, generator=generator)
        self.labels = torch.randint(3, (4 * BATCHES,), generator=generator)

    def __len__(self):
        return len(self.images)

    def __getitem__(self, k):
        return self.images[k], self.labels[k]


class Classifier(pl.LightningModule):
    def __init__(self, kind="Adam", fail_at=None):
        super().__init__()
        self.save_hyperparameters("kind")
        torch.manual_seed(0)
        self.layers = nn.Sequential(
            nn.Conv2d(2, 4, 3, bias=False), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 3)
        )
        self.kind, self.fail_at = kind, fail_at

    def forward(self, images):
        return self.layers(images)

    def training_step(self, batch, k):
        if self.fail_at is not None and self.global_step == self.fail_at:
            raise ArithmeticError("the loss was not to my taste")
        return nn.functional.cross_entropy(self(batch[0]), batch[1])

    def validation_step(self, batch, k):
        self.log("score", self(batch[0]).square().mean())

    def configure_optimizers(self):
        return {
            "Adam": lambda: torch.optim.Adam(self.parameters(), lr=0.01),
            "SGD": lambda: torch.optim.SGD(self.parameters(), lr=0.01),
            "ours": lambda: st.optim.Adam(find(self).param_groups(), lr=0.01, without="abc"),
        }[self.kind]()


class Pair(pl.LightningModule):
    """Two networks with an optimizer each, the second of which is stepped every other time."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        torch.manual_seed(0)
        self.first = nn.Sequential(nn.Linear(4, 5, bias=False), nn.BatchNorm1d(5))
        self.second = nn.Sequential(nn.Linear(4, 3, bias=False), nn.BatchNorm1d(3))

    def forward(self, x):
        return self.first(x), self.second(x)

    def training_step(self, batch, k):
        for which, optimizer in enumerate(self.optimizers()):
            if k % (which + 1) == 0:
                optimizer.zero_grad()
                self.manual_backward(self(batch[0][:, 0, :4, 0])[which].square().mean().exp())
                optimizer.step()

    def configure_optimizers(self):
        return [torch.optim.SGD(self.first.parameters(), lr=0.1), torch.optim.SGD(self.second.parameters(), lr=0.1)]


def find(module):
    return st.find_groups(module, torch.randn(4, 2, 6, 6))


def fit(module, callback, folder, *, epochs=1, resume=None, **options):
    trainer = pl.Trainer(
        accelerator="cpu", devices=1, max_epochs=epochs, callbacks=[callback], default_root_dir=str(folder),
        enable_progress_bar=False, enable_model_summary=False, logger=options.pop("logger", False),
        enable_checkpointing=False, **options,
    )  # fmt: skip
    loader = torch.utils.data.DataLoader(Data(), batch_size=4)
    trainer.fit(module, loader, loader, ckpt_path=resume)
    return trainer


def series(table, quantity, group="layers.0.weight", statistic="median"):
    chosen = table[(table["quantity"] == quantity) & (table["group"] == group) & (table["statistic"] == statistic)]
    return dict(zip(chosen["step"], chosen["value"], strict=True))


@pytest.mark.parametrize("kind", ["Adam", "ours"])
def test_the_records_are_those_of_a_plain_loop(kind, tmp_path):
    callback = WatchCallback(find if kind == "Adam" else None, to=tmp_path / "run")
    fit(Classifier(kind), callback, tmp_path, num_sanity_val_steps=1)
    found = read_run(tmp_path / "run")

    module = Classifier(kind)
    optimizer = module.configure_optimizers()
    losses = {}
    with watch(optimizer, find(module)) as plain:
        for step, batch in enumerate(torch.utils.data.DataLoader(Data(), batch_size=4)):
            optimizer.zero_grad()
            loss = module.training_step(batch, step)
            loss.backward()
            optimizer.step()
            losses[step] = loss.item()
    expected = plain.records()
    for quantity in ("radius", "angle", "effective_lr", "defect", "lr"):
        statistic = "mean" if quantity == "lr" else "median"
        here, there = (series(table, quantity, statistic=statistic) for table in (found.table, expected))
        assert list(here) == list(range(BATCHES))
        np.testing.assert_allclose(list(here.values()), list(there.values()), rtol=1e-5)
    assert series(found.table, "loss", "", "mean") == pytest.approx(losses, rel=1e-6)
    assert found.about["config"] == {"kind": kind}


def test_what_the_module_logs_is_recorded_after_each_epoch(tmp_path):
    callback = WatchCallback(find)
    trainer = fit(Classifier(), callback, tmp_path, epochs=2, num_sanity_val_steps=1)
    scores = series(callback.watch.records(), "score", "", "mean")
    assert list(scores) == [BATCHES - 1, 2 * BATCHES - 1]
    assert scores[2 * BATCHES - 1] == trainer.callback_metrics["score"].item()


def test_accumulated_batches_are_one_step(tmp_path):
    callback = WatchCallback(find)
    fit(Classifier(), callback, tmp_path, accumulate_grad_batches=2)
    table = callback.watch.records()
    assert list(series(table, "radius")) == list(series(table, "loss", "", "mean")) == [0, 1, 2]


@pytest.mark.parametrize("kind", ["Adam", "SGD"])
def test_a_checkpoint_goes_on_with_its_numbers(kind, tmp_path):
    trainer = fit(Classifier(kind), WatchCallback(find, to=tmp_path / "run"), tmp_path)
    trainer.save_checkpoint(tmp_path / "first.ckpt")
    fit(Classifier(kind), WatchCallback(find, to=tmp_path / "run"), tmp_path, epochs=2, resume=tmp_path / "first.ckpt")
    assert list(series(read_run(tmp_path / "run").table, "radius")) == list(range(2 * BATCHES))


def test_an_exception_loses_nothing(tmp_path):
    callback = WatchCallback(find, to=tmp_path / "run")
    with pytest.raises(ArithmeticError):
        fit(Classifier(fail_at=4), callback, tmp_path)
    table = read_run(tmp_path / "run").table
    assert list(series(table, "angle")) == list(series(table, "loss", "", "mean")) == [0, 1, 2, 3]
    assert not callback.watch.running


def test_several_optimizers_are_one_run(tmp_path):
    """A step begins when the first optimizer steps again; the second takes part in every other."""
    callback = WatchCallback(lambda module: st.find_groups(module, torch.randn(8, 4)), to=tmp_path / "run")
    fit(Pair(), callback, tmp_path)
    run = read_run(tmp_path / "run")
    assert list(series(run.table, "radius", "first.0.weight")) == list(range(BATCHES))
    assert list(series(run.table, "radius", "second.0.weight")) == list(range(0, BATCHES, 2))
    labels = callback.watch.labels()
    assert labels.keys() == set(run.table["group"]) - {""} == dict(Pair().named_parameters()).keys()
    assert labels["first.0.weight"] == labels["second.0.weight"] == "invariant"


class Remembers(pl.loggers.logger.DummyLogger):
    def __init__(self):
        super().__init__()
        self.logged = {}

    def log_metrics(self, metrics, step=None):
        for name, value in metrics.items():
            self.logged.setdefault(name, {})[step] = value


def test_the_trainers_loggers_get_the_numbers(tmp_path):
    logger, callback = Remembers(), WatchCallback(find, to=["loggers", tmp_path / "run"])
    fit(Classifier(), callback, tmp_path, logger=logger)
    assert logger.logged["angle/layers.0.weight/median"] == series(callback.watch.records(), "angle")


@pytest.mark.parametrize("kind", ["Adam", "ours"])
def test_without_groups_all_weights_are_watched_and_declared_rows_are_invariant(kind, tmp_path):
    callback = WatchCallback()
    fit(Classifier(kind), callback, tmp_path)
    table, labels = callback.watch.records(), callback.watch.labels()
    assert labels.keys() == dict(Classifier().named_parameters()).keys()
    for name in labels:
        assert list(series(table, "angle", name)) == list(range(BATCHES))
    assert labels["layers.4.weight"] == "not invariant", "its gradient says so"
    assert [name for name, label in labels.items() if label == "invariant"] == ["layers.0.weight"] * (kind == "ours")


def not_found(module):
    raise LookupError("no rows here")


@pytest.mark.parametrize(
    ("groups", "why"), [(lambda module: ["0.weight"], "groups must return"), (not_found, "no rows here")]
)
def test_groups_that_cannot_be_found_are_logged_and_the_training_goes_on(groups, why, tmp_path, caplog):
    callback = WatchCallback(groups, to=tmp_path / "run")
    trainer = fit(Classifier(), callback, tmp_path)
    assert trainer.global_step == BATCHES
    (record,) = [record for record in caplog.records if record.name == "steradian"]
    assert "the training goes on and is not watched" in record.message
    assert why in record.exc_text
    assert callback.watch is None


def test_it_says_what_groups_must_be():
    with pytest.raises(TypeError, match="groups must be what find_groups returned"):
        WatchCallback(["0.weight"])
