"""The config classes that transformers and vLLM load: of `model_type: tiers`, and of families that they do not know."""

import dataclasses
import os
from pathlib import Path
from typing import Any

from transformers import PreTrainedConfig
from vllm.transformers_utils.config_parser_base import ConfigParserBase

from tiers.reference.config import ARCHITECTURE, HF_KEYS, MODEL_TYPE, Layer, ModelConfig, Moe
from tiers.reference.family import OURS, Family
from tiers.reference.heads import HeadLayout
from tiers.reference.load import Description, describe_config, read_config
from tiers.reference.weight_rules import parse_rules
from tiers.vllm_model.compat import FAMILY

# Keys of config.json that describe the model; kept as they were written, so that `--hf-overrides` can change them.
DESCRIPTION_KEYS = tuple(field.name for cls in (ModelConfig, Layer) for field in dataclasses.fields(cls))

# Computed from the description, so never written to a config.json.
DERIVED_KEYS = ("num_attention_heads", "num_key_value_heads", "head_dim", "num_experts")


def asked_family() -> str | None:
    """The family that the environment names for the folder that is served."""
    return os.environ.get(FAMILY) or None


class TiersConfig(PreTrainedConfig):
    """A thin shell: the description as written, and the sizes under the names that vLLM asks for.

    Attributes:
        tiers_family: name and rules of the family whose names the weight files have; None for our own.

    Raises:
        ConfigError: the description is not a model; see `ModelConfig.from_dict`.
    """

    model_type = MODEL_TYPE

    def __init__(self, **kwargs: Any) -> None:
        description = {key: kwargs.pop(key) for key in DESCRIPTION_KEYS if key in kwargs}
        self.tiers_family = kwargs.pop("tiers_family", None)
        kwargs.setdefault("architectures", [ARCHITECTURE])
        super().__init__(**kwargs)
        for key, value in description.items():
            setattr(self, key, value)
        if description:  # transformers makes an empty one to learn the defaults
            self._set_sizes()

    def _set_sizes(self) -> None:
        mixers = self.model.mixers
        layouts = [HeadLayout.of(mixer.heads, mixer.num_kv_heads) for mixer in mixers]
        self.num_attention_heads = max(layout.num_heads for layout in layouts)
        self.num_key_value_heads = max(mixer.num_kv_heads for mixer in mixers)
        self.head_dim = max(mixer.head_dim for mixer in mixers)
        experts = [layer.ffn.num_experts for layer in self.model.layers if isinstance(layer.ffn, Moe)]
        if experts:  # its being there tells vLLM that the model has some
            self.num_experts = max(experts)

    def to_dict(self) -> dict[str, Any]:
        return {key: value for key, value in super().to_dict().items() if key not in DERIVED_KEYS}

    @property
    def model(self) -> ModelConfig:
        """The parsed description."""
        raw = {key: getattr(self, key) for key in DESCRIPTION_KEYS if hasattr(self, key)}
        return ModelConfig.from_dict(raw, "config.json")

    @property
    def description(self) -> Description:
        """The parsed description with the family of the weight files."""
        family = OURS
        if self.tiers_family is not None:
            name, rules = self.tiers_family["name"], self.tiers_family["weights"]
            family = Family(name, (), (), {}, parse_rules(rules, name))
        return Description(family, self.model, {}, {}, ())


def from_raw(raw: dict[str, Any], family: str | None = None) -> TiersConfig:
    """The config of a foreign config.json.

    Args:
        raw: the parsed file.
        family: see `tiers.reference.load.describe`.

    Raises:
        ConfigError, FamilyError: see there.
    """
    found = describe_config(raw, family)
    # What is said beside the mathematics: token ids and dtype, the language model's own first.
    kept = {key: raw[key] for key in HF_KEYS - {"architectures", "model_type"} if key in raw}
    config = TiersConfig(**{**kept, **found.raw, "architectures": [ARCHITECTURE], "model_type": MODEL_TYPE})
    if found.family is not OURS:
        config.tiers_family = {"name": found.family.name, "weights": found.family.table.get("weights", {})}
    return config


def foreign_config(model_type: str) -> type[TiersConfig]:
    """A class that transformers can load for a model type of a family."""

    class ForeignConfig(TiersConfig):
        def __new__(cls, *args: Any, **kwargs: Any) -> Any:
            # Python calls __init__ of ForeignConfig only on what is one, so this is the translated config as it is; and
            # as TiersConfig can be imported by name, it can be sent to other processes.
            return from_raw(kwargs) if kwargs else super().__new__(cls)

    ForeignConfig.model_type = model_type
    return ForeignConfig


class ConfigParser(ConfigParserBase):
    """vLLM's `--config-format tiers`: any folder of a family we know, whatever class transformers has for it."""

    def parse(
        self, model: str | Path, trust_remote_code: bool, revision: str | None = None,
        code_revision: str | None = None, **kwargs: Any,
    ) -> tuple[dict[str, Any], PreTrainedConfig]:  # fmt: skip
        """Read config.json of a local folder; never executes what lies there."""
        raw = read_config(Path(model))
        return raw, from_raw(raw, asked_family())
