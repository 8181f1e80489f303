"""A few steps through the Trainer of transformers."""

import atexit
import contextlib
import os

import numpy as np
import pytest
import torch

import steradian as st
from steradian import watch
from steradian.watching.records import read_run

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
transformers = pytest.importorskip("transformers")
from steradian.watching.callbacks.transformers import WatchCallback  # noqa: E402

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning:(transformers|accelerate|torch).*"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]

STEPS, BATCH, WORDS = 4, 2, 11


def model():
    """Query and key are normalized per head: their rows are invariant."""
    torch.manual_seed(0)
    config = transformers.Qwen3Config(
        vocab_size=WORDS, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, head_dim=4, max_position_embeddings=8, attention_dropout=0.0, use_cache=False,
    )  # fmt: skip
    return transformers.Qwen3ForCausalLM(config)


class Texts(torch.utils.data.Dataset):
    def __init__(self, steps=STEPS, seed=1):
        self.words = torch.randint(WORDS, (BATCH * steps, 6), generator=torch.Generator().manual_seed(seed))

    def __len__(self):
        return len(self.words)

    def __getitem__(self, k):
        return {"input_ids": self.words[k], "labels": self.words[k]}


class InOrder(transformers.Trainer):
    def _get_train_sampler(self, *_):
        return torch.utils.data.SequentialSampler(self.train_dataset)


def train(folder, callback, *, make=torch.optim.AdamW, resume=None, steps=STEPS, network=None, **options):
    network = model() if network is None else network
    settings = {"lr_scheduler_type": "constant", "save_strategy": "no", "max_grad_norm": 0.0} | options
    arguments = transformers.TrainingArguments(
        output_dir=str(folder), per_device_train_batch_size=BATCH, max_steps=steps, use_cpu=True, report_to=[],
        disable_tqdm=True, logging_steps=1, learning_rate=0.01, dataloader_pin_memory=False, **settings,
    )  # fmt: skip
    optimizer = make(network) if make is not torch.optim.AdamW else make(network.parameters(), lr=0.01)
    trainer = InOrder(network, arguments, train_dataset=Texts(), callbacks=[callback], optimizers=(optimizer, None))
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def find(network):
    return st.find_groups(network, **network.dummy_inputs)


def series(table, quantity, group, statistic="median"):
    chosen = table[(table["quantity"] == quantity) & (table["group"] == group) & (table["statistic"] == statistic)]
    return dict(zip(chosen["step"], chosen["value"], strict=True))


def test_the_records_are_those_of_a_plain_loop(tmp_path):
    callback = WatchCallback(find, to=tmp_path / "run")
    trainer = train(tmp_path, callback)
    found = read_run(tmp_path / "run")

    network = model()
    optimizer = torch.optim.AdamW(network.parameters(), lr=0.01)
    losses = {}
    with watch(optimizer, find(network)) as plain:
        for step, batch in enumerate(torch.utils.data.DataLoader(Texts(), batch_size=BATCH)):
            optimizer.zero_grad()
            loss = network(**batch).loss
            loss.backward()
            optimizer.step()
            losses[step] = loss.item()
    assert callback.watch.labels()["model.layers.0.self_attn.q_proj.weight"] == "invariant"
    assert callback.watch.labels() == plain.labels()
    assert callback.watch.names == plain.names
    for group in plain.names:
        for quantity in ("radius", "angle", "effective_lr"):
            here, there = (series(table, quantity, group) for table in (found.table, plain.records()))
            assert list(here) == list(range(STEPS))
            np.testing.assert_allclose(list(here.values()), list(there.values()), rtol=1e-4)
    assert series(found.table, "loss", "", "mean") == pytest.approx(losses, rel=1e-3)
    assert found.about["config"]["learning_rate"] == trainer.args.learning_rate


def sgd(network):
    return torch.optim.SGD(network.parameters(), lr=0.01)


