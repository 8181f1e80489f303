"""What pages take for granted: blocks that are parts of a reader's program get the rest of it here."""

import contextlib
import copy
import inspect
from collections import OrderedDict

import torch
from torch import nn

import steradian as st
from steradian.watching.records import read_run


def network():
    """With the names that README uses."""
    return nn.Sequential(
        OrderedDict(
            layer1=nn.Sequential(
                OrderedDict(conv=nn.Conv2d(3, 4, 3, bias=False), norm=nn.BatchNorm2d(4), activation=nn.ReLU())
            ),
            pool=nn.AdaptiveAvgPool2d(1),
            flatten=nn.Flatten(),
            head=nn.Linear(4, 10),
        )
    )


def program():
    """A model, a batch, a loader, a loss and an optimizer whose parameters have gradients."""
    torch.manual_seed(0)
    model, images, labels = network(), torch.randn(8, 3, 8, 8), torch.randint(10, (8,))
    loss = nn.functional.cross_entropy
    loss(model(images), labels).backward()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    return {
        "st": st,
        "model": model,
        "images": images,
        "labels": labels,
        "loader": [(images, labels)] * 3,
        "loss": loss,
        "optimizer": optimizer,
    }


def reader(block, names, monkeypatch):
    """A reader who has all of that."""
    for name, value in program().items() if "model" not in names else ():
        names.setdefault(name, value)


def new_parameters(model):
    """Stands in for fully_shard, which needs several processes: it, too, puts new parameters in the old ones' place."""
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            setattr(module, name, nn.Parameter(parameter.detach().clone()))


def sharding(block, names, monkeypatch):
    """A reader who shards the model."""
    reader(block, names, monkeypatch)
    names["fully_shard"] = new_parameters


class Graph:
    """Stands in for a CUDA graph, which needs a GPU: a replay does the same work and calls no hooks."""

    def __init__(self, names):
        model, images, labels = (names[name] for name in ("model", "images", "labels"))
        self.optimizer = names["optimizer"]
        self.before = copy.deepcopy((model.state_dict(), self.optimizer.state_dict()))
        self.work = lambda: nn.functional.cross_entropy(model(images), labels).backward()
        self.model = model

    def training_step(self):
        self.optimizer.zero_grad()
        self.work()
        self.optimizer.step()

    def replay(self):
        self.optimizer.zero_grad()
        self.work()
        with torch.no_grad():
            inspect.unwrap(type(self.optimizer).step)(self.optimizer)

    def undo(self):
        """The page goes on with the optimizer as it was."""
        self.model.load_state_dict(self.before[0])
        self.optimizer.load_state_dict(self.before[1])


def watching(block, names, monkeypatch):
    """A reader with a captured step, or with a model and texts for transformers."""
    if "torch.cuda.graph" in block:
        graph = Graph(names)
        names |= {"graph": graph, "training_step": graph.training_step}
        names |= {"static_batch": names["images"], "loader": [names["images"].clone()] * 2}
        monkeypatch.setattr(torch.cuda, "graph", lambda graph: contextlib.nullcontext())
    elif "graph" in names:
        names.pop("graph").undo()
        assert len(read_run("runs/captured").table["step"].unique()) == 3
    if "transformers" in block:
        from transformers import TrainingArguments

        names |= {"arguments": TrainingArguments(output_dir="trained", report_to=[], use_cpu=True), "texts": []}


def nothing(block, names, monkeypatch):
    """Pages that hold whole programs."""


SETUPS = {"README.md": reader, "index.md": reader, "optimizers.md": sharding, "watching.md": watching}
