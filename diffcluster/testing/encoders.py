"""Text and image encoders, a few thousand weights each. Their token numbers are those of the tokenizer they go with."""

from __future__ import annotations

from typing import Any, Final

from transformers import (
    CLIPTextConfig,
    CLIPTextModel,
    CLIPTextModelWithProjection,
    CLIPVisionConfig,
    CLIPVisionModel,
    Gemma2Config,
    Gemma2Model,
    LlamaConfig,
    LlamaModel,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3Model,
    T5Config,
    T5EncoderModel,
    UMT5Config,
    UMT5EncoderModel,
)

from diffcluster.testing.weights import randomize

__all__ = ["IMAGE_SIZE", "PATCH", "WIDTH", "clip_text", "clip_vision", "gemma", "llama", "qwen3", "qwen_vl", "t5"]

WIDTH: Final = 32
"""Hidden size of every text encoder, unless another is asked for."""

IMAGE_SIZE: Final = 32
"""Height and width of what the CLIP image encoder sees."""

PATCH: Final = 14
"""Height and width of a patch that Qwen's image encoder sees: the real one."""

_HEADS: Final[dict[str, int]] = {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16}


def clip_text(tokenizer: Any, *, projection: bool = False, width: int = WIDTH) -> Any:
    """Two layers: several pipelines take the last but one."""
    config = CLIPTextConfig(
        vocab_size=len(tokenizer),
        hidden_size=width,
        intermediate_size=2 * width,
        projection_dim=width,
        num_hidden_layers=2,
        num_attention_heads=2,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return randomize((CLIPTextModelWithProjection if projection else CLIPTextModel)(config))


def clip_vision() -> Any:
    """Of an image of `IMAGE_SIZE`: 4 x 4 patches and one more token."""
    config = CLIPVisionConfig(
        hidden_size=WIDTH,
        intermediate_size=2 * WIDTH,
        projection_dim=WIDTH,
        num_hidden_layers=2,
        num_attention_heads=2,
        image_size=IMAGE_SIZE,
        patch_size=IMAGE_SIZE // 4,
    )
    return randomize(CLIPVisionModel(config))


def t5(tokenizer: Any, *, multilingual: bool = False, width: int = WIDTH) -> Any:
    """The encoder half; `multilingual` gives UMT5."""
    settings = {
        "vocab_size": len(tokenizer), "d_model": width, "d_kv": 16, "d_ff": 2 * width, "num_layers": 2, "num_heads": 2,
        "feed_forward_proj": "gated-gelu", "pad_token_id": tokenizer.pad_token_id,
        "eos_token_id": tokenizer.eos_token_id,
    }  # fmt: skip
    return randomize(UMT5EncoderModel(UMT5Config(**settings)) if multilingual else T5EncoderModel(T5Config(**settings)))


def qwen3(tokenizer: Any, *, layers: int = 3, head: bool = False) -> Any:
    """Qwen 3; with a language `head` where the pipeline's class wants one."""
    config = Qwen3Config(num_hidden_layers=layers, tie_word_embeddings=True, **_decoder(tokenizer))
    return randomize((Qwen3ForCausalLM if head else Qwen3Model)(config))


def gemma(tokenizer: Any) -> Any:
    """Gemma 2. Eager attention: it caps the scores, which other kernels don't."""
    settings = _decoder(tokenizer) | {"bos_token_id": tokenizer.bos_token_id}
    config = Gemma2Config(num_hidden_layers=2, query_pre_attn_scalar=16, attn_implementation="eager", **settings)
    return randomize(Gemma2Model(config))


def llama(tokenizer: Any) -> Any:
    """Four layers: the pipeline takes the hidden states before the last two."""
    return randomize(LlamaModel(LlamaConfig(num_hidden_layers=4, **_decoder(tokenizer))))


def qwen_vl(tokenizer: Any) -> Any:
    """Qwen 2.5 VL, with its image encoder."""
    rope = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [2, 3, 3]}
    text = _decoder(tokenizer) | {"num_hidden_layers": 2, "rope_parameters": rope}
    del text["head_dim"]
    vision = {
        "depth": 2, "hidden_size": WIDTH, "intermediate_size": 2 * WIDTH, "num_heads": 2, "out_hidden_size": WIDTH,
        "patch_size": PATCH, "fullatt_block_indexes": [1],
    }  # fmt: skip
    numbers = {
        f"{name}_token_id": tokenizer.convert_tokens_to_ids(f"<|{token}|>")
        for name, token in (("image", "image_pad"), ("video", "video_pad"), ("vision_start", "vision_start"),
                            ("vision_end", "vision_end"))
    }  # fmt: skip
    config = Qwen2_5_VLConfig(text_config=text, vision_config=vision, tie_word_embeddings=True, **numbers)
    return randomize(Qwen2_5_VLForConditionalGeneration(config))


def _decoder(tokenizer: Any) -> dict[str, Any]:
    return {
        "vocab_size": len(tokenizer), "hidden_size": WIDTH, "intermediate_size": 2 * WIDTH, **_HEADS,
        "max_position_embeddings": 8192, "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id,
    }  # fmt: skip
