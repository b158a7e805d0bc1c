"""What a process of an engine sees: the plugin, its metadata, vLLM, the device, and what is registered.

`look` runs inside the process in question and returns plain data; `look_everywhere` starts the processes as vLLM does. They
are separate interpreters, because the plugin may be there in one and hidden in another, and because whatever is broken may
end a process.
"""

import importlib
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from importlib.metadata import Distribution, PackageNotFoundError, distributions, entry_points, version
from pathlib import Path
from typing import Any

from tiers.reference.config import ARCHITECTURE, MODEL_TYPE
from tiers.reference.errors import TiersError
from tiers.vllm_model import compat

GROUP = "vllm.general_plugins"
DISTRIBUTION = "vllm-tiers"
PLUGIN = "tiers"
MODEL = "tiers.vllm_model.model"

# The process that the user started, and those that vLLM starts: the engine core out of it, a worker out of that, and the
# fresh interpreter that imports a model class to learn what it supports.
COMMAND, ENGINE, WORKER, INSPECTION = "command", "engine", "worker", "inspection"
ENGINE_PROCESSES = (ENGINE, WORKER, INSPECTION)


def look_metadata() -> dict[str, Any]:
    """What installed metadata says in this process; imports neither vLLM nor torch."""
    return {
        "python": sys.executable,
        "plugin": {"version": _version(DISTRIBUTION), "path": str(Path(__file__).parent)},
        "distributions": _distributions(),
        "entry_points": [
            {"name": point.name, "value": point.value, "path": _path(getattr(point, "dist", None))}
            for point in entry_points(group=GROUP)
        ],
        "vllm": compat.vllm_version(),
    }


def look(internals: bool = False) -> dict[str, Any]:
    """Everything that this process sees, once it has loaded plugins as vLLM does.

    Args:
        internals: compare vLLM's internals with the recorded ones too.

    Returns:
        docs/doctor.md describes the keys. `errors` has a line for each thing that failed; nothing is raised.
    """
    found = look_metadata()
    errors: list[str] = []
    found["errors"] = errors
    for key, read in (("torch", _torch), ("cuda", _cuda), ("transformers", lambda: _version("transformers"))):
        found[key] = _guarded(read, f"{key} cannot be looked at", errors)
    found["families"] = _guarded(_families, "families cannot be read", errors) or []
    found |= {"triton": {"version": _version("triton"), "used": None}, "registered": None}
    if found["vllm"] is None or found["torch"] is None:
        return found
    if _guarded(lambda: importlib.import_module("vllm.plugins"), "vLLM cannot be imported", errors) is None:
        return found
    errors += _load_plugins()
    found["triton"]["used"] = _guarded(_has_triton, "vLLM's view of triton is not known", errors)
    found["registered"] = _guarded(_registered, "vLLM's registries cannot be read", errors)
    if compat.unsupported_version() is None:
        if not (found["registered"] or {}).get("architectures"):
            # The entry point may be hidden; whether what is behind it works is worth knowing all the same.
            _guarded(compat.register, "registering fails", errors)
        _guarded(lambda: importlib.import_module(MODEL), "the model class cannot be imported", errors)
    if internals:
        from tiers.vllm_model.doctor_internals import compare

        found["internals"] = _guarded(compare, "vLLM's internals cannot be compared", errors)
    return found


def cause(error: BaseException) -> str:
    """The error that is behind an error, as one line with the place where it was raised."""
    while error.__cause__ is not None:
        error = error.__cause__
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith("<")]
    where = f" ({frames[-1].filename}, line {frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {lines[0] if lines else 'no message'}{where}"


def _guarded(read: Callable[[], Any], what: str, errors: list[str]) -> Any:
    """The result, or None and a line among the errors: a broken part must not hide the others."""
    try:
        return read()
    except Exception as error:
        line = cause(error)
        if not any(line in other for other in errors):
            errors.append(f"{what}: {line}")
        return None


def _version(name: str) -> str | None:
    with suppress(PackageNotFoundError):
        return version(name)
    return None


def _path(distribution: Distribution | None) -> str:
    """The folder of a distribution's metadata."""
    if distribution is None:
        return ""
    return str(getattr(distribution, "_path", None) or distribution.locate_file(""))


