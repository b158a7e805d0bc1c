"""`tiers check`: is every faster tier as exact as the reference, and if not, where does it begin?"""

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from tiers.reference.config import ModelConfig
from tiers.reference.errors import ConfigError, ServingError
from tiers.reference.load import load_model, open_model
from tiers.reference.text import listed_ids
from tiers.vllm_model import check_against, check_layers, check_operators, check_text, compat
from tiers.vllm_model.check_engine import PAGE, STEP, CheckedEngine, Ran, ReferenceEngine, running
from tiers.vllm_model.check_layers import Expected, Reference
from tiers.vllm_model.check_record import Record
from tiers.vllm_model.check_rows import Row, Verdict, overall
from tiers.vllm_model.dispatch import Choice, Where, resolve
from tiers.vllm_model.plan import TierPlan

# Tokens generated after each prompt; tokens at a time where the reference is asked what cutting up does.
NEW_TOKENS, SPLIT = 8, STEP // 2 + 1

EXIT = {Verdict.PASS: 0, Verdict.FAIL: 1, Verdict.INCONCLUSIVE: 2}

# What is asked where --prompts names nothing; the first fits into a step, the second does not.
TEXTS = (
    "The quick brown fox jumps over the lazy dog, and the dog does not mind at all.",
    "A model that was trained elsewhere has to give the same answers here. Its weights have other names, its heads another "
    "order, its positions another formula; each of these can be wrong while the text still reads well. So every layer is "
    "compared with a short program that defines what it should compute, on what the layer itself has read, and the "
    "differences are set against those that rounding alone would make. Where they are larger, something is wrong, and the "
    "first such layer is where to look. Numbers such as 3.14159, names such as Zanzibar and code such as for i in range(10): "
    "print(i * i) belong to a text of this kind as well, since a model meets them too.",
)


@dataclass(frozen=True)
class Options:
    """What to check.

    Attributes:
        folder, family: the model.
        plan: tiers of the engine.
        against: "reference", "transformers", "vllm-native", or another model folder.
        dtype: name of a torch dtype; "" for float32 on the CPU and bfloat16 elsewhere.
        prompts: a file of texts, one per line, or of lists of token ids; None for two of ours.
        ranks: tensor-parallel size.
        layers: only these; None for all.
        operators: whether operators are also checked by themselves.
        engine: whether vLLM runs the model; else our reference does, in the dtype served.
        answers: compare only what the model says, not its layers.
    """

    folder: Path
    family: str | None = None
    plan: str = "auto"
    against: str = "reference"
    dtype: str = ""
    prompts: Path | None = None
    ranks: int = 1
    layers: tuple[int, ...] | None = None
    operators: bool = True
    engine: bool = True
    answers: bool = False


@dataclass
class Report:
    """Everything that was found.

    Attributes:
        about: what was checked and with what.
        rows: comparisons.
        first: where it begins: the first layer or operator that differs; None if nothing does.
        again: a command that checks only that.
        tokens: per layer the error of each token of the longest sequence, for the page.
    """

    about: dict[str, Any]
    rows: list[Row] = field(default_factory=list)
    first: Row | None = None
    again: str = ""
    tokens: dict[int, list[float]] = field(default_factory=dict)

    @property
    def verdict(self) -> Verdict:
        """Of all rows."""
        return overall(self.rows)


def run(options: Options, jsonl: Path | None = None, page: Path | None = None) -> int:
    """Check, print, write.

    Returns:
        0 PASS, 1 FAIL, 2 INCONCLUSIVE.

    Raises:
        TiersError: the folder, the plan or an option is not fit.
    """
    report = check(options)
    print(check_text.text(report))
    if jsonl is not None:
        lines = [report.about | {"verdict": report.verdict}, *(asdict(row) for row in report.rows)]
        jsonl.write_text("".join(json.dumps(line, default=str) + "\n" for line in lines), encoding="utf-8")
    if page is not None:
        from tiers.vllm_model import check_html

        page.write_text(check_html.page(report), encoding="utf-8")
    return EXIT[report.verdict]


