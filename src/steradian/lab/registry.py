"""What the lab can train, by name: methods, networks, data sets and schedules, the paper's and those of plugins.

A plugin is a Python file that calls the `register_` functions. The hash of its source, and of the modules of the user
that it imports, is part of the key of every training that uses it: an edited optimizer is not taken for the old one.
"""

import ast
import hashlib
import importlib.util
import inspect
import math
import re
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from itertools import accumulate
from pathlib import Path
from types import FunctionType, ModuleType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim import Optimizer

from steradian import optim
from steradian.groups import Groups

if TYPE_CHECKING:
    from steradian.lab.config import Config

__all__ = ["AUGMENT", "DATA", "METHODS", "NETWORKS", "SCHEDULES", "is_foreign", "load_plugin", "plugin_of"]
__all__ += ["register_data", "register_method", "register_network", "register_schedule"]

MakeMethod = Callable[[Groups, "Config"], Optimizer | list[Optimizer]]
METHODS: dict[str, MakeMethod] = {}
NETWORKS: dict[str, Callable[..., nn.Module]] = {}
DATA: dict[str, Callable[[Path | None], Any]] = {}
AUGMENT: dict[str, tuple[int, bool]] = {}
"""By data set, the padding of the random crop, and whether images are mirrored; (4, True) if it is not here."""
SCHEDULES: dict[str, Callable[["Config", int], float]] = {}
_KNOWN: dict[str, dict[str, Any]] = {"method": METHODS, "network": NETWORKS, "data": DATA, "schedule": SCHEDULES}
_sources: dict[tuple[str, str], str] = {}  # hash of the source of what a plugin registered, by kind and name
_files: dict[tuple[str, str], Path] = {}  # the plugin that registered it, by kind and name
_loading: Path | None = None  # a plugin
_FOREIGN = (Path(ast.__file__).parent, Path(__file__).parents[1])  # Python's modules and ours


def register_method(name: str, make: MakeMethod) -> None:
    """Register an optimizer under a name.

    Args:
        name: of the method in commands and tables.
        make: called as make(groups, config), where `groups.param_groups()` are the parameters, with their rows marked,
            and `config.lr`, `config.weight_decay`, `config.momentum`, `config.betas` are the settings; returns an
            optimizer, or a list of optimizers that share the parameters.

    >>> register_method("Plain", lambda groups, config: torch.optim.SGD(groups.param_groups(), config.lr))
    """
    _check_call("method", name, make, "groups", "config")
    _register("method", name, make)


def register_network(name: str, make: Callable[..., nn.Module]) -> None:
    """Register a network, made by make(channels=, classes=, size=) for square images."""
    _register("network", name, make)


def register_data(name: str, load: Callable[[Path | None], Any], *, pad: int = 4, flip: bool = True) -> None:
    """Register a data set: load(root) returns images, labels, test images and test labels.

    Images are uint8 (N, S, S, C) with C = 1 or 3, labels whole numbers from 0. `root` is the folder given by --root.
    Training images are padded by `pad` black pixels, cropped at random and, with `flip`, mirrored.
    """
    _check_call("data", name, load, "root")
    _register("data", name, load)
    AUGMENT[name] = (pad, flip)


def register_schedule(name: str, factor: Callable[["Config", int], float]) -> None:
    """Register a schedule: factor(config, epoch) multiplies the rates in this epoch, counted from 0."""
    _register("schedule", name, factor)


def load_plugin(path: Path) -> None:
    """Run a file that registers methods, networks, data sets or schedules."""
    global _loading
    if not path.is_file() or path.suffix != ".py":
        there = "" if path.exists() else ", which does not exist"
        raise ValueError(f"plugin must be a Python file, got {str(path)!r}{there}")
    _loading = path.resolve()
    try:
        run_file(path)
    except SystemExit as error:  # of a script
        raise ImportError(f"plugin {path} ends the process when it is imported: SystemExit {error}") from error
    finally:
        _loading = None
        for each in [registered for registered, source in _sources.items() if not source]:
            _sources[each] = _hash_of(path, "", {})
    if path.resolve() not in _files.values():
        raise ValueError(f"plugin {path} registers no method, network, data or schedule")


