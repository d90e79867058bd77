"""A decoder: what comes next, at every place of a text, from what came before it."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention


class GPT(nn.Module):
    """tokens [batch, time] (int64) -> scores of the token after each of them [batch, time, vocabulary] (float32).

    With layer norms before what they normalise, and one matrix for embedding tokens and for scoring them. No statistics
    of a batch, so a text's scores depend on nothing beside it.
    """

    def __init__(
        self, vocabulary: int, *, context: int, width: int, layers: int, heads: int, dropout: float = 0.0
    ) -> None:
        super().__init__()
        self.context = context
        self.tokens = nn.Embedding(vocabulary, width)
        self.places = nn.Embedding(context, width)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList([Block(width, heads, dropout) for _ in range(layers)])
        self.norm = nn.LayerNorm(width)
        for name, weight in self.named_parameters():
            if weight.dim() == 2:
                # What is added to the stream of all layers is smaller, so that the sum is not the larger the deeper.
                deviation = 0.02 / (2 * layers) ** 0.5 if name.endswith(("out.weight", "down.weight")) else 0.02
                nn.init.normal_(weight, std=deviation)

    def forward(self, tokens: Tensor) -> Tensor:
        places = self.places.weight[: tokens.shape[1]]
        stream = self.dropout(self.tokens(tokens) + places)
        for block in self.blocks:
            stream = block(stream)
        return nn.functional.linear(self.norm(stream), self.tokens.weight)


class Block(nn.Module):
    """Attention to what came before, then two linear layers, each added to the stream [batch, time, width]."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.norm_of_attention, self.norm_of_layers = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, stream: Tensor) -> Tensor:
        stream = stream + self.dropout(self.attend(self.norm_of_attention(stream)))
        inner = nn.functional.gelu(self.up(self.norm_of_layers(stream)))
        added: Tensor = stream + self.dropout(self.down(inner))
        return added

    def attend(self, stream: Tensor) -> Tensor:
        """Mix each place with those before it."""
        batch, time, width = stream.shape
        heads = self.qkv(stream).view(batch, time, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        queries, keys, values = heads.unbind(0)
        mixed = scaled_dot_product_attention(queries, keys, values, is_causal=True)
        attended: Tensor = self.out(mixed.transpose(1, 2).reshape(batch, time, width))
        return attended


@torch.no_grad()
def write(model: GPT, tokens: list[int], *, count: int, temperature: float, seed: int) -> list[int]:
    """Continue a text by ``count`` tokens, drawn one after the other; the same for the same seed.

    Args:
        model: on any device.
        tokens: how the text begins; at least one.
        count: of tokens to add.
        temperature: scores are divided by it; the lower, the likelier what is drawn.
        seed: of the draws.
    """
    model.eval()
    written = list(tokens)
    generator = torch.Generator().manual_seed(seed)
    for _ in range(count):
        window = torch.tensor([written[-model.context :]], device=model.tokens.weight.device)
        chances = (model(window)[0, -1] / temperature).softmax(0).cpu()
        written.append(int(torch.multinomial(chances, 1, generator=generator)))
    return written
