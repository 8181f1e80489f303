"""The verdict: each kind of sentence for a run that has the fault, and not for one that does not have it."""

import json
import logging
import re
import subprocess
import sys
import time
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn

import steradian as st
from steradian.watching.alerts import Alerts
from steradian.watching.records import ALERT_COLUMNS, COLUMNS, STATISTICS, Alert, Block, RecordedRun, causes, read_run
from steradian.watching.verdict import SEVERITIES, History, judge, verdict

from small import groups_of, rows
from small import train as train_rows

STEPS = 200
LAYERS = ("a.weight", "b.weight", "c.weight", "d.weight", "e.weight")


def run(change=lambda values, steps: None, *, label="invariant", alerts=(), cost=0.013, steps=STEPS, bias=True):
    """A healthy AdamW run of five layers and a bias; `change` spoils {quantity: {group: (statistics, steps)}}."""
    noise = np.random.default_rng(0)
    groups = [*LAYERS, "e.bias"] if bias else list(LAYERS)
    at = np.arange(steps)
    means = {
        "angle": 0.01, "radius": 1.0, "gradient_norm": 0.5, "collapsed": 0.0, "lr": 1e-2, "defect": 1e-5,
        "equilibrium_angle": 0.01, "equilibrium_radius": 1.0,
    }  # fmt: skip
    over_rows = np.array([0.5, 0.7, 1.0, 1.4, 2.0, 1.05])[:, None]
    factors = dict(zip(LAYERS, (0.6, 0.8, 1.0, 1.3, 1.7), strict=True))
    values = {}
    for quantity, mean in means.items():
        same = quantity in ("lr", "collapsed") or quantity.startswith("equilibrium")
        values[quantity] = {
            group: np.full((6, steps), mean)
            if same
            else mean * factors.get(group, 1.0) * over_rows * noise.lognormal(0, 0.1, steps)
            for group in groups
        }
    change(values, at)
    pieces = []
    for quantity, of in values.items():
        for group, numbers in of.items():
            if group == "e.bias" and quantity.startswith("equilibrium"):
                continue
            for statistic, line in zip(STATISTICS, numbers, strict=True):
                if quantity != "lr" or statistic == "mean":
                    piece = {"step": at, "group": group, "quantity": quantity, "statistic": statistic, "value": line}
                    pieces.append(pd.DataFrame({"run": "run", **piece}))
    table = pd.concat(pieces, ignore_index=True).astype(
        dict.fromkeys(("run", "group", "quantity", "statistic"), "category")
    )
    shapes = {name: [[8, 16]] if name != "e.bias" else [[8]] for name in groups}
    about = {
        "run": "run",
        "optimizer": {
            "name": "torch.optim.AdamW",
            "groups": [{"params": groups, "lr": 1e-2, "betas": [0.9, 0.999], "weight_decay": 0.1}],
        },
        "groups": [
            {"name": name, "names": [name], "label": "untested" if name == "e.bias" else label, "shapes": shapes[name],
             "rows": 1 if name == "e.bias" else 8, "size": 8 if name == "e.bias" else 16}
            for name in groups
        ],
        "cost": {"share": cost},
    }  # fmt: skip
    written = pd.DataFrame([vars(alert) for alert in alerts], columns=list(ALERT_COLUMNS))
    return RecordedRun("run", about, table[list(COLUMNS)], pd.DataFrame(), pd.DataFrame(), written)


def kinds(sentences):
    return [sentence.kind for sentence in sentences]


def only(sentences, kind):
    (found,) = [sentence for sentence in sentences if sentence.kind == kind]
    return found


# One run for each fault


def from_step(step, quantity, group, factor):
    def change(values, at):
        values[quantity][group][:, at >= step] *= factor

    return change


def all_of(*changes):
    def change(values, at):
        for each in changes:
            each(values, at)

    return change


def nan_weights(values, at):
    for quantity in ("angle", "radius", "gradient_norm"):
        for group in values[quantity]:
            values[quantity][group][:, at >= 43] = np.nan
    for group in values["gradient_norm"]:
        values["gradient_norm"][group][:, at == 42] = np.nan


def frozen_optimizer(values, at):
    for group in values["angle"]:
        values["angle"][group][:, at >= 42] = 2e-8
        values["gradient_norm"][group][:, at == 42] = np.nan


def dead_rows(values, at):
    values["gradient_norm"]["b.weight"][0, at >= 120] = 0.0


def unused_rows(values, at):
    values["gradient_norm"]["b.weight"][:2] = 0.0