def run_file(path: Path) -> ModuleType:
    """Import a file, as a module with a name that no other has; it can import what is in its folder."""
    if (folder := str(path.absolute().parent)) not in sys.path:
        sys.path.insert(0, folder)
    name = f"file {path}".replace(".", " ")  # with a dot it would be in a package
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None, "every .py file has them"  # noqa: PT018
    module = importlib.util.module_from_spec(spec)
    sys.modules[module.__name__] = module  # where classes look for their module
    spec.loader.exec_module(module)
    return module


def plugin_of(config: "Config") -> str:
    """The hash of the plugins that a training uses, "" if none."""
    used = {"method": config.method, "network": config.model, "data": config.data, "schedule": config.schedule}
    return "-".join(sorted({_sources.get(each, "") for each in used.items()} - {""}))


def _check_call(kind: str, name: str, make: Callable[..., Any], *arguments: str) -> None:
    try:
        inspect.signature(make).bind(*arguments)
    except TypeError as error:
        call = f"{'load' if kind == 'data' else 'make'}({', '.join(arguments)})"
        raise TypeError(f"{kind} {name!r} must be called as {call}: {error}") from None


def _register(kind: str, name: str, make: Callable[..., Any]) -> None:
    function = inspect.unwrap(getattr(make, "func", make))  # of a partial
    function = function if isinstance(function, FunctionType | type) else type(function)
    known = _KNOWN[kind]
    if name in known and (kind, name) not in _sources:
        raise ValueError(f"name must not be that of a {kind} of the lab, {', '.join(known)}; got {name!r}")
    if _loading and (kind, name) in _sources and (other := _files.get((kind, name), _loading)) != _loading:
        raise ValueError(f"the {kind} {name!r} of {_loading} has the name of one of {other}")
    known[name] = make
    if _loading:
        _files[kind, name] = _loading
        _sources[kind, name] = ""  # until the plugin's imports have run
    elif not function.__module__.startswith("steradian.lab."):
        file = _file_of(function)
        _sources[kind, name] = _hash_of(file, _package_of(function), {}) if file else _hash_in_notebook(make)


def _file_of(function: Any) -> Path | None:
    """The file that a function or class is defined in; None in a notebook."""
    with suppress(TypeError, OSError):  # a class of a notebook
        path = Path(inspect.getsourcefile(function) or "")
        return path if path.is_file() else None
    return None


def _package_of(function: Any) -> str:
    """The package whose module defines a function or class; "" for a module itself."""
    return getattr(sys.modules.get(getattr(function, "__module__", "")), "__package__", None) or ""


def is_foreign(file: Path) -> bool:
    """Whether a file is installed, Python's or ours, and not the user's."""
    return bool({"site-packages", "dist-packages"} & {*file.parts}) or any(map(file.is_relative_to, _FOREIGN))


def _hash_in_notebook(make: Any) -> str:
    """The hash of a function of a notebook, and of all that it names there: classes, functions, numbers, modules."""
    found: list[bytes] = []
    waiting, met = [make], dict[int, Any]()
    while waiting:
        each = inspect.unwrap(waiting.pop())
        if id(each) in met:
            continue
        met[id(each)] = each
        file = _file_of(each)
        if isinstance(each, partial):
            waiting += [each.func, *each.args, *each.keywords.values()]
        elif isinstance(each, list | tuple):
            waiting += each
        elif isinstance(each, int | float | str):
            found.append(repr(each).encode())
        elif file is not None:  # a module, or what is imported from one
            if not is_foreign(file):
                found.append(_hash_of(file, _package_of(each), {}).encode())
        elif isinstance(each, type):
            members = {name: value for name, value in vars(each).items() if callable(value) or name[:2] != "__"}
            waiting += [*each.__bases__, *members.values()]
        elif isinstance(each, FunctionType):
            try:
                text = inspect.getsource(each)
            except OSError as error:
                raise ValueError(f"{each.__qualname__} must be in a file or a notebook: it has no source") from error
            found.append(text.encode())
            names = sorted({*re.findall(r"\w+", text)} & each.__globals__.keys())
            cells = [cell.cell_contents for cell in each.__closure__ or ()]
            waiting += [*cells, *(each.__defaults__ or ()), *(each.__globals__[name] for name in names)]
    return hashlib.sha256(b"\0".join(found)).hexdigest()[:12]


