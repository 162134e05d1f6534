"""Tiny random models that read images, and images for them."""

from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForMultimodalLM,
    CLIPImageProcessor,
    LlavaProcessor,
    PreTrainedTokenizerFast,
)

from tests.tiny_models import ALL_FAMILIES, END, RECURRENT, ROPE, SIZES, VOCABULARY, with_larger_weights

IMAGE = VOCABULARY - 1  # the placeholder of an image's tokens
VISION = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2, "image_size": 8, "patch_size": 4}
CLIP = {**VISION, "num_hidden_layers": 2, "model_type": "clip_vision_model", "projection_dim": 16}
SIGLIP = {**VISION, "num_hidden_layers": 2}
QWEN = {"depth": 2, "hidden_size": 16, "embed_dim": 16, "num_heads": 2, "out_hidden_size": 32, "patch_size": 4}
MROPE = {"rope_parameters": {**ROPE, "rope_type": "default", "mrope_section": [1, 1, 2]}}
TOKEN = {"image_token_id": IMAGE, "video_token_id": IMAGE - 1, "vision_start_token_id": IMAGE - 2}
OMNI = {
    "audio_token_id": IMAGE - 3,
    "image_token_id": IMAGE,
    "video_token_id": IMAGE - 1,
    "vision_start_token_id": IMAGE - 2,  # none of the classes' fields, but of the released configurations
    "audio_start_token_id": IMAGE - 4,
}
SOUND = {"encoder_layers": 2, "encoder_attention_heads": 2, "encoder_ffn_dim": 24, "d_model": 16, "num_mel_bins": 8}
TEXT = {**SIZES, "vocab_size": VOCABULARY, "bos_token_id": 1, "eos_token_id": END, "pad_token_id": 0}
# By type: the family of its text, and the configurations of vision, text and the whole.
MODELS: dict[str, tuple[str, dict, dict, dict]] = {
    "gemma3": (
        "gemma3",
        SIGLIP,
        {**ALL_FAMILIES["gemma3_text"]},
        {"mm_tokens_per_image": 4, "image_token_index": IMAGE},
    ),
    "mistral3": (
        "mistral",
        {**SIGLIP, "head_dim": 8},
        {"model_type": "mistral", "sliding_window": 6},
        {"image_token_index": IMAGE, "spatial_merge_size": 1},
    ),
    "llava": ("llama", CLIP, {"model_type": "llama"}, {"image_token_index": IMAGE, "image_seq_length": 4}),
    "llava_next": ("llama", CLIP, {"model_type": "llama"}, {}),
    "llava_onevision": ("qwen2", CLIP, {"model_type": "qwen2"}, {}),
    "internvl": ("qwen2", SIGLIP, {"model_type": "qwen2"}, {}),
    "idefics3": ("llama", SIGLIP, {"model_type": "llama"}, {}),
    "smolvlm": ("llama", SIGLIP, {"model_type": "llama"}, {"image_token_id": IMAGE, "scale_factor": 2}),
    "qwen2_vl": ("qwen2", {**QWEN, "hidden_size": 32}, MROPE, TOKEN),
    "qwen2_5_vl": ("qwen2", {**QWEN, "fullatt_block_indexes": [1], "window_size": 8}, MROPE, TOKEN),
    "qwen3_vl": ("qwen3_vl", {**QWEN, "deepstack_visual_indexes": [0, 1]}, MROPE, TOKEN),
    "qwen3_vl_moe": (
        "qwen3_vl_moe",
        {**QWEN, "deepstack_visual_indexes": [0, 1]},
        {**MROPE, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24},
        TOKEN,
    ),
    "qwen3_5_moe": ("qwen3_5_moe", QWEN, {**RECURRENT["qwen3_5_moe_text"]}, TOKEN),
    "qwen3_5": ("qwen3_5", QWEN, {**RECURRENT["qwen3_5_text"]}, TOKEN),
    "glm4v": ("glm4v", {**QWEN, "intermediate_size": 24, "image_size": 8}, MROPE, TOKEN),
    "qwen2_5_omni_thinker": (
        "qwen2",
        {**QWEN, "fullatt_block_indexes": [1], "window_size": 8},
        MROPE,
        {
            **OMNI,
            "audio_config": {**SOUND, "n_window": 4, "output_dim": 32, "max_source_positions": 64},
        },
    ),
    "qwen3_omni_moe_thinker": (
        "qwen3_moe",
        {**QWEN, "intermediate_size": 24, "deepstack_visual_indexes": [0, 1], "num_position_embeddings": 16},
        {**MROPE, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24},
        {
            **OMNI,
            "audio_config": {**SOUND, "downsample_hidden_size": 8, "output_dim": 32, "max_source_positions": 64},
        },
    ),
    "qwen2_audio": (
        "qwen2",
        {},
        {"model_type": "qwen2"},
        {"audio_config": {**SOUND, "max_source_positions": 8}, "audio_token_id": IMAGE - 3},
    ),
    "gemma4": (
        "gemma4",
        {
            **{
                name: VISION[name] for name in ("hidden_size", "intermediate_size", "num_attention_heads", "patch_size")
            },
            "num_hidden_layers": 2,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "pooling_kernel_size": 2,
            "position_embedding_size": 16,
        },
        {**ALL_FAMILIES["gemma4_text"], "use_bidirectional_attention": "vision", "final_logit_softcapping": 3.0},
        {"image_token_id": IMAGE, "video_token_id": IMAGE - 1, "audio_token_id": IMAGE - 2, "audio_config": None},
    ),
    "lfm2_vl": (
        "lfm2",
        {**SIGLIP, "model_type": "siglip2_vision_model", "num_patches": 16},
        {"model_type": "lfm2", **RECURRENT["lfm2"]},
        {"image_token_id": IMAGE, "projector_hidden_size": 24, "tie_word_embeddings": False},
    ),
}


