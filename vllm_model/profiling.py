"""`tiers profile`: where the time of a model's steps goes, and what they hold in memory. docs/profile.md explains it.

Not called profile: that is a module of the standard library.
"""

import gc
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from tiers.reference.config import ModelConfig
from tiers.reference.errors import ServingError
from tiers.reference.load import open_model
from tiers.vllm_model import bench_kernels, bench_report, compat, profiling_memory, profiling_report
from tiers.vllm_model.bench_environment import environment
from tiers.vllm_model.dispatch import Where, resolve
from tiers.vllm_model.plan import TierPlan
from tiers.vllm_model.profiling_memory import HOW, Around, Memory
from tiers.vllm_model.profiling_ranges import DECODE, PREFILL, Watched, marked, ranges
from tiers.vllm_model.profiling_report import Report

# Tokens of a step at most; more of a prompt is cut up.
STEP = 8192


@dataclass(frozen=True)
class Options:
    """What to profile. What is empty or 0 becomes what suits the device.

    Attributes:
        folder, family: the model.
        plan: tiers of the engine.
        dtype: name of a torch dtype.
        prompt_len, output_len, batch: tokens of a prompt, tokens generated for it, requests at a time.
        nsight: only ranges, for Nsight Systems and Nsight Compute, which cannot be used together with torch's profiler.
    """

    folder: Path
    family: str | None = None
    plan: str = "auto"
    dtype: str = ""
    prompt_len: int = 0
    output_len: int = 0
    batch: int = 0
    nsight: bool = False


DEFAULTS: dict[str, dict[str, Any]] = {
    "cuda": {"dtype": "bfloat16", "prompt_len": 1024, "output_len": 16, "batch": 8},
    "cpu": {"dtype": "float32", "prompt_len": 64, "output_len": 8, "batch": 2},
}


def run(options: Options, out: Path | None) -> int:
    """Profile, print tables, write profile.json and trace.json.gz.

    Args:
        options: what to profile.
        out: folder for the files; None for a new one in the current folder.

    Returns:
        0.

    Raises:
        TiersError: the options, the folder or the plan are not fit, or the engine refused to start.
    """
    if reason := compat.unsupported_version():
        raise ServingError(f"cannot profile inside vLLM: {reason}")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    config = open_model(options.folder, options.family).config
    compat.name_family(options.family)
    options = filled(options, device, config)
    resolve(config, TierPlan.parse(options.plan, config), Where(device, None, options.dtype))
    work = bench_report.make_folder(out, "profile")
    report = Report({"kind": device, **environment(device)}, _shown(options))
    _profile(options, config, device, report, work)
    report.write(work / "profile.json")
    files = "profile.json" if options.nsight else "profile.json, trace.json.gz (chrome://tracing, ui.perfetto.dev)"
    print(f"{profiling_report.text(report)}\n\n{work}: {files}")
    return 0


