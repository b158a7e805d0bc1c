"""Imports point one way: reference knows nothing of the others, compiled knows reference, vllm_model knows both."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

# Folder -> what no file in it imports.
FORBIDDEN = {
    "reference": ("tiers.compiled", "tiers.vllm_model", "vllm", "triton", "tests", "pytest"),
    "compiled": ("tiers.vllm_model", "vllm", "tests", "pytest"),
    "vllm_model": ("tests", "pytest"),
}

# From the root of a checkout these work by accident and make a second copy of every module.
SECOND_COPIES = ("reference", "compiled", "vllm_model")


def python_files(folder: Path) -> list[Path]:
    """Every Python file of the project below a folder; environments and builds are not the project's."""
    return sorted(
        path
        for path in folder.rglob("*.py")
        if not any(part.startswith(".") or part in ("build", "dist") for part in path.relative_to(ROOT).parts)
    )


def imports(path: Path) -> Iterator[tuple[int, str]]:
    """(line, full module name) of everything that a file imports, at whatever depth it stands."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level:
            # A relative import stays within its folder only if it does not climb out of it.
            yield node.lineno, "." * node.level + (node.module or "")
        elif isinstance(node, ast.ImportFrom):
            # `from tiers import vllm_model` imports tiers.vllm_model.
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)


def is_within(name: str, module: str) -> bool:
    return name == module or name.startswith(f"{module}.")


@pytest.mark.parametrize("folder", FORBIDDEN)
def test_a_tier_imports_no_faster_one(folder: str) -> None:
    files = python_files(ROOT / folder)
    assert files
    wrong = [
        f"{path.relative_to(ROOT)}:{line} imports {name}"
        for path in files
        for line, name in imports(path)
        for module in FORBIDDEN[folder]
        if is_within(name, module)
    ]
    assert not wrong


def test_no_file_imports_a_second_copy() -> None:
    wrong = [
        f"{path.relative_to(ROOT)}:{line} imports {name}; write tiers.{name}"
        for path in python_files(ROOT)
        for line, name in imports(path)
        for module in SECOND_COPIES
        if is_within(name, module)
    ]
    assert not wrong


def test_imports_are_written_in_full() -> None:
    wrong = [
        f"{path.relative_to(ROOT)}:{line} imports {name}"
        for path in python_files(ROOT)
        for line, name in imports(path)
        if name.startswith(".")
    ]
    assert not wrong


def test_the_walk_finds_what_is_forbidden(tmp_path: Path) -> None:
    path = tmp_path / "x.py"
    path.write_text(
        "import a.b, c\nfrom tiers import vllm_model\nfrom vllm.config import X\ndef f():\n    import triton.language as tl\n"
    )
    found = [name for _, name in imports(path)]
    assert found == ["a.b", "c", "tiers.vllm_model", "vllm.config.X", "triton.language"]
