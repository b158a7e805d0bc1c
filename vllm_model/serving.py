"""Can this model be served with these options? Asked before memory is allocated, and again by every worker.

Also reads the plan out of vLLM's configuration, so that the start-up table, the model and `tiers plan` agree.
"""

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tiers.reference.analysis.tensor_parallel import RANKS, tensor_parallel_misfit
from tiers.reference.config import ModelConfig, Moe
from tiers.reference.errors import ConfigError, ServingError
from tiers.reference.heads import HeadLayout
from tiers.reference.load import Description, ModelFolder, describe, describe_config, open_described
from tiers.reference.positions import LongRope, Sandwich, rotation
from tiers.reference.weight_map import WeightMap
from tiers.vllm_model import compat, metrics, shadow
from tiers.vllm_model.dispatch import Choice, Where, resolve
from tiers.vllm_model.hf_config import TiersConfig, asked_family
from tiers.vllm_model.plan import AUTO, Tier, TierPlan

# vLLM prints loggers below its own name.
logger = logging.getLogger("vllm.tiers")

KV_CACHE_DTYPES = ("auto", "float16", "bfloat16")


@dataclass(frozen=True)
class Options:
    """The engine options that a model may not be able to follow, under the names of vLLM's flags."""

    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    decode_context_parallel_size: int = 1
    prefill_context_parallel_size: int = 1
    kv_cache_dtype: str = AUTO
    enable_lora: bool = False
    enable_prompt_embeds: bool = False
    max_model_len: int | None = None
    enforce_eager: bool = False
    data_parallel_size: int = 1
    enable_expert_parallel: bool = False
    enable_eplb: bool = False
    num_redundant_experts: int = 0


def check_options(config: ModelConfig, options: Options) -> None:
    """Refuse what the model or this version cannot do.

    Raises:
        ServingError: names the flag, what was found, what would work.
    """
    size = options.tensor_parallel_size
    spread = options.enable_expert_parallel
    if misfit := tensor_parallel_misfit(config, size, spread):
        fits = ", ".join(str(n) for n in RANKS if tensor_parallel_misfit(config, n, spread) is None)
        raise ServingError(
            f"--tensor-parallel-size is {size}{' with --enable-expert-parallel' if spread else ''}, but the model has {misfit}, which do not fit on that many ranks. "
            f"Sizes that work: {fits}"
        )
    stages = options.pipeline_parallel_size
    if stages > config.num_hidden_layers:
        raise ServingError(
            f"--pipeline-parallel-size is {stages}, but the model has {config.num_hidden_layers} layers; expected at most that"
        )
    if stages > 1 and options.enforce_eager and compat.device_type() == "cpu":
        # Seen in 0.32.0 with vLLM's own Llama too: a bare assertion at the first step.
        raise ServingError(
            f"--pipeline-parallel-size is {stages} and --enforce-eager is set on the CPU; vLLM's CPU build prepares the "
            "buffers between stages only when it compiles. Leave --enforce-eager out"
        )
    longest = config.max_position_embeddings
    if options.max_model_len is not None and options.max_model_len > longest and _has_table(config):
        raise ServingError(
            f"--max-model-len is {options.max_model_len}, but max_position_embeddings in config.json is {longest}; the table "
            f"of positions ends there. Expected at most {longest}, or a config that describes how positions are stretched"
        )
    if options.kv_cache_dtype not in KV_CACHE_DTYPES:
        raise ServingError(
            f"--kv-cache-dtype is {options.kv_cache_dtype}; expected {', '.join(KV_CACHE_DTYPES)}. "
            "Quantised caches are not supported yet, and vLLM would read them as plain numbers"
        )
    for flag in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        if getattr(options, flag) > 1:
            raise ServingError(
                f"--{flag.replace('_', '-')} is {getattr(options, flag)}; expected 1. A selection over a context that is "
                "spread over ranks is not supported yet"
            )
    _check_experts(config, options)
    if options.enable_lora:
        _check_lora(config)
    sources = [i for i, layer in enumerate(config.layers) if layer.gate is not None and layer.gate.source == "token"]
    if options.enable_prompt_embeds and sources:
        raise ServingError(
            f"--enable-prompt-embeds is set, but layer {sources[0]} has a gate with source token, which looks up token ids; "
            "a prompt of embeddings has none"
        )