def vision_model(kind: str, **text_changes) -> nn.Module:
    """A tiny random model with a vision tower."""
    torch.manual_seed(0)
    _, vision, text, whole = MODELS[kind]
    text = {**TEXT, **text}
    config = AutoConfig.for_model(kind, vision_config=vision, text_config={**text, **text_changes}, **whole)
    model = with_larger_weights(AutoModelForMultimodalLM.from_config(config)).eval()
    for parameter in model.parameters():
        if parameter.dim() > 1 and not parameter.any():  # Gemma 3's projector: no image would change anything
            nn.init.normal_(parameter, std=0.3)
    return model


# The types whose processors' output `images` imitates.
WITH_IMAGES = [
    "llava",
    "gemma3",
    "gemma4",
    "qwen2_5_vl",
    "qwen3_vl",
    "qwen2_vl",
    "glm4v",
    "mistral3",
    "smolvlm",
    "qwen3_5",
    "lfm2_vl",
]


def images(kind: str, seed: int) -> tuple[int, dict[str, torch.Tensor]]:
    """An image of random pixels: its number of tokens, and what a model's processor returns for it."""
    generator = torch.Generator().manual_seed(seed)
    if kind.startswith(("qwen", "glm4v")):
        grid = torch.tensor([[1, 4, 4 + 2 * (seed % 2)]])
        patches = int(grid.prod())
        return patches // 4, {
            "pixel_values": torch.randn(patches, 3 * 2 * 4 * 4, generator=generator),
            "image_grid_thw": grid,
        }
    if kind == "lfm2_vl":
        return 4, {
            "pixel_values": torch.randn(1, 16, 3 * 4 * 4, generator=generator),
            "pixel_attention_mask": torch.ones(1, 16, dtype=torch.int64),
            "spatial_shapes": torch.tensor([[4, 4]]),
        }
    if kind == "gemma4":
        places = torch.cartesian_prod(torch.arange(4), torch.arange(4)).flip(1)[None]
        return 4, {"pixel_values": torch.rand(1, 16, 3 * 4 * 4, generator=generator), "image_position_ids": places}
    pixels = torch.randn(1, 3, 8, 8, generator=generator)
    if kind == "smolvlm":
        return 1, {"pixel_values": pixels[None], "pixel_attention_mask": torch.ones(1, 1, 8, 8, dtype=torch.int64)}
    return 4, {"pixel_values": pixels, **({"image_sizes": torch.tensor([[8, 8]])} if kind == "mistral3" else {})}


def rows_with_images(
    kind: str, counts: list[int], seed: int = 0, words: int = 1
) -> tuple[list[torch.Tensor], list[dict]]:
    """Prompts with so many images each, int64 [n], each `words` tokens longer than the one before; and their inputs
    besides token ids."""
    generator = torch.Generator().manual_seed(seed)
    prompts, inputs = [], []
    for row, count in enumerate(counts):
        ids, parts = torch.randint(5, IMAGE - 3, (2,), generator=generator).tolist(), []
        for image in range(count):
            tokens, part = images(kind, 1000 * seed + 10 * row + image)
            parts.append(part)
            ids += [IMAGE] * tokens + torch.randint(5, IMAGE - 3, (1,), generator=generator).tolist()
        ids += torch.randint(5, IMAGE - 3, (3 + words * row,), generator=generator).tolist()
        prompt = torch.tensor(ids)
        dim = 1 if kind == "smolvlm" else 0
        of_row = {name: torch.cat([part[name] for part in parts], dim) for name in (parts[0] if parts else ())}
        with_types = kind.startswith(("gemma4", "glm4v", "qwen"))
        types = {"gemma3": "token_type_ids"}.get(kind, "mm_token_type_ids" if with_types else "")
        if types:
            of_row[types] = (prompt == IMAGE).long()[None]
        prompts.append(prompt)
        inputs.append(of_row)
    return prompts, inputs


