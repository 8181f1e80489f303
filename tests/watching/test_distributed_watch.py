"""Two and three processes with gloo: what rank 0 records is what one process records."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from steradian import optim, scheme, watch
from steradian.watching.records import read_run

from ranks import network, run, train

STEPS = range(5)


class Plain(torch.optim.Optimizer):
    """x' = x − η∇L(x), and counts its steps."""

    def __init__(self, params):
        super().__init__(params, {"lr": 0.02})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for param in group["params"]:
                self.state[param]["k"] = self.state[param].get("k", 0) + 1
                param.sub_(param.grad, alpha=group["lr"])


OPTIMIZERS = {
    "Plain": Plain,
    "torch's Adam": lambda groups: torch.optim.Adam(groups, lr=0.02, weight_decay=0.05),
    "Adam abc": lambda groups: optim.Adam(groups, lr=0.02, weight_decay=0.05, without="abc"),
}


def groups_of(model, rows):
    named = {name.removeprefix("module."): param for name, param in model.named_parameters()}
    radial = [(name, named.pop(name)) for name in ("0.weight", "3.weight")]
    layout = {"rows": "tensor", "joint": True} if rows == "joint" else {"rows": rows}
    return [{"params": radial, **layout}, {"params": list(named.items())}]


def numbered(watcher):
    return lambda step: watcher.log(number=step)


def alone(kind, rows, **options):
    model = network()
    optimizer = OPTIMIZERS[kind](groups_of(model, rows))
    with watch(optimizer, run="run", **options) as watcher:
        train(model, optimizer, STEPS, after=numbered(watcher))
    return watcher


def assert_same(found, expected, of="statistic"):
    keys = ["step", "group", "quantity", of]
    here, there = (
        {tuple(line[:4]): line[4] for line in table[[*keys, "value"]].itertuples(index=False)}
        for table in (found, expected)
    )
    assert set(here) == set(there)
    for key, value in there.items():
        assert key[2] == "seconds" or here[key] == pytest.approx(value, rel=1e-9, abs=1e-9, nan_ok=True), key


def ddp(rank, ranks, folder):
    for kind in ("torch's Adam", "Adam abc"):
        model = DistributedDataParallel(network())
        optimizer = OPTIMIZERS[kind](groups_of(model, "filter"))
        with watch(optimizer, to=f"{folder}/{kind}") as watcher:
            train(model, optimizer, STEPS, rank=rank, ranks=ranks, after=numbered(watcher))
        assert watcher.error is None
        assert not watcher._flush._logged, "a rank that records nothing keeps nothing"
        if rank == 0:
            assert_same(read_run(f"{folder}/{kind}").table, alone(kind, "filter").records())


def fsdp(rank, ranks, folder):
    layouts = ("filter", "joint") if ranks > 2 else ("filter", "tensor", ("axis", 1), "joint")
    for kind in ("torch's Adam", "Adam abc"):
        for k, rows in enumerate(layouts):
            where = f"{folder}/{kind}-{k}"
            model = fully_shard(network())
            optimizer = OPTIMIZERS[kind](groups_of(model, rows))
            with watch(optimizer, to=where, rows_every=2) as watcher:
                train(model, optimizer, STEPS, rank=rank, ranks=ranks, after=numbered(watcher))
            assert watcher.error is None
            if rank == 0:
                alone(kind, rows, rows_every=2, to=f"{where}-alone")
                run, twin = read_run(where), read_run(f"{where}-alone")
                assert_same(run.table, twin.table)
                assert len(run.rows)
                assert_same(run.rows, twin.rows, "row")


def failing(rank, ranks, folder):
    """Rank 1 stops after two more steps; rank 0 is told so by torch, and what was merged is on disk."""
    model = fully_shard(network())
    optimizer = OPTIMIZERS["Adam abc"](groups_of(model, "filter"))
    kind = ArithmeticError if rank else RuntimeError
    with pytest.raises(kind), watch(optimizer, to=f"{folder}/failing") as watcher:  # noqa: PT012
        train(model, optimizer, range(3), rank=rank, ranks=ranks, after=numbered(watcher))
        watcher.flush()
        train(model, optimizer, range(2), rank=rank, ranks=ranks, after=numbered(watcher))
        if rank:
            dist.destroy_process_group()
            raise ArithmeticError
        train(model, optimizer, STEPS, rank=rank, ranks=ranks, after=numbered(watcher))
    assert not watcher.running
    if rank == 0:
        table = read_run(f"{folder}/failing").table
        there = alone("Adam abc", "filter").records()
        # Every rank has gathered the small parameters, which are rows as a whole.
        spread = {group.name for group in watcher.watched if not group.gathered}
        steps, there = table[table["group"].isin(spread)], there[there["group"].isin(spread)]
        # Rows that another rank had and did not bring are missing; a part of the rows never stands for all of them.
        assert set(steps["step"]) == {0, 1, 2}
        assert_same(steps, there[there["step"] < 3])
        assert set(table[table["quantity"] == "number"]["step"]) >= {0, 1, 2, 3, 4}
        dist.destroy_process_group()


def misread(rank, ranks, folder):
    """A reader that is wrong, or fails, on one rank alone: all ranks go on to record the same quantities."""
    for fails in (False, True):

        @scheme.register(Plain)
        def read(taken, fails=fails):
            late = rank == 1 and taken.state["k"] > 3
            if late and fails:
                raise ArithmeticError
            gradient = taken.gradient()
            return scheme.Step(gradient, torch.ones_like(gradient), taken.setting("lr") * (2 if late else 1))

        model = fully_shard(network())
        optimizer = Plain(groups_of(model, "filter"))
        with watch(optimizer, to=f"{folder}/misread-{fails}", every=1) as watcher:
            train(model, optimizer, STEPS, rank=rank, ranks=ranks, after=numbered(watcher))
        assert watcher.error is None
        if rank == 0:
            table, twin = read_run(f"{folder}/misread-{fails}").table, alone("Plain", "filter", every=1).records()
            for quantity in ("angle", "radius", "update"):
                assert_same(table[table["quantity"] == quantity], twin[twin["quantity"] == quantity])
            rates = table[(table["quantity"] == "effective_lr") & (table["group"] == "0.weight")]
            assert set(rates[rates["value"].isna()]["step"]) >= {3, 4}


def moved(rank, ranks, folder):
    """A sharded parameter has no address of its own: the path follows the part that is here to its new memory."""
    model = fully_shard(network())
    optimizer = OPTIMIZERS["torch's Adam"](groups_of(model, "filter"))
    param, expected = optimizer.param_groups[0]["params"][0], []
    with watch(optimizer, to=f"{folder}/moved", paths={"0.weight": [0]}):
        for step in range(4):
            if step == 2:
                model.float().double()
            train(model, optimizer, range(step, step + 1), rank=rank, ranks=ranks)
            x = param.full_tensor()[0].detach().flatten()
            expected.append((x / x.norm()).float().tolist())
    if rank == 0:
        assert [point.tolist() for point in read_run(f"{folder}/moved").paths["direction"]] == [
            pytest.approx(point, rel=1e-5, abs=1e-6) for point in expected
        ]


def test_two_ranks(tmp_path):
    run([(ddp,), (fsdp,), (misread,), (moved,), (failing,)], 2, tmp_path)


def test_three_ranks_with_fsdp2(tmp_path):
    run([(fsdp,)], 3, tmp_path)