def _check_experts(config: ModelConfig, options: Options) -> None:
    index = next((i for i, layer in enumerate(config.layers) if isinstance(layer.ffn, Moe)), None)
    if index is None:
        if options.enable_expert_parallel:
            raise ServingError(
                "--enable-expert-parallel is set, but no layer of the model has experts; leave the flag out"
            )
        return
    if options.data_parallel_size > 1:
        raise ServingError(
            f"--data-parallel-size is {options.data_parallel_size}, but layer {index} has experts, which vLLM would spread over "
            "these ranks too; expected 1. Start one server per copy of the model instead"
        )
    if options.enable_eplb:
        _check_moving_experts(config, options)
    if options.enable_lora:
        raise ServingError(
            f"--enable-lora is set, but layer {index} has experts, for which adapters are not supported yet. Merge the adapter "
            "into the weights instead"
        )


def _check_moving_experts(config: ModelConfig, options: Options) -> None:
    if compat.device_type() == "cpu":
        raise ServingError("--enable-eplb is set, but vLLM moves experts between GPUs only; leave the flag out")
    ranks = options.tensor_parallel_size
    if not options.enable_expert_parallel or ranks == 1:
        raise ServingError(
            "--enable-eplb is set, but there is nothing to move: experts are whole on a rank only with --enable-expert-parallel "
            "and --tensor-parallel-size above 1"
        )
    sizes = {layer.ffn.num_experts: i for i, layer in enumerate(config.layers) if isinstance(layer.ffn, Moe)}
    if len(sizes) > 1:
        found = ", ".join(f"{size} in layer {index}" for size, index in sizes.items())
        raise ServingError(
            f"--enable-eplb is set, but vLLM wants the same number of experts in all layers; found {found}. Leave the flag out"
        )
    places = min(sizes) + options.num_redundant_experts
    if places % ranks:
        raise ServingError(
            f"--eplb-config asks for {options.num_redundant_experts} redundant experts beside {min(sizes)}, which is {places} on "
            f"{ranks} ranks; expected a multiple of {ranks}"
        )


def _check_moved_tiers(choices: tuple[Choice, ...]) -> None:
    other = next((choice for choice in choices if choice.operator == "moe" and choice.tier is not Tier.FAST), None)
    if other is not None:
        raise ServingError(
            f"--enable-eplb is set, but the experts of layer {other.layer} are on tier {other.tier.value}; vLLM moves only those of "
            "its own layer, which is tier fast. Leave the flag out, or use --tiers '*.moe=fast'"
        )


def _has_table(config: ModelConfig) -> bool:
    positions = [mixer.position for mixer in config.mixers]
    return config.learned_positions or any(rotation(p) is not None or isinstance(p, Sandwich) for p in positions)


def _longrope_notes(config: ModelConfig, max_model_len: int) -> list[str]:
    """Where vLLM's own classes would take other factors than config.json calls for."""
    scalings = {getattr(mixer.position, "scaling", None) for mixer in config.mixers}
    return [
        f"--max-model-len is {max_model_len}, at most the original length {s.original_max_position_embeddings} of longrope, but "
        f"max_position_embeddings is {config.max_position_embeddings}, so that the long factors are used. For the short ones, as "
        'vLLM\'s own classes would take here, set use to "short" in its scaling'
        for s in scalings
        if isinstance(s, LongRope) and s.use == "auto"
        if max_model_len <= s.original_max_position_embeddings < config.max_position_embeddings
    ]


def _check_lora(config: ModelConfig) -> None:
    for index, layer in enumerate(config.layers):
        mixer = layer.mixer
        if mixer is not None and not HeadLayout.of(mixer.heads, mixer.num_kv_heads).is_identity:
            raise ServingError(
                f"--enable-lora is set, but layer {index} has a head_map that is not contiguous: its query heads are "
                "rearranged at load and an adapter's are not. Merge the adapter into the weights instead"
            )


