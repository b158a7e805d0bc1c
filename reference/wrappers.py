"""Names that training wrappers leave in a checkpoint: prefixes to take off, and tensors that are no parameters.

Pure functions on names; no tensor is read.
"""

from collections.abc import Iterable
from pathlib import Path

from tiers.reference.checkpoint import listed
from tiers.reference.errors import CheckpointError

# Modules that wrap another and pass its parameters on, as components of a dotted name: data parallelism and DeepSpeed,
# torch.compile, Lightning and Fabric, FSDP, activation checkpointing.
WRAPPERS = ("module", "_orig_mod", "_forward_module", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")

# What PEFT puts in front of every name; it stays behind when an adapter is merged and the wrapper is saved.
ADAPTER_PREFIX = "base_model.model."


def unwrap(names: Iterable[str], where: str = "checkpoint") -> dict[str, str]:
    """Take wrapper components off names, wherever they stand and only where they do.

    Args:
        names: the names of a checkpoint; only some of them may be wrapped.
        where: what to call the checkpoint in an error.

    Returns:
        Name without wrappers to the name as it was, in the order given.

    Raises:
        CheckpointError: two names are the same without wrappers.
    """
    names = list(names)
    # With an adapter's tensors among them the prefix says which tensor belongs to what; `refuse_unmappable` has that.
    merged = not any(_is_adapter(name) for name in names)
    old: dict[str, str] = {}
    for name in names:
        new = _bare(name)
        if merged:
            new = new.removeprefix(ADAPTER_PREFIX) or new
        if new in old:
            raise CheckpointError(
                f"{where}: {old[new]} and {name} are both {new} once the prefixes of training wrappers are taken off; "
                "expected each tensor once. Remove the one that does not belong"
            )
        old[new] = name
    return old


def _bare(name: str) -> str:
    # The last component is the parameter's own name, whatever it is called.
    *path, leaf = name.split(".")
    return ".".join([part for part in path if part not in WRAPPERS] + [leaf])


def describe(old: dict[str, str]) -> list[str]:
    """A sentence on what `unwrap` took off; none if nothing."""
    changed = [name for new, name in old.items() if new != name]
    if not changed:
        return []
    found = [part for part in WRAPPERS if any(part in name.split(".")[:-1] for name in changed)]
    if any(_bare(name).startswith(ADAPTER_PREFIX) for name in changed):
        found.append(ADAPTER_PREFIX.rstrip("."))
    return [f"took the wrapper prefix {', '.join(found)} off {len(changed)} of {len(old)} names"]


def refuse_unmappable(folder: Path, names: Iterable[str]) -> None:
    """Refuse tensors that are no parameters of a whole model.

    Raises:
        CheckpointError: an adapter that is not merged; parameters that FSDP flattened.
    """
    names = list(names)
    adapters = sorted(name for name in names if _is_adapter(name))
    if adapters:
        raise CheckpointError(
            f"{folder}: unmerged adapter: {listed(adapters, 2)}; expected the weights of a whole model. Load the base "
            "model with the adapter in peft, call merge_and_unload() and save the result"
        )
    flat = sorted(name for name in names if name.rpartition(".")[2].startswith("_flat_param"))
    if flat:
        raise CheckpointError(
            f"{folder}: {listed(flat, 2)} is a flat parameter of FSDP: many weights in one row, without their names or "
            "shapes; expected a tensor per weight. Save the model again with a full state dict "
            "(torch.distributed.checkpoint.state_dict.get_model_state_dict with full_state_dict=True)"
        )


def _is_adapter(name: str) -> bool:
    return any(part.startswith("lora_") for part in name.split("."))
