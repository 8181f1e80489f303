"""The fused step against the reference, under Triton's interpreter on a CPU and on the GPU where there is one."""

import copy
import itertools
import math
from collections import defaultdict
from functools import partial

import pytest
import torch
from torch.testing._internal.two_tensor import TwoTensor

from steradian.optim import Adam, Angular
from steradian.optim.fused import decide

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SUBSETS = ["a", "ab", "abc", "ac", "b", "bc", "c"]
# Tiles of many rows and of one, rows with a tail (9·2^k), rows at odd addresses. A row of one number is left out:
# its momentum is rounding.
SHAPES = [(5, 3, 3, 3), (3, 64), (2, 64, 3, 3), (40, 4), (3, 147), (1, 4608), (40, 5)]


def parameters(shapes, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.nn.Parameter(torch.randn(s, generator=generator).to(DEVICE, dtype)) for s in shapes]


def gradients(params, seed):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(p.shape, generator=generator).to(p) for p in params]


def pair(shapes, *, dtype=torch.float32, rows="filter", seed=0, **options):
    """The same parameters under the reference and under the fused step."""
    made = []
    for fused in (False, True):
        params = parameters(shapes, dtype, seed)
        group = {"params": params, "rows": rows}
        made.append((params, Adam([group], lr=0.02, betas=(0.9, 0.99), fused=fused, **options)))
    return made


def run(made, steps, *, seed=1):
    for k in range(steps):
        for params, optimizer in made:
            for p, g in zip(params, gradients(params, seed + k), strict=True):
                p.grad = g
            optimizer.step()


def assert_alike(made, tolerance):
    (reference, one), (fused, two) = made
    for p, q in zip(reference, fused, strict=True):
        close(q.detach(), p.detach(), tolerance, "param")
        for name, value in one.state[p].items():
            close(two.state[q][name], value, tolerance, name)


def close(found, expected, tolerance, name):
    expected = expected.double().to(found.device)
    scale = expected.abs().max().item() if expected.numel() else 0.0
    torch.testing.assert_close(
        found.double(), expected, rtol=0, atol=tolerance * scale, msg=lambda text: f"{name}: {text}", check_device=False
    )


@pytest.mark.parametrize(
    ("without", "decoupled"),
    [(w, False) for w in SUBSETS]
    + [pytest.param(w, True, marks=[] if w in ("abc", "bc") else pytest.mark.slow) for w in SUBSETS],
)
def test_equals_the_reference(without, decoupled):
    made = pair(SHAPES, without=without, weight_decay=0.1, decoupled_weight_decay=decoupled)
    run(made, 3)
    assert_alike(made, 3e-6)
    assert made[1][1].state[made[1][0][0]]["step"].item() == 3


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16])
@pytest.mark.parametrize("without", ["abc", "bc"])
def test_other_dtypes(without, dtype):
    made = pair(SHAPES, dtype=dtype, without=without, weight_decay=0.1)
    run(made, 2)
    assert_alike(made, 1e-12 if dtype == torch.float64 else 2e-3)


@pytest.mark.parametrize(
    ("rows", "without"),
    [("filter", w) for w in ("a", "ab", "abc", "ac")]
    + [pytest.param(r, w, marks=[] if w == "abc" else pytest.mark.slow) for r in ("tensor", 2) for w in ("abc", "a")],
)
def test_rows_longer_than_a_tile(rows, without):
    made = pair([(2, 5000), (4, 2, 3000), (2, 40)], rows=rows, without=without, weight_decay=0.1)
    run(made, 2)
    assert_alike(made, 3e-6)


@pytest.mark.parametrize("rows", ["tensor", 4, ("axis", 1), ("grid", 2, -1)])
def test_every_layout(rows):
    made = pair([(8, 6, 3), (4, 2, 5)], rows=rows, without="abc", weight_decay=0.1)
    run(made, 3)
    assert_alike(made, 3e-6)


