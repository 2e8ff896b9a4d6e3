"""The packages have every file on disk, and installations of wheel and source archive work."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest
import torch

import inductor_quant
from tests.support.forks import Program

ROOT = Path(__file__).parents[2]
LINK = ROOT / "inductor_quant" / "patterns"
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
SETUPTOOLS = PYPROJECT["tool"]["setuptools"]
NOT_SHIPPED = (".md", ".pyc")


def has_git():
    return shutil.which("git") is not None and (ROOT / ".git").exists()


def folder_of(package):
    """The folder of a package, by pyproject.toml."""
    mapped = SETUPTOOLS["package-dir"]
    name, rest = package, []
    while name not in mapped:
        name, _, last = name.rpartition(".")
        rest.insert(0, last)
    return ROOT.joinpath(mapped[name], *rest)


def test_the_list_of_packages_is_that_of_the_folders_with_an_init():
    found = {
        ".".join(path.parent.relative_to(ROOT).parts)
        for path in (ROOT / "inductor_quant").rglob("__init__.py")
        if LINK not in path.parents
    }
    found |= {
        ".".join(("inductor_quant", *path.parent.relative_to(ROOT).parts))
        for path in (ROOT / "patterns").rglob("__init__.py")
    }
    assert sorted(SETUPTOOLS["packages"]) == sorted(found)


def test_every_package_lies_where_the_mapping_says():
    for package in SETUPTOOLS["packages"]:
        assert (folder_of(package) / "__init__.py").is_file(), package


def test_every_folder_with_a_module_has_an_init():
    for root in (ROOT / "inductor_quant", ROOT / "patterns"):
        for path in root.rglob("*.py"):
            assert (path.parent / "__init__.py").is_file(), path


def test_every_file_that_is_no_module_is_package_data():
    covered = {
        path
        for package, globs in SETUPTOOLS["package-data"].items()
        for pattern in globs
        for path in folder_of(package).glob(pattern)
    }
    data = {
        path
        for root in (ROOT / "inductor_quant", ROOT / "patterns")
        for path in root.rglob("*")
        if path.is_file() and path.suffix not in (".py", *NOT_SHIPPED) and LINK not in path.parents
    }
    assert {str(path.relative_to(ROOT)) for path in data - covered} == set()
    assert any(path.suffix == ".jinja" for path in covered)
    assert any(path.suffix == ".json" for path in covered)
    assert ROOT / "inductor_quant" / "py.typed" in covered


def test_no_glob_of_package_data_is_without_a_file():
    for package, globs in SETUPTOOLS["package-data"].items():
        for pattern in globs:
            assert any(folder_of(package).glob(pattern)), (package, pattern)


# ------------------------------------------------------------------------------------------
# the link


def test_the_linked_folder_is_a_relative_link():
    assert LINK.is_symlink()
    assert os.readlink(LINK) == "../patterns"
    assert LINK.resolve() == ROOT / "patterns"


@pytest.mark.skipif(not has_git(), reason="not a git checkout")
def test_the_link_is_committed_as_a_link():
    listed = subprocess.run(
        ["git", "ls-files", "--stage", "inductor_quant/patterns"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert listed.split()[0] == "120000"


def test_patterns_as_a_package_of_its_own_is_refused():
    done = subprocess.run(
        [sys.executable, "-c", "import patterns"], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode != 0
    assert "ImportError: this package is inductor_quant.patterns" in done.stderr


# ------------------------------------------------------------------------------------------
# the version


def test_the_version_stands_in_one_place():
    version = inductor_quant.__version__
    assert "version" not in PYPROJECT["project"]
    assert PYPROJECT["project"]["dynamic"] == ["version"]
    assert SETUPTOOLS["dynamic"]["version"] == {"attr": "inductor_quant._version.__version__"}
    holders = [
        str(path.relative_to(ROOT))
        for root in (ROOT / "inductor_quant", ROOT / "patterns")
        for path in root.rglob("*.py")
        if LINK not in path.parents
        and re.search(rf"""["']{re.escape(version)}["']""", path.read_text(encoding="utf-8"))
    ]
    assert holders == ["inductor_quant/_version.py"]


