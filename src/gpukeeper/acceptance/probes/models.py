"""The models whose training speed is measured, in plain PyTorch: ResNet-50 and -18 as everybody counts them (25,557,032
and 11,689,512 parameters with 1,000 classes), and a transformer that predicts the next token."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from gpukeeper.acceptance.probes.ranks import BadSetting

NAMES = ("resnet50", "resnet18", "transformer")
IMAGE = 224  # pixels each way, of made-up images
SEQUENCE = 512
_WIDTH, _HEADS, _LAYERS, _FEED_FORWARD = 1024, 16, 12, 4096


def build(name: str, classes: int) -> Any:
    if name == "resnet50":
        return ResNet(Bottleneck, (3, 4, 6, 3), classes)
    if name == "resnet18":
        return ResNet(Basic, (2, 2, 2, 2), classes)
    if name == "transformer":
        return Transformer(classes)
    raise BadSetting(f"Unknown model {name!r}; valid values: {', '.join(NAMES)}.")


def parameters(model: Any) -> int:
    return sum(one.numel() for one in model.parameters())


def _conv(inputs: int, outputs: int, size: int, stride: int = 1) -> Any:
    return nn.Conv2d(inputs, outputs, size, stride, padding=size // 2, bias=False)


class Basic(nn.Module):
    widening = 1

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            _conv(inputs, width, 3, stride), nn.BatchNorm2d(width), nn.ReLU(inplace=True),
            _conv(width, width, 3), nn.BatchNorm2d(width),
        )  # fmt: skip
        self.shortcut = _shortcut(inputs, width, stride)

    def forward(self, x: Any) -> Any:
        return torch.relu(self.body(x) + self.shortcut(x))


class Bottleneck(nn.Module):
    widening = 4

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        outputs = width * self.widening
        self.body = nn.Sequential(
            _conv(inputs, width, 1), nn.BatchNorm2d(width), nn.ReLU(inplace=True),
            _conv(width, width, 3, stride), nn.BatchNorm2d(width), nn.ReLU(inplace=True),
            _conv(width, outputs, 1), nn.BatchNorm2d(outputs),
        )  # fmt: skip
        self.shortcut = _shortcut(inputs, outputs, stride)

    def forward(self, x: Any) -> Any:
        return torch.relu(self.body(x) + self.shortcut(x))


def _shortcut(inputs: int, outputs: int, stride: int) -> Any:
    if stride == 1 and inputs == outputs:
        return nn.Identity()
    return nn.Sequential(_conv(inputs, outputs, 1, stride), nn.BatchNorm2d(outputs))


class ResNet(nn.Module):
    """He et al. 2015, with the stride in the 3×3 of a bottleneck, as in torchvision. Images of any size."""

    def __init__(self, block: Any, depths: tuple[int, ...], classes: int) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, 64, 7, 2, padding=3, bias=False), nn.BatchNorm2d(64), nn.ReLU(inplace=True),
            nn.MaxPool2d(3, 2, padding=1),
        )  # fmt: skip
        blocks, inputs = [], 64
        for stage, depth in enumerate(depths):
            width = 64 * 2**stage
            for place in range(depth):
                blocks.append(block(inputs, width, 2 if stage and not place else 1))
                inputs = width * block.widening
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(inputs, classes)

    def forward(self, images: Any) -> Any:
        return self.head(self.blocks(self.stem(images)).mean((2, 3)))


class Transformer(nn.Module):
    """1024 wide, 16 heads, 12 layers, 4096 in the middle, sequences of 512; each token sees those before it."""

    def __init__(self, tokens: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(tokens, _WIDTH)
        self.places = nn.Embedding(SEQUENCE, _WIDTH)
        layer = nn.TransformerEncoderLayer(_WIDTH, _HEADS, _FEED_FORWARD, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, _LAYERS, enable_nested_tensor=False)
        self.head = nn.Linear(_WIDTH, tokens)

    def forward(self, tokens: Any) -> Any:
        """Batch × sequence → scores, batch × tokens × sequence."""
        length = tokens.shape[1]
        places = torch.arange(length, device=tokens.device)
        mask = nn.Transformer.generate_square_subsequent_mask(length, device=tokens.device)
        hidden = self.layers(self.tokens(tokens) + self.places(places), mask=mask, is_causal=True)
        return self.head(hidden).transpose(1, 2)
