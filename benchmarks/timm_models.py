"""One timm architecture: what it weighs, an input that suits it, and what find_groups says about it."""

import gc
import math
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

import steradian
from no_torchvision import stand_in

__all__ = ["LABELS", "LIMIT", "inspect", "weigh"]

LIMIT = 2 * 2**30
"""Bytes of parameters above which an architecture is left out."""

Label = Callable[[str, tuple[int, ...]], bool]

stand_in()


def is_weight(name: str, shape: tuple[int, ...]) -> bool:
    return len(shape) == 4 and name.endswith("weight")


# family → (architectures, which parameters are rows, by hand)
LABELS: dict[str, tuple[str, Label]] = {
    # Every convolution is followed by BN; the classifier by nothing.
    "resnet": ("resnet18 resnet34 resnet50 resnet101", is_weight),
    "vgg_bn": (
        "vgg11_bn vgg13_bn vgg16_bn",
        lambda name, shape: is_weight(name, shape) and name.startswith("features"),
    ),
    "densenet": ("densenet121 densenet169 densenet201", is_weight),
    "regnet": ("regnetx_002 regnetx_004 regnetx_008", is_weight),
    # The squeeze-and-excite convolutions feed a gate.
    "efficientnet": (
        "efficientnet_b0 efficientnet_b1 efficientnet_b2",
        lambda name, shape: is_weight(name, shape) and ".se." not in name,
    ),
    # LN over the channels behind the stem and behind every depthwise convolution, each with its bias.
    "convnext": (
        "convnext_atto convnext_femto convnext_tiny",
        lambda name, shape: name.startswith("stem.0.") or ".conv_dw." in name,
    ),
    # Weight standardization makes every convolution's filters rows.
    "nfnet": ("nf_resnet26 nf_resnet50", is_weight),
    # Pre-norm: what writes to the residual stream is invariant only together, model-wide.
    "vit": ("vit_tiny_patch16_224 vit_small_patch32_224 vit_base_patch32_224", lambda name, shape: False),
    "mixer": ("mixer_s32_224 mixer_b32_224", lambda name, shape: False),
    # Swin normalizes its patch embedding by itself.
    "swin": (
        "swin_tiny_patch4_window7_224 swin_small_patch4_window7_224",
        lambda name, shape: name.startswith("patch_embed.proj."),
    ),
}


def build(name: str, device: str, **options: Any) -> nn.Module:
    """The architecture with random weights, made on the device itself where it can be."""
    import timm

    torch.manual_seed(0)
    try:
        with torch.device(device):
            return timm.create_model(name, pretrained=False, **options).to(device)
    except Exception:
        # Some compute on the host while they are built.
        return timm.create_model(name, pretrained=False, **options).to("cpu" if device == "meta" else device)


def weigh(name: str) -> dict[str, Any]:
    """Number and bytes of its parameters, without any memory for them."""
    try:
        parameters = list(build(name, "meta").parameters())
    except Exception as error:
        return {"unbuilt": _tell(error)}
    entries = sum(p.numel() for p in parameters)
    bytes_ = sum(p.numel() * p.element_size() for p in parameters)
    return {"tensors": len(parameters), "parameters": entries, "bytes": bytes_}


def sizes(config: dict[str, Any], patch: int) -> Iterator[tuple[int, bool]]:
    """Image sizes to try, and whether the model must be built for it: the cheapest that says enough, then its own.

    Four positions along each side are left of an image where its statistics are taken last.
    """
    own = int(config["input_size"][-1])
    least = config.get("min_input_size")
    pool = config.get("pool_size")
    if not config.get("fixed_input_size"):
        small = int(least[-1]) if least else 4 * math.ceil(own / pool[0]) if pool else 128
        if small < own:
            yield small, False
    elif own > (small := patch * math.ceil(128 / patch)):
        yield small, True
    yield own, False


def _like(smaller: nn.Module, model: nn.Module) -> bool:
    """Whether only tables of positions depend on the image's size."""
    shapes = {name: p.shape for name, p in model.named_parameters()}
    others = {name: p.shape for name, p in smaller.named_parameters()}
    return all("pos" in name for name, _ in shapes.items() ^ others.items())


def inspect(name: str, device: str, batch: int) -> dict[str, Any]:
    """What find_groups finds; under "error" what it raised."""
    record: dict[str, Any] = {"device": device}
    started = time.perf_counter()
    try:
        _inspect(name, device, batch, record)
    except torch.OutOfMemoryError as error:
        record.update(error=_tell(error), memory=True)
    except Exception as error:
        record["error"] = _tell(error)
    record["seconds"] = round(time.perf_counter() - started, 2)
    gc.collect()
    if device != "cpu":
        record["gigabytes"] = round(torch.cuda.max_memory_allocated() / 2**30, 2)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    return record


def _inspect(name: str, device: str, batch: int, record: dict[str, Any]) -> None:
    model = build(name, device)
    config = model.default_cfg
    patch = getattr(getattr(model, "patch_embed", None), "patch_size", None) or 32
    normalizes_batch = any(isinstance(module, _BatchNorm) for module in model.modules())
    # Two samples are no statistics: behind a global pooling they would be all that is left.
    batch = max(batch if normalizes_batch else batch // 2, 1)
    options = list(sizes(config, patch[0] if isinstance(patch, tuple | list) else patch))
    for size, rebuild in options:
        try:
            if rebuild:
                smaller = build(name, device, img_size=size)
                if not _like(smaller, model):
                    continue
                model = smaller
            shape = (batch, config["input_size"][0], size, size)
            torch.manual_seed(0)
            groups = steradian.find_groups(model, torch.randn(shape, device=device))
        except torch.OutOfMemoryError:
            raise
        except Exception:
            # Not every size suits every model; its own must.
            if size == options[-1][0]:
                raise
            model = build(name, device)
        else:
            record.update(input=shape, **_summary(name, model, groups))
            return


def _summary(name: str, model: nn.Module, groups: steradian.Groups) -> dict[str, Any]:
    found = set(groups.layouts)
    parameters = dict(model.named_parameters())
    record: dict[str, Any] = {
        "rows": sum(group.n_rows for group in groups.groups),
        "radial": len(found),
        "joint": len(groups.joint),
        "facts": len(groups.facts),
        "no effect": len(groups.no_effect),
        "rest": len(groups.rest),
        "share": round(sum(parameters[n].numel() for n in found) / sum(p.numel() for p in parameters.values()), 4),
        "unexplained": sum(group.reason.startswith("no known layer") for group in groups.groups),
        "passes": list(groups.passes),
        "notes": [note[:200] for note in groups.notes],
    }
    for family, (architectures, label) in LABELS.items():
        if name in architectures.split():
            expected = {n for n, p in parameters.items() if label(n, tuple(p.shape))}
            record.update(labels=family, missed=sorted(expected - found), extra=sorted(found - expected))
    return record


def _tell(error: BaseException) -> str:
    text = f"{type(error).__name__}: {error}"
    if error.__cause__ is not None:
        text += f" ← {type(error.__cause__).__name__}: {error.__cause__}"
    return text[:400]