def check(options: Options, reference: Reference | None = None) -> Report:
    """Run the engine and compare it.

    Args:
        options: what to check.
        reference: from `make_reference` with the same options, where it was made before.

    Raises:
        TiersError: see `run`.
    """
    opened = open_model(options.folder, options.family)
    compat.name_family(options.family)
    config = opened.config
    dtype = served_dtype(options)
    choices = resolve(config, TierPlan.parse(options.plan, config), Where(_device(), PAGE, dtype))
    prompts = read_prompts(options, config)
    longest = min(config.max_position_embeddings, max(map(len, prompts)) + 2 * NEW_TOKENS + PAGE)
    reference = reference or make_reference(options, dtype)
    if not options.engine:
        own = make_reference(replace(options, against="reference"), dtype)
        return compare(options, ReferenceEngine(own.noisy), reference, prompts, choices)
    with running(options.folder, options.plan, dtype, longest, options.ranks) as engine:
        return compare(options, engine, reference, prompts, choices)


def served_dtype(options: Options) -> str:
    """The dtype of the engine."""
    return options.dtype or ("bfloat16" if _device() == "cuda" else "float32")


def compare(
    options: Options, engine: CheckedEngine | ReferenceEngine, reference: Reference, prompts: list[list[int]],
    choices: Sequence[Choice],
) -> Report:  # fmt: skip
    """Compare a running engine.

    Args:
        options: see there; engine and reference are made from it already.
        engine: whose layers are recorded.
        reference: what it is compared with.
        prompts: token ids; none of them may be in the engine's cache.
        choices: what the plan chose.
    """
    report = Report(_about(options, str(reference.dtype).removeprefix("torch."), choices))
    session = _Session(options, engine, reference, choices, report)
    before = engine.counts()
    records = {tuple(prompt): session.alone(prompt) for prompt in prompts}
    longest = max(prompts, key=len)
    if options.engine:
        session.prefix_hit(longest, records[tuple(longest)])
    if options.against == check_against.NATIVE:
        session.ask_native()
    else:
        session.together(prompts)
    if options.engine:
        report.rows += dispatched(choices, engine.counts() - before)
    if options.operators:
        report.rows += check_operators.rows(reference.exact.config, choices, reference, torch.tensor(longest))
    report.rows = [row for row in merge(report.rows) if options.layers is None or row.layer in (None, *options.layers)]
    _find_first(report, options)
    return report


def make_reference(options: Options, dtype: str) -> Reference:
    """The model that is compared with, in the dtype served and in a higher precision with the same weights."""
    own = options.against in ("reference", check_against.TRANSFORMERS, check_against.NATIVE)
    against, family = (options.folder, options.family) if own else (Path(options.against), None)
    device = _device()
    noisy = load_model(against, getattr(torch, dtype), device, family)
    exact = load_model(against, getattr(torch, dtype), device, family)
    precise = torch.float64 if dtype == "float32" else torch.float32
    for parameter in exact.parameters():
        parameter.data = parameter.data.to(precise)
    if options.against == check_against.TRANSFORMERS:
        return check_against.load_transformers(options.folder, Reference(noisy, exact))
    return Reference(noisy, exact)


