"""Every timm architecture through find_groups: rows per family, errors, and agreement with hand labels.

    python benchmarks/timm_survey.py --seconds 240 --workers 8

Runs where timm is installed. Begins with the smallest architecture of every family, then goes on by size until the
time is up; results/timm.json keeps what is done, and a later run continues from it. Models of more than 2 GB are
left out.
"""

import argparse
import json
import multiprocessing
import os
import queue
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

import steradian

from harness import RESULTS, environment

OUT = RESULTS / "timm.json"
LIMIT = 2 * 2**30


def is_weight(name: str, shape: tuple[int, ...]) -> bool:
    return len(shape) == 4 and name.endswith("weight")


# family → (architecture, which parameters are rows, by hand)
LABELS: dict[str, tuple[str, Callable[[str, tuple[int, ...]], bool]]] = {
    # Every convolution is followed by BN; the classifier by nothing.
    "resnet": ("resnet18", is_weight),
    "vgg_bn": ("vgg11_bn", lambda name, shape: is_weight(name, shape) and name.startswith("features")),
    "densenet": ("densenet121", is_weight),
    "regnet": ("regnetx_002", is_weight),
    # The squeeze-and-excite convolutions feed a gate.
    "efficientnet": ("efficientnet_b0", lambda name, shape: is_weight(name, shape) and ".se." not in name),
    # LN over the channels behind the stem and behind every depthwise convolution, each with its bias.
    "convnext": ("convnext_atto", lambda name, shape: name.startswith("stem.0.") or ".conv_dw." in name),
    # Weight standardization makes every convolution's filters rows; the gates have plain ones.
    "nfnet": ("nf_resnet26", is_weight),
    # Pre-norm: what writes to the residual stream is invariant only together, model-wide.
    "vit": ("vit_tiny_patch16_224", lambda name, shape: False),
    "mixer": ("mixer_s32_224", lambda name, shape: False),
    # Swin normalizes its patch embedding by itself.
    "swin": ("swin_tiny_patch4_window7_224", lambda name, shape: name.startswith("patch_embed.proj.")),
}


def inspect(name: str, device: str) -> dict[str, object]:
    import timm

    record: dict[str, object] = {"architecture": name}
    started = time.perf_counter()
    try:
        torch.manual_seed(0)
        model = timm.create_model(name, pretrained=False)
        size = tuple(model.default_cfg["input_size"])
        model = model.to(device)
        groups = steradian.find_groups(model, torch.randn(4, *size, device=device))
        found = set(groups.layouts)
        record.update(
            parameters=sum(p.numel() for p in model.parameters()),
            rows=sum(group.rows for group in groups.groups),
            radial=len(found),
            joint=len(groups.joint),
            facts=len(groups.facts),
            rest=len(groups.rest),
            share=sum(p.numel() for n, p in model.named_parameters() if n in found)
            / sum(p.numel() for p in model.parameters()),
            passes=list(groups.passes),
        )
        for family, (architecture, label) in LABELS.items():
            if architecture == name:
                expected = {n for n, p in model.named_parameters() if label(n, tuple(p.shape))}
                record.update(labels=family, missed=sorted(expected - found), extra=sorted(found - expected))
    except Exception as error:
        record["error"] = f"{type(error).__name__}: {error}"[:300]
    record["seconds"] = round(time.perf_counter() - started, 2)
    return record


def order() -> Iterator[str]:
    """Labelled architectures, then one of each family, then the rest; the names alone tell, nothing is built."""
    import timm

    yield from (architecture for architecture, _ in LABELS.values())
    modules = timm.list_modules()
    by_module = {module: sorted(timm.list_models(module=module), key=len) for module in modules}
    for names in by_module.values():
        yield from names[:1]
    for names in by_module.values():
        yield from names[1:]


def work(tasks: "multiprocessing.Queue[str]", done: "multiprocessing.Queue[dict[str, object]]", device: str) -> None:
    torch.set_num_threads(1)
    while True:
        try:
            name = tasks.get(timeout=1)
        except queue.Empty:
            return
        done.put(inspect(name, device))


def too_large(name: str) -> bool:
    import timm

    try:
        with torch.device("meta"):
            model = timm.create_model(name, pretrained=False)
        return sum(p.numel() * p.element_size() for p in model.parameters()) > LIMIT
    except Exception:
        return False


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=240)
    parser.add_argument("--workers", type=int, default=max(1, (os.cpu_count() or 2) // 2))
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    # What failed is tried again: it may have been the memory that the workers share.
    records = json.loads(OUT.read_text())["architectures"] if OUT.exists() else []
    records = [record for record in records if "error" not in record]
    known = {record["architecture"] for record in records}
    deadline = time.monotonic() + options.seconds
    context = multiprocessing.get_context("spawn")
    tasks, done = context.Queue(), context.Queue()
    names = [name for name in dict.fromkeys(order()) if name not in known]
    workers = [context.Process(target=work, args=(tasks, done, device), daemon=True) for _ in range(options.workers)]
    for worker in workers:
        worker.start()
    given = 0
    while time.monotonic() < deadline and (given < len(names) or given > len(records) - len(known)):
        while given < len(names) and tasks.qsize() < options.workers:
            if not too_large(names[given]):
                tasks.put(names[given])
            given += 1
        try:
            records.append(done.get(timeout=2))
        except queue.Empty:
            if not any(worker.is_alive() for worker in workers):
                break
            continue
        if len(records) % 20 == 0:
            save(records, device)
    for worker in workers:
        worker.terminate()
    save(records, device)
    report(records)


def save(records: list[dict[str, object]], device: str) -> None:
    RESULTS.mkdir(exist_ok=True)
    part = Path(f"{OUT}.part")
    part.write_text(json.dumps({"environment": environment(), "device": device, "architectures": records}, indent=1))
    os.replace(part, OUT)


def report(records: list[dict[str, object]]) -> None:
    failed = [record for record in records if "error" in record]
    print(f"{len(records)} architectures, {len(failed)} errors")
    for record in failed[:20]:
        print(" ", record["architecture"], record["error"])
    for record in records:
        if "labels" in record:
            print(record["labels"], record["architecture"], "missed", record["missed"], "extra", record["extra"])


if __name__ == "__main__":
    main()
