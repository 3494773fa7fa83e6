"""The models that are swept: from ``transformers``, ``torchvision`` and ``timm``, built from configurations with random
weights, and our own (``own.py``).

One line per model: sizes for a CPU, sizes for a GPU. No network, no dropout. A model whose library is missing, or has
no such model, is a row that says so.
"""

import importlib
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from reflib.sweep import own
from reflib.sweep.model import Built, Model

Sizes = Mapping[str, Any]


class Named(nn.Module):
    """A transformers model called with tensors alone; it returns what its head computes."""

    def __init__(self, model: nn.Module, names: tuple[str, ...]):
        super().__init__()
        self.model, self.names = model, names

    def forward(self, *args: torch.Tensor) -> torch.Tensor:
        return self.model(**dict(zip(self.names, args)), return_dict=False)[0]


class DecodeStep(nn.Module):
    """One new token per sequence, after what is in a static key-value cache. (The cache holds no parameters: it is made
    when the model gets its device and dtype, with random contents.)"""

    def __init__(self, model: Any, batch: int, length: int):
        super().__init__()
        self.model, self.batch, self.length = model, batch, length
        self._apply(lambda t: t)

    def _apply(self, fn: Any, recurse: bool = True) -> nn.Module:
        from transformers import StaticCache

        super()._apply(fn, recurse)
        c, weight = self.model.config, next(self.model.parameters())
        self.cache = StaticCache(config=c, max_cache_len=self.length)
        size = c.hidden_size // c.num_attention_heads
        self.cache.early_initialization(self.batch, c.num_key_value_heads, size, weight.dtype, weight.device)
        random = torch.Generator().manual_seed(0)
        for layer in self.cache.layers:
            for kept in (layer.keys, layer.values):
                kept.copy_(torch.randn(kept.shape, generator=random).bfloat16())  # the same numbers in every dtype
        return self

    def forward(self, ids: torch.Tensor, mask: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        for layer in self.cache.layers:  # every call is the same step
            layer.cumulative_length.copy_(position)
        call = {"position_ids": position.expand(self.batch, 1), "past_key_values": self.cache, "use_cache": True}
        return self.model(ids, attention_mask=mask, **call, return_dict=False)[0]


def transformer(
    config: str, model: str, names: str, inputs: Callable[[bool], tuple], small: Sizes, real: Sizes
) -> Callable[[bool], Built]:
    """Classes of transformers, their arguments' names, and fields of the configuration."""

    def build(big: bool) -> Built:
        return Named(made(config, model, real if big else small), tuple(names.split())), inputs(big)

    return build


def made(config: str, model: str, sizes: Sizes) -> Any:
    """The model, without dropout, and without the cache of past keys and values."""
    library = importlib.import_module("transformers")
    c = getattr(library, config)(**{"use_cache": False, **sizes})
    for part in (c, *(getattr(c, name) for name in ("text_config", "vision_config") if hasattr(c, name))):
        for name, value in part.to_dict().items():
            if ("drop" in name or name.endswith("pdrop")) and isinstance(value, float):
                setattr(part, name, 0.0)
    return getattr(library, model)(c)


def decode(big: bool) -> Built:
    b, n = (8, 2048) if big else (2, 32)
    position = torch.tensor(n // 2)
    mask = (torch.arange(n) <= position).long().expand(b, n).contiguous()
    model = made("LlamaConfig", "LlamaForCausalLM", LLAMA[big])
    return DecodeStep(model, b, n), (own.ids(500, b, 1), mask, position)


def tokens(small: tuple[int, int], real: tuple[int, int], streams: int = 1) -> Callable[[bool], tuple]:
    return lambda big: tuple(own.ids(500, *(real if big else small)) for _ in range(streams))


def images(batch: int, side: int, small: int = 32) -> Callable[[bool], tuple]:
    return lambda big: (torch.randn(batch, 3, side, side) if big else torch.randn(2, 3, small, small),)


def torchvision(name: str, batch: int = 32, side: int = 224, key: str = "", **sizes: Any) -> Callable[[bool], Built]:
    """``key``: the result, where the model returns several by name."""

    def build(big: bool) -> Built:
        library = importlib.import_module("torchvision.models")
        model = library.get_model(name, weights=None, **sizes)
        return without_dropout(Picked(model, key) if key else model), images(batch, side, 64)(big)

    return build


class Picked(nn.Module):
    def __init__(self, model: nn.Module, key: str):
        super().__init__()
        self.model, self.key = model, key

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.model(x)[self.key]


def timm(name: str, batch: int = 32, **sizes: Any) -> Callable[[bool], Built]:
    """``sizes``: arguments for the small model."""

    def build(big: bool) -> Built:
        model = importlib.import_module("timm").create_model(name, pretrained=False, **({} if big else sizes))
        return without_dropout(model), images(batch, 224, 64)(big)

    return build


def without_dropout(model: nn.Module) -> nn.Module:
    """Whole layers that are dropped at random, too."""
    for module in model.modules():
        for name in ("p", "drop_prob", "drop_rate"):
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)
    return model


# -- the list ---------------------------------------------------------------------------------------
LAYERS2 = {"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4}
SMALL = {**LAYERS2, "vocab_size": 512}
DECODER = {"num_hidden_layers": 8, "hidden_size": 1024, "intermediate_size": 2816, "num_attention_heads": 16}
DECODER |= {"num_key_value_heads": 4, "vocab_size": 16384}
LLAMA = ({**SMALL, "num_key_value_heads": 2}, DECODER)
HEAD = {"head_dim": 16}
IMAGE2 = {**LAYERS2, "image_size": 32, "patch_size": 8}
STAGES = {"hidden_sizes": [16, 32, 48, 64], "depths": [1, 1, 1, 1]}
T5_SMALL = {"vocab_size": 512, "d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 2, "num_heads": 4}
WHISPER = {"d_model": 64, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4, "vocab_size": 512}
WHISPER |= {"decoder_attention_heads": 4, "encoder_ffn_dim": 128, "decoder_ffn_dim": 128, "max_source_positions": 32}
WHISPER |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
WAV = {**SMALL, "conv_dim": (32, 32), "conv_stride": (5, 4), "conv_kernel": (10, 8), "apply_spec_augment": False}
WAV |= {"num_feat_extract_layers": 2, "num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 4}
TOWERS = {"text_config": {**SMALL, "max_position_embeddings": 16}, "vision_config": IMAGE2, "projection_dim": 32}

_HF: tuple[tuple[str, float, Callable[[bool], Built]], ...] = (
    ("gpt2", 1.6, transformer("GPT2Config", "GPT2LMHeadModel", "input_ids", tokens((2, 16), (4, 512)),
        {"n_layer": 2, "n_embd": 64, "n_head": 4, "vocab_size": 512}, {"vocab_size": 16384})),
    ("llama", 1.2, transformer("LlamaConfig", "LlamaForCausalLM", "input_ids", tokens((2, 16), (4, 512)), *LLAMA)),
    ("llama_decode", 1.2, decode),
    ("qwen3", 1.3, transformer("Qwen3Config", "Qwen3ForCausalLM", "input_ids", tokens((2, 16), (4, 512)),
        {**LLAMA[0], **HEAD}, {**DECODER, "head_dim": 64})),
    ("gemma2", 1.4, transformer("Gemma2Config", "Gemma2ForCausalLM", "input_ids", tokens((2, 16), (4, 512)),
        {**LLAMA[0], **HEAD}, {**DECODER, "head_dim": 64})),
    ("mixtral", 1.5, transformer("MixtralConfig", "MixtralForCausalLM", "input_ids", tokens((2, 16), (4, 256)),
        {**LLAMA[0], "num_local_experts": 4},
        {**DECODER, "num_hidden_layers": 4, "hidden_size": 512, "intermediate_size": 1024})),
    ("t5", 1.8, transformer("T5Config", "T5ForConditionalGeneration", "input_ids decoder_input_ids",
        tokens((2, 16), (8, 256), 2), T5_SMALL, {"vocab_size": 16384})),
    ("bert", 1.4, transformer("BertConfig", "BertForMaskedLM", "input_ids", tokens((2, 16), (8, 256)), SMALL, {})),
    ("albert", 1.0, transformer("AlbertConfig", "AlbertForMaskedLM", "input_ids", tokens((2, 16), (8, 256)),
        {**SMALL, "embedding_size": 32}, {"hidden_size": 768, "intermediate_size": 3072, "num_attention_heads": 12})),
    ("deberta", 1.4, transformer("DebertaV2Config", "DebertaV2ForMaskedLM", "input_ids", tokens((2, 16), (8, 256)),
        {**SMALL, "relative_attention": True, "pos_att_type": ["p2c", "c2p"]},
        {"num_hidden_layers": 4, "hidden_size": 768, "intermediate_size": 3072, "num_attention_heads": 12,
         "relative_attention": True, "pos_att_type": ["p2c", "c2p"], "vocab_size": 16384})),
    ("vit", 1.2, transformer("ViTConfig", "ViTForImageClassification", "pixel_values", images(32, 224), IMAGE2, {})),
    ("swin", 1.8, transformer("SwinConfig", "SwinForImageClassification", "pixel_values", images(32, 224),
        {"image_size": 32, "patch_size": 4, "embed_dim": 16, "depths": [2, 2], "num_heads": [2, 4], "window_size": 4},
        {})),
    ("segformer", 1.3, transformer("SegformerConfig", "SegformerForSemanticSegmentation", "pixel_values",
        images(8, 256, 64), {**STAGES, "decoder_hidden_size": 32}, {})),
    ("convnext_hf", 1.2, transformer("ConvNextConfig", "ConvNextForImageClassification", "pixel_values",
        images(32, 224), STAGES, {})),
    ("clip", 1.6, transformer("CLIPConfig", "CLIPModel", "input_ids pixel_values",
        lambda big: (*tokens((2, 16), (16, 64))(big), *images(16, 224)(big)), TOWERS, {})),
    ("whisper", 1.6, transformer("WhisperConfig", "WhisperForConditionalGeneration", "input_features decoder_input_ids",
        lambda big: (torch.randn(4, 80, 3000) if big else torch.randn(2, 80, 64), *tokens((2, 8), (4, 128))(big)),
        WHISPER, {"d_model": 384, "encoder_layers": 4, "decoder_layers": 4, "encoder_attention_heads": 6,
                  "decoder_attention_heads": 6, "encoder_ffn_dim": 1536, "decoder_ffn_dim": 1536})),
    ("wav2vec2", 1.3, transformer("Wav2Vec2Config", "Wav2Vec2ForCTC", "input_values",
        lambda big: (torch.randn(4, 32000) if big else torch.randn(2, 800),),
        WAV, {"num_hidden_layers": 6, "apply_spec_augment": False})),
)  # fmt: skip

_TORCHVISION = (
    ("resnet50", 1.2, torchvision("resnet50")),
    ("mobilenet_v3", 1.1, torchvision("mobilenet_v3_large")),
    ("efficientnet_b0", 1.4, torchvision("efficientnet_b0")),
    ("densenet121", 2.0, torchvision("densenet121", 16)),
    ("shufflenet_v2", 1.1, torchvision("shufflenet_v2_x1_0")),
    ("deeplabv3", 1.3, torchvision("deeplabv3_mobilenet_v3_large", 8, 256, key="out", weights_backbone=None)),
)  # fmt: skip

_TIMM = (
    ("convnext_tiny", 1.2, timm("convnext_tiny", depths=(1, 1, 1, 1), dims=(16, 32, 48, 64))),
    ("mixer", 1.0, timm("mixer_s16_224", img_size=64)),
    ("resnext50", 1.2, timm("resnext50_32x4d", layers=(1, 1, 1, 1))),
    ("poolformer", 1.2, timm("poolformer_s12")),
    ("efficientvit_b0", 1.2, timm("efficientvit_b0")),
)

MODELS: tuple[Model, ...] = (
    *(Model(n, b, "transformers", c, ("inference",) if n == "llama_decode" else Model.modes) for n, c, b in _HF),
    *(Model(n, b, "torchvision", c) for n, c, b in _TORCHVISION),
    *(Model(n, b, "timm", c) for n, c, b in _TIMM),
    *own.MODELS,
)
