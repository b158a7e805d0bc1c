"""`tiers bench`: what the tiers of a model buy, operator by operator and for whole engines. docs/bench.md explains it."""

import signal
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from tiers.reference.checkpoint import open_checkpoint
from tiers.reference.config import ModelConfig, TopK
from tiers.reference.errors import ServingError
from tiers.reference.load import describe, open_model
from tiers.vllm_model import bench_cases, bench_engine, bench_html, bench_kernels, bench_llama, bench_report, compat
from tiers.vllm_model.bench_environment import environment
from tiers.vllm_model.bench_report import EngineResult, Report
from tiers.vllm_model.dispatch import Where, resolve
from tiers.vllm_model.plan import Tier, TierPlan


@dataclass(frozen=True)
class Options:
    """What to bench. What is empty or 0 becomes what suits the device.

    Attributes:
        folder: a model folder; None for the standard shapes, which have no engine.
        family: how to read it, see `tiers.reference.load.describe`.
        kernels, engine: which halves.
        plans: tier plans, an engine each; where all are names of tiers, operators are timed on these only.
        native, transformers: also a Llama of the same shape, by vLLM's own class and by vLLM's transformers backend.
        dummy: the folder has a config.json only; the weights are vLLM's dummy ones.
        dtype: name of a torch dtype.
        batch, context: of attention, requests and tokens of each.
        k, share: of top-k attention, for the standard shapes.
        prompt_len, output_len, requests, concurrency, rounds, starts: of the engines.
    """

    folder: Path | None = None
    family: str | None = None
    kernels: bool = True
    engine: bool = True
    plans: tuple[str, ...] = ("reference", "auto")
    native: bool = False
    transformers: bool = False
    dummy: bool = False
    dtype: str = ""
    batch: tuple[int, ...] = ()
    context: tuple[int, ...] = ()
    k: tuple[int, ...] = ()
    share: tuple[str, ...] = ("head",)
    prompt_len: int = 0
    output_len: int = 0
    requests: int = 0
    concurrency: int = 0
    rounds: int = 3
    starts: int = 1


@dataclass(frozen=True)
class Defaults:
    """Sizes that suit a device; those of the CPU take a minute or two.

    Attributes:
        chunk: query tokens of attention on a prompt.
        gate_tokens, gate_width: of the knowledge gate; the width is for the standard shapes.
        others: as in Options.
    """

    dtype: str
    batch: tuple[int, ...]
    context: tuple[int, ...]
    k: tuple[int, ...]
    prompt_len: int
    output_len: int
    requests: int
    concurrency: int
    chunk: int
    gate_tokens: tuple[int, ...]
    gate_width: int


DEFAULTS = {
    "cuda": Defaults("bfloat16", (1, 8), (8192, 32768), (256,), 1024, 128, 64, 64, 2048, (1, 8, 64, 512, 8192), 4096),
    "cpu": Defaults("float32", (1, 4), (512, 2048), (64,), 64, 16, 4, 4, 128, (1, 8, 64), 1024),
}


# The options that a job of bench_engine.py takes as they are.
TRAFFIC = ("requests", "concurrency", "prompt_len", "output_len", "rounds")


@dataclass(frozen=True)
class Engine:
    """One of the engines that are compared.

    Attributes:
        name: the plan, "native" or "transformers".
        model: what it runs, in words.
        plan: None for a Llama.
        impl: vLLM's --model-impl.
        dummy: its weights are vLLM's dummy ones.
        incomparable: why it does not compute what the reference model does; empty if it does.
    """

    name: str
    model: str
    plan: str | None
    impl: str = "auto"
    dummy: bool = False
    incomparable: str = ""


