"""The wheel, built here: what is in it, and that it works where nothing but what it asks for is installed."""

import importlib.metadata
import os
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from steradian import __version__

ROOT = Path(__file__).parents[1]
ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}

pytestmark = pytest.mark.slow

TRAINING = """
import torch
from torch import nn
import steradian as st

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(6, 5, bias=False), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 2))
inputs = torch.randn(16, 6)
groups = st.find_groups(model, inputs)
optimizer = st.optim.Angular(groups.param_groups(), lr=0.05)
with st.watch(optimizer, groups, to="runs/a") as watch:
    for _ in range(5):
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        optimizer.step()
print(round(watch.latest()["0.weight"]["angle"]["median"], 4))
st.report(["runs/a"], "page.html")
print(all(getattr(st, name) is not None for name in st.__all__), st.__file__)
"""

USER = """
import torch
import steradian as st
from typing_extensions import assert_type
model = torch.nn.Linear(3, 2)
groups = assert_type(st.find_groups(model, torch.randn(4, 3)), st.Groups)
optimizer = st.optim.Angular(groups.param_groups(), lr={rate})
print(st.watch(optimizer, model, to="runs/a").summary())
"""


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The wheel, made from the source archive as a release is, and the archive."""
    folder = tmp_path_factory.mktemp("dist")
    call(sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, ROOT, env=os.environ)
    return folder / f"steradian-{__version__}-py3-none-any.whl", folder / f"steradian-{__version__}.tar.gz"


@pytest.fixture(scope="module")
def python(built, tmp_path_factory):
    """A new environment with the wheel and its extra "lab".

    What these ask for is linked from the environment of the tests, not downloaded, and nothing else is there: neither
    the source tree nor a package that the wheel does not declare.
    """
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, symlinks=True)
    python = folder / "bin" / "python"
    packages = Path(sysconfig.get_path("purelib", vars={"base": str(folder)}))
    for name in needed(built[0], "lab"):
        distribution = importlib.metadata.distribution(name)
        for part in {file.parts[0] for file in distribution.files} - {"..", "__pycache__"}:
            if not (packages / part).exists():  # some share a folder
                (packages / part).symlink_to(distribution.locate_file(part))
    pip = [sys.executable, "-m", "pip", "--python", python]
    call(*pip, "install", "--no-index", "--find-links", built[0].parent, "steradian[lab]")
    call(*pip, "check")
    return python


def needed(wheel, extra):
    """Names of the distributions that the wheel and its extra ask for, and those that these ask for."""
    with zipfile.ZipFile(wheel) as archive:
        info = zipfile.Path(archive, f"steradian-{__version__}.dist-info/")
        asked = [(line, extra) for line in importlib.metadata.PathDistribution(info).requires]
    found = set()
    while asked:
        line, extra = asked.pop()
        requirement = Requirement(line)
        if requirement.marker and not requirement.marker.evaluate({"extra": extra}):
            continue
        for extra in ("", *requirement.extras):
            if (requirement.name, extra) not in found:
                found.add((requirement.name, extra))
                asked += [(line, extra) for line in importlib.metadata.requires(requirement.name) or ()]
    return {name for name, _ in found}


def call(*command, cwd=None, env=ENVIRONMENT):
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, cwd=cwd, env=env)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout


def test_what_is_in_the_wheel_and_in_the_source_archive(built):
    wheel, archive = built
    package = ROOT / "src" / "steradian"
    source = {
        f"steradian/{path.relative_to(package).as_posix()}"
        for path in package.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert {"steradian/py.typed", "steradian/reporting/assets/sections.toml"} <= source
    about = f"steradian-{__version__}.dist-info"
    with zipfile.ZipFile(wheel) as file:
        names = set(file.namelist())
    assert {name for name in names if not name.startswith(about)} == source
    assert {f"{about}/licenses/LICENSE", f"{about}/entry_points.txt"} <= names
    with tarfile.open(archive) as file:
        names = {name.split("/", 1)[1] for name in file.getnames()}
    others = {"PKG-INFO", "pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md", "CITATION.cff", ".gitignore"}
    assert names == {f"src/{name}" for name in source} | others


def test_the_installed_wheel_trains_and_reports(python, tmp_path):
    angle, names = call(python, "-c", TRAINING, cwd=tmp_path).splitlines()
    assert float(angle) == 0.05
    assert names.startswith(f"True {python.parents[1]}")
    assert "0.weight" in (tmp_path / "page.html").read_text()


def test_the_installed_command_runs_the_demo(python, tmp_path):
    command = python.with_name("steradian")
    assert "inspect" in call(command, "--help", cwd=tmp_path)
    assert "BatchNorm2d" in call(command, "demo", "--epochs", "1", cwd=tmp_path)
    assert "BatchNorm2d" in (tmp_path / "demo" / "index.html").read_text()


def test_results_of_an_installed_package_do_not_name_the_commit_of_the_folder_around_it(python):
    around = python.parents[1]
    git = ["git", "-c", "user.name=a", "-c", "user.email=a", "-C", around]
    call(*git, "init", "--quiet")
    call(*git, "commit", "--quiet", "--allow-empty", "--message", "a")
    code = "import torch, steradian.lab.results as r; print(r.environment(torch.device('cpu'))['commit'] or 'none')"
    assert call(python, "-c", code, env=ENVIRONMENT | {"STERADIAN_COMMIT": ""}) == "none\n"


def test_a_type_checker_reads_the_types_of_the_installed_wheel(python, tmp_path):
    check = [sys.executable, "-m", "mypy", "--strict", f"--python-executable={python}", "user.py"]
    (tmp_path / "user.py").write_text(USER.format(rate=0.01))
    call(*check, cwd=tmp_path)
    (tmp_path / "user.py").write_text(USER.format(rate="'fast'"))
    done = subprocess.run([*map(str, check)], capture_output=True, text=True, cwd=tmp_path, env=ENVIRONMENT)
    assert done.returncode == 1
    assert 'Argument "lr" to "Angular" has incompatible type "str"' in done.stdout
