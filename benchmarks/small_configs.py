"""Small configurations of Hugging Face's model types: every size by its name, and a layer of every kind.

In most of transformers' configurations a setting's name says what it is. What does not follow the names is in
OVERRIDES, with the reason. Configurations inside a configuration, such as of a vision tower, are made small likewise.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

from transformers import CONFIG_MAPPING, PreTrainedConfig

VOCABULARY, FIRST_SPECIAL = 128, 96  # ids of images, ends of turns and the like are FIRST_SPECIAL and above
SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
TOKEN = r".*(token|boi|eoi|boa|eoa|im_\w+|patch|unk|mask|lang)_(id|index)"  # settings with a special token
LAYERS = ("num_hidden_layers", "num_layers", "n_layer", "n_layers", "decoder_layers", "num_decoder_layers", "layers")
INDICES = r".*(_layers|_idxs|_indexes|_layer_ids|_indices)"  # settings with the numbers of layers
# The size of a setting by the first pattern that matches its name. Smaller defaults are kept.
SIZES = {
    r"(.*_)?vocab(_size)?|vocab_size_.*": VOCABULARY,
    r"(\w+_)?(n|num)_(hidden_|encoder_|decoder_)?layers?|(decoder|encoder)_layers|\w*depth|layers|num_blocks": 2,
    r".*(kv|key_value|kv_n|num_key)_heads|num_query_groups|n_mamba_heads": 2,
    r".*heads|n_head": 4,
    r"qk_rope_head_dim|rotary_dim": 8,
    r"qk_head_dim": 16 + 8,
    r"mamba_(d_head|headdim|head_dim)": 32,  # by heads it is twice the hidden size
    r".*head_dim|.*headdim|kv_channels|dim_head|d_kv|d_head|.*head_size|mamba_d_state|.*state_size": 16,
    r".*intermediate_size(_mlp)?|.*ffn_dim|d_ff|dff|dim_ff|n_inner|.*ffn_hidden_size|mlp_dim|d_inner"
    r"|feed_forward_size|share_expert_dim": 96,
    r".*hidden_size.*|d_model|n_embd|(embedding|emb|embed|projection|.*_embed_proj)_dim|embedding_size|lru_width"
    r"|.*output_dim|.*proj.*_dim|adapter_(in|out)_dim|adapter_input_size": 64,
    r".*_rank|hc_lowrank": 16,
    r"(n|num|moe_num)_(routed_|local_)?experts": 4,
    r"num_experts_per_tok(en)?|moe_k|moe_topk|moe_top_k|top_k_experts": 2,
    r"n_groups?|topk_group|num_expert_group|mamba_n_?groups": 1,
    r"(n|num|moe_num)_shared_experts|first_k_dense_replace|num_dense_layers": 1,
    r"num_nextn_predict_layers": 0,
    r"sliding_window|sliding_window_size|local_attention": 8,
    r"max_position_embeddings|n_positions|n_ctx|max_seq_len|model_max_length|max_target_positions|context_length": 512,
}
# By type: settings that replace those, with the reason.
ROUTED = {"num_experts_per_tok": 2, "n_routed_experts": 4, "n_group": 1, "topk_group": 1}
PERIOD = {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1}
SHARED_KV = {  # layers that share keys and values come after one of each kind that does not
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "num_kv_shared_layers": 2,
    "intermediate_size": [96] * 4,
    "activation_sparsity_pattern": [0.0] * 4,
}
ENCODERS = (
    "bert bert-generation big_bird camembert data2vec-text electra ernie megatron-bert rembert roberta "
    "roberta-prelayernorm roc_bert roformer xlm-roberta xlm-roberta-xl xmod"
)
MROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
OVERRIDES: dict[str, dict[str, Any]] = {
    **{  # sections for larger heads, which are no setting
        name: {"text_config": {"rope_parameters": MROPE}}
        for name in "qwen2_vl qwen2_5_vl glm4v glm46v glm_ocr glmga paddleocr_vl".split()
    },
    "glm4v_moe": {
        "text_config": {"rope_parameters": {**MROPE, "partial_rotary_factor": 0.5, "mrope_section": [1, 1, 2]}}
    },
    # Released configurations have the token, which is none of the class's fields.
    "qwen2_5_omni_thinker": {"text_config": {"rope_parameters": MROPE}, "vision_start_token_id": 3},
    "qwen3_omni_moe_thinker": {"vision_start_token_id": 3},
    **{name: {"is_decoder": True} for name in ENCODERS.split()},  # without it their attention is not causal
    "bamba": {"attn_layer_indices": [1]},  # no attention by default
    "cohere_compass_text": {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 10000.0}}},
    "dbrx": {"attn_config": {"rope_theta": 10000.0, "clip_qkv": 8.0}},  # not among its fields; None is not taken
    "deepseek_v2": ROUTED,  # no number of experts by default
    "dots1": {**ROUTED, "n_shared_experts": 1},
    "falcon_h1": {"mamba_d_ssm": 128, "mamba_d_head": 32},  # heads times their width
    "gemma3n_text": SHARED_KV,
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},  # a list of its own for the layers
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"]},  # no attention by default
    "hrm_text": {"num_layers_per_stack": 1, "num_hidden_layers": 8},  # two cycles of four layers
    "hunyuan_v1_moe": {"num_experts": 4, "moe_topk": 2},  # one expert by default
    "jamba": PERIOD,  # layers by period
    "lfm2": {"layer_types": ["conv", "full_attention"]},  # attention alone by default
    "lfm2_vl": {"text_config": {"layer_types": ["conv", "full_attention"]}},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},  # none by default
    "llama4_text": {"layer_types": None, "no_rope_layers": [1, 0], "moe_layers": [1]},
    "llama4": {"text_config": {"layer_types": None, "no_rope_layers": [1, 0], "moe_layers": [1]}},
    "longcat_flash": {"head_dim": 8},  # of the rotated part
    "mamba2": {"head_dim": 32},  # heads times their width is twice the hidden size
    "mistral4": {"qk_nope_head_dim": 8, "qk_head_dim": 16, "head_dim": 16},  # of which partial_rotary_factor is a half
    "nemotron": {"num_key_value_heads": 2},  # none by default
    "recurrent_gemma": {"num_hidden_layers": 3},  # its third layer is the first with attention
    "vibevoice_asr": {  # its encoders double the filters six times
        f"{kind}_tokenizer_encoder_config": {"num_filters": 2} for kind in ("acoustic", "semantic")
    },
}


def small_config(model_type: str) -> PreTrainedConfig:
    """Return a small configuration of a type, from its default one. Raises what its class raises."""
    return made_small(CONFIG_MAPPING[model_type](), {}, OVERRIDES.get(model_type, {}))


def made_small(config: PreTrainedConfig, specials: dict[int, int], overrides: dict[str, Any]) -> PreTrainedConfig:
    """Return a small configuration like `config`.

    specials: the new ids of special tokens, by their old ones; those of this configuration are added.
    overrides: settings that replace the others; those of a configuration inside, as a dictionary by its name.
    """
    settings = {field.name: vars(config)[field.name] for field in fields(config) if field.name in vars(config)}
    layers, small = Layers.of(settings), {}
    for name, value in settings.items():
        if isinstance(value, PreTrainedConfig):
            small[name] = made_small(value, specials, overrides.get(name, {}))
        elif name in overrides:
            small[name] = overrides[name]
        else:
            small[name] = small_value(name, value, layers, specials)
    small |= {name: value for name, value in overrides.items() if name not in small}
    if "head_dim" in small and small["head_dim"] is None:  # some models take it as it is
        small["head_dim"] = small["hidden_size"] // small["num_attention_heads"]
    if small.get("kv_lora_rank"):  # latent attention expands a latent to keys and values of every head
        small["num_key_value_heads"] = small["num_attention_heads"]
    if isinstance(rope := small.get("rope_parameters"), dict):
        small["rope_parameters"] = small_rope(rope, small)
    return type(config)(**small)


@dataclass(frozen=True)
class Layers:
    """The layers of a model, of which a small model keeps some.

    count: layers of the model.  chosen: indices of the layers that the small model keeps, ascending.
    """

    count: int
    chosen: list[int]

    @classmethod
    def of(cls, settings: dict[str, Any]) -> "Layers":
        """Choose the first layer of each kind, at least two.

        A layer's kind is what lists with an entry for each layer, and lists of layers' numbers, say of it.
        """
        layers = cls(next((settings[name] for name in LAYERS if isinstance(settings.get(name), int)), 0), [])
        kinds: list[list[Any]] = [[] for _ in range(layers.count)]
        for name, value in settings.items():
            if layers.are_of(value) and len(set(map(str, value))) <= 4:
                for kind, of_layer in zip(kinds, value, strict=True):
                    kind.append(str(of_layer))
            elif layers.are_numbers(name, value):
                for number, kind in enumerate(kinds):
                    kind.append(number in value)
        chosen = set({str(kind): number for number, kind in reversed(list(enumerate(kinds)))}.values())
        others = [number for number in range(layers.count) if number not in chosen]
        return cls(layers.count, sorted({*chosen, *others[: max(2 - len(chosen), 0)]}))

    def are_of(self, value: Any) -> bool:
        """Whether a setting has an entry for each layer."""
        return isinstance(value, list | tuple) and 0 < len(value) == self.count

    def are_numbers(self, name: str, value: Any) -> bool:
        """Whether a setting has the numbers of some layers."""
        numbers = isinstance(value, list | tuple) and all(isinstance(each, int) for each in value)
        return numbers and bool(re.fullmatch(INDICES, name)) and all(0 <= number < self.count for number in value)

    def part(self, name: str, value: Sequence[Any]) -> Sequence[Any]:
        """Return what a list says of the chosen layers; the whole list if it is not of layers."""
        if self.are_of(value):
            return [value[number] for number in self.chosen]
        if self.are_numbers(name, value):
            return [place for place, number in enumerate(self.chosen) if number in value]
        return value


def small_value(name: str, value: Any, layers: Layers, specials: dict[int, int]) -> Any:
    """Return the small value of a setting.  specials: as `made_small`'s."""
    if name in SPECIAL and value is not None:
        return SPECIAL[name]
    if isinstance(value, float) and "drop" in name:
        return 0.0
    if isinstance(value, list | tuple):
        return type(value)(layers.part(name, value))
    if not isinstance(value, int) or isinstance(value, bool):
        return value
    if re.fullmatch(TOKEN, name):
        return specials.setdefault(value, min(FIRST_SPECIAL + len(specials), VOCABULARY - 1))
    if name in LAYERS and layers.chosen:
        return len(layers.chosen)
    size = next((size for pattern, size in SIZES.items() if re.fullmatch(pattern, name)), value)
    return min(size, value)


def small_rope(rope: dict[str, Any], settings: dict[str, Any]) -> dict[str, Any]:
    """Return rope's parameters for the small heads: sections of a head, whose sum is half of the rotated part.

    rope: the parameters, or those of each type of layer.
    """
    if any(isinstance(value, dict) for value in rope.values()):
        return {name: small_rope(value, settings) if isinstance(value, dict) else value for name, value in rope.items()}
    if "mrope_section" not in rope:
        return rope
    width = settings.get("head_dim") or settings["hidden_size"] // settings["num_attention_heads"]
    half = int(width * rope.get("partial_rotary_factor", 1.0)) // 2
    sections = rope["mrope_section"]
    small = [max(section * half // sum(sections), 1) for section in sections]
    small[0] += half - sum(small)
    return {**rope, "mrope_section": small}
