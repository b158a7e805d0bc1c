"""From what is seen to what is likely wrong and how to find out: docs/doctor.md and `tiers doctor --symptoms` print it."""

import textwrap
from dataclasses import dataclass


@dataclass(frozen=True)
class Symptom:
    """One row.

    Attributes:
        seen: what the user sees.
        causes: the likely ones, the likeliest first.
        checks: a command and what to look for in its output; in the order in which to try them.
    """

    seen: str
    causes: tuple[str, ...]
    checks: tuple[tuple[str, str], ...]


SYMPTOMS = (
    Symptom(
        "vLLM does not know the model: architecture or model type not supported",
        (
            "the plugin is not installed where vLLM runs, or on this node",
            "VLLM_PLUGINS leaves tiers out",
            "older metadata of vllm-tiers hides the entry point",
            "the import of the model failed in another process, whose message scrolled past",
            "an error in a file of TIERS_FAMILIES, so that none of them is registered",
            "no family answers to the name in config.json",
        ),
        (
            ("tiers doctor", "what each process sees, and the error behind"),
            ("tiers inspect DIR", "the family, or the nearest one"),
        ),
    ),
    Symptom(
        "output is NaN, empty, or `!!!!`",
        (
            "float16: the values of a model trained in bfloat16 pass its range of 65504",
            "scores overflow: scale missing or applied twice, softcap missing",
            "a mask that leaves a row without keys, so that its softmax divides by zero",
            "NaN or infinity in the weights",
            "a tier that is wrong on this device",
        ),
        (
            ("tiers serve DIR --dtype bfloat16", "if the output is right with it, the range of float16 was the cause"),
            ("tiers inspect DIR", "dtypes, values of config.json that nothing reads (scale, softcap)"),
            ("tiers doctor", "operators that failed"),
            ("tiers check DIR", "the first layer and operator that differ"),
            ("tiers check DIR --bisect", "what has to go back to the reference, and a plan that works"),
        ),
    ),
    Symptom(
        "fluent but wrong text from the first token on",
        (
            "rows of a fused qkv read in another order than they were written",
            "rotary channels paired as halves instead of alternating, or the reverse; wrong base or scaling",
            "query heads that read the wrong key/value head (head map)",
            "scales of quantised weights applied to other rows or groups than they belong to",
            "multipliers of embedding, residual, attention or logits left out",
            "gate and up of the ffn exchanged",
            "an untied head left at its initial values",
        ),
        (
            ("tiers map DIR --explain", "which tensor fills what, with its layout"),
            ("tiers inspect DIR", "head map, positions, values that nothing reads, tensors without a place"),
            ("tiers check DIR", "if every tier agrees with the reference, the description of the model is wrong"),
        ),
    ),
    Symptom(
        "right in the first token, wrong in those after it",
        (
            "positions of decode steps off by one, or biases that are right in prefill only",
            "keys written to the wrong slot of the cache, or rotated twice",
            "the decode kernel of a tier, which is another one than that of prefill",
        ),
        (
            ("tiers doctor", "operators that failed, and in which batch"),
            ("tiers check DIR", "the first layer and operator that differ"),
            ("tiers check DIR --bisect", "what has to go back to the reference, and a plan that works"),
            ("tiers serve DIR --tiers reference", "if the output is right with it, a faster tier is the cause"),
        ),
    ),
    Symptom(
        "right alone, wrong in a batch or in prompts served in chunks",
        (
            "lengths or offsets of requests exchanged",
            "padding rows that reach the cache or the result",
            "state of one request left over for the next",
            "another order of sums in larger batches: a rounding, not a fault, where log-probabilities stay near",
        ),
        (
            ("tiers doctor", "batches of several requests and padding rows, on every tier"),
            ("tiers check DIR", "the first layer and operator that differ, beside the errors of rounding"),
            (
                "tiers serve DIR --enforce-eager",
                "if the output is right with it, padding inside CUDA graphs is the cause",
            ),
        ),
    ),
    Symptom(
        "wrong after a hit in the prefix cache, right the first time",
        (
            "keys and values misplaced in the cache: another page size or layout than the kernel assumes",
            "blocks that are written after they are shared",
            "positions counted from the first token that is not cached",
        ),
        (
            ("tiers serve DIR --no-enable-prefix-caching", "if the output is right with it, the cache is the cause"),
            ("tiers doctor", "operators that failed, and with which cache layout"),
            ("tiers check DIR", "whether attention differs on the cache of this model"),
        ),
    ),
    Symptom(
        "wrong or refused with tensor parallelism only",
        (
            "heads, groups or a quantisation block that does not divide by the ranks",
            "slopes, norms or maps of the whole model used on a rank's part of the heads",
            "a sum over ranks left out, or done twice (bias)",
            "a rank whose process lacks the plugin or has another version",
        ),
        (
            ("tiers inspect DIR", "which numbers of ranks are possible"),
            ("tiers doctor", "differences between processes"),
            ("tiers check DIR --tensor-parallel-size N", "the first layer that differs with that many ranks"),
        ),
    ),
    Symptom(
        "right, but half as fast as expected",
        (
            "a slower tier serves: unsupported shape or dtype, or it failed its check at the start",
            "--enforce-eager, or a tier that cannot be part of CUDA graphs",
            "vLLM's own attention is not used for dense layers (head size, float32, softcap)",
            "strided or unaligned access in a kernel: head sizes that are no power of two",
            "short prompts or few requests, where attention is not what takes the time",
        ),
        (
            ("tiers plan DIR", "tier of each layer, and why no faster one"),
            ("curl -s http://localhost:8000/metrics | grep tiers_dispatch_total", "what ran, by tier"),
            ("tiers bench DIR", "time of each tier beside the limits of the device"),
        ),
    ),
    Symptom(
        "the first request, or the start, takes very long",
        (
            "kernels and graphs compile: once for each kind of layer, kept on disk",
            "the folder of compiled code is not kept: a new container each time",
            "a new shape after the start, which compiles again",
            "weights read over a slow network",
            "it never ends: a script computed on the CPU before LLM(...), and vLLM forked its workers",
        ),
        (
            ("tiers doctor", "how far compiling gets; the second run is fast if the results are kept"),
            ("tiers serve DIR", "the log says when weights are read and when it compiles"),
            ("tiers plan DIR", "layers on the compiled tier, the slowest to compile"),
            ("VLLM_WORKER_MULTIPROC_METHOD=spawn", "if the script then starts, forking was the cause"),
        ),
    ),
)


def markdown() -> str:
    """The table of docs/doctor.md."""
    lines = ["| seen | likely causes | what would tell |", "|---|---|---|"]
    for row in SYMPTOMS:
        checks = "<br>".join(f"`{command.replace('|', chr(92) + '|')}`: {what}" for command, what in row.checks)
        lines.append(f"| {row.seen} | {'; '.join(row.causes)} | {checks} |")
    return "\n".join(lines)


def text() -> str:
    """The table for a terminal: a paragraph for each row."""
    lines = []
    for row in SYMPTOMS:
        lines += [row.seen, "  likely causes"]
        lines += [
            textwrap.fill(cause, 110, initial_indent="    - ", subsequent_indent="      ") for cause in row.causes
        ]
        lines += ["  what would tell"]
        lines += [f"    {command}\n      {what}" for command, what in row.checks] + [""]
    return "\n".join(lines[:-1])