def rate_fell(factor):
    def change(values, at):
        for group in values["lr"]:
            values["lr"][group][:, at >= 100] *= 0.1
            values["angle"][group][:, at >= 100] *= factor

    return change


def far_from_equilibrium(values, at):
    for group in LAYERS:
        values["equilibrium_angle"][group][:] = 0.2  # ηλ = 0.2²/2 · 19: the time for it is over


def unbalanced(values, at):
    for group in LAYERS:
        values["equilibrium_radius"][group][:] = 10.0
        values["equilibrium_angle"][group][:] = 0.0005


def falling_rate(values, at):
    unbalanced(values, at)
    for group in values["lr"]:
        values["lr"][group][:] = 1e-2 * (1 - at / (len(at) + 50))


FAULTS = {
    "not finite": (
        nan_weights, "bad", "a.weight",
        r"weights of 6 groups are NaN or infinite from step 43 on.* in the gradient of a.weight and 5 more at step 42",
    ),
    "frozen": (
        frozen_optimizer, "bad", "a.weight",
        r"optimizer froze after NaN or infinite gradients at step 42: 6 of 6 groups no longer turn \(at most 2e-08 rad",
    ),
    "frozen ": (
        all_of(from_step(50, "angle", "c.weight", 0.0), from_step(50, "lr", "c.weight", 0.0)), "warning", "c.weight",
        r"1 of 5 layers is frozen while the median layer turns 0.0\d+ rad per step: c.weight, since step 50; its ra",
    ),
    "dead": (
        from_step(90, "gradient_norm", "b.weight", 0.0), "bad", "b.weight",
        "1 of 5 layers is dead, with a gradient of exactly 0 since step 90: b.weight",
    ),
    "dead ": (dead_rows, "warning", "b.weight", "At least one row of b.weight died: .* exactly 0 since step 120"),
    "dead  ": (unused_rows, "note", "b.weight", "At least a tenth of the rows of b.weight had no gradient.*tokens"),
    "collapsed": (
        lambda values, at: values["collapsed"]["d.weight"].__setitem__((slice(None), at >= 70), 0.25),
        "warning", "d.weight", "Rows of 1 layer have collapsed: 25 % of d.weight .* since step 70",
    ),
    "collapsed ": (
        from_step(100, "radius", "d.weight", 1e-3), "warning", "d.weight",
        r"1 of 5 layers is collapsing: the radius of d.weight fell (990|1,000) × since .*, to 0.0013",
    ),
    "fast": (
        from_step(60, "angle", "e.weight", 10.0), "warning", "e.weight",
        r"1 of 5 layers turns more than 3 × faster than the median layer \(0.0\d+ rad per step\): "
        r"e.weight 1\d × \(0.1\d* rad, since step (59|60|61)\)",
    ),
    "slow": (
        from_step(0, "angle", "a.weight", 0.1), "warning", "a.weight",
        r"1 of 5 layers turns more than 3 × slower .*: a.weight 1\d × .*since the first observed step",
    ),
    "rate": (
        rate_fell(3.0), "warning", None,
        r"rate fell 10 × since step 99, but 5 of 5 layers turn further per step than before, ..weight [23].*rad\)",
    ),
    "equilibrium": (
        far_from_equilibrium, "warning", "a.weight",
        r"5 of 5 invariant layers turn far below their own equilibrium, by \d+ × .* a.weight, 0.00\d+ instead of 0.2 r",
    ),
    "balance": (
        unbalanced, "note", "a.weight",
        r"Weight decay is not in balance yet in 5 of 5 invariant layers: a.weight \(radius 0.\d+, in balance 10\) "
        r"needs about [\d,]+ more steps at this rate",
    ),
    "balance ": (
        falling_rate, "note", "a.weight",
        r"5 of 5 invariant layers, and never will be under this schedule: the rate reaches 0 in about 5\d steps, and",
    ),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_said_with_its_figure_and_layer(fault):
    change, severity, group, text = FAULTS[fault]
    sentence = only(verdict(run(change)), fault.strip())
    assert re.search(text, sentence.text), sentence.text
    assert sentence.severity == severity
    assert sentence.quantity
    assert group is None or sentence.group == group
    assert not re.search(r"\bnan\b|\binf\b", sentence.text)


def test_a_healthy_run_has_none_of_them():
    sentences = verdict(run())
    assert kinds(sentences) == ["healthy", "share"]
    assert re.fullmatch(
        r"Nothing is wrong up to step 199: the median layer turns 0.0\d+ rad per step, the 5 layers from 0.00\d+ "
        r"\(a.weight\) to 0.01\d* \(e.weight\), and the watch took 1.3 % of the training's time.",
        sentences[0].text,
    )
    assert all(sentence.severity == "note" for sentence in sentences)


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        (rate_fell(0.1), "rate"),  # the angle falls with the rate
        (from_step(60, "angle", "e.weight", 1.4), "fast"),
        (from_step(60, "angle", "e.bias", 100.0), "fast"),  # biases are not compared with layers
        (lambda values, at: values["angle"]["e.weight"].__setitem__((slice(None), at == 150), 1.0), "fast"),  # one step
        (from_step(60, "lr", "e.bias", 0.0), "frozen"),
        (lambda values, at: values["gradient_norm"]["b.weight"].__setitem__((0, at % 2 == 0), 0.0), "dead"),
    ],
)
def test_what_is_no_fault_is_not_said(change, kind):
    assert kind not in kinds(verdict(run(change)))


