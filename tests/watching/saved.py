"""Small whole models, their trainings with the weights saved around every step, and what the weights tell in float64.

An independent twin of what the watch records on any weight: it shares no code with the package. Radii stay below 4, so
that float32 can hold them to 1e-6.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")

WORDS = 70
"""More rows than the 64 that are recorded where nobody asked for single rows."""

# Models


class Block(nn.Module):
    """Two convolutions with BN beside a shortcut."""

    def __init__(self, channels, out):
        super().__init__()
        self.conv1 = nn.Conv2d(channels, out, 3, stride=2, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(out)
        self.conv2 = nn.Conv2d(out, out, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(out)
        self.shortcut = nn.Sequential(nn.Conv2d(channels, out, 1, stride=2, bias=False), nn.BatchNorm2d(out))

    def forward(self, x):
        inner = self.bn2(self.conv2(torch.relu(self.bn1(self.conv1(x)))))
        return torch.relu(inner + self.shortcut(x))


class ResNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(3, 4, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(4)
        self.layer1 = Block(4, 6)
        self.layer2 = Block(6, 8)
        self.fc = nn.Linear(8, 5)

    def forward(self, x):
        x = self.layer2(self.layer1(torch.relu(self.bn1(self.conv1(x)))))
        return self.fc(x.mean(dim=(2, 3)))


def resnet():
    torch.manual_seed(0)
    model = ResNet()
    with torch.no_grad():
        for layer in model.modules():
            if isinstance(layer, nn.BatchNorm2d):
                layer.bias.normal_(std=0.1)  # a bias of zeros has no direction
    return model


SIZES = {
    "vocab_size": WORDS, "hidden_size": 12, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "max_position_embeddings": 8, "attention_dropout": 0.0, "use_cache": False,
}  # fmt: skip


def llama():
    import transformers

    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**SIZES, initializer_range=0.05, tie_word_embeddings=False)
    )


def qwen3():
    """Query and key are normalized per head, and the embedding is tied to the head of the model."""
    import transformers

    torch.manual_seed(0)
    config = transformers.Qwen3Config(**SIZES, head_dim=6, initializer_range=0.1, tie_word_embeddings=True)
    return transformers.Qwen3ForCausalLM(config)


MODELS = {"ResNet": resnet, "Llama": llama, "Qwen3": qwen3}


def images(step=0, dtype=torch.float32, count=6):
    generator = torch.Generator().manual_seed(step)
    return torch.randn(count, 3, 8, 8, generator=generator, dtype=torch.float64).to(dtype)


def words(step=0):
    return torch.randint(WORDS, (3, 7), generator=torch.Generator().manual_seed(step))


def loss_of(model, step):
    if hasattr(model, "config"):
        return model(input_ids=words(step), labels=words(step)).loss
    outputs = model(images(step, next(model.parameters()).dtype))
    return nn.functional.cross_entropy(outputs, torch.arange(len(outputs)) % outputs.shape[1])


# Trainings


@dataclass
class Point:
    """The weights around one step, and its gradients, by name."""

    before: dict
    after: dict
    gradients: dict


def clones(params):
    return {name: param.detach().clone() for name, param in params.items()}


def train(model, optimizers, steps, *, loss: Callable = loss_of, each: Callable | None = None):
    """Train, and save all weights before and after each step; `each(step)` is called before the gradients go."""
    optimizers = optimizers if isinstance(optimizers, list) else [optimizers]
    params = dict(model.named_parameters())
    history = []
    for step in range(steps):
        model.zero_grad()
        loss(model, step).backward()
        before = clones(params)
        for optimizer in optimizers:
            optimizer.step()
        gradients = {name: param.grad.clone() for name, param in params.items() if param.grad is not None}
        history.append(Point(before, clones(params), gradients))
        if each is not None:
            each(step)
    return history


def stepped(model, *optimizers):
    """Names of the trainable parameters that the optimizers step, in the order of the model."""
    taken = {id(p) for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]}
    return [name for name, param in model.named_parameters() if id(param) in taken and param.requires_grad]


# What the weights tell


def spec_of(tensor):
    return "filter" if tensor.ndim >= 2 else "tensor"


def rows_of(tensors, spec=None):
    """(n, d) rows in float64 of one tensor, or of several that are rows only together."""
    parts = []
    for tensor in tensors:
        count = {"filter": tensor.shape[0] if tensor.ndim else 1, "tensor": 1}.get(spec or spec_of(tensor), spec)
        parts.append(tensor.detach().to_dense().to(torch.float64).reshape(count, -1).numpy())
    return np.concatenate(parts, axis=1)


def turned(x, y):
    """Angles between rows, well conditioned near 0 and π."""
    u, v = (rows / np.linalg.norm(rows, axis=1, keepdims=True) for rows in (x, y))
    return 2 * np.arctan2(np.linalg.norm(u - v, axis=1), np.linalg.norm(u + v, axis=1))


def quantities(point, names, spec=None):
    """What is recorded of every row of a group on any model, by its definition."""
    x, y = (rows_of([tensors[name] for name in names], spec) for tensors in (point.before, point.after))
    length, moved = np.linalg.norm(x, axis=1), np.linalg.norm(y - x, axis=1)
    inward = np.abs(np.sum((y - x) * x, axis=1)) / length
    found = {
        "radius": length,
        "angle": turned(x, y),
        "update": moved / length,
        "radial_share": np.divide(inward, moved, out=np.zeros_like(moved), where=moved > 0),
    }
    if all(name in point.gradients for name in names):
        g = rows_of([point.gradients[name] for name in names], spec)
        steepness = np.linalg.norm(g, axis=1)
        slope = np.abs(np.sum(g * x, axis=1)) / length
        found["gradient_norm"] = steepness
        found["defect"] = np.divide(slope, steepness, out=np.zeros_like(slope), where=steepness > 0)
    return found


def statistics(values):
    """As the table has them, over all rows."""
    ordered, last = np.sort(values), len(values) - 1
    places = {"min": 0.0, "q10": 0.1 * last, "median": 0.5 * last, "q90": 0.9 * last, "max": float(last)}
    return {
        **{name: np.interp(place, range(last + 1), ordered) for name, place in places.items()},
        "mean": values.mean(),
    }


# What was recorded


def values_of(table, columns):
    """{columns: value} of a table, each once."""
    keys = list(zip(*(table[column].tolist() for column in columns), strict=True))
    assert len(keys) == len(set(keys)), "a line is recorded twice"
    return dict(zip(keys, table["value"].tolist(), strict=True))


def assert_recorded(watcher, history, names, *, run=None, atol=1e-6, of=("radius", "angle", "update"), specs=None):
    """The statistics of every weight at every step, and with `run` its single rows, are those of the saved weights.

    Args:
        watcher: the watch.
        history: the points of the training.
        names: the parameters that should be recorded.
        run: what `read_run` gave, where `record_rows` names all groups.
        atol: absolute tolerance, a number or one for each quantity.
        of: the quantities.
        specs: {names of a group: spec} of groups that are not cut by default.
    """
    table = watcher.records()
    table = table[table["quantity"].isin(of)]
    found = values_of(table, ("step", "group", "quantity", "statistic"))
    single = {}
    if run is not None:
        single = values_of(run.rows[run.rows["quantity"].isin(of)], ("step", "group", "quantity", "row"))
    joint = {name: group for group in specs or {} for name in group}
    groups = list(dict.fromkeys(joint.get(name, (name,)) for name in names))
    expected, rows, allowed = {}, {}, {}
    for step, point in enumerate(history):
        for group in groups:
            numbers = quantities(point, group, (specs or {}).get(group))
            for quantity in of:
                key = (step, " + ".join(group), quantity)
                allowed[key] = atol if isinstance(atol, float) else atol[quantity](numbers)
                expected |= {(*key, name): value for name, value in statistics(numbers[quantity]).items()}
                rows |= {(*key, row): value for row, value in enumerate(numbers[quantity])}
    compare(found, expected, allowed)
    if run is not None:
        compare(single, rows, allowed)


def compare(found, expected, allowed):
    missing, more = set(expected) - set(found), set(found) - set(expected)
    assert not missing, f"{len(missing)} numbers are not recorded, such as {min(missing)}"
    assert not more, f"{len(more)} more numbers are recorded, such as {min(more)}"
    off = {
        key: (found[key], value) for key, value in expected.items() if not abs(found[key] - value) <= allowed[key[:3]]
    }
    assert not off, f"{len(off)} of {len(expected)} are wrong, such as {next(iter(off.items()))}"
