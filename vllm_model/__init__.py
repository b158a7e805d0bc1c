"""Tier 3 and the vLLM model. vLLM calls `register` in every process it starts (entry point vllm.general_plugins)."""


def register() -> None:
    """Make vLLM know `model_type: tiers`. May run any number of times; loads no model code and patches nothing.

    On a vLLM outside the tested range it logs one line and registers nothing, so that other models keep working.
    """
    from tiers.vllm_model import compat

    compat.register()