def test_nothing_is_frozen_where_the_rate_or_the_gradient_went_to_0():
    def ended(values, at):
        for group in values["lr"]:
            values["lr"][group][:, at >= 150] = 0.0
            values["angle"][group][:, at >= 150] = 0.0

    def converged(values, at):
        for group in values["lr"]:
            values["gradient_norm"][group][:, at >= 150] = 1e-9
            values["angle"][group][:, at >= 150] = 1e-9

    for change in (ended, converged):
        assert "frozen" not in kinds(verdict(run(change)))


@pytest.mark.parametrize("gains", [False, True])
def test_weights_in_half_precision_that_rounding_keeps_where_they_are(gains):
    """Layers of which some have a rate that is too small, and gains, which are near 1."""
    torch.manual_seed(0)
    between = [nn.LayerNorm(64) if gains else nn.ReLU() for _ in range(3)]
    layers = [(nn.Linear(64, 64, bias=gains), other) for other in between]
    model = nn.Sequential(*(part for layer in layers for part in layer)).to(torch.bfloat16)
    params = list(model.parameters())
    small = torch.optim.SGD([{"params": params[:2], "lr": 1e-6}, {"params": params[2:]}], lr=1)
    optimizer = torch.optim.AdamW(params, lr=1e-4) if gains else small
    with st.watch(optimizer, model, every=1) as watch:
        for _ in range(20):
            optimizer.zero_grad()
            out = model(torch.randn(16, 64, dtype=torch.bfloat16)).float()
            (out - torch.randn(16, 64)).square().mean().backward()
            optimizer.step()
    sentence = only(watch.verdict(), "rounded")
    assert sentence.severity == "warning"
    assert sentence.text.startswith(
        "3 of 12 groups in bfloat16 did not move" if gains else "2 of 3 groups in bfloat16 did not move"
    )
    assert ("1.weight" if gains else "0.weight") in sentence.text


def trained(optimizer, model, steps, every=None, loss=lambda step, out: out.square().mean(), accumulate=1):
    """A watched training on noise."""
    with st.watch(optimizer, model, every=every, cost=1e9) as watch:
        for step in range(steps):
            loss(step, model(torch.randn(16, 12))).backward()
            optimizer.step()
            if (step + 1) % accumulate == 0:
                optimizer.zero_grad()
    return watch


def two_layers():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(12, 16), nn.LayerNorm(16), nn.Tanh(), nn.Linear(16, 4))


@pytest.mark.parametrize("make", [torch.optim.AdamW, torch.optim.Adadelta])
def test_float32_weights_that_a_tiny_rate_does_not_move(make):
    for lr, lost in ((1e-12, True), (1e-4, False)):
        model = two_layers()
        watch = trained(make(model.parameters(), lr=lr), model, 20)
        assert ("rounded" in kinds(watch.verdict())) is lost
        if lost:
            sentence = only(watch.verdict(), "rounded")
            assert sentence.severity == "warning"
            assert re.search(r"\d of 6 groups in float32 did not move, or hardly did, at most of", sentence.text)


@pytest.mark.parametrize("every", [None, 1])
@pytest.mark.parametrize("times", [2, 4])
def test_an_optimizer_that_accumulates_inside_its_step_is_not_frozen(times, every):
    class Accumulating(torch.optim.AdamW):
        calls = 0

        def step(self, closure=None):
            self.calls += 1
            return super().step(closure) if self.calls % times == 0 else None

    model = two_layers()
    watch = trained(Accumulating(model.parameters(), lr=1e-2), model, 150, every, accumulate=times)
    assert watch.verdict()[0].text.startswith("Nothing is wrong up to step 149" if every else "Nothing is wrong up to")
    assert "the median layer turns 0.0" in watch.verdict()[0].text