def test_joint_rows_and_the_rest_step_too():
    made = []
    for fused in (False, True):
        weight, bias, gain, alone = parameters([(8, 5), (8,), (3,), (4, 7)])
        groups = [
            {"params": [weight, bias], "rows": "tensor", "joint": True},
            {"params": [gain]},
            {"params": [alone], "rows": "filter"},
        ]
        made.append(([weight, bias, gain, alone], Adam(groups, lr=0.02, without="abc", fused=fused)))
    run(made, 3)
    assert_alike(made, 2e-5)  # the rest takes torch's fused step here and its plain one there


def test_groups_with_settings_of_their_own_share_one_launch():
    made = []
    for fused in (False, True):
        params = parameters([(4, 6), (3, 9), (5, 2)])
        groups = [
            {"params": [params[0]], "rows": "filter", "lr": 0.1, "without": "a"},
            {"params": [params[1]], "rows": "filter", "weight_decay": 0.3, "betas": (0.0, 0.5), "eps": 0.0},
            {"params": [params[2]], "rows": 5, "maximize": True, "without": "ac"},
        ]
        made.append((params, Adam(groups, lr=0.02, without="abc", fused=fused)))
    run(made, 4)
    assert_alike(made, 3e-6)


@pytest.mark.parametrize("rate", [lambda: torch.tensor(0.05), lambda: torch.tensor([0.05], dtype=torch.float64)])
def test_tensor_rates_and_schedules(rate):
    made = pair([(4, 6)], without="abc")
    for _, optimizer in made:
        optimizer.param_groups[0]["lr"] = rate().to(DEVICE)
    for k in range(4):
        for _, optimizer in made:
            optimizer.param_groups[0]["lr"].fill_(0.05 / (k + 1))
        run(made, 1, seed=k)
    assert_alike(made, 3e-6)


def test_a_schedule_and_gradients_that_move_in_memory():
    [_, (params, _)] = made = pair([(4, 6), (3, 40)], without="abc", weight_decay=0.1)
    run(made, 1)
    for rate in (0.1, 0.3):
        for _, optimizer in made:
            optimizer.param_groups[0]["lr"] = rate
            optimizer.step()
    params[0].grad = params[0].grad.clone()
    for _, optimizer in made:
        optimizer.step()
    assert_alike(made, 3e-6)


def test_numbers_that_change_between_steps():
    made = pair([(4, 6)], without="abc", weight_decay=0.1)
    for k in range(4):
        for _, optimizer in made:
            optimizer.param_groups[0].update(lr=0.05 / (k + 1), weight_decay=0.1 * k, betas=(0.9, 0.9 + 0.02 * k))
        run(made, 1, seed=k)
    assert_alike(made, 3e-6)


def test_channels_last_and_other_memory():
    made = []
    for fused in (False, True):
        params = parameters([(6, 4, 3, 3)])
        params.append(torch.nn.Parameter(params[0].detach().clone().to(memory_format=torch.channels_last)))
        params.append(torch.nn.Parameter(torch.ones(12, 5, device=DEVICE)[::2] * torch.arange(1, 6).to(DEVICE)))
        made.append((params, Adam([{"params": params, "rows": "filter"}], lr=0.02, without="abc", fused=fused)))
    run(made, 3)
    assert_alike(made, 3e-6)
    torch.testing.assert_close(
        *(p.detach().is_contiguous(memory_format=torch.channels_last) for p in made[1][0][1:2] * 2)
    )


def test_gradients_that_come_and_go():
    made = pair([(4, 6), (3, 5)], without="abc", weight_decay=0.1)
    run(made, 2)
    for params, optimizer in made:
        params[1].grad = None
        optimizer.step()
    run(made, 2, seed=9)
    assert_alike(made, 3e-6)
    steps = [optimizer.state[params[1]]["step"].item() for params, optimizer in made]
    assert steps == [4, 4]


def test_new_addresses_and_new_groups_are_seen():
    made = pair([(4, 6)], without="abc", weight_decay=0.1)
    run(made, 2)
    for params, optimizer in made:
        params[0].data = params[0].data.clone() * 2
        [extra] = parameters([(3, 40)], seed=5)
        params.append(extra)
        optimizer.add_param_group({"params": [extra], "rows": "filter"})
    run(made, 2, seed=5)
    assert_alike(made, 3e-6)


