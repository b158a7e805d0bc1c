"""Whether vLLM would serve a folder without this plugin: one section of `tiers inspect`."""

import ast
import difflib
import functools
import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tiers.reference.analysis.families import named_in
from tiers.vllm_model.inspect_folder import Opened


@functools.cache
def vllm_architectures() -> frozenset[str]:
    """Architectures of vLLM's own classes; none without vLLM.

    Read out of the source of its registry: importing that takes longer than all the rest of an inspection.
    """
    try:
        spec = importlib.util.find_spec("vllm")
    except ValueError:  # blocked, as tests do
        spec = None
    if spec is None or spec.origin is None:
        return frozenset()
    path = Path(spec.origin).parent / "model_executor" / "models" / "registry.py"
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"))
    except (OSError, SyntaxError, ValueError):
        return frozenset()
    tables = [
        node.value
        for node in tree.body
        if isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(node.value, ast.Dict)
        for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
        # "_TEXT_GENERATION_MODELS" and its like: architecture to (module, class).
        if isinstance(target, ast.Name) and target.id.endswith("_MODELS") and "PREVIOUSLY" not in target.id
    ]
    return frozenset(
        key.value
        for table in tables
        for key, value in zip(table.keys, table.values, strict=True)
        if isinstance(key, ast.Constant) and isinstance(key.value, str) and isinstance(value, ast.Tuple)
    )


def stock(opened: Opened, strict: bool) -> Any:
    """Whether vLLM would take the folder without this plugin."""
    from tiers.vllm_model.compat import vllm_version

    known = vllm_architectures()
    found: dict[str, Any] = {
        "vllm": vllm_version(),
        "architecture": None,
        "native": None,
        "transformers": None,
        "why": [],
    }
    if not known:
        opened.note("stock", "vLLM is not installed here, so it is not known which architectures it has")
    if not opened.architectures:
        found["why"].append("config.json names no architecture")
        return found
    name = found["architecture"] = opened.architectures[0]
    if known:
        found["native"] = name in known
    if found["native"]:
        found["why"].append(
            "vLLM has a class by this name, which makes embeddings, not text"
            if name.endswith("Model") and not name.endswith("LMHeadModel")
            else "vLLM has a class by this name; whether it computes what this config says is not known here"
        )
        return found
    if known:
        found["why"].append(f"vLLM has no class {name}{_near(name, known)}")
    failures = _transformers_failures(name, opened.raw)
    if failures is None:
        return found
    found["transformers"] = not failures
    found["why"] += failures or [f"transformers has {name}, which vLLM's Transformers backend can run"]
    return found


def _near(name: str, known: frozenset[str]) -> str:
    # What names have in common at their end says nothing.
    stems = {other.removesuffix("ForCausalLM"): other for other in sorted(known)}
    close = difflib.get_close_matches(name.removesuffix("ForCausalLM"), stems, n=1, cutoff=0.75)
    return f"; the nearest is {stems[close[0]]}" if close else ""


def _transformers_failures(name: str, raw: Any) -> list[str] | None:
    """Why vLLM's Transformers backend cannot run an architecture; None if transformers is not installed."""
    try:
        import transformers
        from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES
    except ImportError:
        return None
    failures = []
    auto_map = raw.get("auto_map") if isinstance(raw, Mapping) else None
    if name in dir(transformers):
        # What vLLM's registry asks of the class.
        asked = ("is_backend_compatible", "_can_set_attn_implementation")
        if not any(getattr(getattr(transformers, name), method, bool)() for method in asked):
            failures.append(f"the class {name} of transformers cannot take vLLM's attention")
    else:
        failures.append(f"transformers has no class {name}")
    types = named_in(raw, "model_type")[:1]
    if types and types[0] not in CONFIG_MAPPING_NAMES:
        failures.append(f"transformers has no config class for model_type {types[0]}")
    if auto_map and failures:
        failures.append(
            "auto_map names Python code in the folder, which needs --trust-remote-code; tiers never passes it"
        )
        if isinstance(auto_map, Mapping) and "AutoModel" not in auto_map:
            failures.append("auto_map has no AutoModel, the class without a head that the Transformers backend builds")
    return failures