def _distributions() -> list[dict[str, Any]]:
    """Every distribution of this project on sys.path, in order: Python takes entry points from the first one only."""
    found: dict[str, dict[str, Any]] = {}
    for item in distributions(name=DISTRIBUTION):
        points = [f"{p.name} = {p.value}" for p in item.entry_points if p.group == GROUP]
        path = _path(item)
        found.setdefault(
            str(Path(path).resolve()), {"path": path, "version": item.metadata["Version"], "entry_points": points}
        )
    return list(found.values())


def _torch() -> str:
    import torch

    return torch.__version__


def _has_triton() -> bool:
    from vllm.triton_utils import HAS_TRITON

    return bool(HAS_TRITON)


def _cuda() -> dict[str, Any]:
    """Driver, what torch was built for, and the devices that it can use; `why` says why there are none."""
    import torch

    found: dict[str, Any] = {"built_for": torch.version.cuda, "driver": None, "devices": [], "why": None}
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    with suppress(OSError, subprocess.SubprocessError, IndexError):
        lines = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout.splitlines()
        found["driver"] = lines[0].strip()
    if torch.cuda.is_available():
        found["devices"] = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    elif torch.version.cuda is not None:
        try:
            torch.cuda.init()
        except Exception as error:  # torch raises several kinds
            found["why"] = cause(error)
    return found


def _load_plugins() -> list[str]:
    """Load plugins as vLLM does. vLLM only logs a plugin that cannot be imported, and dies of one that raises."""
    from vllm.plugins import load_general_plugins

    raised = False
    try:
        load_general_plugins()
    except Exception:
        raised = True
    errors = []
    allowed = plugin_names()
    for point in entry_points(group=GROUP):
        if allowed is not None and point.name not in allowed:
            continue
        try:
            function = point.load()
            if raised:
                function()
        except Exception as error:
            what = f"plugin {point.name} ({point.value}, {_path(getattr(point, 'dist', None))}) fails"
            errors.append(f"{what}: {cause(error)}")
    return errors


def plugin_names() -> list[str] | None:
    """VLLM_PLUGINS as vLLM reads it: separated by commas, nothing stripped; None if it is not set."""
    return None if "VLLM_PLUGINS" not in os.environ else os.environ["VLLM_PLUGINS"].split(",")