def test_a_state_that_is_moved_to_other_memory_is_stepped_there():
    made = pair([(4, 6), (3, 5)], without="abc", weight_decay=0.1)
    run(made, 2)
    for params, optimizer in made:
        for state in optimizer.state.values():
            state.update({name: value.clone() for name, value in state.items()})
        for _ in range(2):  # the gradients stay where they are
            optimizer.step()
        optimizer.state[params[0]].clear()
        optimizer.step()
    assert_alike(made, 3e-6)
    assert made[1][1].state[made[1][0][0]]["step"].item() == 1


def _reset(params, optimizer):
    optimizer.state = defaultdict(dict)


def _forget(params, optimizer):
    optimizer.state.clear()


def _forget_one(params, optimizer):
    optimizer.state.pop(params[0])


def _another(params, optimizer):
    optimizer.state[params[0]] = {name: torch.zeros_like(value) for name, value in optimizer.state[params[0]].items()}


def _another_entry(name, params, optimizer):
    optimizer.state[params[0]][name] = torch.zeros_like(optimizer.state[params[0]][name])


@pytest.mark.parametrize(
    "change",
    [_reset, _forget, _forget_one, _another]
    + [partial(_another_entry, name) for name in ("exp_avg", "exp_avg_sq", "step")],
    ids=["reset", "clear", "pop", "another", "exp_avg", "exp_avg_sq", "step"],
)
def test_a_state_that_the_user_puts_in_place_of_the_old_is_the_one_that_is_stepped(change):
    made = pair([(4, 6), (3, 5)], without="abc", weight_decay=0.1)
    run(made, 2)
    for params, optimizer in made:
        change(params, optimizer)
        for _ in range(2):  # the gradients stay where they are
            optimizer.step()
    assert_alike(made, 3e-6)


def test_groups_and_parameters_in_place_of_the_old_are_seen():
    made = pair([(4, 6), (3, 5)], without="abc", weight_decay=0.1)
    run(made, 2)
    for params, optimizer in made:
        group = optimizer.param_groups[0]
        gradient, params[1] = params[1].grad, torch.nn.Parameter(2 * params[1].detach())
        params[1].grad = gradient
        group["params"][1] = params[1]
        optimizer.step()
        optimizer.param_groups[0] = {**group, "lr": 0.5}
        optimizer.step()
    assert_alike(made, 3e-6)


def test_gradients_at_other_addresses_and_of_other_alignment_are_read_there():
    made = pair([(4, 8), (3, 5)], without="abc", weight_decay=0.1)
    run(made, 2)
    for params, optimizer in made:
        for shift in (0, 1, 4):
            for p, g in zip(params, gradients(params, 7 + shift), strict=True):
                p.grad = torch.cat([g.new_zeros(shift), g.flatten()])[shift:].view(p.shape)
            optimizer.step()
    assert_alike(made, 3e-6)


def test_a_loaded_or_copied_state_goes_on():
    made = pair([(4, 6), (2, 600)], without="abc", weight_decay=0.1)
    run(made, 3)
    resumed = []
    for params, optimizer in made:
        twins = [torch.nn.Parameter(p.detach().clone()) for p in params]
        fused = optimizer.param_groups[0]["fused"]
        other = Adam([{"params": twins, "rows": "filter"}], lr=0.5, without="abc", fused=fused)
        other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        resumed.append((twins, other))
    run(made, 2, seed=7)
    run(resumed, 2, seed=7)
    for (params, _), (twins, _) in zip(made, resumed, strict=True):
        for p, q in zip(params, twins, strict=True):
            torch.testing.assert_close(p, q, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("without", "shapes", "scale"),
    [("abc", [*SHAPES, (2, 5000)], None), ("abc", [(3, 64), (2, 5000)], 64.0), ("bc", SHAPES[:5], None)],
)
def test_emission_equals_the_references(without, shapes, scale):
    made = pair(shapes, without=without, weight_decay=0.1)
    for _, optimizer in made:
        optimizer.emit()
    run(made, 2)
    (reference, one), (fused, two) = made
    if scale is not None:
        two.grad_scale = torch.full((1,), scale, device=DEVICE)
        for q in fused:
            q.grad *= scale
        two.step()
        one.step()
    for p, q in zip(reference, fused, strict=True):
        torch.testing.assert_close(two.telemetry[q], one.telemetry[p], rtol=2e-4, atol=1e-6)