@pytest.mark.parametrize(
    ("steps", "nan_at", "text"),
    [
        (900, 155, r"from a step between 151 and 160 on, and the training cannot recover from this\.$"),
        (155, 152, r"from a step between 151 and 155 on, and the training cannot recover from this\.$"),
        (15, 14, r"from step 15 on, .*; it was first seen in the gradient of 0.weight and 5 more at step 14\.$"),
        (90, 50, r"from a step between 51 and 60 on, .*; it was first seen in the gradient of .* at step 50\.$"),
    ],
)
def test_nan_between_observed_steps_is_dated_by_both(steps, nan_at, text, tmp_path):
    model = two_layers()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def loss(step, out):
        return out.square().mean() * (torch.nan if step == nan_at else 1)

    with st.watch(optimizer, model, cost=1e9, to=tmp_path) as watch:
        for step in range(steps):
            optimizer.zero_grad()
            loss(step, model(torch.randn(16, 12))).backward()
            optimizer.step()
    sentence = only(watch.verdict(), "not finite")
    assert sentence.severity == "bad"
    assert re.search(text, sentence.text), sentence.text
    assert only(verdict(read_run(tmp_path)), "not finite") == sentence


def test_a_loss_of_0_kills_no_layer():
    model = two_layers()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    watch = trained(optimizer, model, 40, 1, lambda step, out: (out.square() if step < 20 else 0 * out).mean())
    sentence = watch.verdict()[0]
    assert (sentence.kind, sentence.severity) == ("dead", "warning")
    assert sentence.text.startswith("Every gradient is exactly 0 since step 20: the loss does not depend on")


def test_one_layer_is_not_compared_with_itself():
    model = nn.Linear(12, 4)
    [sentence, *_] = trained(torch.optim.SGD(model.parameters(), lr=0.01), model, 20).verdict()
    assert re.match(r"Nothing is wrong up to step 19: the layer turns 0\.00\d+ rad per step, and the", sentence.text)


def test_a_watch_that_takes_longer_than_the_training():
    text = verdict(run(cost=2.9))[0].text
    assert text.endswith("and the watch took 2.9 × the time of the training's own steps.")


@pytest.mark.parametrize("at", [0, 10])
@pytest.mark.parametrize("whole", [False, True])
def test_layers_that_are_replaced_in_the_model_take_no_step(whole, at, tmp_path):
    """The optimizer has the old ones, whose gradients are None."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with st.watch(optimizer, model, to=tmp_path / "run", every=1) as watcher:
        for step in range(40):
            if step == at and whole:
                model.load_state_dict(model.state_dict(), assign=True)
            elif step == at:
                model[2] = nn.Linear(8, 3)
            optimizer.zero_grad()
            model(torch.randn(16, 5)).square().mean().backward()
            optimizer.step()
    [said] = [sentence for sentence in watcher.verdict() if "not observed since" in sentence.text]
    assert said.severity == ("warning" if whole else "note")
    assert f"since {f'step {at}' if at else 'the first observed step'}: " in said.text
    assert said.group == ("0.weight" if whole else "2.weight")
    assert ("healthy" in kinds(watcher.verdict())) is not whole
    if not whole:
        assert said in verdict(read_run(tmp_path / "run"))


def test_numbers_that_changed_their_sign_are_not_frozen():
    """A row of one number turns by π when its sign changes, and by nothing else."""
    number = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([number], lr=1.5)
    with st.watch(optimizer, every=1) as watcher:
        for step in range(30):
            optimizer.param_groups[0]["lr"] = 1.5 if step < 3 else 0.001
            number.grad = number.detach().clone()
            optimizer.step()
    assert watcher.records().query("quantity == 'angle'")["value"].max() > 3
    assert "frozen" not in kinds(watcher.verdict())


def test_rows_without_a_gradient_say_nothing_of_the_pace_of_their_layer():
    """An embedding most of whose tokens are in no batch."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(500, 16), nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 5))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with st.watch(optimizer, model, every=1) as watch:
        for _ in range(20):
            optimizer.zero_grad()
            tokens = torch.randint(40, (64,))
            nn.functional.cross_entropy(model(tokens), tokens % 5).backward()
            optimizer.step()
    assert watch.latest()["0.weight"]["angle"]["median"] < 1e-6
    assert not {"fast", "slow", "frozen"} & set(kinds(watch.verdict()))
    assert watch.verdict()[0].kind == "healthy"
    assert "0.weight" not in watch.verdict()[0].text


