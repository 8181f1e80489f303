"""Commands on data: pack and check."""

from pathlib import Path
from typing import Annotated

import typer

from steradian.cli import app, screen

_HELP = """Data sets: pack them into few files, and check them.

Example: steradian data check digits"""
data = typer.Typer(help=_HELP, no_args_is_help=True)
app.add_typer(data, name="data")

Name = Annotated[str, typer.Argument(help="digits, cifar10, cifar100, svhn, or the name of packed data.")]
Out = Annotated[Path, typer.Option("--out", "-o", help="Folder to write.")]
Root = Annotated[Path | None, typer.Option(help="Folder of the archives, or packed; data/NAME if none.")]


@data.command()
def pack(name: Name, out: Out, root: Root = None) -> None:
    """Write a data set in the packed form: lossless WebP mosaics, labels, and checksums.

    Example: steradian data pack digits --out data/digits
    """
    from steradian.lab.data import load
    from steradian.lab.data import pack as write

    write(load(name, root), out, source=f"{name} from {root or 'its default source'}")
    screen().print(f"The packed data: {out}", soft_wrap=True)


@data.command()
def check(name: Name, root: Root = None) -> None:
    """Read a data set, verify its checksums, and print what it holds.

    Example: steradian data check digits
    """
    from steradian.lab.data import load

    found = load(name, root)
    size = f"{found.train.size} × {found.train.size} × {found.train.channels}"
    counts = f"{len(found.train)} training and {len(found.test)} test images of {size}"
    typer.echo(f"{found.name}: {counts}, {len(found.classes)} classes")


@data.command()
def corpus(
    out: Out,
    source: Annotated[Path | None, typer.Option(help="Folder of Python files; the installed packages if none.")] = None,
) -> None:
    """Write the Python files of an environment as one text, for a language model.

    Example: steradian data corpus --out data/python-source
    """
    from steradian.lab.language import build_corpus

    build_corpus(out, source)
    screen().print(f"The text: {out}", soft_wrap=True)