def _registered() -> dict[str, Any]:
    """What of ours vLLM and transformers know."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    from vllm.model_executor.model_loader import _LOAD_FORMAT_TO_MODEL_LOADER
    from vllm.model_executor.models import ModelRegistry
    from vllm.transformers_utils.config import _CONFIG_FORMAT_TO_CONFIG_PARSER
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    ours = [name for name, entry in ModelRegistry.models.items() if getattr(entry, "module_name", None) == MODEL]
    return {
        "architectures": sorted(ours),
        "model_type": MODEL_TYPE in CONFIG_MAPPING,
        "config_parser": compat.CONFIG_FORMAT in _CONFIG_FORMAT_TO_CONFIG_PARSER,
        "load_format": compat.LOAD_FORMAT in _LOAD_FORMAT_TO_MODEL_LOADER,
        "attention_backend": compat.BACKEND_NAME in AttentionBackendEnum.__members__,
    }


def _families() -> list[dict[str, Any]]:
    """Families and family files of the user, each with its error or None; shipped ones are left out."""
    from tiers.reference.family import VARIABLE, own_families, read_family

    found: list[dict[str, Any]] = []
    for text in (part for part in os.environ.get(VARIABLE, "").split(os.pathsep) if part):
        path = Path(text)
        if not path.exists():
            error = f"{VARIABLE} names {path}, which is not there; expected a family file or a folder of them"
            found.append({"file": str(path), "name": None, "error": error})
            continue
        for file in sorted(path.glob("*.toml")) if path.is_dir() else [path]:
            try:
                found.append({"file": str(file), "name": read_family(file).name, "error": None})
            except TiersError as problem:
                found.append({"file": str(file), "name": None, "error": str(problem)})
    if not any(entry["error"] for entry in found):
        known = {entry["name"] for entry in found}
        try:
            packaged = [family.name for family in own_families() if family.name not in known]
            found += [{"file": "an installed package", "name": name, "error": None} for name in packaged]
        except TiersError as problem:
            found.append({"file": "an installed package", "name": None, "error": str(problem)})
    return found


def look_everywhere(limit: float) -> dict[str, dict[str, Any]]:
    """Start the processes that vLLM would start, at the same time, and let each look.

    Args:
        limit: seconds for all of them together.

    Returns:
        By process; one that brought nothing back has only `errors`, which say how it ended.
    """
    end = time.monotonic() + limit
    with tempfile.TemporaryDirectory(prefix="tiers-doctor-") as name:
        folder = Path(name)
        # As the API server starts its engine core.
        engine = multiprocessing.get_context("spawn").Process(target=_engine, args=(str(folder), end))
        engine.start()
        # As vLLM inspects a model class: -m puts the current folder ahead on sys.path.
        with open(folder / f"{INSPECTION}.log", "wb") as log:
            inspection = subprocess.Popen(
                [sys.executable, "-m", "tiers.vllm_model.doctor_process", str(folder / INSPECTION)],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log,
            )  # fmt: skip
        engine.join(max(0.0, end - time.monotonic()))
        if engine.is_alive():
            engine.kill()
            engine.join()
            # A worker outlives an engine that is killed.
            with suppress(OSError, ValueError):
                os.kill(int((folder / f"{WORKER}.pid").read_text()), signal.SIGKILL)
        try:
            inspected: int | None = inspection.wait(max(0.1, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            inspection.kill()
            inspection.wait()
            inspected = None
        codes = {ENGINE: engine.exitcode, WORKER: None, INSPECTION: inspected}
        with suppress(OSError, ValueError):
            codes[WORKER] = int((folder / f"{WORKER}.code").read_text())
        return {COMMAND: look_metadata()} | {role: _result(folder, role, codes[role]) for role in ENGINE_PROCESSES}


def _result(folder: Path, role: str, code: int | None) -> dict[str, Any]:
    with suppress(OSError, ValueError):
        return json.loads((folder / role).read_text())
    return {"errors": [f"the process ended without an answer: {ended(code, folder / f'{role}.log')}"]}


def ended(code: int | None, log: Path) -> str:
    """How a process ended, with the last line that it wrote."""
    try:
        lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    except OSError:
        lines = []
    if code is None:
        how = "it took too long"
    elif code < 0:
        how = f"signal {signal.Signals(-code).name}" if -code in set(signal.Signals) else f"signal {-code}"
    else:
        how = f"exit code {code}"
    return f"{how}; its last line: {lines[-1]}" if lines else how


def _engine(folder: str, end: float) -> None:
    """The engine core: starts a worker, as vLLM's executor does, and looks."""
    worker = multiprocessing.get_context("spawn").Process(target=_spawned, args=(folder, WORKER), daemon=True)
    worker.start()
    (Path(folder) / f"{WORKER}.pid").write_text(str(worker.pid))
    _spawned(folder, ENGINE)
    worker.join(max(1.0, end - time.monotonic() - 1))
    if worker.is_alive():
        worker.kill()
        return
    # Once it has ended, its number may be another process's.
    (Path(folder) / f"{WORKER}.pid").unlink()
    (Path(folder) / f"{WORKER}.code").write_text(str(worker.exitcode))


def _spawned(folder: str, role: str) -> None:
    log = os.open(str(Path(folder) / f"{role}.log"), os.O_WRONLY | os.O_CREAT, 0o600)
    os.dup2(log, 1)
    os.dup2(log, 2)
    _write(Path(folder) / role, look(internals=role == ENGINE))


def _write(path: Path, found: dict[str, Any]) -> None:
    """Whole or not at all, so that a process that is killed leaves nothing half written."""
    part = path.with_suffix(".part")
    part.write_text(json.dumps(found))
    part.replace(path)


def lacks(registered: dict[str, Any]) -> list[str]:
    """What of ours is not registered, in words."""
    names = {
        "model_type": f"the model type {MODEL_TYPE} of transformers",
        "config_parser": f"the config format {compat.CONFIG_FORMAT}",
        "load_format": f"the load format {compat.LOAD_FORMAT}",
        "attention_backend": f"the attention backend {compat.BACKEND_NAME}",
    }
    missing = [] if ARCHITECTURE in registered["architectures"] else [f"the architecture {ARCHITECTURE}"]
    return missing + [text for key, text in names.items() if not registered[key]]


if __name__ == "__main__":
    _write(Path(sys.argv[1]), look())