def test_a_step_that_a_scaler_skips_tells_nothing():
    x, whole = parameters([(4, 6), (3, 5)])
    groups = [{"params": [x], "rows": "filter", "without": "abc"}, {"params": [whole], "rows": "filter", "without": ""}]
    optimizer = Adam(groups, fused=True)
    optimizer.emit()
    run([([x, whole], optimizer)], 1)
    before = {p: telemetry.clone() for p, telemetry in optimizer.telemetry.items()}
    optimizer.grad_scale, optimizer.found_inf = torch.ones((), device=DEVICE), torch.ones((), device=DEVICE)
    x.grad, whole.grad = torch.ones_like(x), torch.ones_like(whole)
    optimizer.step()
    for p, telemetry in before.items():
        assert telemetry[:, :2].gt(0).all()
        torch.testing.assert_close(optimizer.telemetry[p], telemetry, rtol=0, atol=0)


def test_a_second_place_gets_the_same_telemetry():
    """Rows in tiles and in chunks; nothing comes where a step misses some rows, or is not the kernels' alone."""
    params = parameters([(5, 3, 3, 3), (3, 147), (2, 5000)])
    optimizer = Adam([{"params": params, "rows": "filter"}], without="abc", fused=True)
    optimizer.emit()
    run([(params, optimizer)], 1)
    telemetry = optimizer.telemetry
    [buffer] = telemetry.buffers
    assert telemetry.left is None
    telemetry.also = torch.full_like(buffer, -1)
    run([(params, optimizer)], 1, seed=7)
    assert telemetry.left is telemetry.also
    assert buffer[:, :2].gt(0).all()
    torch.testing.assert_close(telemetry.also, buffer, rtol=0, atol=0)
    telemetry.also.fill_(-1)
    params[1].grad = None
    optimizer.step()
    assert telemetry.left is None
    assert (telemetry.also == -1).all()
    params[1].grad = params[0].grad.new_ones(params[1].shape)
    optimizer.step()
    assert telemetry.left is telemetry.also
    optimizer.param_groups[0]["fused"] = False
    optimizer.step()
    assert telemetry.left is None


@pytest.mark.parametrize("angle", [1e-7, 1e-3, 0.5, 1.5, 3.0, 3.1415])
def test_emitted_angles_keep_their_digits(angle):
    """A step of known angle: x along one axis, the gradient along another."""
    x = torch.nn.Parameter(torch.zeros(1, 4, dtype=torch.float64, device=DEVICE))
    with torch.no_grad():
        x[0, 0] = 1
    optimizer = Adam([{"params": [x], "rows": "filter"}], lr=1.0, betas=(0.0, 0.0), eps=0.0, without="a", fused=True)
    optimizer.emit()
    gradient = [[1 - math.cos(angle), -math.sin(angle), 0, 0]]
    x.grad = torch.tensor(gradient, dtype=torch.float64, device=DEVICE)
    optimizer.param_groups[0]["lr"] = x.grad.square().mean().sqrt().item()  # the step is then the gradient itself
    optimizer.step()
    assert optimizer.telemetry[x][0, 1].item() == pytest.approx(angle, rel=1e-9)


def test_a_gradient_scaler_is_obeyed_without_looking():
    made = pair([(4, 6), (2, 5000)], without="abc", weight_decay=0.1)
    run(made, 1)
    (reference, one), (fused, two) = made
    for p, q, g in zip(reference, fused, gradients(reference, 3), strict=True):
        p.grad, q.grad = g, g * 1024
    two.grad_scale, two.found_inf = torch.full((1,), 1024.0, device=DEVICE), torch.zeros(1, device=DEVICE)
    one.step()
    two.step()
    assert_alike(made, 3e-6)
    before = [p.detach().clone() for p in fused]
    two.found_inf.fill_(1)
    two.step()
    for p, x in zip(fused, before, strict=True):
        torch.testing.assert_close(p.detach(), x, rtol=0, atol=0)
    assert two.state[fused[0]]["step"].item() == 2