def check_vllm_config(vllm_config: Any) -> None:
    """Check a complete vLLM configuration against the model and, for a local folder, against its files' headers.

    Raises:
        TiersError: see `check_options`, `choose_tiers`, `shadow.options_of` and `tiers.reference.load.open_model`.
    """
    config = model_config_of(vllm_config)
    parallel = vllm_config.parallel_config
    check_options(
        config,
        Options(
            tensor_parallel_size=parallel.tensor_parallel_size,
            pipeline_parallel_size=parallel.pipeline_parallel_size,
            decode_context_parallel_size=parallel.decode_context_parallel_size,
            prefill_context_parallel_size=parallel.prefill_context_parallel_size,
            kv_cache_dtype=vllm_config.cache_config.cache_dtype,
            enable_lora=vllm_config.lora_config is not None,
            enable_prompt_embeds=vllm_config.model_config.enable_prompt_embeds,
            max_model_len=vllm_config.model_config.max_model_len,
            enforce_eager=vllm_config.model_config.enforce_eager,
            data_parallel_size=parallel.data_parallel_size,
            enable_expert_parallel=parallel.enable_expert_parallel,
            enable_eplb=parallel.enable_eplb,
            num_redundant_experts=parallel.eplb_config.num_redundant_experts,
        ),
    )
    for note in _longrope_notes(config, vllm_config.model_config.max_model_len):
        logger.warning("%s", note)
    choices = choose_tiers(vllm_config)
    if parallel.enable_eplb:
        _check_moved_tiers(choices)
    shadow.options_of(vllm_config.additional_config)
    metrics.balance_rate(vllm_config.additional_config)
    folds_tables(vllm_config.additional_config)
    from tiers.vllm_model import sampling  # imports vLLM's samplers, which nobody else here needs

    sampling.mask_ids_without_token(vllm_config, config.vocab_size)
    if reads_folder(vllm_config):
        folder = model_folder(vllm_config.model_config)
        for note in _logged_once(folder):
            logger.info("%s: %s", folder.folder, note)


def reads_folder(vllm_config: Any) -> bool:
    """Whether the weights come from files in a local folder (not from a hub, a stream, or a random seed)."""
    return (
        vllm_config.load_config.load_format in ("auto", "hf", "safetensors", "pt", compat.LOAD_FORMAT)
        and Path(vllm_config.model_config.model).is_dir()
    )


def description(model_config: Any) -> Description:
    """The model that vLLM was asked for, with what --hf-overrides changed, and the family that its files are of."""
    hf_config = model_config.hf_config
    if isinstance(hf_config, TiersConfig):
        return hf_config.description
    # An architecture of a user's family on a model type that transformers knows: its own class has read the config.
    folder = Path(model_config.model)
    return describe(folder, asked_family()) if folder.is_dir() else describe_config(hf_config.to_dict(), asked_family())


def model_config_of(vllm_config: Any) -> ModelConfig:
    """The parsed model."""
    return description(vllm_config.model_config).config


def model_folder(model_config: Any) -> ModelFolder:
    """The local folder of a model, its headers checked once per process."""
    found = description(model_config)
    key = (Path(model_config.model), found.config)
    if key not in _folders:
        _folders[key] = open_described(key[0], found)
    return _folders[key]


def weight_map(vllm_config: Any) -> WeightMap:
    """Where the tensors that vLLM's loader hands over belong."""
    if reads_folder(vllm_config):
        return model_folder(vllm_config.model_config).map
    found = description(vllm_config.model_config)
    return WeightMap(found.family, found.config)


_folders: dict[tuple[Path, ModelConfig], ModelFolder] = {}
_logged: set[Path] = set()


def _logged_once(folder: ModelFolder) -> list[str]:
    if folder.folder in _logged:
        return []
    _logged.add(folder.folder)
    return folder.notes


def folds_tables(additional: Any) -> bool:
    """Whether `--additional-config '{"fold_tables": true}'` gives memory for the products of tables.

    Raises:
        ConfigError: neither true nor false.
    """
    found = additional.get("fold_tables", False) if isinstance(additional, dict) else False
    if not isinstance(found, bool):
        raise ConfigError(
            f"additional-config: fold_tables is {found!r}; expected true or false, whether gates keep their tables a second "
            "time, multiplied by half of their weight"
        )
    return found


def choose_tiers(vllm_config: Any) -> tuple[Choice, ...]:
    """The tier of every operator, from `--additional-config '{"tiers": PLAN}'`.

    Raises:
        PlanError: the plan does not parse, or names a tier that cannot serve.
        ConfigError: the plan is not text.
    """
    additional = vllm_config.additional_config
    text = additional.get("tiers", AUTO) if isinstance(additional, dict) else AUTO
    if not isinstance(text, str):
        raise ConfigError(f"additional-config: tiers is {text!r}; expected text such as auto or 0-3=reference")
    config = model_config_of(vllm_config)
    dtype = str(vllm_config.model_config.dtype).removeprefix("torch.")
    where = Where(compat.device_type(), vllm_config.cache_config.block_size, dtype)
    return resolve(config, TierPlan.parse(text, config), where)
