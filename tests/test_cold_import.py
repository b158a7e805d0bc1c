"""A fresh process without vLLM, triton and transformers imports the whole reference; registering is cheap."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]

# A module that is None in sys.modules cannot be imported, and find_spec says that it is not there.
BLOCK = "import sys; sys.modules.update(dict.fromkeys(('vllm', 'triton', 'transformers', 'jax')))\n"


def run(code: str) -> str:
    """Standard output of a fresh interpreter, away from the root so that only installed names resolve."""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, cwd=ROOT / "tests", check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def reference_modules() -> list[str]:
    names = []
    for path in sorted((ROOT / "reference").rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        names.append(".".join(["tiers", *(parts[:-1] if parts[-1] == "__init__" else parts)]))
    return names


def test_the_reference_needs_neither_vllm_nor_triton() -> None:
    modules = reference_modules()
    assert "tiers.reference.model" in modules
    assert "tiers.reference.ops.attention" in modules
    output = run(f"{BLOCK}import importlib\nfor name in {modules}:\n    importlib.import_module(name)\nprint('done')")
    assert output.strip() == "done"


def test_the_reference_runs_without_vllm_and_triton() -> None:
    code = (
        "import torch\n"
        "from tiers.reference.testing.tiny import tiny_config, tiny_model\n"
        "print(tuple(tiny_model(tiny_config())(torch.tensor([1, 2, 3])).shape))\n"
    )
    assert run(BLOCK + code).strip() == "(3, 320)"


def test_the_plugin_imports_neither_torch_nor_vllm() -> None:
    # vLLM imports it in every process it starts, whatever model that process is for.
    code = (
        "import sys\n"
        "from tiers.vllm_model import register\n"
        "assert callable(register)\n"
        "print(sorted({name.partition('.')[0] for name in sys.modules} & {'torch', 'vllm', 'transformers', 'triton'}))\n"
    )
    assert run(code).strip() == "[]"
