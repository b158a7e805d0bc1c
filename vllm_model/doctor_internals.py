"""What this project uses of vLLM, and whether the installed vLLM still has it as the tested one had.

`python -m tiers.vllm_model.doctor_internals` records the signatures of the installed vLLM in vllm_internals.json. Run it on
a tested version only, after an import of vLLM was added or TESTED in compat.py has changed.
"""

import ast
import importlib
import inspect
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import EnumType
from pathlib import Path
from typing import Any

from tiers.vllm_model.compat import vllm_version

FILE = Path(__file__).with_name("vllm_internals.json")

# "module:name", or a module. Everything that a file of vllm_model imports from vLLM (a test compares), and what is called
# or read of it beyond.
USED: tuple[str, ...] = (
    "vllm.compilation.decorators:support_torch_compile",
    "vllm.config:VllmConfig",
    "vllm.config:VllmConfig.additional_config",
    "vllm.config:VllmConfig.cache_config",
    "vllm.config:VllmConfig.compilation_config",
    "vllm.config:VllmConfig.load_config",
    "vllm.config:VllmConfig.lora_config",
    "vllm.config:VllmConfig.model_config",
    "vllm.config:VllmConfig.parallel_config",
    "vllm.config:VllmConfig.quant_config",
    "vllm.config:VllmConfig.scheduler_config",
    "vllm.config:VllmConfig.speculative_config",
    "vllm.config:VllmConfig.use_v2_model_runner",
    "vllm.config:get_current_vllm_config",
    "vllm.config:get_current_vllm_config_or_none",
    "vllm.distributed:cleanup_dist_env_and_memory",
    "vllm.distributed:get_pp_group",
    "vllm.distributed:get_tensor_model_parallel_rank",
    "vllm.distributed:get_tensor_model_parallel_world_size",
    "vllm.distributed:tensor_model_parallel_all_reduce",
    "vllm.entrypoints.cli.serve",
    "vllm.entrypoints.cli.serve:cmd_init",
    "vllm.entrypoints.serve.utils.api_utils:VLLM_SUBCMD_PARSER_EPILOG",
    "vllm.entrypoints.serve.utils.api_utils:cli_env_setup",
    "vllm.forward_context:get_forward_context",
    "vllm.forward_context:is_forward_context_available",
    "vllm.logger:configure_logging_from_args",
    "vllm.logger:init_logger",
    "vllm.model_executor.layers.activation:GeluAndMul",
    "vllm.model_executor.layers.activation:SiluAndMul",
    "vllm.model_executor.layers.attention:Attention",
    "vllm.model_executor.layers.fused_moe:FusedMoEFactory",
    "vllm.model_executor.layers.layernorm:GemmaRMSNorm",
    "vllm.model_executor.layers.layernorm:RMSNorm",
    "vllm.model_executor.layers.linear:ColumnParallelLinear",
    "vllm.model_executor.layers.linear:LinearBase",
    "vllm.model_executor.layers.linear:MergedColumnParallelLinear",
    "vllm.model_executor.layers.linear:QKVParallelLinear",
    "vllm.model_executor.layers.linear:ReplicatedLinear",
    "vllm.model_executor.layers.linear:RowParallelLinear",
    "vllm.model_executor.layers.linear:UnquantizedLinearMethod",
    "vllm.model_executor.layers.logits_processor:LogitsProcessor",
    "vllm.model_executor.layers.rotary_embedding:RotaryEmbedding",
    "vllm.model_executor.layers.vocab_parallel_embedding:ParallelLMHead",
    "vllm.model_executor.layers.vocab_parallel_embedding:ParallelLMHead.tie_weights",
    "vllm.model_executor.layers.vocab_parallel_embedding:VocabParallelEmbedding",
    "vllm.model_executor.model_loader.default_loader:DefaultModelLoader",
    "vllm.model_executor.model_loader.weight_utils:default_weight_loader",
    "vllm.model_executor.model_loader:_LOAD_FORMAT_TO_MODEL_LOADER",
    "vllm.model_executor.models.config:MODELS_CONFIG_MAP",
    "vllm.model_executor.models.interfaces:MixtureOfExperts",
    "vllm.model_executor.models.interfaces:SupportsLoRA",
    "vllm.model_executor.models.interfaces:SupportsPP",
    "vllm.model_executor.models.utils:PPMissingLayer",
    "vllm.model_executor.models.utils:WeightsMapper",
    "vllm.model_executor.models.utils:is_pp_missing_parameter",
    "vllm.model_executor.models.utils:make_layers",
    "vllm.model_executor.models.utils:maybe_prefix",
    "vllm.model_executor.models:ModelRegistry",
    "vllm.model_executor.models:ModelRegistry.get_supported_archs",
    "vllm.model_executor.models:ModelRegistry.register_model",
    "vllm.model_executor.utils:set_weight_attrs",
    "vllm.platforms:current_platform",
    "vllm.platforms:current_platform.device_type",
    "vllm.plugins:load_general_plugins",
    "vllm.sampling_params:RequestOutputKind",
    "vllm.sampling_params:RequestOutputKind.DELTA",
    "vllm.sequence:IntermediateTensors",
    "vllm.transformers_utils.config:_CONFIG_FORMAT_TO_CONFIG_PARSER",
    "vllm.transformers_utils.config_parser_base:ConfigParserBase",
    "vllm.triton_utils:HAS_TRITON",
    "vllm.utils.argparse_utils:FlexibleArgumentParser",
    "vllm.utils.torch_utils:LayerNameType",
    "vllm.utils.torch_utils:_encode_layer_name",
    "vllm.utils.torch_utils:_resolve_layer_name",
    "vllm.utils.torch_utils:direct_register_custom_op",
    "vllm.v1.attention.backend:AttentionBackend",
    "vllm.v1.attention.backend:AttentionCGSupport",
    "vllm.v1.attention.backend:AttentionCGSupport.NEVER",
    "vllm.v1.attention.backend:AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE",
    "vllm.v1.attention.backend:AttentionImpl",
    "vllm.v1.attention.backend:AttentionMetadata",
    "vllm.v1.attention.backend:AttentionMetadataBuilder",
    "vllm.v1.attention.backend:AttentionType",
    "vllm.v1.attention.backend:AttentionType.DECODER",
    "vllm.v1.attention.backend:CommonAttentionMetadata",
    "vllm.v1.attention.backend:CommonAttentionMetadata.block_table_tensor",
    "vllm.v1.attention.backend:CommonAttentionMetadata.max_query_len",
    "vllm.v1.attention.backend:CommonAttentionMetadata.max_seq_len",
    "vllm.v1.attention.backend:CommonAttentionMetadata.num_actual_tokens",
    "vllm.v1.attention.backend:CommonAttentionMetadata.query_start_loc",
    "vllm.v1.attention.backend:CommonAttentionMetadata.query_start_loc_cpu",
    "vllm.v1.attention.backend:CommonAttentionMetadata.seq_lens",
    "vllm.v1.attention.backend:CommonAttentionMetadata.seq_lens_cpu_upper_bound",
    "vllm.v1.attention.backend:MultipleOf",
    "vllm.v1.attention.backends.fa_utils:flash_attn_varlen_func",
    "vllm.v1.attention.backends.fa_utils:get_flash_attn_version",
    "vllm.v1.attention.backends.fa_utils:get_scheduler_metadata",
    "vllm.v1.attention.backends.registry:AttentionBackendEnum",
    "vllm.v1.attention.backends.registry:register_backend",
    "vllm.v1.sample.logits_processor:LogitsProcessor",
    "vllm.v1.worker.gpu.sample.logits_processor:LogitsProcessor",
    "vllm.v1.worker.workspace:current_workspace_manager",
    "vllm.v1.worker.workspace:is_workspace_manager_initialized",
    "vllm:LLM",
    "vllm:LLM.generate",
    "vllm:SamplingParams",
)

