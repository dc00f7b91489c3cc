"""Small models of 27 published architectures, built from configurations only: nothing is downloaded.

Each has 2 blocks in each stack (Swin: in each of 2 stages), 32 hidden units, 4 heads in each attention, no dropout, and
random weights in float64.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from torch import Tensor, nn

VOCAB = 64
HIDDEN, FFN, HEADS, BLOCKS, HEAD_SIZE = 32, 64, 4, 2, 8
IMAGE, PATCH, CLASSES = 32, 8, 16
BATCH, LENGTH, SHORT_LENGTH = 2, 9, 5
MEL_BINS, FRAMES = 8, 24
WEIGHT_NOISE = 0.1  # large enough for attention that is far from uniform

Batch = dict[str, Any]


@dataclass(frozen=True)
class Architecture:
    """An architecture: `make` returns the library's model, `batch` the keyword arguments of its forward."""

    name: str
    kind: str
    make: Callable[[], nn.Module]
    batch: Callable[[], Batch]

    def build(self) -> nn.Module:
        """Return the model in float64 and train mode, with the same weights on each call."""
        torch.manual_seed(0)
        model = self.make().to(torch.float64).train()
        with torch.no_grad():
            for parameter in model.parameters():  # some biases are initialized to zero
                parameter.add_(WEIGHT_NOISE * torch.randn_like(parameter))
        return model


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(1)


def _tokens() -> Batch:
    return {"input_ids": torch.randint(3, VOCAB, (BATCH, LENGTH), generator=_generator())}


def _masked_tokens() -> Batch:
    """Return token ids with an attention mask; the second sequence ends in two padding tokens."""
    mask = torch.ones(BATCH, LENGTH, dtype=torch.long)
    mask[1, -2:] = 0
    return {**_tokens(), "attention_mask": mask}


def _decoder_tokens() -> Tensor:
    return torch.randint(3, VOCAB, (BATCH, SHORT_LENGTH), generator=_generator())


def _token_pairs() -> Batch:
    return {**_masked_tokens(), "decoder_input_ids": _decoder_tokens()}


def _speech() -> Batch:
    features = torch.randn(BATCH, MEL_BINS, FRAMES, dtype=torch.float64, generator=_generator())
    return {"input_features": features, "decoder_input_ids": _decoder_tokens()}


def _images() -> Tensor:
    return torch.randn(BATCH, 3, IMAGE, IMAGE, dtype=torch.float64, generator=_generator())


def _pixel_values() -> Batch:
    return {"pixel_values": _images()}


def _x() -> Batch:
    return {"x": _images()}