def run(options: Options, out: Path | None) -> int:
    """Bench, print a table, write bench.json and bench.html.

    Args:
        options: what to bench.
        out: folder for the report; None for a new one in the current folder.

    Returns:
        0, or 1 if some check failed, or 130 after Ctrl-C, when the report is partial.

    Raises:
        TiersError: the options, the folder or a plan are not fit; raised before anything is measured.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    config = None
    if options.folder is not None:
        has_weights = options.engine and not options.dummy
        config = (open_model if has_weights else describe)(options.folder, options.family).config
        compat.name_family(options.family)
    options = _filled(options, DEFAULTS[device], config)
    engines = _engines(options, config, device) if options.engine and config is not None else []
    work = bench_report.make_folder(out, "bench")
    report = Report(environment(device), _shown(options))
    if options.folder is not None:
        report.environment["model"] = str(options.folder)
    try:
        with _terminated_like_interrupted():
            if options.kernels:
                _bench_kernels(options, config, device, report, work)
            if config is not None and options.folder is not None:
                _bench_engines(options, options.folder, config, engines, report, work)
        report.complete = True
    except KeyboardInterrupt:
        print("\ntiers: stopped; what there is so far:", file=sys.stderr)
    finally:
        report.write(work / "bench.json")
        (work / "bench.html").write_text(bench_html.page(report), encoding="utf-8")
    print(f"{bench_report.text(report)}\n\nreport: {work / 'bench.html'}, {work / 'bench.json'}")
    return 130 if not report.complete else int(report.failed)


def _filled(options: Options, defaults: Defaults, config: ModelConfig | None) -> Options:
    """Put in what was left to the device, within what the model takes.

    Raises:
        ServingError: a length is beyond the model's.
    """
    longest = config.max_position_embeddings if config is not None else sys.maxsize
    output_len = options.output_len or min(defaults.output_len, max(1, longest // 4))
    prompt_len = options.prompt_len or max(1, min(defaults.prompt_len, longest - output_len))
    context = options.context or tuple(dict.fromkeys(min(length, longest) for length in defaults.context))
    for flags, length in (("--context", max(context)), ("--prompt-len and --output-len", prompt_len + output_len)):
        if length > longest:
            raise ServingError(
                f"{flags} come to {length} tokens, but max_position_embeddings in config.json is {longest}; expected at most that"
            )
    requests = options.requests or options.concurrency or defaults.requests
    return replace(
        options,
        dtype=options.dtype or defaults.dtype,
        batch=options.batch or defaults.batch,
        context=context,
        k=options.k or defaults.k,
        prompt_len=prompt_len,
        output_len=output_len,
        requests=requests,
        concurrency=options.concurrency or min(defaults.concurrency, requests),
    )


def _shown(options: Options) -> dict[str, Any]:
    """The options that had a part in the run, by their flags, ready for JSON."""
    found = asdict(options)
    del found["kernels"], found["engine"], found["folder"]
    found["tiers"] = found.pop("plans")
    if options.folder is not None:
        del found["k"], found["share"]
    if not options.kernels:
        del found["batch"], found["context"]
    if not options.engine:
        for name in (*TRAFFIC, "starts", "tiers"):
            del found[name]
    return {
        name: list(value) if isinstance(value, tuple) else value
        for name, value in found.items()
        if value is not None and value is not False
    }


@contextmanager
def _terminated_like_interrupted() -> Iterator[None]:
    """A polite kill stops the run as Ctrl-C does."""

    def interrupt(number: int, frame: Any) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


# ---- operators ------------------------------------------------------------------------------------------------------


def _bench_kernels(options: Options, config: ModelConfig | None, device: str, report: Report, work: Path) -> None:
    from tqdm import tqdm

    defaults, dtype = DEFAULTS[device], getattr(torch, options.dtype)
    if config is None:
        mixers = bench_cases.standard_mixers(options.k, options.share)
        gates, width = list(bench_cases.STANDARD_GATES), defaults.gate_width
    else:
        mixers, width = bench_cases.model_mixers(config), config.hidden_size
        gates = list(dict.fromkeys(layer.gate for layer in config.layers if layer.gate is not None))
    groups = bench_cases.attention_groups(mixers, options.batch, options.context, defaults.chunk)
    groups += [[bench_cases.GateCase(gate, width, count)] for gate in gates for count in defaults.gate_tokens]
    with tqdm(total=len(groups), desc="operators", unit="shape", disable=None) as bar:

        def done() -> None:
            bar.update()
            report.write(work / "bench.json")

        limits = bench_kernels.measure_limits(device, dtype)
        report.limits = {
            "read, GB/s": round(limits.read / 1e9, 1),
            "copy (read and written), GB/s": round(limits.copy / 1e9, 1),
            f"{options.dtype} matrix product, TFLOP/s": round(limits.operations / 1e12, 2),
        }
        names = [tier.value for tier in Tier]
        tiers = [Tier(plan) for plan in options.plans] if set(options.plans) <= set(names) else list(Tier)
        bench_kernels.run(groups, tiers, bench_cases.Machine(device, dtype, limits), report, done)


# ---- engines --------------------------------------------------------------------------------------------------------


def _engines(options: Options, config: ModelConfig, device: str) -> list[Engine]:
    """The plans, then a Llama by vLLM's own class and by transformers.

    Raises:
        TiersError: vLLM is not there, a plan does not fit the model, or the model has no Llama of its shape.
    """
    if reason := compat.unsupported_version():
        raise ServingError(f"cannot bench engines: {reason}")
    for plan in options.plans:
        resolve(config, TierPlan.parse(plan, config), Where(device, None, options.dtype))
    engines = [Engine(plan, "the model", plan, dummy=options.dummy) for plan in dict.fromkeys(options.plans)]
    if options.native or options.transformers:
        llama = bench_llama.as_llama(config)
        dummy = options.dummy or bool(llama.weights_differ)
        why = "dummy weights" if options.dummy else llama.weights_differ or llama.function_differs
        model = f"a {llama.name} of the same shape" if dummy else f"the same weights in a {llama.name}"
        if options.native:
            engines.append(Engine("native", model, None, "vllm", dummy, why))
        if options.transformers:
            engines.append(Engine("transformers", model, None, "transformers", dummy, why))
    return engines


def _bench_engines(
    options: Options, folder: Path, config: ModelConfig, engines: list[Engine], report: Report, work: Path
) -> None:
    """Start each engine in turn, as often as asked for; every second time in the opposite order."""
    from tqdm import tqdm

    total = options.starts * len(engines) * options.rounds * options.requests
    with (
        tempfile.TemporaryDirectory(prefix="llama-", dir=work) as scratch,
        tqdm(total=total, unit="request", disable=None) as bar,
    ):
        llama = Path(scratch) / "model"
        if any(engine.plan is None for engine in engines):
            dummy = all(engine.dummy for engine in engines if engine.plan is None)
            bench_llama.write(llama, config, None if dummy else folder, options.family)
        # What the plans said to the prompts of the check.
        said: dict[str, list[dict[str, Any]]] = {}
        for start in range(options.starts):
            for engine in engines if start % 2 == 0 else engines[::-1]:
                bar.set_description(f"engine {engine.name}, start {start + 1}")
                result = EngineResult(engine.name, engine.model, start)
                report.engines.append(result)
                check = _check(options, folder, config, engine, said)
                job = {
                    "engine": _arguments(options, folder if engine.plan is not None else llama, config, engine, check),
                    "check": check,
                    "traffic": {name: getattr(options, name) for name in TRAFFIC} | {"vocab_size": config.vocab_size},
                }
                answer = bench_engine.run(job, work, result, bar.update)
                if answer and engine.plan is not None and result.status == bench_report.OK:
                    said.setdefault(engine.name, answer)
                report.write(work / "bench.json")


def _check(
    options: Options, folder: Path, config: ModelConfig, engine: Engine, said: dict[str, list[dict[str, Any]]]
) -> dict[str, Any]:
    """What the engine is compared with, see bench_engine."""
    patterns = [mixer.pattern for mixer in config.mixers]
    kept = max((p.k + p.sink + p.window for p in patterns if isinstance(p, TopK)), default=0)
    # Long enough that top-k has to choose.
    longest = max(1, min(max(64, 2 * kept), config.max_position_embeddings - bench_engine.CHECK_TOKENS))
    lengths = sorted({1, max(1, longest // 2), longest})
    check: dict[str, Any] = {"lengths": lengths, "vocab_size": config.vocab_size, "dtype": options.dtype}
    other = next((name for name in said if name != engine.name), None)
    if engine.incomparable:
        check["why"] = engine.incomparable
    elif not engine.dummy and _fits(folder):
        check["model"] = str(folder)
    elif other is not None:
        check.update(by=other, said=said[other])
    else:
        check["why"] = (
            f"{'dummy weights' if engine.dummy else 'the reference model is too large'}, and no plan before it"
        )
    return check


def _arguments(
    options: Options, model: Path, config: ModelConfig, engine: Engine, check: dict[str, Any]
) -> dict[str, Any]:
    """Keywords of vLLM's LLM."""
    length = max(options.prompt_len + options.output_len, max(check["lengths"]) + bench_engine.CHECK_TOKENS)
    requests = max(options.concurrency, len(check["lengths"]))
    arguments: dict[str, Any] = {
        "model": str(model),
        "model_impl": engine.impl,
        "load_format": "dummy" if engine.dummy else "auto",
        "dtype": options.dtype,
        "skip_tokenizer_init": True,
        "max_model_len": length,
        "max_num_seqs": requests,
        "enable_prefix_caching": False,
    }
    if engine.plan is not None:
        arguments |= {"additional_config": {"tiers": engine.plan}, "config_format": compat.CONFIG_FORMAT}
    if not torch.cuda.is_available():
        # Compiling takes longer here than what is measured.
        arguments["enforce_eager"] = True
        per_token = sum(2 * mixer.num_kv_heads * mixer.head_dim for mixer in config.mixers)
        tokens = 128 * (requests * -(-length // 128) + 8)
        arguments["kv_cache_memory_bytes"] = tokens * per_token * getattr(torch, options.dtype).itemsize
    return arguments


def _fits(folder: Path) -> bool:
    """Whether the reference model fits into memory in float32."""
    numbers = sum(torch.Size(info.shape).numel() for info in open_checkpoint(folder).infos.values())
    with suppress(MemoryError):
        bench_cases.require(5 * numbers, "cpu")
        return True
    return False
