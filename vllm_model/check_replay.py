"""`tiers check --replay FILE`: what a shadow check has kept, on every tier that this device has."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tiers.reference.config import Attention, Gate, Layer, Swiglu
from tiers.reference.errors import ConfigError
from tiers.reference.ops.bias import Bias
from tiers.reference.positions import T5, Alibi, Kerple, NoPosition, Position, Xpos
from tiers.vllm_model import check_text, compat, dispatch
from tiers.vllm_model.check_rows import Row, Verdict, overall
from tiers.vllm_model.dispatch import Where
from tiers.vllm_model.plan import Tier
from tiers.vllm_model.shadow_call import Call, expected, judged, read

# As of `tiers check`.
EXIT = {Verdict.PASS: 0, Verdict.FAIL: 1, Verdict.INCONCLUSIVE: 2}


def run(file: Path | str) -> int:
    """Compute what a dump holds again, compare, print.

    Args:
        file: that `tiers serve --shadow R --shadow-dumps FOLDER` wrote.

    Returns:
        0 PASS, 1 FAIL (of the recorded output, or of a tier here), 2 INCONCLUSIVE.

    Raises:
        ConfigError: the file is not there, or no dump.
    """
    about, call = read(Path(file))
    try:
        rows, unable = compare(about, _on_device(call))
    except (KeyError, IndexError, TypeError, ValueError, RuntimeError) as error:
        # The reference takes whatever a tier takes, so its inputs are not what was written.
        raise ConfigError(
            f"--replay {file}: the reference cannot run on it ({type(error).__name__}: {error})"
        ) from None
    print(text(about, call, rows, unable))
    return EXIT[overall(rows)]


def compare(about: dict[str, Any], call: Call) -> tuple[list[Row], list[str]]:
    """A row for what was recorded and one per tier that can run here, and why the others cannot."""
    with torch.inference_mode():
        exact, noisy, decided = expected(call)
        rows = [_row(about, about["tier"], "as recorded")]
        judged(rows[0], call.output, exact, noisy, decided)
        unable = []
        for tier in Tier:
            if reason := _unsupported(about, call, tier):
                unable.append(f"{tier.value}: {reason}")
                continue
            rows.append(_row(about, tier.value, "here"))
            try:
                actual = noisy if tier is Tier.REFERENCE else call.run(dispatch.function(call.function, tier))
            except Exception as error:  # whatever a compiler or a driver raises: the tier cannot compute this
                rows[-1].verdict, rows[-1].error = Verdict.FAIL, float("inf")
                rows[-1].note = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no message'}"
                continue
            judged(rows[-1], actual, exact, noisy, decided)
    return rows, unable


def text(about: dict[str, Any], call: Call, rows: list[Row], unable: list[str]) -> str:
    """What the file is, the table, what could not run, and the verdict."""
    versions = about["versions"]
    lines = [
        f"layer {about['layer']}: {about['function']}, {_what(call)}, {about['dtype']}; recorded on {about['device']}, tier "
        f"{about['tier']} (vllm-tiers {versions['tiers']}, vLLM {versions['vllm']}, torch {versions['torch']}); there it was "
        f"off by {about['found']['error']:.3g}, budget {about['found']['budget']:.3g}",
        *check_text.table(rows),
        *(f"  not here: {reason}" for reason in unable),
    ]
    recorded, here = rows[0], overall(rows[1:])
    if recorded.verdict is Verdict.FAIL and here is Verdict.PASS:
        lines.append(
            f"What tier {about['tier']} gave when this was recorded is wrong; every tier that ran here is right."
            + (
                " The tier that gave it is not among them."
                if about["tier"] not in {row.tier for row in rows[1:]}
                else ""
            )
        )
    return "\n".join([*lines, f"{overall(rows)}: {len(rows)} comparisons"])


def _row(about: dict[str, Any], tier: str, how: str) -> Row:
    return Row("operator", about["layer"], about["operator"], tier, how)


def _what(call: Call) -> str:
    if call.function != "paged_attention":
        return f"{len(call.output)} tokens of width {call.output.shape[-1]}"
    lengths = call.tensors["lengths"].tolist()
    options = " ".join(f"{name}={value}" for name, value in vars(call.options["pattern"]).items())
    return (
        f"{call.options['pattern'].kind} {options}".strip()
        + f", {len(call.output)} query tokens of {len(lengths)} requests with up to {max(lengths)} tokens"
    )


def _on_device(call: Call) -> Call:
    device = compat.device_type()

    def move(value: Any) -> Any:
        return value.to(device) if isinstance(value, Tensor | Bias) else value

    return replace(
        call,
        tensors={name: move(tensor) for name, tensor in call.tensors.items()},
        options={name: move(value) for name, value in call.options.items()},
        output=move(call.output),
    )


def _unsupported(about: dict[str, Any], call: Call, tier: Tier) -> str | None:
    """Why a tier cannot run a call here, by the rules that a plan goes by; None if it can."""
    layer, block = _layer(call), call.tensors["cache"].shape[2] if "cache" in call.tensors else None
    where = Where(compat.device_type(), block, about["dtype"])
    if layer.mixer is not None and about["operator"] == "attention" and dispatch.is_native(layer.mixer, tier, where):
        return "vLLM's own attention, which only an engine runs"
    return dispatch.unsupported(about["operator"], tier, layer, where)


def _position(options: dict[str, Any]) -> Position:
    """Positions of the kind that a call adds to its scores."""
    if options["decay_D"] is not None:
        return Xpos()
    bias: Bias | None = options["bias"]
    if bias is None:
        return NoPosition()
    kinds: dict[str, Position] = {
        "linear": Alibi(), "sqrt": Alibi(distance="sqrt"), "log": Kerple(), "table": T5()
    }  # fmt: skip
    return kinds[bias.kind]


def _layer(call: Call) -> Layer:
    """A layer with the operator of a call; of the rest of it nothing is known, and nothing asked."""
    ffn = Swiglu(intermediate_size=1)
    if call.function != "paged_attention":
        return Layer(Attention(1, 1, 2), ffn, Gate("linear", "token"))
    heads, size = call.tensors["query"].shape[1:]
    options = call.options
    kv_heads = call.tensors["cache"].shape[1]
    return Layer(
        Attention(
            heads, kv_heads, size, pattern=options["pattern"], position=_position(options), scale=options["scale"],
            softcap=options["softcap"],
        ),
        ffn,
    )  # fmt: skip
