"""Byte-level tokenizers with the special tokens and chat templates of model families, and a tiny model for one."""

from pathlib import Path

import torch
import trl
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers, trainers
from tokenizers.decoders import ByteLevel
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

TEMPLATES = Path(trl.__file__).parent / "chat_templates"
# Family → its special tokens (the first is the tokenizer's bos, the second its eos), and the token that ends a turn.
FAMILIES = {
    "qwen2_5": (("", "<|im_end|>", "<|im_start|>", "<|endoftext|>"), "<|im_end|>"),
    "qwen3": (("", "<|im_end|>", "<|im_start|>", "<|endoftext|>"), "<|im_end|>"),
    "gemma": (("<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"), "<end_of_turn>"),
    "gemma3": (("<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"), "<end_of_turn>"),
    "phi3": (("<s>", "<|endoftext|>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>"), "<|end|>"),
    "llama3": (
        ("<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
        "<|eot_id|>",
    ),
    "llama3_1": (
        (
            "<|begin_of_text|>",
            "<|end_of_text|>",
            "<|start_header_id|>",
            "<|end_header_id|>",
            "<|eot_id|>",
            "<|eom_id|>",
        ),
        "<|eot_id|>",
    ),
    "chatml": (("", "<|im_end|>", "<|im_start|>"), "<|im_end|>"),
    "cohere": (
        ("<BOS_TOKEN>", "<|END_OF_TURN_TOKEN|>", "<|START_OF_TURN_TOKEN|>", "<|USER_TOKEN|>", "<|CHATBOT_TOKEN|>"),
        "<|END_OF_TURN_TOKEN|>",
    ),
}
QWEN3_5 = (("", "<|im_end|>", "<|im_start|>", "<|endoftext|>"), "<|im_end|>")
GEMMA4 = """
    <bos> <turn|> <|turn> <eos> <|tool> <tool|> <|tool_call> <tool_call|> <|tool_response> <tool_response|> <|channel>
    <channel|> <|think|> <|"|>
"""
# The same of families with tool calls in formats of their own, and the token that ends a call's turn, where GLM and
# Gemma 4 stop at the start of the tool's result.
WITH_OWN_TOOLS = {
    **dict.fromkeys(("qwen3_5_think", "qwen3_5_nothink", "qwen3_6", "qwen3_8"), QWEN3_5),
    "glm4moe": (
        ("", "<|endoftext|>", "[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"),
        "<|observation|>",
    ),
    "gptoss": (
        ("", "<|return|>", "<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|constrain|>", "<|call|>"),
        "<|call|>",
    ),
    "gemma4_v2": (tuple(GEMMA4.split()), "<turn|>"),
    **dict.fromkeys(("gemma4", "gemma4_v3", "gemma4_v4", "gemma4_v5"), (tuple(GEMMA4.split()), "<|tool_response>")),
}
# From transformers' documentation (docs/source/en/chat_templating_writing.md), without a default system message.
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# Whose special tokens take the white space after them (microsoft/Phi-3-mini-4k-instruct, tokenizer.json).
STRIPPING = ("phi3",)


def tokenizer_of(family: str, merged_text: str = "") -> PreTrainedTokenizerFast:
    """A byte-level tokenizer with a family's special tokens and its chat template, from TRL.

    merged_text: has BPE merges learned on this text, so that tokens span several characters.
    """
    special, _ = {**FAMILIES, **WITH_OWN_TOOLS}[family]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = Tokenizer(models.BPE({char: i for i, char in enumerate(alphabet)}, []))
    inner.pre_tokenizer, inner.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), ByteLevel()
    if merged_text:
        inner.train_from_iterator(
            [merged_text], trainers.BpeTrainer(vocab_size=700, initial_alphabet=alphabet, show_progress=False)
        )
    strips = family in STRIPPING
    inner.add_special_tokens(
        [AddedToken(text, special=True, normalized=False, rstrip=strips) for text in special if text]
    )
    ends = {"eos_token": special[1], "pad_token": special[1], **({"bos_token": special[0]} if special[0] else {})}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, **ends)
    tokenizer.chat_template = CHATML if family == "chatml" else (TEMPLATES / f"{family}.jinja").read_text()
    return tokenizer


def chat_model(directory: Path) -> str:
    """A tiny Llama with tied embeddings, dropout and Gemma's template, whose turns end with a token that is not the
    tokenizer's end token, and a newline."""
    torch.manual_seed(0)
    tokenizer = tokenizer_of("gemma")
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    large = {"initializer_range": 0.2, "attention_dropout": 0.5}  # logits that are large enough for dropout to change
    config = LlamaConfig(**sizes, **large, vocab_size=len(tokenizer), tie_word_embeddings=True)
    config.bos_token_id, config.eos_token_id = tokenizer.bos_token_id, tokenizer.eos_token_id
    LlamaForCausalLM(config).save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return str(directory)