_BERT = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": FFN,
    "num_hidden_layers": BLOCKS,
    "num_attention_heads": HEADS,
    "max_position_embeddings": 64,
    "pad_token_id": 1,
}
_LLAMA = {**_BERT, "num_key_value_heads": 2, "pad_token_id": None, "bos_token_id": 1, "eos_token_id": 2}
_GPT2 = {
    "vocab_size": VOCAB,
    "n_embd": HIDDEN,
    "n_layer": BLOCKS,
    "n_head": HEADS,
    "n_positions": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_DISTILBERT = {
    "vocab_size": VOCAB,
    "dim": HIDDEN,
    "hidden_dim": FFN,
    "n_layers": BLOCKS,
    "n_heads": HEADS,
    "max_position_embeddings": 64,
}
_OPT = {**_BERT, "word_embed_proj_dim": HIDDEN, "ffn_dim": FFN}
_BLOOM = {"vocab_size": VOCAB, "hidden_size": HIDDEN, "n_layer": BLOCKS, "n_head": HEADS}
_T5 = {
    "vocab_size": VOCAB,
    "d_model": HIDDEN,
    "d_kv": HEAD_SIZE,
    "d_ff": FFN,
    "num_layers": BLOCKS,
    "num_heads": HEADS,
}
_ENCODER_DECODER = {
    "vocab_size": VOCAB,
    "d_model": HIDDEN,
    "encoder_layers": BLOCKS,
    "decoder_layers": BLOCKS,
    "encoder_ffn_dim": FFN,
    "decoder_ffn_dim": FFN,
    "encoder_attention_heads": HEADS,
    "decoder_attention_heads": HEADS,
    "pad_token_id": 1,
    "bos_token_id": 0,
    "eos_token_id": 2,
    "decoder_start_token_id": 2,
}
_BART = {**_ENCODER_DECODER, "max_position_embeddings": 64, "forced_eos_token_id": None}
_WHISPER = {
    **_ENCODER_DECODER,
    "num_mel_bins": MEL_BINS,
    "max_source_positions": FRAMES // 2,
    "max_target_positions": 64,
}
_HF_IMAGES = {
    "hidden_size": HIDDEN,
    "intermediate_size": FFN,
    "num_hidden_layers": BLOCKS,
    "num_attention_heads": HEADS,
    "image_size": IMAGE,
    "patch_size": PATCH,
}
_QWEN2_MOE = {
    **_LLAMA,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": FFN,
    "num_experts": 4,
    "num_experts_per_tok": 2,
}
_MAMBA = {"vocab_size": VOCAB, "hidden_size": HIDDEN, "num_hidden_layers": BLOCKS, "state_size": 8}


def _transformers(model_class: str, family: str, **options: Any) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        import transformers

        config = transformers.AutoConfig.for_model(family, **options)
        for name, value in config.to_dict().items():
            if ("drop" in name or name.endswith("_dropout_prob")) and isinstance(value, float):
                setattr(config, name, 0.0)
        config.use_cache = False
        config._experts_implementation = "eager"  # the default uses grouped_mm, which lacks float64
        return getattr(transformers, model_class)(config)

    return make


def _timm(name: str, **options: Any) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        import timm

        return timm.create_model(name, pretrained=False, img_size=IMAGE, num_classes=CLASSES, **options)

    return make


def _timm_mixer() -> nn.Module:
    from timm.models.mlp_mixer import MlpMixer

    return MlpMixer(CLASSES, IMAGE, patch_size=PATCH, num_blocks=BLOCKS, embed_dim=HIDDEN)


def _torchvision_vit() -> nn.Module:
    from torchvision.models import VisionTransformer

    return VisionTransformer(IMAGE, PATCH, BLOCKS, HEADS, HIDDEN, FFN, num_classes=CLASSES)


ARCHITECTURES: tuple[Architecture, ...] = (
    Architecture("BERT", "encoder", _transformers("BertForMaskedLM", "bert", **_BERT), _masked_tokens),
    Architecture("RoBERTa", "encoder", _transformers("RobertaForMaskedLM", "roberta", **_BERT), _masked_tokens),
    Architecture(
        "DistilBERT", "encoder", _transformers("DistilBertForMaskedLM", "distilbert", **_DISTILBERT), _masked_tokens
    ),
    Architecture(
        "ALBERT", "encoder", _transformers("AlbertForMaskedLM", "albert", **_BERT, embedding_size=16), _masked_tokens
    ),
    Architecture(
        "ELECTRA", "encoder", _transformers("ElectraForMaskedLM", "electra", **_BERT, embedding_size=16), _masked_tokens
    ),
    Architecture(
        "DeBERTa-v2",
        "encoder",
        _transformers(
            "DebertaV2ForMaskedLM", "deberta-v2", **_BERT, relative_attention=True, pos_att_type=["p2c", "c2p"]
        ),
        _masked_tokens,
    ),
    Architecture("GPT-2", "decoder", _transformers("GPT2LMHeadModel", "gpt2", **_GPT2), _tokens),
    Architecture("GPT-NeoX", "decoder", _transformers("GPTNeoXForCausalLM", "gpt_neox", **_BERT), _tokens),
    Architecture("Llama", "decoder", _transformers("LlamaForCausalLM", "llama", **_LLAMA), _tokens),
    Architecture("OPT", "decoder", _transformers("OPTForCausalLM", "opt", **_OPT), _masked_tokens),
    Architecture("Bloom", "decoder", _transformers("BloomForCausalLM", "bloom", **_BLOOM), _tokens),
    Architecture("Falcon", "decoder", _transformers("FalconForCausalLM", "falcon", **_BERT), _tokens),
    Architecture("Phi", "decoder", _transformers("PhiForCausalLM", "phi", **_LLAMA), _tokens),
    Architecture("Gemma 2", "decoder", _transformers("Gemma2ForCausalLM", "gemma2", **_LLAMA, head_dim=8), _tokens),
    Architecture("Qwen3", "decoder", _transformers("Qwen3ForCausalLM", "qwen3", **_LLAMA, head_dim=8), _tokens),
    Architecture("T5", "encoder-decoder", _transformers("T5ForConditionalGeneration", "t5", **_T5), _token_pairs),
    Architecture(
        "BART", "encoder-decoder", _transformers("BartForConditionalGeneration", "bart", **_BART), _token_pairs
    ),
    Architecture(
        "Whisper", "encoder-decoder", _transformers("WhisperForConditionalGeneration", "whisper", **_WHISPER), _speech
    ),
    Architecture("ViT", "vision", _transformers("ViTForImageClassification", "vit", **_HF_IMAGES), _pixel_values),
    Architecture(
        "CLIP vision",
        "vision",
        _transformers("CLIPVisionModelWithProjection", "clip_vision_model", **_HF_IMAGES, projection_dim=CLASSES),
        _pixel_values,
    ),
    Architecture(
        "timm ViT",
        "vision",
        _timm("vit_tiny_patch16_224", patch_size=PATCH, embed_dim=HIDDEN, depth=BLOCKS, num_heads=HEADS),
        _x,
    ),
    Architecture(
        "timm Swin",
        "vision",
        _timm(
            "swin_tiny_patch4_window7_224",
            window_size=4,
            embed_dim=HIDDEN,
            depths=(2, 2),
            num_heads=(4, 4),
            drop_path_rate=0.0,
        ),
        _x,
    ),
    Architecture("timm MLP-Mixer", "vision", _timm_mixer, _x),
    Architecture("torchvision ViT", "vision", _torchvision_vit, _x),
    Architecture(
        "Mixtral",
        "mixture of experts",
        _transformers("MixtralForCausalLM", "mixtral", **_LLAMA, num_local_experts=4),
        _tokens,
    ),
    Architecture(
        "Qwen2-MoE",
        "mixture of experts",
        _transformers("Qwen2MoeForCausalLM", "qwen2_moe", **_QWEN2_MOE),
        _tokens,
    ),
    Architecture("Mamba", "state space", _transformers("MambaForCausalLM", "mamba", **_MAMBA), _tokens),
)