@pytest.mark.parametrize("without", SUBSETS)
def test_collapsed_and_extreme_rows(without):
    """A zero row, a vanishing one, gradients of 1e-30 and 1e30: nothing becomes NaN, the other rows do not notice."""
    values = torch.randn(6, 40, generator=torch.Generator().manual_seed(0))
    scales = torch.tensor([1.0, 0.0, 1e-20, 1.0, 1.0, 1.0]).unsqueeze(1)
    slopes = torch.tensor([1.0, 1.0, 0.0, 1e-30, 1e30, 0.0]).unsqueeze(1)
    x = torch.nn.Parameter((values * scales).to(DEVICE))
    alone = torch.nn.Parameter(values[:1].clone().to(DEVICE))
    optimizer = Adam([{"params": [x, alone], "rows": "filter"}], lr=0.1, weight_decay=0.1, without=without, fused=True)
    for k in range(5):
        g = torch.randn(6, 40, generator=torch.Generator().manual_seed(k)).to(DEVICE)
        x.grad, alone.grad = g * slopes.to(DEVICE), g[:1].clone()
        optimizer.step()
        tensors = [x.detach(), *optimizer.state[x].values()]
        assert all(t.isfinite().all() for t in tensors)
    torch.testing.assert_close(x.detach()[:1], alone.detach(), rtol=1e-6, atol=1e-7)


# Which step is taken ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("rest", ["sgd", "adamw"])
def test_the_first_step_makes_all_that_a_capture_needs(rest):
    """A capture cannot make tables, and users take one step before it."""
    params = parameters([(3, 8), (4,)])
    made = [{"params": params[:1], "rows": "filter"}, {"params": params[1:]}]
    optimizer = Angular(made, lr=0.01, rest=rest, fused=True, capturable=True)
    for p, g in zip(params, gradients(params, 1), strict=True):
        p.grad = g
    optimizer.step()
    kept = optimizer._fused_step
    assert kept is not None
    optimizer.step()
    assert optimizer._fused_step is kept


def test_on_a_cpu_the_default_is_the_reference():
    [x] = [torch.nn.Parameter(torch.randn(3, 5))]
    optimizer = Adam([{"params": [x], "rows": "filter"}], without="abc")
    x.grad = torch.ones_like(x)
    optimizer.step()
    assert optimizer._fused_step is None
    assert not optimizer._step_supports_amp_scaling


def test_the_default_is_fused_where_that_works_and_falls_back_set_by_set(monkeypatch):
    monkeypatch.setattr(decide, "runs_kernels", lambda device: True)
    made = []
    for fused in (False, None):
        params = parameters([(4, 6), (4, 3, 2), (5,)])
        groups = [
            {"params": params[:1], "rows": "filter"},
            {"params": params[1:2], "rows": ("axis", 1)},
            {"params": params[2:]},
        ]
        made.append((params, Adam(groups, lr=0.02, without="abc", fused=fused)))
    run(made, 3)
    assert_alike(made, 2e-5)
    (_, one), (fused, two) = made
    assert (one._fused_step, one._step_supports_amp_scaling) == (None, False)
    assert two._step_supports_amp_scaling
    [plan] = two._fused_step.plans
    assert [param is fused[0] for param in plan.params] == [True]
    assert [rows.params[0] is fused[1] for _, sets in two._fused_step.plain for rows in sets] == [True]


def test_rows_that_are_not_fused_obey_a_scaler_too():
    """Where no row is fused at all, the step still is what the scaler was telemetry."""
    made = pair([(4, 3, 2)], rows=("axis", 1), without="abc")
    run(made, 1)
    two = made[1][1]
    two.grad_scale = torch.full((), 8.0, device=DEVICE)
    for p, q in zip(*(params for params, _ in made), strict=True):
        p.grad, q.grad = torch.ones_like(p), torch.full_like(q, 8.0)
    for _, optimizer in made:
        optimizer.step()
    assert_alike(made, 3e-6)


