"""Text for language models: bytes of Python files, packed into two files."""

import hashlib
import json
import lzma
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

__all__ = ["Corpus", "build_corpus"]


@dataclass(frozen=True)
class Corpus:
    """Bytes to train on and to validate on, uint8."""

    name: str
    train: Tensor
    val: Tensor
    fingerprint: str

    @classmethod
    def read(cls, folder: Path) -> "Corpus":
        """Read a folder that `build_corpus` wrote, and check its checksums."""
        about, parts = json.loads((folder / "meta.json").read_text()), {}
        for part in ("train", "val"):
            text = lzma.decompress((folder / f"{part}.bin.xz").read_bytes())
            if hashlib.sha256(text).hexdigest() != about["sha256"][part]:
                raise ValueError(f"{folder / part}.bin.xz is damaged: its SHA-256 is not that of meta.json")
            parts[part] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        return cls(about["name"], parts["train"], parts["val"], about["sha256"]["train"][:12])


def build_corpus(out: Path, source: Path | None = None, *, name: str = "python-source", most: int = 64_000_000) -> None:
    """Write the Python files of an environment as one text.

    All `*.py` of 501 to 199,999 bytes, one of each content, in the order of the SHA-1 of their relative path, joined by
    a zero byte. The first 1 % of the files are for validation; of the others the first `most` bytes are for training.

    Args:
        out: folder to write.
        source: folder of the files; None: the packages of this environment.
        name: of the corpus.
        most: bytes to train on.
    """
    source, files = source or Path(sysconfig.get_paths()["purelib"]), dict[bytes, bytes]()
    paths = {path.relative_to(source).as_posix(): path for path in source.rglob("*.py") if path.is_file()}
    for relative in sorted(paths, key=lambda each: hashlib.sha1(each.encode()).digest()):
        if 500 < paths[relative].stat().st_size < 200_000:
            files.setdefault(hashlib.sha256(text := paths[relative].read_bytes()).digest(), text)
    texts, count = list(files.values()), max(1, len(files) // 100)
    if len(texts) < 2:
        raise ValueError(f"source must have at least two Python files of 501 to 199,999 bytes, got {source}")
    parts = {"train": b"\0".join(texts[count:])[:most], "val": b"\0".join(texts[:count])}
    out.mkdir(parents=True, exist_ok=True)
    for part, text in parts.items():
        (out / f"{part}.bin.xz").write_bytes(lzma.compress(text))
    sums = {part: hashlib.sha256(text).hexdigest() for part, text in parts.items()}
    sizes = {part: len(text) for part, text in parts.items()}
    (out / "meta.json").write_text(json.dumps({"name": name, "bytes": sizes, "sha256": sums}, indent=1))