# Methods that vLLM calls and classes of ours define: any change of their arguments is a problem.
OVERRIDDEN: tuple[str, ...] = (
    "vllm.model_executor.layers.attention:Attention.bind_kv_cache",
    "vllm.model_executor.model_loader.default_loader:DefaultModelLoader.download_model",
    "vllm.model_executor.model_loader.default_loader:DefaultModelLoader.get_all_weights",
    "vllm.transformers_utils.config_parser_base:ConfigParserBase.parse",
    "vllm.v1.attention.backend:AttentionBackend.get_builder_cls",
    "vllm.v1.attention.backend:AttentionBackend.get_impl_cls",
    "vllm.v1.attention.backend:AttentionBackend.get_name",
    "vllm.v1.attention.backend:AttentionBackend.get_supported_kernel_block_sizes",
    "vllm.v1.attention.backend:AttentionImpl.__init__",
    "vllm.v1.attention.backend:AttentionImpl.forward",
    "vllm.v1.attention.backend:AttentionMetadataBuilder.__init__",
    "vllm.v1.attention.backend:AttentionMetadataBuilder.build",
    "vllm.v1.attention.backend:AttentionMetadataBuilder.get_cudagraph_support",
)

# Only there where vLLM runs on CUDA.
CUDA_ONLY = frozenset(
    ("vllm.v1.attention.backends.fa_utils:flash_attn_varlen_func", "vllm.v1.attention.backends.fa_utils:get_scheduler_metadata")
)  # fmt: skip

# Classes that vLLM makes; we read some attributes, listed above.
NOT_CALLED = frozenset(
    (
        "vllm.config:VllmConfig",
        "vllm.utils.torch_utils:LayerNameType",
        "vllm.v1.attention.backend:CommonAttentionMetadata",
    )
)

_MISSING = object()


@dataclass(frozen=True)
class Difference:
    """Something that is not as recorded.

    Attributes:
        found: the signature here; None if it is missing.
        breaks: our use of it would fail, as far as signatures tell.
    """

    name: str
    recorded: str | None
    found: str | None
    breaks: bool


