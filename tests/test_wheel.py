"""The wheel holds what users run, and an environment with nothing but the wheel and its dependencies runs a sweep."""

import json
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Sequence
from pathlib import Path

import pytest
from sweep_process import BUNDLED, grid_flags

ROOT = Path(__file__).parents[1]
PACKAGES = ("orchestrator", "sampler", "tasks")
SOURCES = (*PACKAGES, "tools", "tests", "pyproject.toml", "README.md", "LICENSE", "Makefile")
BUILD = "import sys, setuptools.build_meta as backend; print(backend.build_wheel(sys.argv[1]))"
LIST_MODULES = """
import importlib, json, orchestrator.cli.__main__, sampler, tasks
print(json.dumps({name: importlib.import_module(name).__file__ for name in ("orchestrator", "sampler", "tasks")}))
"""


def run(command: Sequence[str | Path], folder: Path) -> str:
    """Standard output of a command that cannot find the checkout through its directory or PYTHONPATH."""
    hidden = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")
    environment = {name: value for name, value in os.environ.items() if name not in hidden}
    environment |= {"HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": "", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    ended = subprocess.run(list(map(str, command)), cwd=folder, env=environment, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


def copy_project(target: Path) -> None:
    target.mkdir(parents=True)
    for name in SOURCES:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, target / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / name, target)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy of the checkout, which stays free of build files; with the installed setuptools, offline."""
    source, out = tmp_path_factory.mktemp("source") / "copy", tmp_path_factory.mktemp("wheel")
    copy_project(source)
    name = run([sys.executable, "-c", BUILD, out], source).splitlines()[-1]
    return out / name


def test_the_wheel_has_all_files_of_the_packages_and_no_others(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        packed = {name for name in archive.namelist() if ".dist-info/" not in name}
    files = (path for package in PACKAGES for path in (ROOT / package).rglob("*") if path.is_file())
    assert packed == {str(path.relative_to(ROOT)) for path in files if "__pycache__" not in path.parts}


def test_the_wheel_has_no_tools_tests_or_reference_decoder(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        code = {name: archive.read(name).decode() for name in names if name.endswith(".py")}
    assert {name.split("/")[0] for name in names if ".dist-info/" not in name} == set(PACKAGES)
    for name, text in code.items():
        assert "import tools" not in text, name
        assert "from tools" not in text, name
    for word in ("optimizer.step", "reference_generate", "ReferenceModel"):
        assert not [name for name, text in code.items() if word in text], word


@pytest.mark.slow
def test_wheel_and_source_archive_are_reproducible(tmp_path: Path) -> None:
    """Built twice from copies with other paths, dates and permissions."""
    found = []
    for number, mode in enumerate((0o644, 0o664)):
        source = tmp_path / f"copy-{number}" / ("x" * number)
        copy_project(source)
        for path in source.rglob("*"):
            if path.is_file():
                path.chmod(mode)
                os.utime(path, (10**9 + number, 10**9 + number))
        command = ["make", "dist", f"BIN={Path(sys.executable).parent}", "SOURCE_DATE_EPOCH=1700000000"]
        run(command, source)
        found.append({path.name: path.read_bytes() for path in (source / "dist").iterdir()})
    assert {name.partition("-")[2] for name in found[0]} == {"0.1.0.tar.gz", "0.1.0-py3-none-any.whl"}
    assert found[0] == found[1]


@pytest.mark.slow
def test_a_sweep_of_the_installed_wheel(wheel: Path, tmp_path: Path) -> None:
    """In a new virtual environment that sees the dependencies of this one, from an empty directory."""
    environment, empty = tmp_path / "environment", tmp_path / "empty"
    empty.mkdir()
    run([sys.executable, "-m", "venv", environment], empty)
    python, reuse_sweep = environment / "bin" / "python", environment / "bin" / "reuse-sweep"
    run([python, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", wheel], empty)
    (site,) = environment.glob("lib/python*/site-packages")
    # Only the paths: .pth files in these directories, such as that of an editable installation, are not processed.
    dependencies = [path for path in sys.path if Path(path).name in ("site-packages", "dist-packages")]
    (site / "dependencies.pth").write_text("\n".join(dependencies) + "\n", encoding="utf-8")

    modules = json.loads(run([python, "-c", LIST_MODULES], empty))
    assert all(Path(file).is_relative_to(environment) for file in modules.values()), modules
    assert "sweep" in run([reuse_sweep, "--help"], empty)

    flags = [*BUNDLED, *grid_flags("k1,k2_middle", limit=3)]
    flags += ["--actors", "1", "--threads-per-actor", "1", "--no-dashboard", "--name", "installed"]
    run([reuse_sweep, "sweep", *flags, "--out", "results"], empty)
    status = json.loads(run([reuse_sweep, "status", "results/installed", "--json"], empty))
    assert (status["state"], status["documents"]["done"], status["documents"]["missing"]) == ("complete", 6, 0)
    record = json.loads((empty / "results" / "installed" / "sweep.json").read_text(encoding="utf-8"))
    assert [command["code"]["commit"] for command in record["commands"]] == [None], "a checkout would have a commit"
    run([reuse_sweep, "report", "results/installed", "--out", "report"], empty)
    assert "k2_middle" in (empty / "report" / "report.html").read_text(encoding="utf-8")
    submit = ["slurm", "submit", "--dry-run", "--nodes", "1", "--time", "1:00:00", "--", *flags[:6]]
    assert "#SBATCH" in run([reuse_sweep, *submit], empty)
