"""The recorded imbalance of pairs is ‖a‖/‖b‖ of the weights after the step."""

import base64
import gzip
import json
import logging
import re

import numpy as np
import pytest
import torch
from torch import nn

import steradian as st
from steradian import watch
from steradian.watching.records import STATISTICS, read_run

from cases.pairs import CASES
from small import series

PAIR = "mlp.up.weight / down.weight"


class Gated(nn.Module):
    def __init__(self, width=6, hidden=9):
        super().__init__()
        self.gate, self.up = nn.Linear(width, hidden), nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width)

    def forward(self, x):
        return self.down(nn.functional.silu(self.gate(x)) * self.up(x))


def gated(dtype=torch.float32):
    torch.manual_seed(0)
    model = nn.ModuleDict({"mlp": Gated()}).to(dtype)
    model.forward = lambda x: model["mlp"](x)
    return model


def train(model, optimizer, steps, record=lambda: None):
    for step in range(steps):
        x = torch.randn(8, 6, generator=torch.Generator().manual_seed(step)).to(next(model.parameters()).dtype)
        optimizer.zero_grad()
        (model(x) - x).square().mean().backward()
        optimizer.step()
        record()


def ratios(model):
    """Of each hidden unit of a gated MLP, in float64."""
    up, bias, down = (
        param.detach().double().numpy()
        for param in (model["mlp"].up.weight, model["mlp"].up.bias, model["mlp"].down.weight)
    )
    return np.sqrt(((up**2).sum(1) + bias**2) / (down**2).sum(0))


def statistics(values):
    return [*np.quantile(values, [0, 0.1, 0.5, 0.9, 1]), values.mean()]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("every", "at"), [(1, [0, 9, 10, 30]), (3, [0, 9, 12, 30]), (4, [0, 12])])
def test_it_is_that_of_the_weights_after_the_step(dtype, every, at, tmp_path):
    """At the first observed step after each flush, and at the last step before one that the user asked for."""
    model = gated()
    groups = st.find_groups(model, torch.randn(4, 6))
    model.to(dtype)  # the parameters stay the same objects
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    expected = []
    with watch(optimizer, groups, to=tmp_path, every=every) as watcher:
        train(model, optimizer, 10, lambda: expected.append(ratios(model)))
        watcher.flush()
        train(model, optimizer, 21, lambda: expected.append(ratios(model)))
    assert watcher.error is None
    table = read_run(tmp_path).table
    assert list(series(table, "imbalance", PAIR)) == at
    for step in at:
        found = [series(table, "imbalance", PAIR, name)[step] for name in STATISTICS]
        assert found == pytest.approx(statistics(expected[step]), rel=1e-6)
    assert expected[0] != pytest.approx(expected[30], rel=1e-3)  # the test can tell the steps apart


def test_a_side_that_is_ten_times_larger_shows_the_factor():
    plain, scaled = [], []
    for factor, found in ((1, plain), (10, scaled)):
        model = gated(torch.float64)
        groups = st.find_groups(model, torch.randn(4, 6))
        with torch.no_grad():
            model["mlp"].up.weight *= factor
            model["mlp"].up.bias *= factor
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        with watch(optimizer, groups) as watcher:
            train(model, optimizer, 1)
        found += [series(watcher.records(), "imbalance", PAIR, name)[0] for name in STATISTICS]
    assert np.array(scaled) == pytest.approx(10 * np.array(plain), rel=1e-6)


def test_a_logger_gets_the_median_of_convolutions():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(2, 4, 3), nn.ReLU(), nn.Conv2d(4, 3, 3, bias=False))
    groups = st.find_groups(model, torch.randn(2, 2, 6, 6))
    logged = {}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with watch(optimizer, groups, to=lambda values, step: logged.setdefault(step, values)) as watcher:
        model(torch.randn(2, 2, 6, 6)).square().mean().backward()
        optimizer.step()
    first, bias, second = (param.detach().double() for param in model.parameters())
    expected = ((first.square().sum((1, 2, 3)) + bias.square()) / second.square().sum((0, 2, 3))).sqrt()
    assert watcher.error is None
    assert logged[0]["imbalance/0.weight / 2.weight/median"] == pytest.approx(expected.quantile(0.5).item(), rel=1e-6)