def test_a_table_that_a_graph_reads_is_left_to_it():
    made = pair([(4, 6)], without="abc")
    run(made, 2)
    [plan] = made[1][1]._fused_step.plans
    table, values = plan.table, plan.table.clone()
    plan.in_graph = True
    run(made, 1, seed=7)
    if plan.table is table:  # the new gradient lies where the old one did
        made[1][1].param_groups[0]["lr"] = made[0][1].param_groups[0]["lr"] = 0.5
        run(made, 1, seed=8)
    assert plan.table is not table
    torch.testing.assert_close(table, values, rtol=0, atol=0)
    assert_alike(made, 3e-6)


def test_what_a_graph_only_promised_to_write_is_written_by_the_next_step():
    made = pair([(4, 6)], without="abc", capturable=True)
    run(made, 1)
    [plan] = made[1][1]._fused_step.plans
    plan.changed = True
    plan._write(capturing=True)
    plan.table.zero_(), plan.items.zero_()  # as a capture leaves them
    plan.in_graph = True
    table = plan.table
    for _, optimizer in made:
        optimizer.step()
    assert plan.table is not table
    assert_alike(made, 3e-6)


# At the ends of the range --------------------------------------------------------------------------------------


@pytest.mark.parametrize("without", ["b", "bc"])
@pytest.mark.parametrize("d", [1, 5])
def test_rows_that_pass_through_the_origin(without, d):
    """They land at the antipode, where 1 + ⟨u,u'⟩ is rounding; the momentum is tangent there, so nothing is left."""
    made = pair([(64, d)], without=without)
    for params, _ in made:
        params[0].data *= 0.01
    for k in range(12):
        for params, optimizer in made:
            (p,) = params
            p.grad = p.detach() * torch.rand(64, 1, generator=torch.Generator().manual_seed(k)).to(DEVICE)
            optimizer.step()
    for params, optimizer in made:
        assert params[0].detach().abs().max() < 0.1
        assert optimizer.state[params[0]]["exp_avg"].abs().max() < 1e-6
    close(made[1][0][0].detach(), made[0][0][0].detach(), 1e-3, "param")


@pytest.mark.filterwarnings("ignore:.*encountered in reduce:RuntimeWarning")  # numpy's, in Triton's interpreter
@pytest.mark.parametrize("bad", [1e18, torch.inf])
@pytest.mark.parametrize("without", ["ab", "ac", "abc"])
def test_a_long_row_whose_gradient_overflows_takes_no_step(without, bad):
    """Finite as it is in every chunk, or not: what the chunks left of the momentum is not taken."""
    made = pair([(2, 6000)], without=without, weight_decay=0.5, decoupled_weight_decay=True)
    for k in range(4):
        for params, optimizer in made:
            params[0].grad = gradients(params, k)[0]
            if k == 2:
                params[0].grad[0] *= bad
            optimizer.step()
    assert_alike(made, 3e-6)


@pytest.mark.parametrize("shape", [(3, 40), (1, 6000)])
@pytest.mark.parametrize("without", ["abc", "bc"])
def test_moments_without_memory_forget_a_spike(without, shape):
    made = pair([shape], without=without)
    for params, optimizer in made:
        optimizer.param_groups[0]["betas"] = (0.0, 0.0)
        for k, size in enumerate((1e6, 1.0)):
            params[0].grad = size * gradients(params, k)[0]
            optimizer.step()
    assert_alike(made, 3e-6)


@pytest.mark.parametrize("without", ["b", "c", "abc"])
def test_what_float16_does_not_hold(without):
    made = pair([(3, 40)], dtype=torch.float16, without=without)
    for k in range(4):
        for params, optimizer in made:
            params[0].grad = (7e3 * gradients(params, k)[0].float()).half()
            optimizer.step()
    assert all(torch.isfinite(value).all() for value in (made[1][0][0], *made[1][1].state[made[1][0][0]].values()))
    assert_alike(made, 2e-3)


def test_a_default_device_is_not_where_the_tables_are():
    made = pair([(3, 40), (2, 6000)], without="abc")
    steps = [[gradients(params, k) for k in range(2)] for params, _ in made]
    torch.set_default_device("meta")
    try:
        for (params, optimizer), of_steps in zip(made, steps, strict=True):
            optimizer.emit()
            for gradients_of_step in of_steps:
                for p, g in zip(params, gradients_of_step, strict=True):
                    p.grad = g
                optimizer.step()
    finally:
        torch.set_default_device(None)
    assert_alike(made, 3e-6)