def find(name: str) -> Any:
    """What a dotted name stands for.

    Raises:
        Exception: whatever its import raises, or AttributeError.
    """
    module, _, path = name.partition(":")
    found: Any = importlib.import_module(module)
    for part in path.split(".") if path else ():
        inner = getattr(found, part, _MISSING)
        if inner is _MISSING:
            # A field of a dataclass without a default is no attribute of the class.
            if part not in getattr(found, "__dataclass_fields__", {}):
                raise AttributeError(f"{found!r} has no attribute {part!r}")
            return None
        found = inner
    return found


def signature(thing: Any) -> str | None:
    """Arguments as text, "(self, x, *, scale=1.0)"; None for what is not called.

    Annotations are left out, and of defaults all but plain values: they change without anything else changing.
    """
    # The arguments of enumerations and protocols are Python's, and differ between its versions.
    if not callable(thing) or isinstance(thing, EnumType) or getattr(thing, "_is_protocol", False):
        return None
    try:
        parameters = inspect.signature(thing).parameters.values()
    except (TypeError, ValueError):
        return None
    plain = (bool, int, float, str, type(None))
    kept = [
        p.replace(annotation=p.empty, default=p.default if p.default is p.empty or type(p.default) in plain else ...)
        for p in parameters
    ]
    return str(inspect.Signature(kept)).replace("Ellipsis", "...")


def installed(names: Iterable[str]) -> dict[str, str | Exception | None]:
    """Of each name its signature, or what kept it from being found."""
    found: dict[str, str | Exception | None] = {}
    for name in names:
        try:
            thing = find(name)
            found[name] = None if name in NOT_CALLED else signature(thing)
        except Exception as error:  # a module of vLLM may raise anything when it is imported
            found[name] = error
    return found


def record(path: Path = FILE) -> None:
    """Write down the installed vLLM.

    Raises:
        RuntimeError: something that we use is not there.
    """
    found = installed((*USED, *OVERRIDDEN))
    missing = [f"{n}: {e}" for n, e in found.items() if isinstance(e, Exception) and n not in CUDA_ONLY]
    if missing:
        raise RuntimeError(f"vLLM {vllm_version()} cannot be recorded: {'; '.join(missing)}")
    names = {name: None if isinstance(text, Exception) else text for name, text in found.items()}
    # One version has several builds, "0.32.0+cpu"; their signatures are the same.
    version = (vllm_version() or "").partition("+")[0]
    path.write_text(json.dumps({"vllm": version, "names": dict(sorted(names.items()))}, indent=1) + "\n")


def compare(recorded: Mapping[str, Any] | None = None, cuda: bool | None = None) -> dict[str, Any]:
    """Compare the installed vLLM with the recorded one.

    Args:
        recorded: as `record` writes it; None reads the file.
        cuda: whether vLLM runs on CUDA here; None asks vLLM.

    Returns:
        "recorded" and "installed" versions, the number of names "compared", and "differences" as dictionaries.
    """
    recorded = json.loads(FILE.read_text()) if recorded is None else recorded
    if cuda is None:
        from vllm.platforms import current_platform

        cuda = current_platform.device_type == "cuda"
    names = {name: text for name, text in recorded["names"].items() if cuda or name not in CUDA_ONLY}
    differences = []
    for name, found in installed(names).items():
        before = names[name]
        if isinstance(found, Exception):
            differences.append(Difference(name, before, None, True))
        elif before is not None and found != before:
            differences.append(
                Difference(name, before, found or "not callable", name in OVERRIDDEN or breaks(before, found))
            )
    return {
        "recorded": recorded["vllm"], "installed": vllm_version(), "compared": len(names),
        "differences": [vars(difference) for difference in differences],
    }  # fmt: skip


def breaks(before: str, now: str | None) -> bool:
    """Whether a call that fits one signature may fail on the other.

    It may if an argument is gone, if one that may be left out has to be given now, or if those that have to be given stand
    in another order. Arguments with a default we pass by name, so that their order does not count.
    """
    if now is None:
        return True
    old, new = _arguments(before), _arguments(now)
    takes_any = any(kind == "**" for kind, _ in new.values())
    gone = any(name not in new and not (takes_any and kind == "keyword") for name, (kind, _) in old.items())
    demanded = any(required and not old.get(name, ("", False))[1] for name, (_, required) in new.items())
    return gone or demanded or _leading(old) != _leading(new)[: len(_leading(old))]


def _leading(arguments: Mapping[str, tuple[str, bool]]) -> list[str]:
    return [name for name, (kind, required) in arguments.items() if kind == "positional" and required]


def _arguments(text: str) -> dict[str, tuple[str, bool]]:
    """Name -> kind and whether it must be given."""
    function = ast.parse(f"def f{text}: pass").body[0]
    assert isinstance(function, ast.FunctionDef)
    args = function.args
    names = [arg.arg for arg in (*args.posonlyargs, *args.args)]
    required = len(names) - len(args.defaults)
    found = {name: ("positional", place < required) for place, name in enumerate(names)}
    found |= {
        arg.arg: ("keyword", default is None) for arg, default in zip(args.kwonlyargs, args.kw_defaults, strict=True)
    }
    if args.vararg:
        found[args.vararg.arg] = ("*", False)
    if args.kwarg:
        found[args.kwarg.arg] = ("**", False)
    return found


if __name__ == "__main__":
    record()
