"""The linked packages import from a bare checkout, an editable install and a wheel alike."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parent.parent
LINKED = ("kernels", "parallelisms")
PROBE = "import titanforge.config, titanforge.kernels, titanforge.parallelisms as p; print(p.__file__)"


def python(*arguments: str, cwd: Path, path: str | None = None) -> str:
    """Run this interpreter and return what it printed; its errors fail the test."""
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    environment |= {"OMP_NUM_THREADS": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    if path is not None:
        environment["PYTHONPATH"] = path
    done = subprocess.run(
        [sys.executable, *arguments], cwd=cwd, env=environment, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, f"{arguments}:\n{done.stdout}\n{done.stderr}"
    return done.stdout.strip()


def clean_copy(folder: Path) -> Path:
    """The tracked files as git would check them out, with what the working tree holds now."""
    names = subprocess.run(
        ["git", "ls-files", "-z"], cwd=REPOSITORY, capture_output=True, check=True, text=True
    ).stdout.split("\0")
    for name in filter(None, names):
        source, target = REPOSITORY / name, folder / name
        if not source.exists() and not source.is_symlink():
            continue  # deleted but not committed yet
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.is_symlink():
            target.symlink_to(os.readlink(source))
        else:
            target.write_bytes(source.read_bytes())
    return folder


@pytest.mark.parametrize("name", LINKED)
def test_links_are_committed_and_relative(name):
    link = REPOSITORY / "titanforge" / name
    assert link.is_symlink() and os.readlink(link) == f"../{name}"
    mode = subprocess.run(
        ["git", "ls-files", "--stage", f"titanforge/{name}"], cwd=REPOSITORY, capture_output=True, text=True
    ).stdout.split()[0]
    assert mode == "120000", "git holds a copy instead of a symlink"


def test_bare_checkout(tmp_path):
    copy = clean_copy(tmp_path / "checkout")
    # -S: no site-packages, so that no installed titanforge can answer in its place; torch comes by path.
    import torch

    packages = str(Path(torch.__file__).parent.parent)
    assert python("-S", "-c", PROBE, cwd=copy, path=packages) == str(
        copy / "titanforge" / "parallelisms" / "__init__.py"
    )


@pytest.mark.slow
def test_editable_install(tmp_path):
    copy = clean_copy(tmp_path / "checkout")
    target = tmp_path / "site"
    install = ["-m", "pip", "install", "--quiet", "--no-build-isolation", "--no-deps", "--no-index"]
    # --ignore-installed: or pip would first uninstall the titanforge of the environment that runs this.
    where = ["--ignore-installed", "--prefix", str(target)]
    python(*install, *where, "--editable", str(copy), cwd=tmp_path)
    (site,) = target.glob("lib/python*/site-packages")
    # .pth files count in site folders alone, hence addsitedir. Run elsewhere: the checkout must not answer.
    probe = f"import site, sys; sys.path.insert(0, {str(site)!r}); site.addsitedir({str(site)!r}); {PROBE}"
    import torch

    packages = str(Path(torch.__file__).parent.parent)
    found = python("-S", "-c", probe, cwd=tmp_path, path=packages)
    assert Path(found).resolve() == copy / "parallelisms" / "__init__.py"


@pytest.mark.slow
def test_wheel(tmp_path):
    copy = clean_copy(tmp_path / "checkout")
    build = ["-m", "pip", "wheel", "--quiet", "--no-build-isolation", "--no-deps", "--no-index"]
    python(*build, "--wheel-dir", str(tmp_path / "dist"), str(copy), cwd=tmp_path)
    (wheel,) = (tmp_path / "dist").glob("titanforge-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        archive.extractall(tmp_path / "site")
    sources = {
        path.relative_to(REPOSITORY).as_posix()
        for path in (REPOSITORY / "titanforge").rglob("*.py")
        if (copy / path.relative_to(REPOSITORY)).exists()
    }
    for name in LINKED:
        sources |= {f"titanforge/{name}/{path.name}" for path in (copy / name).glob("*.py")}
    assert sources <= names, f"missing in the wheel: {sorted(sources - names)}"
    top = {name.partition("/")[0] for name in names}
    assert {name for name in top if not name.endswith(".dist-info")} == {"titanforge"}
    assert any(name.endswith("LICENSE") for name in names)
    import torch

    packages = str(Path(torch.__file__).parent.parent)
    found = python("-S", "-c", PROBE, cwd=tmp_path, path=f"{tmp_path / 'site'}{os.pathsep}{packages}")
    assert found == str(tmp_path / "site" / "titanforge" / "parallelisms" / "__init__.py")


def test_requirements_do_not_force_an_upgrade_of_torch():
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    assert "torch>=2.11" in project["dependencies"], "a lower bound alone: whoever has 2.11 or later keeps it"
    assert project["requires-python"] == ">=3.11" and project["license"] == "BSD-3-Clause"
    assert any(
        requirement.startswith("setuptools") for requirement in project["optional-dependencies"]["dev"]
    )
