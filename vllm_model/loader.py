"""Read the weights of a local folder with the loader that the reference model uses, whatever its files are."""

import time
from collections.abc import Generator
from typing import Any

from torch import Tensor, nn
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

from tiers.vllm_model import serving


class FolderLoader(DefaultModelLoader):
    """vLLM's loader, but the tensors come out of `tiers.reference.checkpoint`; they have the names of the files."""

    def download_model(self, model_config: Any) -> None:
        """The folder is here already."""

    def get_all_weights(self, model_config: Any, model: nn.Module) -> Generator[tuple[str, Tensor], None, None]:
        """Yield every tensor of the folder, full size, on the CPU."""
        self.counter_before_loading_weights = time.perf_counter()
        yield from serving.model_folder(model_config).checkpoint.tensors()