def _hash_of(file: Path, package: str, found: dict[Path, bytes]) -> str:
    """The hash of a file and of the user's modules that it imports, directly or through others."""
    found[file] = file.read_bytes()
    for node in ast.walk(ast.parse(found[file])) if file.suffix == ".py" else ():
        module = getattr(node, "module", None)
        start = "." * getattr(node, "level", 0) + (f"{module}." if module else "")
        for each in node.names if isinstance(node, ast.Import | ast.ImportFrom) else ():
            with suppress(ImportError, SyntaxError, ValueError):  # an optional package that is not there
                parts = importlib.util.resolve_name(start + each.name, package).split(".")
                for name in accumulate(parts, "{}.{}".format):
                    spec = importlib.util.find_spec(name)
                    at = Path((spec and spec.origin) or "")  # a namespace has none
                    if is_foreign(at):
                        break
                    if spec and at.is_file() and at not in found:
                        _hash_of(at, spec.parent or "", found)
                    if not (spec and spec.submodule_search_locations):
                        break
    return hashlib.sha256(b"".join(found.values())).hexdigest()[:12]


def _warm(factor: Callable[[float], float]) -> Callable[["Config", int], float]:
    """A schedule of the share of the epochs after the warm-up that are over; in the warm-up the rate rises linearly."""

    def scheduled(config: "Config", epoch: int) -> float:
        if epoch < config.warmup:
            return (epoch + 1) / (config.warmup + 1)
        return factor((epoch - config.warmup) / (config.epochs - config.warmup))

    return scheduled


register_schedule("steps", lambda config, epoch: config.gamma ** sum(epoch >= m for m in config.milestones))
register_schedule("cosine", _warm(lambda passed: 0.5 + 0.5 * math.cos(math.pi * passed)))
register_schedule("linear", _warm(lambda passed: 1 - passed))
register_schedule("constant", _warm(lambda _: 1.0))


# The methods of the paper's experiments. Parameters without rows are trained by plain Adam with the same rate and L2
# (`rest_lr` for AdamG), so that only what happens on the rows differs; with AdaGrad and AdaGradG they get SGD.


def optimizer_of(make: Callable[..., Optimizer], *fields: str, **options: Any) -> MakeMethod:
    """A method: one optimizer of all parameters, with lr, weight_decay and these fields of the configuration."""

    def made(groups: Groups, config: "Config") -> Optimizer:
        given = {name: getattr(config, name) for name in ("weight_decay", *fields)}
        return make(groups.param_groups(), config.lr, **given, **options)

    return made


def split_rows(groups: Groups) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Param groups with rows, and the others."""
    made = groups.param_groups()
    return [g for g in made if g.get("rows") is not None], [g for g in made if g.get("rows") is None]


def _adam_w(groups: Groups, config: "Config") -> Optimizer:
    made = groups.param_groups(decoupled_weight_decay=True, rest={"decoupled_weight_decay": False})
    return optim.Adam(made, config.lr, config.betas, weight_decay=config.weight_decay)


def _adamg_as_released(groups: Groups, config: "Config") -> Optimizer:
    """The condition that selects Adam-G is inverted in the authors' released code, so that filters get plain Adam."""
    made = groups.param_groups(rest={"lr": config.rest_lr or 1e-3})
    return torch.optim.Adam(made, config.lr, config.betas, weight_decay=config.weight_decay)


def _ada_grad(groups: Groups, config: "Config") -> list[Optimizer]:
    """Adam without momentum on the rows."""
    (rows, rest), decay, betas = split_rows(groups), config.weight_decay, (0.0, config.betas[1])
    adam = torch.optim.Adam(rows, config.lr, betas, weight_decay=decay)
    return [adam, torch.optim.SGD(rest, config.rest_lr or config.lr, weight_decay=decay)]


register_method("SGD-M", optimizer_of(torch.optim.SGD, "momentum"))
register_method("Adam", optimizer_of(torch.optim.Adam, "betas"))
register_method("AdamW†", _adam_w)
register_method("AdamG†", lambda groups, c: optimizer_of(optim.AdamG, "betas", rest_lr=c.rest_lr or 1e-3)(groups, c))
for _letters in ("a", "ab", "abc"):
    register_method(f"Adam w/o ({_letters})", optimizer_of(optim.Adam, "betas", without=_letters))
register_method("SGD", optimizer_of(torch.optim.SGD))
register_method("AdaGradG", lambda groups, c: optim.AdaGradG.from_sgd(groups.param_groups(), c.lr, c.weight_decay))
register_method("AdaGrad", _ada_grad)
register_method("AdamG† as released", _adamg_as_released)
PAPERS = tuple(METHODS)
"""The methods of the paper's experiments, whatever else is registered later."""