def test_layers_most_of_whose_rows_died_are_still_compared():
    def died(values, at):
        values["gradient_norm"]["b.weight"][:3, at >= 50] = 0.0

    found = verdict(run(all_of(died, from_step(50, "angle", "b.weight", 0.01))))
    assert only(found, "slow").group == "b.weight"
    assert "died" in only(found, "dead").text


def test_a_row_of_padding_has_not_collapsed():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(10, 16, padding_idx=1), nn.Linear(16, 5))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    with st.watch(optimizer, model, every=1) as watch:
        for _ in range(20):
            optimizer.zero_grad()
            tokens = torch.arange(10)
            nn.functional.cross_entropy(model(tokens), tokens % 5).backward()
            optimizer.step()
    sentence = only(watch.verdict(), "collapsed")
    assert sentence.severity == "note"
    assert sentence.text.startswith("10 % of the rows of 0.weight are 0 from the first observed step on")


def test_layers_are_compared_under_one_optimizer():
    """Muon turns its matrices much further than AdamW turns the head, which is as it was set."""

    def muon(recorded):
        [group] = recorded.about["optimizer"]["groups"]
        adamw = {**group, "params": ["e.weight", "e.bias"]}
        matrices = {"params": list(LAYERS[:-1]), "lr": 1e-2, "momentum": 0.95, "ns_steps": 5}
        recorded.about["optimizer"] = {"name": "torch.optim.Muon + torch.optim.AdamW", "groups": [matrices, adamw]}
        return recorded

    slow = from_step(0, "angle", "e.weight", 0.05)
    assert only(verdict(run(slow)), "slow").group == "e.weight"
    assert "slow" not in kinds(verdict(muon(run(slow))))
    text = only(verdict(muon(run(from_step(0, "angle", "a.weight", 0.05)))), "slow").text
    assert text.startswith("1 of 4 layers under the same optimizer turns more than 3 × slower")


def test_steps_after_the_last_observed_one_are_counted(tmp_path):
    params = rows((4, 5), (3, 5), (2, 5))
    optimizer = torch.optim.AdamW(params, lr=1e-3)
    with st.watch(optimizer, every=50, to=tmp_path) as watch:
        train_rows(optimizer, params, 390)
        assert "up to step 350, the last observed one of 390 steps:" in watch.verdict()[0].text
    assert read_run(tmp_path).about["last_step"] == 389
    assert verdict(read_run(tmp_path))[0].text == watch.verdict()[0].text


def test_gradients_that_were_nan_once_are_said_although_training_goes_on():
    def change(values, at):
        values["gradient_norm"]["b.weight"][:, at == 42] = np.inf

    sentence = only(verdict(run(change)), "not finite")
    assert sentence.severity == "warning"
    assert sentence.text == (
        "The gradient of 1 group was NaN or infinite at 1 observed step, first at step 42 in b.weight; the weights are "
        "finite."
    )


def test_the_share_of_invariant_weights():
    text = only(verdict(run()), "share").text
    assert text.startswith("98.8 % of the watched weights (640 of 648) are invariant: weight decay does not regularize")


def on_spheres(recorded):
    """The same run under Angular, whose layers are in a param group with rows."""
    [group] = recorded.about["optimizer"]["groups"]
    group |= {"direction": "gradient", "spread": "equal"}
    groups = [{**group, "params": list(LAYERS), "rows": "filter"}, {**group, "params": ["e.bias"], "rows": None}]
    recorded.about["optimizer"] = {"name": "steradian.optim.angular.Angular", "groups": groups}
    return recorded


@pytest.mark.parametrize("make", [st.optim.AdamG, st.optim.AdaGradG])
def test_weight_decay_of_rows_whose_radius_is_fixed_is_said_to_have_no_effect(make):
    params = rows((4, 5), (3, 5))
    optimizer = make(groups_of(params), lr=0.01, weight_decay=0.1)
    with st.watch(optimizer, every=1) as watch:
        train_rows(optimizer, params, 10)
    assert "weight decay has no effect on them" in only(watch.verdict(), "share").text


def test_under_angular_weight_decay_is_said_to_have_no_effect():
    text = only(verdict(on_spheres(run())), "share").text
    assert text.endswith("are invariant: their rate sets their angle per step, and weight decay has no effect on them.")


