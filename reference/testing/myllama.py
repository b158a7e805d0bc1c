"""MyLLaMA, the worked example of docs/myllama.md: a Llama with ALiBi, in plain PyTorch and with names of its own.

Written without any of the operators of this project, so that it can be compared with them.
"""

import json
import math
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

CONFIG: dict[str, Any] = {
    "architectures": ["MyLlamaForCausalLM"],
    "model_type": "myllama",
    "dtype": "float32",
    "vocab_size": 320,
    "d_model": 256,
    "n_layers": 3,
    "n_heads": 8,
    "n_groups": 4,
    "ffn_width": 352,
    "norm_epsilon": 1e-5,
    "max_seq_len": 512,
}


class MyLlama(nn.Module):
    """Takes the token ids of one sequence, [T], and gives logits, [T, vocab_size]."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        self.embedding = nn.Embedding(config["vocab_size"], config["d_model"])
        self.blocks = nn.ModuleList(Block(config) for _ in range(config["n_layers"]))
        self.final_norm = nn.RMSNorm(config["d_model"], eps=config["norm_epsilon"])
        self.output = nn.Linear(config["d_model"], config["vocab_size"], bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        return self.output(self.final_norm(x))


class Block(nn.Module):
    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        width = config["d_model"]
        self.attention = AlibiAttention(width, config["n_heads"], config["n_groups"])
        self.ffn = GatedFfn(width, config["ffn_width"])
        self.norm1 = nn.RMSNorm(width, eps=config["norm_epsilon"])
        self.norm2 = nn.RMSNorm(width, eps=config["norm_epsilon"])

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.ffn(self.norm2(x))


class AlibiAttention(nn.Module):
    """Rows of `qkv` come group by group: the query heads of a group, its key head, its value head."""

    slopes: Tensor

    def __init__(self, width: int, heads: int, groups: int) -> None:
        super().__init__()
        self.groups, self.size = groups, width // heads
        self.qkv = nn.Linear(width, (heads + 2 * groups) * self.size, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        # For a power of two the published slopes are a geometric series from its own ratio.
        self.register_buffer("slopes", 2.0 ** (-8.0 / heads * torch.arange(1, heads + 1)))

    def forward(self, x: Tensor) -> Tensor:
        length, size = len(x), self.size
        qkv = self.qkv(x).view(length, self.groups, -1, size)
        query, key, value = qkv[:, :, :-2], qkv[:, :, -2], qkv[:, :, -1]
        distance = torch.arange(length)[:, None] - torch.arange(length)
        scores = torch.einsum("igqd,jgd->gqij", query, key) / math.sqrt(size)
        scores = scores - self.slopes.view(self.groups, -1, 1, 1) * distance
        weights = scores.masked_fill(distance < 0, float("-inf")).softmax(-1)
        return self.out(torch.einsum("gqij,jgd->igqd", weights, value).reshape(length, -1))


class GatedFfn(nn.Module):
    """Gate and up in one matrix."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.w13 = nn.Linear(width, 2 * inner, bias=False)
        self.w2 = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.w13(x).chunk(2, dim=-1)
        return self.w2(nn.functional.silu(gate) * up)


def save_myllama(folder: Path, seed: int = 0, **changes: Any) -> MyLlama:
    """Write a folder with random weights, as the team that trained the model would; returns the model.

    Args:
        folder: made if it is not there.
        seed: of the weights.
        changes: keys of config.json to replace.
    """
    config = {**CONFIG, **changes}
    model = MyLlama(config)
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        values = torch.randn(parameter.shape, generator=generator)
        parameter.data = 1 + 0.1 * values if parameter.dim() == 1 else values * 1.5 * parameter.shape[1] ** -0.5
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    save_file({name: tensor.contiguous() for name, tensor in model.state_dict().items()}, folder / "model.safetensors")
    return model.requires_grad_(False).eval()