# ------------------------------------------------------------------------------------------
# source archive -> wheel -> another folder


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The folder with the source archive and the wheel that was built from it."""
    pytest.importorskip("build", reason="needs the package build, of the test extra")
    source = tmp_path_factory.mktemp("source") / "checkout"
    skip = shutil.ignore_patterns(".*", "__pycache__", "*.egg-info", "build", "dist")
    shutil.copytree(ROOT, source, symlinks=True, ignore=skip)
    out = tmp_path_factory.mktemp("dist")
    done = subprocess.run(
        [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), str(source)],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return out


@pytest.fixture(scope="module")
def wheel(built):
    [path] = built.glob("*.whl")
    return path


def expected_files():
    """Every source file, under the name that it has in an installation."""
    found = set()
    for prefix, root in (
        (Path("inductor_quant"), ROOT / "inductor_quant"),
        (Path("inductor_quant/patterns"), ROOT / "patterns"),
    ):
        for path in root.rglob("*"):
            if path.is_file() and path.suffix not in NOT_SHIPPED and LINK not in path.parents:
                found.add(str(prefix / path.relative_to(root)))
    return found


def test_the_wheel_has_every_file_of_both_folders_and_no_other(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
    assert names == expected_files()
    assert "inductor_quant/patterns/graph_pass.py" in names
    assert "inductor_quant/kernels/scaled_mm/mm/int8.py.jinja" in names
    assert "inductor_quant/py.typed" in names


def test_the_wheel_is_for_any_platform_and_has_the_licence_and_the_entry_point(wheel):
    assert wheel.name == f"inductor_quant-{inductor_quant.__version__}-py3-none-any.whl"
    with zipfile.ZipFile(wheel) as archive:
        info = f"inductor_quant-{inductor_quant.__version__}.dist-info"
        entry_points = archive.read(f"{info}/entry_points.txt").decode()
        names = archive.namelist()
    assert "[torch_dynamo_backends]" in entry_points
    assert f"{info}/licenses/LICENSE" in names


def test_the_source_archive_has_the_linked_folder_as_files(built):
    [path] = built.glob("*.tar.gz")
    with tarfile.open(path) as archive:
        members = {m.name.partition("/")[2]: m for m in archive.getmembers()}
    assert members["patterns/graph_pass.py"].isfile()
    assert members["inductor_quant/kernels/scaled_mm/mm/int8.py.jinja"].isfile()
    assert {"pyproject.toml", "README.md", "LICENSE"} <= members.keys()


# A graph of one extern call: no kernel is generated, so no C++ compiler is needed.
PROGRAM = """
import runpy, sys
from importlib import metadata
from pathlib import Path
import torch

target = Path(sys.argv[1])
[entry] = {
    (entry.name, entry.value)
    for entry in metadata.entry_points(group="torch_dynamo_backends")
    if entry.name == "inductor_quant"
}
assert entry[1] == "inductor_quant.backend:inductor_quant_backend"
assert "inductor_quant" not in sys.modules
x, y = torch.ones(32, 64, dtype=torch.int8), torch.ones(64, 48, dtype=torch.int8)
assert torch.compile(torch._int_mm, backend="inductor_quant")(x, y).eq(64).all()

import inductor_quant
from inductor_quant import kernels, patterns
from inductor_quant.kernels.tuning import cost_model
for module in (inductor_quant, kernels, patterns):
    assert target in Path(module.__file__).parents, module.__file__
assert metadata.version("inductor_quant") == inductor_quant.__version__
assert metadata.distribution("inductor_quant").locate_file("") == target
for kernel in kernels.KERNELS:
    assert kernel.source()
assert cost_model.load("w8a8_mm", 90).configs
assert patterns.graph_pass.source_hash()

for example in sys.argv[2:]:
    runpy.run_path(example, run_name="__main__")

sys.argv[1:] = ["doctor"]
try:
    runpy.run_module("inductor_quant", run_name="__main__")  # python -m inductor_quant doctor
except SystemExit as end:
    assert end.code == (0 if torch.cuda.is_available() else 1), end.code
else:
    raise AssertionError("doctor gives no exit code")
"""


@pytest.mark.parametrize(("kind", "examples"), [("*.whl", ["minimal.py"]), ("*.tar.gz", [])])
def test_an_installation_elsewhere_compiles_by_name_and_doctor_runs(
    kind, examples, built, forks, tmp_path
):
    """Of the wheel and of the source archive. Nothing of the checkout is on the path."""
    [archive] = built.glob(kind)
    target = tmp_path / "target"
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index"]
    pip += ["--no-build-isolation", "--target", str(target), str(archive)]
    subprocess.run(pip, check=True)
    copies = [str(shutil.copy(ROOT / "examples" / name, tmp_path)) for name in examples]
    [last] = forks.run(Program(PROGRAM, (str(target), *copies), str(target)))
    if not torch.cuda.is_available():
        assert "no CUDA device" in last
