"""Tiny random models of every family, and LoRA adapters on them."""

import copy

import peft
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMaskedLM, AutoModelForSeq2SeqLM

VOCABULARY = 97
END = 2

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 96,
}
GPT2_SIZES = {"n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 96}
PLAIN_SIZES = {key: SIZES[key] for key in ("hidden_size", "num_hidden_layers", "num_attention_heads")}

# Family → configuration; sizes are small, and sliding windows are shorter than the tests' sequences.
FAMILIES = {
    "llama": SIZES,
    "qwen2": SIZES,
    "qwen3": SIZES,
    "mistral": {**SIZES, "sliding_window": 6},
    "gemma3_text": {**SIZES, "sliding_window": 6, "layer_types": ["sliding_attention"] * 2 + ["full_attention"]},
    "phi3": {**SIZES, "pad_token_id": 0},
    "gpt2": {**GPT2_SIZES, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
    "opt": {**PLAIN_SIZES, "dropout": 0.0, "ffn_dim": 48, "word_embed_proj_dim": 16, "max_position_embeddings": 96},
    "gpt_neox": {**PLAIN_SIZES, "intermediate_size": 48, "max_position_embeddings": 96},
    "bloom": {"hidden_size": 32, "n_layer": 3, "n_head": 4},
    "gptj": {**GPT2_SIZES, "rotary_dim": 4},
    "mixtral": {**SIZES, "num_local_experts": 4, "num_experts_per_tok": 2},
}

# Families similar to those above, which do not run in the whole test matrix.
MORE_FAMILIES = {
    "smollm3": {**SIZES, "no_rope_layers": [1, 0, 1]},
    "granite": {
        **SIZES,
        "embedding_multiplier": 3.0,
        "attention_multiplier": 0.2,
        "residual_multiplier": 0.6,
        "logits_scaling": 2.0,
    },
    "olmo2": SIZES,
    "gemma2": {
        **SIZES,
        "sliding_window": 6,
        "query_pre_attn_scalar": 12,
        "attn_logit_softcapping": 4.0,
        "final_logit_softcapping": 3.0,
    },
    "falcon": {**PLAIN_SIZES, "multi_query": True, "new_decoder_architecture": False},
    "qwen3_moe": {
        **SIZES,
        "moe_intermediate_size": 24,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "mlp_only_layers": [1],
        "norm_topk_prob": True,
    },
}
ALL_FAMILIES = {**FAMILIES, **MORE_FAMILIES}


# Encoders and encoder-decoders: class and configuration.
ENCODER_SIZES = {**PLAIN_SIZES, "intermediate_size": 48, "max_position_embeddings": 96}
NON_DECODERS = {
    "bert": (AutoModelForMaskedLM, ENCODER_SIZES),
    "roberta": (AutoModelForMaskedLM, {**ENCODER_SIZES, "pad_token_id": 0}),
    "distilbert": (
        AutoModelForMaskedLM,
        {"dim": 32, "n_layers": 3, "n_heads": 4, "hidden_dim": 48, "max_position_embeddings": 96},
    ),
    "t5": (
        AutoModelForSeq2SeqLM,
        {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_decoder_layers": 2, "num_heads": 4},
    ),
}


def tiny_non_decoder(name: str, seed: int = 0, dtype: torch.dtype = torch.float32, **changes) -> nn.Module:
    """A random model of NON_DECODERS in eval mode, with random biases and norms too."""
    torch.manual_seed(seed)
    kind, sizes = NON_DECODERS[name]
    special = {"bos_token_id": 1, "eos_token_id": END, "pad_token_id": 0, "decoder_start_token_id": 0}
    model = kind.from_config(AutoConfig.for_model(name, **{"vocab_size": VOCABULARY, **special, **sizes, **changes}))
    return with_larger_weights(model).to(dtype).eval()


def with_larger_weights(model: nn.Module) -> nn.Module:
    """`model` with larger weights: `from_config`'s 0.02 makes all logits nearly equal, and biases are 0."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.1)
            else:
                parameter.mul_(3.0)
    return model


def tiny_model(
    family: str, seed: int = 0, dtype: torch.dtype = torch.float32, sizes: dict | None = None, **changes
) -> nn.Module:
    """A random model of `family` with random biases and norms too, so that omitting one changes the logits.

    sizes: the configuration of a family outside ALL_FAMILIES.
    """
    torch.manual_seed(seed)
    special = {"bos_token_id": 1, "eos_token_id": END, "pad_token_id": 0}
    settings = {**special, "vocab_size": VOCABULARY, **(sizes or ALL_FAMILIES[family]), **changes}
    config = AutoConfig.for_model(family, **settings)
    return with_larger_weights(AutoModelForCausalLM.from_config(config)).to(dtype)


def with_peft(model: nn.Module, seed: int = 1, **settings) -> nn.Module:
    """`model` with a random PEFT LoRA on every linear layer except the head."""
    torch.manual_seed(seed)
    lora = {"r": 4, "lora_alpha": 8, "target_modules": "all-linear", "init_lora_weights": False, **settings}
    return peft.get_peft_model(model, peft.LoraConfig(**lora))


class ChatLoRA(nn.Module):
    """A linear layer with LoRA in DeepSpeed-Chat's convention."""

    def __init__(self, linear: nn.Linear, rank: int = 4):
        super().__init__()
        self.weight, self.bias = linear.weight, linear.bias
        rows, columns = linear.weight.shape
        self.lora_right_weight = nn.Parameter(torch.randn(columns, rank) * 0.2)
        self.lora_left_weight = nn.Parameter(torch.randn(rank, rows) * 0.2)
        self.lora_scaling = 1.5 / rank
        self.weight.requires_grad = False

    def forward(self, x):
        delta = (x @ self.lora_right_weight @ self.lora_left_weight) * self.lora_scaling
        return nn.functional.linear(x, self.weight, self.bias) + delta


def with_chat_lora(model: nn.Module, seed: int = 1) -> nn.Module:
    """`model` with DeepSpeed-Chat's LoRA on every linear layer except the head; other parameters frozen."""
    torch.manual_seed(seed)
    model.requires_grad_(False)
    head = model.get_output_embeddings()
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if type(child) is nn.Linear and child is not head:
                setattr(module, name, ChatLoRA(child))
    return model


ADAPTERS = {"none": lambda model: model, "peft": with_peft, "chat": with_chat_lora}


def prompts(rows: int, length: int, padded: bool, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Random prompts and their mask, int64 [rows, length]; left padded by 0, 1, 2, … tokens where `padded`."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, VOCABULARY, (rows, length), generator=generator)
    mask = torch.ones_like(ids)
    if padded:
        for row in range(rows):
            mask[row, : min(row, length - 1)] = 0
    return ids * mask, mask


def twin(model: nn.Module) -> nn.Module:
    """An unpartitioned copy in eval mode, as the Hugging Face reference."""
    return copy.deepcopy(model).eval()