def test_an_angle_is_not_compared_with_a_rate():
    """The head under Angular has a rate, the other layers have an angle."""
    fast = all_of(from_step(0, "angle", "e.weight", 100.0), from_step(0, "lr", "e.weight", 100.0))
    assert "at 100 × the usual rate" in only(verdict(run(fast)), "fast").text
    recorded = on_spheres(run(fast))
    rows, rest = recorded.about["optimizer"]["groups"]
    rows["params"].remove("e.weight")
    rest["params"].append("e.weight")
    assert "fast" not in kinds(verdict(recorded))


def test_an_angle_that_lags_behind_a_falling_rate_is_no_fault():
    def fall(values, at):
        factor = np.where(at < STEPS // 2, 1.0, 0.01)
        for group in values["lr"]:
            values["lr"][group] *= factor
            values["angle"][group] *= factor
            values["equilibrium_angle"][group] *= np.sqrt(factor)

    sentence = only(verdict(run(fall)), "equilibrium")
    assert sentence.severity == "note"
    assert "radii follow a falling rate slowly" in sentence.text


def test_the_end_of_a_run_has_no_step_of_its_first_half():
    """The first 20 steps are all observed, then few: the angle at the end is not that of the start."""
    recorded = run(from_step(25, "angle", LAYERS[2], 0.01), steps=51)

    def observed(*steps):
        return verdict(replace(recorded, table=recorded.table[recorded.table["step"].isin([*range(20), *steps])]))

    assert "c.weight" in only(observed(30, 40, 50), "slow").text
    [sentence, *_] = observed(40, 50)
    few = "The second half of the run has only 2 of the 22 observed steps: too few to judge the layers. With every=5"
    assert sentence.text.startswith(few)


@pytest.mark.parametrize(("factor", "severity"), [(0.3, "note"), (0.05, "warning")])
def test_layers_that_are_not_far_apart_are_no_warning(factor, severity):
    found = verdict(run(from_step(0, "angle", "b.weight", factor)))
    assert only(found, "slow").severity == severity
    assert ("healthy" in kinds(found)) == (severity == "note")


def test_without_proved_rows_one_line_says_how_to_get_them():
    sentences = verdict(run(all_of(unbalanced, far_from_equilibrium), label="untested"))
    assert kinds(sentences) == ["healthy", "find_groups"]
    assert "find_groups(model, inputs)" in sentences[-1].text


def test_a_model_whose_layers_are_all_refuted_is_not_sent_to_find_groups():
    sentences = verdict(run(label="not invariant"))
    assert kinds(sentences) == ["healthy", "find_groups"]
    assert sentences[-1].text.startswith("No layer is invariant: lengths count as well as directions")


def test_gradients_that_refute_single_rows_do_not_refute_blocks():
    inclined = all_of(*(from_step(0, "defect", name, 1e4) for name in LAYERS))
    sentences = verdict(run(inclined, label="untested"))
    assert sentences[-1].kind == "find_groups"
    assert "Blocks of rows, such as the heads of a model with QK-norm, may still be" in sentences[-1].text


def test_a_layer_most_of_whose_rows_have_no_gradient_is_not_frozen():
    """An embedding of which a batch uses a few tokens."""
    still = from_step(0, "angle", "c.weight", 0.0)
    assert "frozen" in kinds(verdict(run(still)))

    def of_few_rows(values, at):
        values["gradient_norm"]["c.weight"][:3] = 0  # the smallest, the 10th percentile and the median

    assert "frozen" not in kinds(verdict(run(all_of(still, of_few_rows))))


def test_at_most_seven_sentences_the_most_severe_first():
    everything = all_of(
        *(FAULTS[name][0] for name in ("balance", "rate", "dead ", "collapsed")),
        from_step(0, "angle", "a.weight", 0.01),
        from_step(0, "angle", "e.weight", 100.0),
        from_step(90, "gradient_norm", "c.weight", 0.0),
    )
    alerts = [Alert(3, "b.weight", kind, f"{kind} is violated") for kind in ("H1", "H2")]
    for label in ("invariant", "untested"):
        sentences = verdict(run(everything, alerts=alerts, label=label))
        assert len(sentences) == 7
        assert sentences[0].kind == "dead"
        order = [SEVERITIES.index(sentence.severity) for sentence in sentences]
        assert order == sorted(order)
        assert "healthy" not in kinds(sentences)
    assert sentences[-1].kind == "find_groups"


def test_alerts_that_no_other_sentence_is_about_are_repeated():
    alerts = [Alert(3, name, "H2", f"H2 is violated: z = {k}.5 is not below π") for k, name in enumerate(LAYERS)]
    sentence = only(verdict(run(alerts=alerts)), "H2")
    assert (
        sentence.text
        == "H2 is violated (z is not below π) in 5 groups from step 3: a.weight, b.weight, c.weight and 2 more."
    )
    assert sentence.quantity == "velocity"
    covered = [Alert(3, "a.weight", "equilibrium", "it turns 4 times as far")]
    assert kinds(verdict(run(alerts=covered))) == ["healthy", "share"]


def test_short_and_incomplete_runs():
    assert kinds(verdict(run(steps=3))) == ["early"]
    assert "the watch's cost is not known yet" in verdict(run(cost=None))[0].text
    whole = run()
    assert verdict(RecordedRun("run", whole.about, whole.table[:0], whole.rows, whole.paths, whole.alerts)) == []


# Real trainings


def train(tmp_path, factor=1.0, *, every=1, groups=False):
    """A small normalized network; the rate of one of its layers is multiplied by `factor`."""
    torch.manual_seed(0)
    sizes = (8, 32, 32, 32, 32)
    layers = [(nn.Linear(a, b, bias=False), nn.LayerNorm(b), nn.ReLU()) for a, b in pairwise(sizes)]
    model = nn.Sequential(*(part for layer in layers for part in layer), nn.Linear(32, 4))
    others = [param for param in model.parameters() if param is not model[6].weight]
    optimizer = torch.optim.AdamW([{"params": others}, {"params": [model[6].weight], "lr": 1e-3 * factor}], lr=1e-3)
    watched = st.find_groups(model, torch.randn(16, 8)) if groups else model
    with st.watch(optimizer, watched, to=tmp_path, run="small", every=every) as watch:
        for _ in range(100):
            x = torch.randn(64, 8)
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), x[:, :4].argmax(1)).backward()
            optimizer.step()
    assert watch.error is None
    return watch