def read_prompts(options: Options, config: ModelConfig) -> list[list[int]]:
    """Token ids of what is asked.

    Raises:
        ConfigError: the file cannot be read, or a prompt is empty, too long or has ids outside the vocabulary.
        ServingError: texts, but the folder has no tokenizer.
    """
    room = config.max_position_embeddings - 2 * NEW_TOKENS - PAGE
    if room < PAGE:
        raise ServingError(
            f"max_position_embeddings is {config.max_position_embeddings}; a check needs room for {2 * PAGE + 16}"
        )
    if options.prompts is None:
        if not (options.folder / "tokenizer.json").is_file():
            generator = torch.Generator().manual_seed(0)
            sizes = [min(length, room) for length in (40, 3 * STEP + 5)]
            return [torch.randint(config.vocab_size, (size,), generator=generator).tolist() for size in sizes]
        return [ids[:room] for ids in _encode(options.folder, TEXTS)]
    try:
        lines = [line for line in options.prompts.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--prompts {options.prompts}: cannot be read ({error})") from None
    listed = [listed_ids(line) for line in lines]
    if not lines:
        raise ConfigError(f"--prompts {options.prompts}: no line; expected a text or a list of token ids on each")
    texts = iter(_encode(options.folder, [line for line, ids in zip(lines, listed, strict=True) if ids is None]))
    prompts = [ids if ids is not None else next(texts) for ids in listed]
    for number, ids in enumerate(prompts, 1):
        if not 0 < len(ids) <= room or not all(0 <= i < config.vocab_size for i in ids):
            raise ConfigError(
                f"--prompts {options.prompts}: line {number} has {len(ids)} tokens; expected 1 to {room}, with ids below "
                f"{config.vocab_size}"
            )
    return prompts


def _encode(folder: Path, texts: Sequence[str]) -> list[list[int]]:
    if not texts:
        return []
    from tiers.reference.text import load_tokenizer

    tokenizer = load_tokenizer(folder)
    return [tokenizer.encode(text) for text in texts]


# ---- the cases --------------------------------------------------------------------------------------------------------


@dataclass
class _Session:
    """A running engine and what is found out about it."""

    options: Options
    engine: CheckedEngine | ReferenceEngine
    reference: Reference
    choices: Sequence[Choice]
    report: Report
    # For vLLM's own class, which is asked once for all: what the reference says, logits, ids, case.
    later: list[tuple[Expected, torch.Tensor, torch.Tensor, str]] = field(default_factory=list)

    def alone(self, prompt: list[int]) -> Record:
        """A prompt by itself, cut up if it is longer than a step; then its continuation token by token."""
        _say(f"a prompt of {len(prompt)} tokens")
        ran = self.engine.run(prompt, NEW_TOKENS)
        self._compare(ran, ran.record, "alone")
        return ran.record

    def prefix_hit(self, prompt: list[int], first: Record) -> None:
        """The prompt again with another end: its first pages come out of the cache.

        Args:
            prompt: was run before.
            first: what was recorded then.
        """
        _say("the same prompt again, with another end")
        vocabulary = self.reference.exact.config.vocab_size
        ran = self.engine.run([*prompt[:-2], *((token + 1) % vocabulary for token in prompt[-2:])], NEW_TOKENS)
        start = ran.cached
        if not start:
            note = "nothing came out of the cache"
            self.report.rows.append(Row("model", None, "logprobs", "", "prefix hit", note=note))
            return
        # Only the rest was computed; what layers read of the cached tokens they read in the first request.
        whole = Record(steps=[start, *ran.record.steps], positions=torch.arange(start + len(ran.record.positions)))
        for key, tensor in ran.record.tensors.items():
            whole.tensors[key] = torch.cat((first.tensors[key][:start], tensor))
        self._compare(ran, whole, "prefix hit", skip=start)

    def together(self, prompts: list[list[int]]) -> None:
        """Several short prompts at once, with tokens of their own, so that nothing comes out of the cache."""
        _say("several prompts at once")
        vocabulary = self.reference.exact.config.vocab_size
        shifted = [[(t + 1 + i) % vocabulary for t in prompt[: 8 + 13 * i]] for prompt in prompts for i in range(3)]
        for prompt, (tokens, logprobs) in zip(shifted, self.engine.together(shifted, NEW_TOKENS), strict=True):
            ids = torch.tensor([*prompt, *tokens])
            expected = self.reference.of(ids[:-1])
            row = check_layers.chosen(self.reference, expected, torch.tensor(logprobs), ids, len(prompt))
            row.how = "all at once"
            self.report.rows.append(row)

    def ask_native(self) -> None:
        """Compare with vLLM's own class."""
        _say("vLLM's own class")
        read = [ids[: len(logits)].tolist() for _, logits, ids, _ in self.later]
        dtype = str(self.reference.dtype).removeprefix("torch.")
        found = check_against.native_logprobs(self.options.folder, read, dtype, max(map(len, read)) + PAGE)
        for (expected, logits, ids, case), theirs in zip(self.later, found, strict=True):
            self.report.rows.append(
                check_layers.given(self.reference, expected, logits[:-1], torch.tensor(theirs), ids, case)
            )

    def _compare(self, ran: Ran, record: Record, case: str, skip: int = 0) -> None:
        ids = torch.tensor(ran.ids)
        read = ids[: len(record.positions)]
        expected = self.reference.of(read, SPLIT if case == "alone" else None)
        logits = ran.logits_TV
        if skip:  # of the cached tokens there are none
            logits = torch.cat((expected.noisy_logits[:skip].float().cpu(), logits))
        if self.options.against == check_against.NATIVE:
            self.later.append((expected, logits, ids, case))
            return
        if self.options.answers:
            self.report.rows += check_layers.logprobs(self.reference, expected, logits, ids, case)
            return
        rows = check_layers.accumulated(self.reference, expected, record)
        if self.options.against != check_against.TRANSFORMERS:
            # The layers of transformers cannot be fed with what ours have read.
            tiers = {(choice.layer, choice.operator): choice.tier.value for choice in self.choices}

            def tier(layer: int, name: str) -> str:
                return tiers.get((layer, name)) or (tiers.get((layer, "moe"), "") if name == "ffn" else "")

            rows += check_layers.same_input(self.reference, record, read, tier)
        for row in rows:
            row.how = row.how if case == "alone" else f"{row.how}, {case}"
        self.report.rows += rows
        self.report.rows += check_layers.logprobs(self.reference, expected, logits, ids, case)
        if case == "alone":
            self.report.tokens = check_layers.token_errors(expected, record)


def dispatched(choices: Sequence[Choice], counts: Any) -> list[Row]:
    """Whether what the plan chose is what ran, by counts; vLLM's own attention counts nothing."""
    rows = []
    for operator in dict.fromkeys(choice.operator for choice in choices):
        own = (c for c in choices if c.operator == operator and not (c.native and operator == "attention"))
        planned = {choice.tier.value for choice in own}
        ran = {tier for (name, tier), calls in counts.items() if name == operator and calls}
        row = Row("dispatch", None, operator, ", ".join(sorted(ran)) or "vLLM's own", "counts", compared=1, total=1)
        row.verdict = Verdict.PASS if ran == planned else Verdict.FAIL
        if ran != planned:
            row.note = f"the plan chose {', '.join(sorted(planned)) or 'nothing of ours'}; ran: {', '.join(sorted(ran)) or 'nothing of ours'}"
        rows.append(row)
    return rows


# ---- the report -------------------------------------------------------------------------------------------------------


def merge(rows: Sequence[Row]) -> list[Row]:
    """One row for what was compared in several sequences: its worst, with the tokens of all."""
    found: dict[tuple[Any, ...], Row] = {}
    for row in rows:
        key = (row.level, row.layer, row.what, row.tier, row.how)
        if key not in found:
            found[key] = row
            continue
        both = found[key], row
        worst = max(both, key=lambda r: (r.verdict is Verdict.FAIL, r.error / r.budget if r.budget else r.error))
        worst.compared, worst.total = sum(r.compared for r in both), sum(r.total for r in both)
        worst.verdict = overall(both)
        found[key] = worst
    return list(found.values())


# Within a layer, in the order in which they run; what is made of them comes last.
_ORDER = ("attention", "experts", "ffn", "gate", "layer", "hidden")


def _find_first(report: Report, options: Options) -> None:
    failed = [row for row in report.rows if row.verdict is Verdict.FAIL and row.layer is not None]
    # What differs on the same input is a cause; what has accumulated is its effect.
    causes = [row for row in failed if row.how.startswith("same input") or row.level == "operator"] or failed
    causes.sort(key=lambda row: (row.layer, _ORDER.index(row.what) if row.what in _ORDER else 0))
    others = [row for row in report.rows if row.verdict is Verdict.FAIL]
    report.first = causes[0] if causes else others[0] if others else None
    if report.first is not None and report.first.layer is not None:
        number, what = report.first.layer, report.first.what
        plan = (
            f"{number}.{what}={report.first.tier}"
            if what in ("attention", "gate") and report.first.tier
            else options.plan
        )
        base = "reference," if plan != options.plan else ""
        report.again = f"tiers check {options.folder} --tiers '{base}{plan}' --layers {number}"


def _about(options: Options, dtype: str, choices: Sequence[Choice]) -> dict[str, Any]:
    return {
        "model": str(options.folder), "against": options.against, "plan": options.plan if options.engine else "none, without vLLM", "dtype": dtype,
        "device": _device(), "ranks": options.ranks, "vllm": compat.vllm_version(), "torch": torch.__version__,
        "exact": "float64" if dtype == "float32" else "float32",
    }  # fmt: skip


def _device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def _say(what: str) -> None:
    print("\033[K" * sys.stderr.isatty() + f"tiers: checking {what}", file=sys.stderr, flush=True)
