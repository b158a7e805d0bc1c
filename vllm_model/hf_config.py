"""The config class that transformers and vLLM load for `model_type: tiers`."""

import dataclasses
from typing import Any

from transformers import PreTrainedConfig

from tiers.reference.config import ARCHITECTURE, MODEL_TYPE, Layer, ModelConfig
from tiers.reference.heads import HeadLayout

# Keys of config.json that describe the model; kept as they were written, so that `--hf-overrides` can change them.
DESCRIPTION_KEYS = tuple(field.name for cls in (ModelConfig, Layer) for field in dataclasses.fields(cls))

# Computed from the description, so never written to a config.json.
DERIVED_KEYS = ("num_attention_heads", "num_key_value_heads", "head_dim")


class TiersConfig(PreTrainedConfig):
    """A thin shell: the description as written, and the sizes under the names that vLLM asks for.

    Raises:
        ConfigError: the description is not a model; see `ModelConfig.from_dict`.
    """

    model_type = MODEL_TYPE

    def __init__(self, **kwargs: Any) -> None:
        description = {key: kwargs.pop(key) for key in DESCRIPTION_KEYS if key in kwargs}
        kwargs.setdefault("architectures", [ARCHITECTURE])
        super().__init__(**kwargs)
        for key, value in description.items():
            setattr(self, key, value)
        if description:  # transformers makes an empty one to learn the defaults
            self._set_sizes()

    def _set_sizes(self) -> None:
        mixers = [layer.mixer for layer in self.model.layers]
        layouts = [HeadLayout.of(mixer.heads, mixer.num_kv_heads) for mixer in mixers]
        self.num_attention_heads = max(layout.num_heads for layout in layouts)
        self.num_key_value_heads = max(mixer.num_kv_heads for mixer in mixers)
        self.head_dim = max(mixer.head_dim for mixer in mixers)

    def to_dict(self) -> dict[str, Any]:
        return {key: value for key, value in super().to_dict().items() if key not in DERIVED_KEYS}

    @property
    def model(self) -> ModelConfig:
        """The parsed description."""
        raw = {key: getattr(self, key) for key in DESCRIPTION_KEYS if hasattr(self, key)}
        return ModelConfig.from_dict(raw, "config.json")