@pytest.mark.parametrize("make", [torch.optim.AdamW, sgd], ids=["AdamW", "SGD"])
def test_a_checkpoint_goes_on_with_its_numbers(make, tmp_path):
    options = {"make": make, "save_strategy": "steps", "save_steps": 2}
    train(tmp_path, WatchCallback(to=tmp_path / "run"), steps=2, **options)
    train(tmp_path, WatchCallback(to=tmp_path / "run"), resume=str(tmp_path / "checkpoint-2"), **options)
    table = read_run(tmp_path / "run").table
    group = "model.layers.0.self_attn.q_proj.weight"
    assert list(series(table, "radius", group)) == list(range(STEPS))


def test_accumulated_batches_are_one_step_and_our_optimizer_names_its_rows(tmp_path):
    def ours(network):
        return st.optim.Adam(find(network).param_groups(), lr=0.01, without="abc")

    callback = WatchCallback()
    train(tmp_path, callback, make=ours, steps=2, gradient_accumulation_steps=2)
    group = "model.layers.0.self_attn.q_proj.weight"
    assert list(series(callback.watch.records(), "angle", group)) == [0, 1]
    assert callback.watch.labels()[group] == "invariant"


class Bare(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = torch.nn.Linear(6, 6)

    def forward(self, input_ids, labels):
        return {"loss": self.inner(input_ids.float()).square().mean()}


def test_without_groups_all_weights_are_watched(tmp_path):
    callback = WatchCallback()
    train(tmp_path, callback, network=Bare())
    assert callback.watch.labels() == {"inner.weight": "untested", "inner.bias": "untested"}
    for name in callback.watch.names:
        assert list(series(callback.watch.records(), "angle", name)) == list(range(STEPS))


@pytest.mark.parametrize(("groups", "why"), [(find, "dummy_inputs"), (lambda _: ["0.weight"], "groups must return")])
def test_groups_that_cannot_be_found_are_logged_and_the_training_goes_on(groups, why, tmp_path, caplog):
    callback = WatchCallback(groups)
    trainer = train(tmp_path, callback, network=Bare())
    assert trainer.state.global_step == STEPS
    (record,) = [record for record in caplog.records if record.name == "steradian"]
    assert "the training goes on and is not watched" in record.message
    assert why in record.exc_text
    assert callback.watch is None


def test_it_says_what_groups_must_be():
    with pytest.raises(TypeError, match="groups must be what find_groups returned"):
        WatchCallback(["0.weight"])


class Fails(WatchCallback):
    def on_step_end(self, args, state, control, **found):
        if state.global_step == 3:
            raise ArithmeticError("stop here")


def test_an_exception_that_ends_the_process_loses_nothing(tmp_path):
    child = os.fork()
    if not child:  # what an interpreter does at the end of a script that raised
        atexit._clear()
        with contextlib.suppress(ArithmeticError):
            train(tmp_path, Fails(to=tmp_path / "run"))
        atexit._run_exitfuncs()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    table = read_run(tmp_path / "run").table
    assert list(series(table, "angle", "model.layers.0.self_attn.q_proj.weight")) == [0, 1, 2]


def test_after_an_exception_the_next_training_ends_the_watch(tmp_path):
    callback = Fails()
    with pytest.raises(ArithmeticError):
        train(tmp_path, callback)
    left = callback.watch
    train(tmp_path, callback, steps=1)
    assert not left.running
    assert list(series(left.records(), "angle", left.names[0])) == [0, 1, 2]
    assert callback.watch is not left


def test_an_optimizer_that_accelerate_prepared():
    """Its wrapper is a torch optimizer that has no hooks; a plain loop hands it over as it is."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    network = torch.nn.Sequential(torch.nn.Linear(3, 4, bias=False), torch.nn.BatchNorm1d(4))
    groups = st.find_groups(network, torch.randn(8, 3))
    network, optimizer = accelerator.prepare(network, torch.optim.SGD(network.parameters(), lr=0.1))
    with watch(optimizer, groups) as watcher:
        for _ in range(6):
            with accelerator.accumulate(network):
                accelerator.backward(network(torch.randn(8, 3)).pow(4).sum())
                optimizer.step()
                optimizer.zero_grad()
    assert watcher.error is None
    assert list(series(watcher.records(), "effective_lr", "0.weight")) == [0, 1, 2]