@pytest.mark.parametrize("without", ["c", "abc"])
def test_parameters_of_a_wrapping_class_get_the_plain_step(without):
    """They have no memory of their own for a kernel to step on; others beside them do."""
    plain, wrapped, beside = (parameters([(3, 40)])[0] for _ in range(3))
    wrapped = torch.nn.Parameter(TwoTensor(wrapped.detach(), wrapped.detach().clone()))
    one = Adam([{"params": [plain], "rows": "filter"}], lr=0.02, without=without, fused=False)
    two = Adam([{"params": [wrapped, beside], "rows": "filter"}], lr=0.02, without=without, fused=True)
    for k in range(3):
        plain.grad = beside.grad = gradients([plain], k)[0]
        wrapped.grad = TwoTensor(plain.grad, plain.grad.clone())
        one.step()
        two.step()
    for found in (wrapped.a, wrapped.b, beside):
        close(found.detach(), plain.detach(), 3e-6, "param")


# Angular ------------------------------------------------------------------------------------------------------------


def pair_of_angles(shapes, *, dtype=torch.float32, rows="filter", **options):
    made = []
    for fused in (False, True):
        params = [torch.nn.Parameter(3 * p.detach()) for p in parameters(shapes, dtype)]
        optimizer = Angular([{"params": params, "rows": rows}], lr=0.02, fused=fused, **options)
        optimizer.emit()
        made.append((params, optimizer))
    return made


ANGLED = [(5, 3, 3, 3), (3, 64), (2, 64, 3, 3), (40, 5), (2, 6000)]


@pytest.mark.parametrize(
    ("direction", "spread", "nesterov", "dtype"),
    [
        ("gradient", "equal", False, torch.float32),
        ("gradient", "equal", True, torch.float64),
        ("gradient", "rms", False, torch.float64),
        ("gradient", "rms", True, torch.float32),
        ("muon", "equal", False, torch.float64),
        ("muon", "rms", True, torch.float64),
    ],
)
def test_angles_equal_the_reference(direction, spread, nesterov, dtype):
    """Rows of tiles and longer ones, telemetry too; rows that idle, or whose gradient is radial or not finite."""
    made = pair_of_angles(ANGLED, dtype=dtype, direction=direction, spread=spread, nesterov=nesterov)
    for k in range(3):
        for params, optimizer in made:
            for p, g in zip(params, gradients(params, 1 + k), strict=True):
                p.grad = g
            params[0].grad[1] = 0
            params[2].grad[1] = params[2].detach()[1]
            for p in (params[1], params[-1]):
                p.grad[0, 3] = torch.nan if k == 1 else 1
                p.grad[1] = 0
            optimizer.step()
    assert_alike(made, 3e-6 if dtype == torch.float32 else 1e-13)
    for p, q in zip(made[0][0], made[1][0], strict=True):
        one, two = made[0][1].telemetry[p], made[1][1].telemetry[q]
        torch.testing.assert_close(two, one, rtol=1e-4 if dtype == torch.float32 else 1e-10, atol=1e-5)
    assert torch.equal(made[1][0][-1].detach()[1], 3 * parameters(ANGLED, dtype)[-1].detach()[1])


@pytest.mark.parametrize("rows", ["tensor", 2, ("axis", 1)])
@pytest.mark.parametrize("direction", ["gradient", "muon"])
def test_angles_of_other_layouts(rows, direction):
    """Several parameters of one shape, too, whose matrices are stacked along Muon's direction."""
    dtype = torch.float64 if direction == "muon" else torch.float32
    shapes = [(4, 2, 5), (2, 3, 3000), (4, 2, 5)]
    made = pair_of_angles(shapes, rows=rows, spread="rms", maximize=True, direction=direction, dtype=dtype)
    run(made, 2)
    assert_alike(made, 3e-6 if direction == "gradient" else 1e-12)


