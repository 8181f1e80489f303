"""Every timm architecture through find_groups: rows per family, errors, and agreement with hand labels.

    python benchmarks/timm_survey.py --seconds 560 --workers 14

Runs where timm is installed. Weighs all architectures, leaves those out whose parameters take more than 2 GB, and
inspects the others: the hand-labelled first, then the lightest of every family, then the rest by weight. The file
keeps what is done, and a later run continues from it; what failed is tried again.
"""

import argparse
import json
import os
import statistics
import time
from collections.abc import Iterator
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch

from pool import Pool
from timm_models import LABELS, LIMIT, inspect, weigh

from harness import RESULTS, environment

HEAVY = 2**29
"""Bytes of parameters above which fewer architectures are inspected at a time."""

Records = dict[str, dict[str, Any]]


def setup() -> None:
    import warnings

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")


def families() -> dict[str, str]:
    """Architecture → the module of timm that defines it."""
    import timm

    return {name: module for module in timm.list_modules() for name in timm.list_models(module=module)}


def order(records: Records, family: dict[str, str]) -> Iterator[str]:
    """Labelled architectures, then the lightest of each family, then the second lightest, and so on."""
    yield from (name for names, _ in LABELS.values() for name in names.split() if name in family)
    by_family: dict[str, list[str]] = {}
    for name in sorted(family, key=lambda n: records.get(n, {}).get("bytes", 0)):
        by_family.setdefault(family[name], []).append(name)
    for names in zip_longest(*by_family.values()):
        yield from (name for name in names if name is not None)