def test_a_healthy_training(tmp_path):
    watch = train(tmp_path, groups=True)
    sentences = watch.verdict()
    assert sentences[0].kind == "healthy"
    assert {sentence.severity for sentence in sentences} == {"note"}
    assert "share" in kinds(sentences)
    head, table = watch.summary().split("\n\n")
    assert " ".join(head.split()).startswith(f"small, verdict - {sentences[0].text} - ")
    assert table.startswith("small, step 99\n")
    # The folder says the same; its share of the time was measured a little earlier.
    assert kinds(verdict(read_run(tmp_path))) == kinds(sentences)


def test_sentences_are_wrapped_to_the_width_of_the_terminal(tmp_path, monkeypatch):
    watch = train(tmp_path, groups=True)
    sentences = [f"- {sentence.text}" for sentence in watch.verdict()]
    for width in (60, 100):
        monkeypatch.setenv("COLUMNS", str(width))
        lines = watch.summary().split("\n\n")[0].splitlines()[1:]
        assert max(map(len, lines)) <= width
        assert " ".join(" ".join(lines).split()) == " ".join(sentences)
        # No word would have fitted on the line before.
        assert all(len(one) + 1 + len(other.split()[0]) > width for one, other in pairwise(lines) if other[0] == " ")


def test_a_layer_with_a_hundred_times_the_rate(tmp_path):
    watch = train(tmp_path, 100.0)
    sentence = watch.verdict()[0]
    assert (sentence.kind, sentence.group, sentence.quantity) == ("fast", "6.weight", "angle")
    assert "1 of 5 layers turns more than 3 × faster" in sentence.text
    assert "at 100 × the usual rate" in sentence.text
    assert [each.text for each in verdict(read_run(tmp_path))] == [each.text for each in watch.verdict()]


def test_the_verdict_of_a_large_run_is_quick():
    count, groups = 300, tuple(f"layers.{k}.weight" for k in range(300))
    quantities = ("angle", "radius", "gradient_norm", "collapsed", "lr", "update", "defect", "effective_lr")
    values = np.random.default_rng(0).lognormal(-4, 0.3, (count, len(quantities), len(groups), len(STATISTICS)))
    values[:, quantities.index("collapsed")], values[:, quantities.index("lr")] = 0, 1e-3
    everything = np.ones((len(quantities), len(groups)), dtype=bool)
    block = Block(
        "run", np.arange(count) * 33, groups, quantities, values, np.ones((count, 300), dtype=bool), everything
    )
    entries = [{"name": name, "names": [name], "rows": 64, "size": 64, "shapes": []} for name in groups]
    about = {"groups": entries, "optimizer": {"name": "", "groups": []}, "cost": {}}
    history = History()
    history.add(block)
    began = time.perf_counter()
    assert judge(history, about, dict.fromkeys(groups, "untested"), [])[0].kind == "healthy"
    assert time.perf_counter() - began < 1