def test_parts_of_a_fused_tensor():
    """Grouped queries: a channel of v goes with the columns of o that belong to both heads that share it."""
    torch.manual_seed(0)
    case = next(case for case in CASES if "qkv" in dict(case.build().named_children()))
    model, (args, _) = case.build(), case.inputs()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with watch(optimizer, st.find_groups(model, *args)) as watcher:
        model(*args).square().mean().backward()
        optimizer.step()
    table = watcher.records()
    v = torch.cat([model.qkv.weight, model.qkv.bias[:, None]], 1).detach().double()[24:]
    o = model.o.weight.detach().double().reshape(8, 2, 2, 4)
    expected = v.norm(dim=1) / o.square().sum((0, 2)).sqrt().flatten()
    found = [series(table, "imbalance", "qkv.weight / o.weight", name)[0] for name in STATISTICS]
    assert found == pytest.approx(statistics(expected.numpy()), rel=1e-6)
    assert "qkv.weight / qkv.weight" in set(table["group"])  # q with k


def test_only_the_pairs_of_watched_weights():
    model = nn.Sequential(*(layer for _ in range(3) for layer in (nn.Linear(6, 6), nn.ReLU())), nn.Linear(6, 6))
    groups = st.find_groups(model, torch.randn(4, 6))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with watch(optimizer, groups, only="0.*") as watcher:
        train(model, optimizer, 2)
    table = watcher.records()
    assert set(table[table["quantity"] == "imbalance"]["group"]) == {"0.weight / 2.weight"}


def test_several_devices_are_left_out_with_one_line(caplog):
    model = gated()
    groups = st.find_groups(model, torch.randn(4, 6))
    optimizer = torch.optim.SGD([model["mlp"].gate.weight, model["mlp"].up.weight], lr=0.1)
    model["mlp"].down.to("meta")
    groups = groups.of(model)
    with caplog.at_level(logging.WARNING), watch(optimizer, groups) as watcher:
        model["mlp"].up.weight.grad = torch.ones_like(model["mlp"].up.weight)
        optimizer.step()
    assert watcher.error is None
    assert "imbalance" not in set(watcher.records()["quantity"])
    assert sum(PAIR in line for line in caplog.messages) == 1


def test_a_model_without_pairs_records_none_and_the_page_is_one_of_layers(tmp_path):
    torch.manual_seed(0)
    smooth = nn.Sequential(nn.Linear(6, 6), nn.GELU(), nn.Linear(6, 6))
    for model, name in ((smooth, "none"), (gated(), "some")):
        groups = st.find_groups(model, torch.randn(4, 6))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with watch(optimizer, groups, to=tmp_path / name):
            train(model, optimizer, 3)
        found = read_run(tmp_path / name).table
        assert ("imbalance" in set(found["quantity"])) == (name == "some") == bool(groups.pairs)
    page = st.report([tmp_path / "some"], tmp_path / "page.html").read_text(encoding="utf-8")
    packed = re.search(r'id="data">(.*?)</script>', page, re.DOTALL).group(1)
    data = json.loads(gzip.decompress(base64.b64decode(packed)))
    assert set(data["groups"]) == {name for name, _ in gated().named_parameters()}
    assert "imbalance" not in data["quantities"]
    assert set(data["runs"][0]["series"]["imbalance"]) >= {PAIR}
    assert '<figure class="figure" id="imbalance" data-kind="pairs"' in page
    page = st.report([tmp_path / "none"], tmp_path / "page.html").read_text(encoding="utf-8")
    assert 'id="imbalance"' not in page
