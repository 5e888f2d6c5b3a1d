"""What README.md and docs/ name exists: files, folders, configuration keys, Python modules, make targets."""

from __future__ import annotations

import functools
import re
from pathlib import Path

import pytest

from titanforge.config import schema
from titanforge.config.theirs import FOREIGN_KEYS

REPOSITORY = Path(__file__).parent.parent
PAGES = [
    path
    for path in [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").glob("**/*.md"))]
    if path.exists()
]
FOLDERS = ("titanforge", "parallelisms", "kernels", "train_configs", "scripts", "tests", "docs", ".ci")

_CODE = re.compile(r"```.*?```|`[^`\n]+`", re.DOTALL)
_LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
_PATH = re.compile(
    rf"(?<![\w./<-])(?:\./)?((?:{'|'.join(map(re.escape, FOLDERS))})/[\w./*<>-]*|[\w-]+\.(?:py|toml|md))"
)
_MODULE = re.compile(r"-m (titanforge[\w.]*)")
_FLAG = re.compile(r"--([a-z_]+(?:\.[a-z_]+)+)")
_MAKE = re.compile(r"\bmake ([a-z-]+)")
_SECTIONS = {section.partition(".")[0] for section in schema.all_sections()}
_KEY = re.compile(rf"(?<![\w./-])((?:{'|'.join(sorted(_SECTIONS))})(?:\.[a-z][a-z0-9_]*)+)(?![\w/(])")
# What the pages use as examples of a user's own files and of keys.
EXAMPLES = {"my_run.toml", "CONFIG.toml", "FILE.toml", "x.toml", "section.key"}
_SUFFIXES = (".py", ".toml", ".md", ".json", ".jsonl", ".png", ".sh", ".parquet", ".txt")


def code_of(page: Path) -> str:
    """Everything between backquotes but for Python programs (``model.layers`` is no key)."""
    blocks = _CODE.findall(page.read_text(encoding="utf-8"))
    return "\n".join(block for block in blocks if not block.startswith("```python"))


@functools.cache
def file_names() -> set[str]:
    """Names of all our files, for pages that name one without its folder."""
    folders = [REPOSITORY / folder for folder in FOLDERS]
    return {path.name for folder in folders for path in folder.rglob("*")} | {
        p.name for p in REPOSITORY.iterdir()
    }


def missing_paths(text: str) -> list[str]:
    missing = []
    for path in _PATH.findall(text):
        path = path.rstrip(".")
        if "<" in path or ">" in path:
            continue  # a placeholder
        if "*" in path:
            exists = any(REPOSITORY.glob(path.rstrip("/")))
        else:
            exists = (REPOSITORY / path).exists() if "/" in path else path in file_names()
        if not exists and path not in EXAMPLES:
            missing.append(path)
    return missing


def missing_keys(text: str) -> list[str]:
    known = {*schema.all_keys(), *schema.all_sections(), *FOREIGN_KEYS}
    prefixes = {name[: name.rindex(".")] for name in known if "." in name} | known
    named = [*_FLAG.findall(text), *_KEY.findall(text)]
    return [name for name in named if name not in prefixes | EXAMPLES and not name.endswith(_SUFFIXES)]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(REPOSITORY)))
class TestPage:
    def test_paths_exist(self, page):
        assert missing_paths(code_of(page)) == []

    def test_links_lead_somewhere(self, page):
        for target in _LINK.findall(page.read_text(encoding="utf-8")):
            if "://" in target or target.startswith("#"):
                continue
            assert (page.parent / target.partition("#")[0]).exists(), f"{page.name} links to {target}"

    def test_configuration_keys_exist(self, page):
        assert missing_keys(code_of(page)) == []

    def test_modules_exist(self, page):
        for module in _MODULE.findall(code_of(page)):
            path = REPOSITORY / module.replace(".", "/")
            assert path.with_suffix(".py").exists() or (path / "__main__.py").exists(), module

    def test_make_targets_exist(self, page):
        makefile = (REPOSITORY / "Makefile").read_text()
        for target in _MAKE.findall(code_of(page)):
            assert re.search(rf"^{target}:", makefile, re.MULTILINE), f"make {target}"


def test_there_are_pages():
    assert {page.name for page in PAGES} >= {"config.md", "multinode.md"}


def test_what_is_missing_is_seen():
    assert missing_paths("`scripts/nowhere.sh` `train_configs/none.toml` nothing.py") == [
        "scripts/nowhere.sh",
        "train_configs/none.toml",
        "nothing.py",
    ]
    assert missing_paths("`bash scripts/train.sh`, ./train.py, train_configs/*.toml, docs/") == []
    assert missing_keys("`--training.stpes 3` or `optimizer.lrr = 1`") == ["training.stpes", "optimizer.lrr"]
    assert (
        missing_keys("`--training.steps 3`, `[training.dataloader]`, metrics.jsonl, data.num_streams") == []
    )
