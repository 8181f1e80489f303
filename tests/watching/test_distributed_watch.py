"""Two and three processes with gloo: what rank 0 records is what one process records."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from steradian import optim, watch
from steradian.watching.records import read_run

from ranks import network, run, train

STEPS = range(5)
OPTIMIZERS = {
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
    for kind in OPTIMIZERS:
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
    for kind in OPTIMIZERS:
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
    run([(ddp,), (fsdp,), (moved,), (failing,)], 2, tmp_path)


def test_three_ranks_with_fsdp2(tmp_path):
    run([(fsdp,)], 3, tmp_path)