@pytest.mark.parametrize(("dtype", "shapes"), [(torch.float32, [(4, 4608)]), (torch.float16, [(4, 2560), (4, 2560)])])
def test_matrices_of_long_aligned_rows_and_of_half_precision_are_fused(dtype, shapes):
    """To 2 % of the angle: on a GPU, Newton–Schulz in bfloat16 tells apart what rounding made of the same momenta."""
    made = pair_of_angles(shapes, dtype=dtype, direction="muon")
    run(made, 2)
    assert not made[1][1]._fused_step.plain
    for p, q in zip(made[0][0], made[1][0], strict=True):
        apart = (p.detach() - q.detach()).float().norm(dim=1) / p.detach().float().norm(dim=1)
        assert apart.max() < 0.02 * 2 * 0.02


def test_half_precision_angles_are_those_of_the_rounded_weights():
    made = pair_of_angles([(3, 64), (2, 6000)], dtype=torch.float16)
    run(made, 2)
    assert_alike(made, 2e-3)
    for p, q in zip(made[0][0], made[1][0], strict=True):
        torch.testing.assert_close(made[1][1].telemetry[q], made[0][1].telemetry[p], rtol=2e-2, atol=1e-4)


def test_angles_go_on_from_a_state_of_the_plain_step_and_follow_the_rate():
    made = pair_of_angles([(3, 64)], spread="rms")
    run(made, 2)
    made[1][1].load_state_dict(copy.deepcopy(made[0][1].state_dict()) | {})
    with torch.no_grad():
        made[1][0][0].copy_(made[0][0][0])
    made[1][1].param_groups[0]["fused"] = True
    for _, optimizer in made:
        optimizer.param_groups[0]["lr"] = torch.tensor(0.05, device=DEVICE)
    run(made, 2, seed=7)
    assert_alike(made, 3e-6)


def test_other_directions_are_not_fused():
    params = parameters([(3, 64)])
    with pytest.raises(ValueError, match="fused must be None or False for the direction 'adam'"):
        Angular([{"params": params, "rows": "filter"}], direction="adam", fused=True)
    groups = [
        {"params": [p], "rows": "filter", "direction": d}
        for p, d in zip(parameters([(3, 8), (5, 7)]), ("gradient", "adam"), strict=True)
    ]
    optimizer = Angular(groups, lr=0.25)
    optimizer.emit()
    optimizer.param_groups[0]["fused"] = True
    for group in optimizer.param_groups:
        for p, g in zip(group["params"], gradients(group["params"], 3), strict=True):
            p.grad = g
    optimizer.step()
    for told in optimizer.telemetry.values():
        torch.testing.assert_close(told[:, 1], torch.full_like(told[:, 1], 0.25), rtol=1e-5, atol=0)


# Corrected decay ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize("decoupled", [False, True])
def test_corrected_decay_equals_the_reference(decoupled, on_device):
    made = pair(
        [(3, 64), (2, 6000)], without="abc", weight_decay=0.5, decoupled_weight_decay=decoupled, corrected_decay=True
    )
    for rate in (0.02, 0.01, 0.002):
        for _, optimizer in made:
            optimizer.param_groups[0]["lr"] = torch.tensor(rate, device=DEVICE) if on_device else rate
        run(made, 1)
    assert_alike(made, 3e-6)


def test_a_corrected_decay_that_begins_or_ends_is_seen():
    """Where it is all that a group's own update does; a decay of another value needs no other step."""
    made = []
    for fused in (False, True):
        params = parameters([(4, 6), (4, 6)])
        groups = [{"params": [p], "rows": "filter", "without": w} for p, w in zip(params, ("", "abc"), strict=True)]
        made.append((params, Adam(groups, lr=0.1, decoupled_weight_decay=True, corrected_decay=True, fused=fused)))
    steps = []
    for decay in (0.0, 0.0, 1.0, 2.0, 0.0):
        for params, optimizer in made:
            for group in optimizer.param_groups:
                group.update(lr=0.01, weight_decay=decay)
            for p in params:
                p.grad = torch.zeros_like(p)
            optimizer.step()
        steps.append(made[1][1]._fused_step)
        assert_alike(made, 1e-6)
    assert [step is before for before, step in itertools.pairwise(steps)] == [True, False, True, False]