def filled(options: Options, device: str, config: ModelConfig) -> Options:
    """Put in what was left to the device, within what the model takes.

    Raises:
        ServingError: prompt and output are longer than the model takes, or there is no step of decode.
    """
    longest, defaults = config.max_position_embeddings, DEFAULTS[device]
    output_len = options.output_len or min(defaults["output_len"], max(2, longest // 4))
    prompt_len = options.prompt_len or max(1, min(defaults["prompt_len"], longest - output_len))
    if prompt_len + output_len > longest:
        raise ServingError(
            f"--prompt-len and --output-len come to {prompt_len + output_len} tokens, but max_position_embeddings in "
            f"config.json is {longest}; expected at most that"
        )
    if output_len < 2:
        raise ServingError(
            f"--output-len is {output_len}; expected 2 or more, since the first token belongs to the prefill"
        )
    return replace(
        options, prompt_len=prompt_len, output_len=output_len, dtype=options.dtype or defaults["dtype"],
        batch=options.batch or defaults["batch"],
    )  # fmt: skip


def _shown(options: Options) -> dict[str, Any]:
    found = asdict(options)
    return {"model": str(found.pop("folder")), **found}


# ---- the engine ------------------------------------------------------------------------------------------------------


@contextmanager
def engine_here(options: Options, config: ModelConfig) -> Iterator[Any]:
    """vLLM's LLM with its model in this process, eager, so that hooks run; it ends with the block.

    Not check_engine's: that one copies to the host whatever a layer reads and writes.
    """
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    for name, value in {"VLLM_LOGGING_LEVEL": "WARNING", "HF_HUB_OFFLINE": "1", "VLLM_LOGGING_COLOR": "0"}.items():
        os.environ.setdefault(name, value)
    length = options.prompt_len + options.output_len
    arguments: dict[str, Any] = {
        "model": str(options.folder), "config_format": compat.CONFIG_FORMAT, "dtype": options.dtype, "seed": 0,
        "additional_config": {"tiers": options.plan}, "skip_tokenizer_init": True, "enforce_eager": True,
        "max_model_len": length, "max_num_seqs": options.batch, "enable_prefix_caching": False,
        "max_num_batched_tokens": max(options.batch, min(STEP, options.batch * options.prompt_len)),
        # A step then returns what it has computed itself, so that its time is its own.
        "async_scheduling": False,
    }  # fmt: skip
    if not torch.cuda.is_available():
        per_token = sum(2 * mixer.num_kv_heads * mixer.head_dim for mixer in config.mixers)
        tokens = 128 * (options.batch * -(-length // 128) + 8)
        arguments["kv_cache_memory_bytes"] = tokens * per_token * getattr(torch, options.dtype).itemsize
    with compat.engine(**arguments) as engine:
        yield engine


def itself(model: Any) -> Any:
    """For `apply_model`, which calls in this process and so returns the very model."""
    return model


def drive(engine: Any, name: str, options: Options, vocabulary: int, around: Around) -> None:
    """Run a batch of random prompts step by step.

    Args:
        engine: vLLM's LLM, idle.
        name: of the requests; not used before.
        options: how many and how long.
        vocabulary: ids are below.
        around: wraps each step; gets its phase. A step is of the prefill until every request has its first token.
    """
    from vllm import SamplingParams

    core = engine.llm_engine
    generator = torch.Generator().manual_seed(0)
    sampling = SamplingParams(temperature=0, max_tokens=options.output_len, ignore_eos=True, detokenize=False)
    for i in range(options.batch):
        ids = torch.randint(vocabulary, (options.prompt_len,), generator=generator).tolist()
        core.add_request(f"{name}-{i}", {"prompt_token_ids": ids}, sampling)
    begun: set[str] = set()
    while core.has_unfinished_requests():
        with around(PREFILL if len(begun) < options.batch else DECODE):
            outputs = core.step()
        begun |= {output.request_id for output in outputs if output.outputs[0].token_ids}


# ---- the passes ------------------------------------------------------------------------------------------------------


def _profile(options: Options, config: ModelConfig, device: str, report: Report, work: Path) -> None:
    limits = None
    if not options.nsight:
        _say("what the device does at best")
        # Before the engine, which takes nearly all memory of a GPU.
        limits = bench_kernels.measure_limits(device, getattr(torch, options.dtype))
        report.limits = {
            "limits: read, GB/s": round(limits.read / 1e9, 1), "copy, GB/s": round(limits.copy / 1e9, 1),
            f"{options.dtype} matrix product, TFLOP/s": round(limits.operations / 1e12, 2),
        }  # fmt: skip
        gc.collect()
        if device == "cuda":
            torch.cuda.empty_cache()
    before = profiling_memory.allocated()
    _say("the engine's start")
    with engine_here(options, config) as engine:
        (model,) = engine.apply_model(itself)
        _say("memory")
        # Also what is compiled, tuned and allocated once happens here.
        drive(engine, "warm", options, config.vocab_size, lambda phase: nullcontext())
        report.memory = [*profiling_memory.held(model, before), *_activations(engine, options, config, device)]
        _say("time")
        with ranges(model) as watched:
            if limits is None:
                _only_ranges(engine, options, config, watched)
                report.notes.append("times are in the file of Nsight Systems or Nsight Compute")
                return
            events = _timed(engine, options, config, watched, work / "trace.json.gz")
        found = profiling_report.times(events, device == "cuda")
        profiling_report.fill(report, found, watched, config, getattr(torch, options.dtype).itemsize, limits)


def _activations(engine: Any, options: Options, config: ModelConfig, device: str) -> list[Memory]:
    """The highest of all steps of each phase, in a pass of its own."""
    found = profiling_memory.activations(partial(drive, engine, "memory", options, config.vocab_size))
    return [Memory(f"activations, {phase}", size, HOW[device]) for phase, size in found.items()]


def _timed(engine: Any, options: Options, config: ModelConfig, watched: Watched, trace: Path) -> Sequence[Any]:
    """Run under torch's profiler; its events. Writes the trace."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    # The first range of a profiler is dearer than the others: set up what there is to set up.
    with torch.profiler.profile(activities=activities), marked("tiers"):
        pass
    with torch.profiler.profile(activities=activities) as profiler:
        drive(engine, "time", options, config.vocab_size, _stepping(watched))
    profiler.export_chrome_trace(str(trace))
    return profiler.events() or []


def _only_ranges(engine: Any, options: Options, config: ModelConfig, watched: Watched) -> None:
    """Run between cudaProfilerStart and cudaProfilerStop, for a profiler around this process."""
    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.profiler.start()
    drive(engine, "ranges", options, config.vocab_size, _stepping(watched))
    if cuda:
        torch.cuda.synchronize()
        torch.cuda.profiler.stop()


def _stepping(watched: Watched) -> Around:
    """A range around each step."""

    def around(phase: str) -> AbstractContextManager[Any]:
        watched.phase = phase
        return marked(f"tiers/{phase}")

    return around


def _say(what: str) -> None:
    print("\033[K" * sys.stderr.isatty() + f"tiers: profiling: {what}", file=sys.stderr, flush=True)