# Prompts with images, videos and audio.

OMNI_TYPES = ("qwen2_5_omni_thinker", "qwen3_omni_moe_thinker")
TIMED = ("glm4v", "qwen3_vl", "qwen3_5")  # types whose frames have a time as text before each


def videos(kind: str, seed: int) -> tuple[int, dict[str, torch.Tensor]]:
    """A video of two frames of random pixels: the number of its tokens, and what a model's processor returns for it."""
    tokens, image = images(kind, seed)
    of_video = {
        "pixel_values_videos": torch.cat([image["pixel_values"], -image["pixel_values"]]),
        "video_grid_thw": image["image_grid_thw"] * torch.tensor([2, 1, 1]),
    }
    seconds = {"qwen2_5_vl": "second_per_grid_ts"} | dict.fromkeys(OMNI_TYPES, "video_second_per_grid")
    return 2 * tokens, of_video | ({seconds[kind]: torch.tensor([1.0])} if kind in seconds else {})


def sounds(kind: str, seed: int) -> tuple[int, dict[str, torch.Tensor]]:
    """A sound of random features, padded on the right: its number of tokens, and what a processor returns for it."""
    generator, frames = torch.Generator().manual_seed(seed), 12 + 4 * (seed % 2)
    features = torch.zeros(1, 8, 16)
    features[..., :frames] = torch.randn(1, 8, frames, generator=generator)
    mask = (torch.arange(16) < frames).long()[None]
    tokens = -(-frames // 8) if kind == "qwen3_omni_moe_thinker" else frames // 4
    return tokens, {"input_features": features, "feature_attention_mask": mask}


def rows_with_media(kind: str, media: list[str], seed: int = 0) -> tuple[list[torch.Tensor], list[dict]]:
    """Prompts with images, videos and sounds, by the letters of each: "iv" has an image, then a video.

    Returns prompts int64 [n] of different lengths, and their inputs besides token ids.
    """
    generator = torch.Generator().manual_seed(seed)
    makers = {"i": (images, IMAGE), "v": (videos, IMAGE if kind == "glm4v" else IMAGE - 1), "a": (sounds, IMAGE - 3)}

    def text(count: int) -> list[int]:
        return torch.randint(5, IMAGE - 4, (count,), generator=generator).tolist()

    prompts, inputs = [], []
    for row, letters in enumerate(media):
        ids, types, parts = text(2), [0, 0], []
        for number, letter in enumerate(letters):
            make, token = makers[letter]
            tokens, part = make(kind, 1000 * seed + 10 * row + number)
            parts.append(part)
            spans = 2 if letter == "v" and kind in TIMED else 1
            for _ in range(spans):
                ids += [IMAGE - 4 if letter == "a" else IMAGE - 2] + [token] * (tokens // spans) + text(1)
                types += [0] + [" iva".index(letter)] * (tokens // spans) + [0]
        ids += text(3 + 7 * row)
        types += [0] * (len(ids) - len(types))
        of_row = {
            name: torch.cat([part[name] for part in parts if name in part])
            for name in dict.fromkeys(name for part in parts for name in part)
        }
        if kind in TIMED or kind.endswith("_vl"):
            of_row["mm_token_type_ids"] = torch.tensor([types])
        prompts.append(torch.tensor(ids))
        inputs.append(of_row)
    return prompts, inputs


# A model with a processor, saved.

SPECIAL = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
WORDS = [*SPECIAL.values(), "<image>", "user", "assistant", "is", "it", "dark", "or", "bright"]
TEMPLATE = """
{%- for message in messages %}{{ message.role }} {% for part in message.content -%}
{{ '<image> ' if part.type == 'image' else part.text + ' ' }}{% endfor %}{% endfor %}
{%- if add_generation_prompt %}assistant{% endif %}"""


def save_model(directory: Path) -> None:
    """A random LLaVA that knows twelve words, and its processor."""
    torch.manual_seed(0)
    ids = {name.replace("token", "token_id"): WORDS.index(word) for name, word in SPECIAL.items()}
    text = {**TEXT, **ids, "vocab_size": len(WORDS), "model_type": "llama", "num_hidden_layers": 2}
    whole = {"image_token_index": WORDS.index("<image>"), "image_seq_length": 4, "vision_config": CLIP}
    config = AutoConfig.for_model("llava", text_config=text, **whole)
    with_larger_weights(AutoModelForMultimodalLM.from_config(config)).save_pretrained(directory)
    words = Tokenizer(models.WordLevel({word: index for index, word in enumerate(WORDS)}, SPECIAL["unk_token"]))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, additional_special_tokens=["<image>"], **SPECIAL)
    pixels = CLIPImageProcessor(size={"shortest_edge": 8}, crop_size={"height": 8, "width": 8})
    settings = {"patch_size": 4, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}
    LlavaProcessor(pixels, tokenizer, chat_template=TEMPLATE, **settings).save_pretrained(directory)
