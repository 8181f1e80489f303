"""Two and three processes with gloo: DDP and FSDP2 give what one process gives."""

import contextlib

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

from steradian import Groups, find_groups, optim, watch

from ranks import network, run, train

STEPS, HALF = range(20), 10
OPTIMIZERS = {
    "Adam abc": lambda groups: optim.Adam(groups, lr=0.02, weight_decay=0.05, without="abc"),
    "Adam bc": lambda groups: optim.Adam(groups, lr=0.02, weight_decay=0.05, without="bc"),
    "Adam a, decoupled": lambda groups: optim.Adam(
        groups, lr=0.02, weight_decay=0.5, without="a", decoupled_weight_decay=True
    ),
    "Adam abc, fused": lambda groups: optim.Adam(groups, lr=0.02, weight_decay=0.05, without="abc", fused=True),
    "SGD bc": lambda groups: optim.SGD(groups, lr=0.05, momentum=0.9, weight_decay=0.05, without="bc"),
    "AdamP": lambda groups: optim.AdamP(groups, lr=0.02),
    "AdamG": lambda groups: optim.AdamG(groups, lr=0.02),
    "Angular": lambda groups: optim.Angular(groups, lr=0.02, spread="rms", nesterov=True),
    "Angular muon": lambda groups: optim.Angular(groups, lr=0.02, direction="muon", spread="rms", rest="adamw"),
    "AdaGradG": lambda groups: optim.AdaGradG.from_sgd(groups, lr=0.05),
}


def groups_of(model, rows="filter"):
    named = dict(model.named_parameters())
    radial = [p for name, p in named.items() if name.endswith(("0.weight", "3.weight"))]
    rest = [p for name, p in named.items() if not name.endswith(("0.weight", "3.weight"))]
    if rows == "joint":  # two filters that a rank may or may not hold together, as one row
        return [{"params": radial, "rows": "tensor", "joint": True}, {"params": rest}]
    return [{"params": radial, "rows": rows}, {"params": rest}]


def whole(model):
    state = {}
    for name, p in model.state_dict().items():
        state[name.removeprefix("module.")] = (p.full_tensor() if hasattr(p, "full_tensor") else p).detach().clone()
    return state


def alone(kind, rows="filter"):
    model = network()
    optimizer = OPTIMIZERS[kind](groups_of(model, rows))
    train(model, optimizer, STEPS)
    return whole(model)


def assert_same(found, expected):
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=1e-12, msg=lambda text, n=name: f"{n}: {text}")


def ddp(rank, ranks, folder, kind):
    model = DistributedDataParallel(network())
    assert list(find_groups(model, torch.randn(4, 2, 4, 4, dtype=torch.float64)).layouts) == ["0.weight", "3.weight"]
    train(model, OPTIMIZERS[kind](groups_of(model)), STEPS, rank=rank, ranks=ranks)
    assert_same(whole(model), alone(kind))


def fsdp(rank, ranks, folder, kind):
    model = network()
    images = torch.randn(2, 2, 4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    groups = find_groups(model, images)
    assert groups.layouts == {"0.weight": "filter", "3.weight": "filter"}
    path = f"{folder}/groups-{rank}.json"
    groups.save(path)
    fully_shard(model)
    with pytest.raises(ValueError, match=r"0\.weight.*before fully_shard.*Groups\.load\(path, model\)"):
        find_groups(model, images)
    assert Groups.load(path, model) == groups.of(model)
    optimizer = OPTIMIZERS[kind](groups.of(model).param_groups())
    train(model, optimizer, STEPS, rank=rank, ranks=ranks)
    assert_same(whole(model), alone(kind))


def save(rank, ranks, folder, kind):
    model = fully_shard(network())
    optimizer = OPTIMIZERS[kind](groups_of(model))
    train(model, optimizer, STEPS[:HALF], rank=rank, ranks=ranks)
    state = {"model": model.state_dict(), "optimizer": get_optimizer_state_dict(model, optimizer)}
    dcp.save(state, checkpoint_id=folder)


def resume(rank, ranks, folder, kind):
    model = fully_shard(network())
    optimizer = OPTIMIZERS[kind](groups_of(model))
    state = {"model": model.state_dict(), "optimizer": get_optimizer_state_dict(model, optimizer)}
    dcp.load(state, checkpoint_id=folder)
    model.load_state_dict(state["model"])
    set_optimizer_state_dict(model, optimizer, state["optimizer"])
    train(model, optimizer, STEPS[HALF:], rank=rank, ranks=ranks)
    assert_same(whole(model), alone(kind))


def crossing(rank, ranks, folder, kind):
    for rows in ("tensor", ("axis", 1), "joint"):
        model = fully_shard(network())
        train(model, OPTIMIZERS[kind](groups_of(model, rows)), STEPS, rank=rank, ranks=ranks)
        assert_same(whole(model), alone(kind, rows))


def sharded_later(rank, ranks, folder, kind):
    """As accelerate does: the sharded parameters are put in the place of those that the optimizer was made for."""
    for rows in ("filter", "tensor"):
        model = network()
        optimizer = OPTIMIZERS[kind](groups_of(model, rows))
        for group, now in zip(optimizer.param_groups, groups_of(fully_shard(model), rows), strict=True):
            group["params"] = now["params"]
        train(model, optimizer, STEPS, rank=rank, ranks=ranks)
        assert_same(whole(model), alone(kind, rows))


def flattened(rank, ranks, folder, kind):
    """What it leaves of parameters are pieces of a line, in which every number would be a row."""
    model = FullyShardedDataParallel(network().float(), use_orig_params=True, device_id=torch.device("cpu"))
    with pytest.raises(ValueError, match="FullyShardedDataParallel made flat"):
        OPTIMIZERS[kind](groups_of(model))
    with pytest.raises(ValueError, match="shard with fully_shard, after the rows are found"):
        find_groups(model, torch.randn(2, 2, 4, 4))
    quiet = contextlib.nullcontext()  # rank 0 speaks for all
    with quiet if rank else pytest.warns(UserWarning, match="nothing to watch: .*flattened by FullySharded"):
        assert not watch(torch.optim.SGD(groups_of(model), lr=0.1)).names


PLAIN = [kind for kind in OPTIMIZERS if not kind.endswith("fused")]
# Fused on a CPU needs Triton's interpreter.
FUSED = [] if torch.cuda.is_available() else [(fsdp, "Adam abc, fused"), (crossing, "Adam abc, fused")]
TWO = [(ddp, "Adam abc"), *((fsdp, kind) for kind in PLAIN), (crossing, "Adam abc"), (crossing, "SGD bc"), *FUSED]
TWO += [(sharded_later, "AdaGradG"), (flattened, "Adam abc")]
TWO += [(crossing, "Angular muon"), (ddp, "Angular muon")]
THREE = [(fsdp, "Adam abc"), (fsdp, "SGD bc"), (fsdp, "Angular muon"), (crossing, "Adam bc")]


def test_two_ranks_and_three_that_go_on_from_their_checkpoint(tmp_path):
    run([*TWO, (save, "Adam abc")], 2, tmp_path / "adam")
    run([*THREE, (resume, "Adam abc")], 3, tmp_path / "adam")
    run([(save, "Angular muon")], 2, tmp_path / "angular")
    run([(resume, "Angular muon")], 3, tmp_path / "angular")
    run([(save, "AdaGradG")], 2, tmp_path / "adagradg")
    run([(resume, "AdaGradG")], 3, tmp_path / "adagradg")
