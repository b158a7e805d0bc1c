"""`tiers serve`: check everything that can be checked, then become `vllm serve`."""

import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from tiers.reference.errors import ServingError
from tiers.reference.load import open_model, weights
from tiers.vllm_model import compat, shadow
from tiers.vllm_model.dispatch import Where, resolve
from tiers.vllm_model.plan import AUTO, TierPlan
from tiers.vllm_model.serving import Options, check_options


def serve(
    folder: Path,
    plan: str | None,
    flags: Sequence[str],
    family: str | None = None,
    shadow_rate: str | None = None,
    shadow_dumps: Path | None = None,
) -> None:
    """Serve a model folder.

    Args:
        folder: config.json and *.safetensors.
        plan: text of a tier plan; None for the one in --additional-config, or auto.
        flags: flags of `vllm serve`.
        family: name of a family or path of its file; None goes by config.json.
        shadow_rate: share of the steps that the reference computes again; None for the one in --additional-config, or none.
        shadow_dumps: folder for what failed there.

    Raises:
        TiersError: the folder, the plan or a flag is not fit; raised before vLLM starts a process or takes memory.
    """
    checks = shadow.from_flags(shadow_rate, shadow_dumps)
    model = open_model(folder, family)
    config, checkpoint = model.config, model.checkpoint
    for note in model.notes:
        _say(note)
    if plan is not None:
        TierPlan.parse(plan, config)
    if reason := compat.unsupported_version():
        raise ServingError(f"cannot serve: {reason}")
    allowed = os.environ.get("VLLM_PLUGINS")
    if allowed is not None and "tiers" not in allowed.split(","):
        raise ServingError(
            f"the environment variable VLLM_PLUGINS is {allowed!r}, so vLLM would not load this plugin; add tiers to the list "
            "or unset it"
        )
    started = time.monotonic()
    for name, _ in weights(model):
        if sys.stderr.isatty() and time.monotonic() - started > 2:
            print(f"\r\033[Ktiers: reading weights: {name}\r", end="", file=sys.stderr)
    _say(f"{folder}: {len(checkpoint.infos)} tensors, {checkpoint.bytes / 2**20:,.0f} MiB, all there and finite")

    args, command = compat.parse_serve([str(folder), *flags])
    length = args.max_model_len if isinstance(args.max_model_len, int) and args.max_model_len > 0 else None
    same = (
        "tensor_parallel_size", "pipeline_parallel_size", "decode_context_parallel_size", "prefill_context_parallel_size",
        "kv_cache_dtype", "enable_prompt_embeds", "enforce_eager", "data_parallel_size", "enable_expert_parallel",
        "enable_eplb",
    )  # fmt: skip
    flags_given = {name: getattr(args, name) for name in same}
    others = {"enable_lora": bool(args.enable_lora), "num_redundant_experts": args.eplb_config.num_redundant_experts}
    check_options(config, Options(**flags_given, **others, max_model_len=length))
    if args.dtype == "auto" and "float32" in {
        str(info.dtype).removeprefix("torch.") for info in checkpoint.infos.values()
    }:
        _say("the weights are float32; --dtype auto lets vLLM serve them in 16 bits, --dtype float32 keeps them")
    # Folders of a family are read by our parser, which finds the family again, in every process that vLLM starts.
    args.config_format = compat.CONFIG_FORMAT
    compat.name_family(family)
    if plan is not None:
        args.additional_config = {**(args.additional_config or {}), "tiers": plan}
    if checks:
        args.additional_config = {**(args.additional_config or {}), **checks}
    shadow.options_of(args.additional_config)
    text = (args.additional_config or {}).get("tiers", AUTO)
    resolve(
        config,
        TierPlan.parse(text, config),
        Where(compat.device_type(), args.block_size, None if args.dtype == "auto" else str(args.dtype)),
    )
    command.cmd(args)


def _say(message: str) -> None:
    print("\033[K" * sys.stderr.isatty() + f"tiers: {message}", file=sys.stderr, flush=True)
