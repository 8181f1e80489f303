"""Each alert in a situation that was made for it: said once, in words, with the group's name."""

import logging
import re

import pytest
import torch

from steradian import optim, watch
from steradian.watching.records import read_run

from small import groups_of, rows, set_gradients


def sgd(groups, **options):
    return torch.optim.SGD(groups, **{"lr": 0.1, **options})


def trained(tmp_path, make, steps, scale=lambda step: (1.0, 1.0), spoil=None):
    """Train "w" and "v" with gradients across the rows, scaled; `spoil` changes "w" or its gradient in every step."""
    params = rows((4, 5), (3, 5))
    optimizer = make(groups_of(params))
    with watch(optimizer, to=tmp_path, run="run", every=1) as watcher:
        for step in range(steps):
            set_gradients(params, step)
            for param, factor in zip(params, scale(step), strict=True):
                param.grad *= factor
            if spoil is not None:
                spoil(params[0])
            optimizer.step()
            if step % 20 == 19:
                watcher.flush()
    assert watcher.error is None
    return watcher


@torch.no_grad()
def no_gradient_no_weight(w):
    w[:2] = 0
    w.grad[:2] = 0


@torch.no_grad()
def along(w):
    w.grad += w


@torch.no_grad()
def not_a_number(w):
    w[0, 0] = float("nan")


SITUATIONS = {
    # x' = x − ηλx crosses the origin where ηλ > 1; v has no decay
    "H1": (lambda groups: sgd(split(groups, weight_decay=(12.0, 0.0))), 3, {}, "H1 is violated: .*1.2, not below 1"),
    # z = η‖∇L(u)‖/r²
    "H2": (sgd, 3, {"scale": lambda step: (1e4, 1.0)}, "H2 is violated: z = .* is not below π"),
    "collapsed": (sgd, 45, {"spoil": no_gradient_no_weight}, "50 % of its rows collapsed"),
    "defect": (sgd, 45, {"spoil": along}, "gradient is not orthogonal to the rows"),
    "not finite": (sgd, 45, {"spoil": not_a_number}, "NaN or infinite"),
}


def split(groups, weight_decay):
    """The two parameters with a decay each."""
    return [
        {"params": [named], "rows": "filter", "weight_decay": decay}
        for named, decay in zip(groups[0]["params"], weight_decay, strict=True)
    ]


@pytest.mark.parametrize("kind", SITUATIONS)
def test_an_alert_is_said_once_with_the_groups_name(kind, tmp_path, caplog):
    make, steps, options, text = SITUATIONS[kind]
    watcher = trained(tmp_path, make, steps, **options)
    said = [alert for alert in watcher.alerts if alert.kind == kind]
    assert [alert.group for alert in said] == ["w"]
    messages = [record for record in caplog.records if str(said[0]) in record.getMessage()]
    assert len(messages) == 1
    assert messages[0].levelno == logging.WARNING
    assert messages[0].getMessage().startswith(f"run: step {said[0].step}, w: ")
    assert re.search(text, said[0].text), said[0].text
    written = read_run(tmp_path).alerts
    assert written[written["kind"] == kind][["step", "group", "text"]].to_numpy().tolist() == [
        [said[0].step, "w", said[0].text]
    ]
    assert str(said[0]) in " ".join(watcher.summary().split())


def test_gradients_that_are_not_finite_are_told_where_the_step_leaves_the_rows_alone(tmp_path):
    def spoil(w):
        w.grad[0, 0] = float("nan")

    watcher = trained(tmp_path, lambda groups: optim.Adam(groups, lr=0.1, without="abc"), 3, spoil=spoil)
    assert [str(alert) for alert in watcher.alerts] == ["step 0, w: its gradient holds NaN or infinite numbers"]


def test_a_quiet_training_has_no_alerts(tmp_path):
    watcher = trained(tmp_path, lambda groups: sgd(groups, lr=0.5, weight_decay=0.05), 150)
    assert watcher.alerts == []


def test_steps_that_are_taken_again_say_their_own_alerts(tmp_path):
    def train(first, factors):
        with watch(optimizer, to=tmp_path, phenomena=False, step=first):
            for step, factor in enumerate(factors):
                set_gradients(params, step)
                params[0].grad *= factor
                optimizer.step()

    params = rows((4, 5), (3, 5))
    optimizer = sgd(groups_of(params))
    train(0, (1.0, 1.0, 1e4, 1.0))
    assert read_run(tmp_path).alerts["step"].tolist() == [2]
    train(3, (1.0, 1e9))  # steps 0 to 2 stand, and so does what was said of them
    assert read_run(tmp_path).alerts["step"].tolist() == [2, 4]
    train(2, (1.0, 1.0))
    assert read_run(tmp_path).alerts.empty