class Survey:
    """The records, the file that holds them, and the time that is left."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.out: Path = options.out
        self.records: Records = {}
        for path in filter(Path.exists, [*options.resume, self.out]):
            self.take_over(json.loads(path.read_text())["architectures"])
        self.family = families()
        self.device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
        self.until = time.monotonic() + options.seconds
        self.only: list[str] = options.only
        self.heavy: int = options.heavy
        self.least_bytes, self.most_bytes = options.least * 2**30, options.gigabytes * 2**30
        self.pool = Pool(
            options.workers, setup, preload=["torch", "timm", "steradian", "timm_models"], limit=options.limit
        )
        self._saved = time.monotonic()

    def take_over(self, records: list[dict[str, Any]]) -> None:
        """Keep what is known of an architecture, unless nothing but its weight is new."""
        for record in records:
            name = record["architecture"]
            if "rows" in record or "rows" not in self.records.get(name, {}):
                self.records[name] = record

    def run(self) -> None:
        """Weigh, inspect, and inspect again with a smaller batch what did not fit into the memory."""
        new = [name for name in self.family if not {"bytes", "unbuilt"} & set(self.records.get(name, {}))]
        for (_, (name,)), weight in self.pool.run(((weigh, (name,)) for name in new), until=self.until):
            self.records[name] = {"architecture": name, "family": self.family[name]} | (
                {"unbuilt": weight} if isinstance(weight, str) else weight
            )
            self._progress(f"weighed {len(self.records)} of {len(self.family)}")
        waiting = [name for name in self._open() if not self._starved(name)]
        heavy = [name for name in waiting if self.records[name]["bytes"] > HEAVY]
        self._inspect([name for name in waiting if name not in heavy], batch=4)
        self._inspect(heavy, batch=4, most=self.heavy)
        starved = sorted(filter(self._starved, self._open()), key=lambda name: self.records[name]["bytes"])
        self._inspect(starved, batch=2, most=max(1, self.heavy // 3))
        self.pool.close()
        self.save()

    def _open(self) -> list[str]:
        """What is to be inspected and has not been."""
        return [
            name
            for name in dict.fromkeys(order(self.records, self.family))
            if self.wanted(name) and "rows" not in self.records[name]
        ]

    def _starved(self, name: str) -> bool:
        """Whether its batch did not fit into the memory: it said so, or the system killed it."""
        record = self.records[name]
        return bool(record.get("memory")) or record.get("error", "").endswith("exit code -9")

    def wanted(self, name: str) -> bool:
        """Whether an architecture builds and is light enough."""
        record = self.records.get(name, {})
        chosen = not self.only or any(part in name for part in self.only)
        return chosen and self.least_bytes <= record.get("bytes", LIMIT + 1) <= min(LIMIT, self.most_bytes)

    def _inspect(self, names: list[str], *, batch: int, most: int | None = None) -> None:
        tasks = ((inspect, (name, self.device, batch)) for name in names)
        for done, ((_, (name, *_)), result) in enumerate(self.pool.run(tasks, until=self.until, most=most), 1):
            kept = {
                key: self.records[name][key] for key in ("architecture", "family", "tensors", "parameters", "bytes")
            }
            self.records[name] = kept | ({"error": result} if isinstance(result, str) else result)
            if "error" in self.records[name]:
                print(f"{name}: {self.records[name]['error']}", flush=True)
            self._progress(f"{done} of {len(names)}, {max(0, self.until - time.monotonic()):.0f} s left, {name}")

    def _progress(self, text: str) -> None:
        if time.monotonic() - self._saved > 10:
            print(text, flush=True)
            self.save()
            self._saved = time.monotonic()

    def save(self) -> None:
        """Write the file in one piece."""
        self.out.parent.mkdir(parents=True, exist_ok=True)
        part = Path(f"{self.out}.part")
        records = [self.records[name] for name in sorted(self.records)]
        facts = {"environment": environment(), "timm": _timm_version(), "families": self.counts()}
        lines = ",\n".join(json.dumps(record, ensure_ascii=False) for record in records)
        part.write_text(json.dumps(facts, indent=1)[:-2] + f',\n "architectures": [\n{lines}\n]}}\n')
        os.replace(part, self.out)

    def counts(self) -> dict[str, dict[str, int]]:
        """Per family: architectures, those that did not build, were too large or failed, and what was found."""
        table: dict[str, dict[str, int]] = {}
        for record in self.records.values():
            row = table.setdefault(record["family"], dict.fromkeys(COLUMNS, 0))
            row["architectures"] += 1
            row["unbuilt"] += "unbuilt" in record
            row["too large"] += record.get("bytes", 0) > LIMIT
            row["inspected"] += "rows" in record
            row["errors"] += "error" in record
            for key in ("rows", "radial", "joint", "facts"):
                row[key] += record.get(key, 0)
        return dict(sorted(table.items()))


COLUMNS = ("architectures", "unbuilt", "too large", "inspected", "errors", "rows", "radial", "joint", "facts")


def _timm_version() -> str:
    import timm

    return timm.__version__


def report(survey: Survey) -> bool:
    """Print what there is; whether nothing failed and every label agrees."""
    print(f"{'family':32}" + "".join(f"{column:>14}" for column in COLUMNS))
    for family, row in survey.counts().items():
        print(f"{family:32}" + "".join(f"{row[column]:14}" for column in COLUMNS))
    records = list(survey.records.values())
    done = [record for record in records if "rows" in record]
    failed = [record for record in records if "error" in record]
    left = [record for record in records if not {"rows", "error", "unbuilt"} & set(record) and record["bytes"] <= LIMIT]
    seconds = [record["seconds"] for record in done]
    if seconds:
        print(f"seconds per architecture: median {statistics.median(seconds):.1f}, most {max(seconds):.1f}")
    for record in failed:
        print(f"failed: {record['architecture']}: {record['error']}")
    wrong = [record for record in done if record.get("missed") or record.get("extra")]
    for record in (record for record in done if "labels" in record):
        print(record["labels"], record["architecture"], "missed", record["missed"], "extra", record["extra"])
    print(f"{len(done)} inspected, {len(failed)} failed, {len(left)} left, {len(wrong)} labels disagree")
    return not failed and not wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=560)
    parser.add_argument("--workers", type=int, default=max(1, (os.cpu_count() or 2) - 2))
    parser.add_argument("--heavy", type=int, default=6, help="most workers for those above half a gigabyte")
    parser.add_argument("--limit", type=float, default=120, help="seconds for one architecture")
    parser.add_argument("--device", default="")
    parser.add_argument("--out", type=Path, default=RESULTS / "timm.json")
    parser.add_argument("--resume", type=Path, nargs="*", default=[RESULTS / "timm.json"], help="what is known already")
    parser.add_argument("--gigabytes", type=float, default=2.0, help="most bytes of parameters")
    parser.add_argument("--least", type=float, default=0.0, help="least bytes of parameters, in gigabytes")
    parser.add_argument("--only", nargs="*", default=[], help="parts of names")
    survey = Survey(parser.parse_args())
    survey.run()
    return 0 if report(survey) else 1


if __name__ == "__main__":
    raise SystemExit(main())
