"""The layers and the arrows between them: who may import whom, for every Python file of the repository."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parent.parent
TOP = "titanforge"

# Layer → the layers below it that it may import. "root" is what assembles: titanforge/*.py and train.py.
MAY_IMPORT: dict[str, set[str]] = {
    "config": set(),
    "kernels": set(),
    "models": set(),
    "data": set(),
    "parallelisms": set(),
    "optim": {"kernels"},
    "sync": {"kernels"},
    "forge": {"optim", "kernels", "sync"},
    "checkpoint": set(),
    "metrics": set(),
}
# What a layer may import from outside, beside the standard library (None: anything).
OUTSIDE: dict[str, set[str] | None] = {
    "config": {"tomli"},
    "kernels": {"torch", "triton"},
    "parallelisms": {"torch"},
    "models": {"torch"},
    "optim": {"torch"},
    "sync": {"torch"},
    "forge": {"torch"},
    "checkpoint": {"torch", "safetensors"},
    "data": None,
    "metrics": None,
}
BARE_NAMES = {"kernels", "parallelisms"}


def python_files() -> list[Path]:
    """Every Python file that is ours, each once: the folders behind the symlinks are listed at the root."""
    files = [REPOSITORY / "train.py"]
    for folder in ("titanforge", "kernels", "parallelisms", "scripts", "tests"):
        for path in sorted((REPOSITORY / folder).rglob("*.py")):
            relative = path.relative_to(REPOSITORY)
            if not any((REPOSITORY / parent).is_symlink() for parent in relative.parents):
                files.append(path)
    return files


def module_name(path: Path) -> str:
    parts = list(path.relative_to(REPOSITORY).with_suffix("").parts)
    if parts[0] in BARE_NAMES:
        parts.insert(0, TOP)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def layer_of(module: str) -> str | None:
    """The layer of a titanforge module; "root" for what assembles; None for anything outside titanforge."""
    parts = module.split(".")
    if parts[0] == "train":
        return "root"
    if parts[0] != TOP:
        return None
    return parts[1] if len(parts) > 1 and parts[1] in MAY_IMPORT else "root"


def imports(path: Path) -> list[tuple[str, int]]:
    """Absolute module names imported anywhere in a file (also inside functions), with line numbers.

    ``from a import b`` counts as ``a.b`` too, because b may be a module. Imports for type checking alone
    count as well: an arrow drawn for a type is an arrow.
    """
    package = (
        module_name(path).split(".") if path.name == "__init__.py" else module_name(path).split(".")[:-1]
    )
    found: list[tuple[str, int]] = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"), str(path))):
        if isinstance(node, ast.Import):
            found += [(alias.name, node.lineno) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            found += [(f"{module}.{alias.name}", node.lineno) for alias in node.names]
    return found


def wrong_arrows(path: Path) -> list[str]:
    """One line for each import that the layering forbids."""
    relative = path.relative_to(REPOSITORY)
    layer = layer_of(module_name(path))
    wrong = []
    for target, line in imports(path):
        head = target.partition(".")[0]
        if head in BARE_NAMES:
            wrong.append(f"{relative}:{line}: imports {target}: write {TOP}.{target}")
            continue
        if layer is None or layer == "root":
            continue
        target_layer = layer_of(target)
        if target_layer is None:
            allowed = OUTSIDE[layer]
            if allowed is not None and head not in allowed and head not in sys.stdlib_module_names:
                wrong.append(f"{relative}:{line}: {layer} imports {head}, allowed are {sorted(allowed)}")
        elif target_layer != layer and target_layer not in MAY_IMPORT[layer]:
            wrong.append(f"{relative}:{line}: {layer} imports {target} ({target_layer}), against the arrows")
    return wrong


@pytest.mark.parametrize("path", python_files(), ids=lambda path: str(path.relative_to(REPOSITORY)))
def test_arrows_point_down(path):
    assert wrong_arrows(path) == []


def test_every_package_is_a_layer():
    packages = {path.parent.name for path in (REPOSITORY / TOP).glob("*/__init__.py")}
    assert packages == set(MAY_IMPORT) == set(OUTSIDE)


def test_layers_have_no_cycle():
    def reaches(layer: str) -> set[str]:
        return MAY_IMPORT[layer].union(*(reaches(below) for below in MAY_IMPORT[layer]))

    assert all(layer not in reaches(layer) for layer in MAY_IMPORT)


@pytest.mark.parametrize(
    "source, layer, part",
    [
        ("import kernels", "titanforge/optim", "write titanforge.kernels"),
        ("from parallelisms.mesh import ParallelDims", "scripts", "write titanforge.parallelisms.mesh"),
        ("from titanforge.optim import rule", "kernels", "against the arrows"),
        ("def f():\n    import titanforge.config.sections", "titanforge/models/llama3", "against the arrows"),
        ("from titanforge import trainer", "titanforge/optim", "against the arrows"),
        ("from ..sync import ledger", "titanforge/optim", "against the arrows"),
        ("import numpy", "kernels", "allowed are ['torch', 'triton']"),
    ],
)
def test_a_wrong_arrow_is_seen(source, layer, part, tmp_path, monkeypatch):
    monkeypatch.setattr(sys.modules[__name__], "REPOSITORY", tmp_path)
    path = tmp_path / layer / "probe.py"
    path.parent.mkdir(parents=True)
    path.write_text(source)
    (message,) = wrong_arrows(path)
    assert part in message


def test_right_arrows_are_not_seen(tmp_path, monkeypatch):
    monkeypatch.setattr(sys.modules[__name__], "REPOSITORY", tmp_path)
    path = tmp_path / "titanforge" / "forge" / "probe.py"
    path.parent.mkdir(parents=True)
    path.write_text("import math\nimport torch\nfrom titanforge.optim import rule\nfrom . import plan\n")
    assert wrong_arrows(path) == []
    root = tmp_path / "titanforge" / "trainer.py"
    root.write_text("from titanforge.config import JobConfig\nimport wandb\n")
    assert wrong_arrows(root) == []
