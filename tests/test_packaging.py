"""setup.cfg, the tree and what is installed agree."""

import configparser
import tomllib
from importlib.metadata import distribution
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TIERS = ("reference", "compiled", "vllm_model")


@pytest.fixture(scope="module")
def setup() -> configparser.ConfigParser:
    parser = configparser.ConfigParser()
    parser.read(ROOT / "setup.cfg", encoding="utf-8")
    return parser


def lines(text: str) -> list[str]:
    return [line.strip() for line in text.splitlines() if line.strip() and not line.strip().startswith("#")]


def pairs(text: str) -> dict[str, str]:
    split = (line.partition("=") for line in lines(text))
    return {key.strip(): value.strip() for key, _, value in split}


def test_every_package_is_listed(setup: configparser.ConfigParser) -> None:
    # An unlisted one works where the project is installed editable and is missing from the wheel.
    found = {
        "tiers." + ".".join(path.parent.relative_to(ROOT).parts)
        for tier in TIERS
        for path in (ROOT / tier).rglob("__init__.py")
    }
    listed = lines(setup["options"]["packages"])
    assert sorted(listed) == sorted(found)
    assert len(listed) == len(set(listed))


def test_every_module_lies_in_a_package() -> None:
    orphans = [
        str(path.relative_to(ROOT))
        for tier in TIERS
        for path in (ROOT / tier).rglob("*.py")
        if not (path.parent / "__init__.py").is_file()
    ]
    assert not orphans


def test_every_tier_is_mapped_and_typed(setup: configparser.ConfigParser) -> None:
    assert pairs(setup["options"]["package_dir"]) == {f"tiers.{tier}": tier for tier in TIERS}
    data = {package: lines(files) for package, files in setup["options.package_data"].items()}
    files = {"reference": ["families/*.toml"], "vllm_model": ["vllm_internals.json"]}
    assert data == {f"tiers.{tier}": ["py.typed", *files.get(tier, [])] for tier in TIERS}
    assert all((ROOT / tier / "py.typed").is_file() for tier in TIERS)


def test_there_is_no_tiers_folder() -> None:
    # It would shadow the namespace package under `python -m pytest`.
    assert not (ROOT / "tiers").exists()


def test_tests_are_no_package() -> None:
    assert not list((ROOT / "tests").rglob("__init__.py"))
    assert not (ROOT / "conftest.py").exists()


def test_the_installed_version_is_that_of_the_tree(setup: configparser.ConfigParser) -> None:
    assert distribution("vllm-tiers").version == setup["metadata"]["version"]


def test_entry_points_are_installed_and_load(setup: configparser.ConfigParser) -> None:
    section = setup["options.entry_points"]
    expected = {(group, name, target) for group in section for name, target in pairs(section[group]).items()}
    installed = distribution("vllm-tiers").entry_points
    assert {(point.group, point.name, point.value) for point in installed} == expected
    assert {group for group, _, _ in expected} == {"console_scripts", "vllm.general_plugins"}
    assert all(callable(point.load()) for point in installed)


def test_pyproject_repeats_nothing() -> None:
    parsed = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert set(parsed) == {"build-system", "tool"}
    assert set(parsed["tool"]) == {"ruff"}


def test_nothing_imports_jax(setup: configparser.ConfigParser) -> None:
    sources = [path for folder in (*TIERS, "tests") for path in (ROOT / folder).rglob("*.py")]
    assert sources
    users = [
        f"{path.relative_to(ROOT)}:{number}"
        for path in sources
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if line.strip().startswith(("import jax", "from jax", "import flax", "from flax"))
    ]
    assert not users
    requirements = setup["options"]["install_requires"] + "".join(setup["options.extras_require"].values())
    assert "jax" not in requirements