def test_a_long_history_is_thinned(monkeypatch):
    monkeypatch.setattr("steradian.watching.verdict._KEPT", 6500)
    history = History()
    ones = np.ones((100, 1, 2, len(STATISTICS)))
    for k in range(20):
        active, defined = np.ones((100, 2), dtype=bool), np.ones((1, 2), dtype=bool)
        history.add(Block("run", np.arange(100 * k, 100 * k + 100), ("a", "b"), ("angle",), ones, active, defined))
    assert history.values.size <= 6500
    assert history.steps.tolist() == list(range(0, 2000, 8))


def test_it_needs_no_pandas():
    code = "import sys, steradian.watching.verdict as room; assert room.judge; print('pandas' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


# Causes


def test_alerts_of_one_cause_are_one_line(tmp_path, caplog):
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(7)))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with caplog.at_level(logging.WARNING), st.watch(optimizer, model, to=tmp_path, run="run", every=1) as watch:
        for step in range(60):
            optimizer.zero_grad()
            model(torch.randn(8, 4) if step < 42 else torch.full((8, 4), torch.nan)).square().mean().backward()
            optimizer.step()
            watch.flush()
    assert len(watch.alerts) == 14
    (line,) = re.findall(r"^alert: .*(?:\n  .*)*", watch.summary(), re.MULTILINE)
    text = " ".join(line.split())
    assert re.match(r"alert: NaN or infinite (gradients|weights or gradients) in 14 groups from step 42: ", text)
    assert len([record for record in caplog.records if "NaN" in record.getMessage()]) == 1
    page = st.report([tmp_path], tmp_path / "page.html").read_text()
    assert "<h3>1 alert</h3>" in page
    assert page.count("in 14 groups from step 42") == 1
    assert only(watch.verdict(), "not finite").severity == "bad"


def test_different_causes_are_different_lines():
    alerts = [Alert(5, name, "H2", f"H2 is violated: z = {k}.5 is not below π") for k, name in enumerate("abcd")]
    alerts.append(Alert(1, "a", "collapsed", "12 % of its rows collapsed"))
    assert [(cause.kind, cause.step, cause.groups) for cause in causes(alerts)] == [
        ("collapsed", 1, ["a"]),
        ("H2", 5, ["a", "b", "c", "d"]),
    ]
    assert causes(alerts)[0].text == "step 1, a: 12 % of its rows collapsed"
    assert causes(alerts)[1].text.endswith("in 4 groups from step 5: a, b, c and 1 more")


@pytest.mark.parametrize(("first", "since", "words"), [(0, 0, "not invariant"), (0, 60, "the ε"), (5000, 0, "the ε")])
def test_the_cause_of_a_large_defect(first, since, words):
    """Rows whose gradient was never orthogonal to them are not invariant; ε matters when the radius has shrunk."""
    alerts = Alerts({"w"})
    for start in (0, 50):
        steps = np.arange(start, start + 50)
        defects = np.where(steps >= since, 0.4, 1e-5)[:, None, None, None] * np.ones((1, 1, 1, len(STATISTICS)))
        active, defined = np.ones((50, 1), dtype=bool), np.ones((1, 1), dtype=bool)
        alerts.check(Block("run", first + steps, ("w",), ("defect",), defects, active, defined))
    (alert,) = alerts.raised
    assert alert.kind == "defect"
    assert words in alert.text
    assert ("not invariant" in alert.text) != ("the ε" in alert.text)


# The page


def test_the_page_begins_with_the_verdict(tmp_path):
    train(tmp_path / "fast", 100.0)
    train(tmp_path / "usual")
    page = st.report([tmp_path / "fast", tmp_path / "usual"], tmp_path / "page.html").read_text()
    section = page[page.index('<section class="card" id="verdict">') : page.index('<section id="overview">')]
    for name in ("fast", "usual"):
        assert json.loads((tmp_path / name / "run.json").read_text())["cost"]["share"] > 0
    assert section.count('<ul class="findings">') == 2
    assert '<li class="warning">1 of 5 layers turns more than 3 × faster' in section
    assert '<li class="healthy">Nothing is wrong up to step 99' in section
    assert re.search(r'<a href="#angle" [^>]*>Angle per step</a>', section)
    assert all(f'id="{target}"' in page for target in re.findall(r'href="#([\w-]+)"', section))
