"""Chat with a model in a terminal; its answers are streamed token by token.

The model that `make demo` trains, on a CPU; a model of 7B, or its adapter's directory, on a GPU:
python -m rlhf_examples.chat --path runs/demo/ppo/model
python -m rlhf_examples.chat --path my-model --dtype bfloat16 --max_new_tokens 512
"""

import json
import sys
from collections.abc import Callable
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase, TextStreamer

import hybrid
from rlhf_examples.common.arguments import ChatArguments
from rlhf_examples.common.command_line import run_command
from rlhf_examples.common.engines import deepspeed_config
from rlhf_examples.common.models import load_exported, load_tokenizer, merged, require_model
from rlhf_examples.common.ranks import device, end_preparation, seed_everything

Messages = list[dict[str, str]]
HELP = "Enter sends a message. /new starts a new conversation, /quit (or Ctrl-D) exits."


def main() -> None:
    """Chat with the settings of the command line."""
    run_command(ChatArguments, run)


def run(args: ChatArguments) -> None:
    """Load the model and chat until the input ends."""
    require_model("path", args.path, args.attn_implementation)
    seed_everything(args.seed)
    tokenizer = load_tokenizer(args.path)
    dtype = "float32" if args.dtype == "int8" else args.dtype
    model = merged(load_exported(args.path, deepspeed_config(dtype, zero_stage=0), args.attn_implementation))
    max_out_tokens = min(getattr(model.config, "max_position_embeddings", 0) or 4096, 4096)
    end_preparation()
    engine = hybrid.init_inference(
        model, dtype=args.dtype, replace_with_kernel_inject=True, max_out_tokens=max_out_tokens
    )
    print(f"{args.path}: {HELP}", file=sys.stderr)
    talk(engine, tokenizer, lambda: input("\n> "), args)


def talk(
    engine: hybrid.InferenceEngine, tokenizer: PreTrainedTokenizerBase, ask: Callable[[], str], args: ChatArguments
) -> Messages:
    """Run a conversation and return its messages.

    ask: returns the next user message; raises EOFError at the end of the input.
    A model without a chat template continues the last message as plain text.
    """
    beginning = [{"role": "system", "content": args.system}] if args.system else []
    messages = list(beginning)
    while True:
        try:
            text = ask()
        except (EOFError, KeyboardInterrupt):
            return messages
        if text.strip() == "/quit":
            return messages
        if text.strip() == "/new":
            messages = list(beginning)
        elif text.strip():
            messages.append({"role": "user", "content": text})
            messages.append({"role": "assistant", "content": answer(engine, tokenizer, messages, args)})


def answer(
    engine: hybrid.InferenceEngine, tokenizer: PreTrainedTokenizerBase, messages: Messages, args: ChatArguments
) -> str:
    """Generate the model's answer to the last message, print it as it is generated, and return it."""
    ids = encode_prompt(tokenizer, messages, json.loads(args.chat_template_kwargs or "{}"))
    ends = [*args.stop_token_ids, tokenizer.eos_token_id, hybrid.turn_end_token(tokenizer)]
    ends = [token for token in dict.fromkeys(ends) if token is not None]
    sampling = {"do_sample": True, "temperature": args.temperature, "top_p": args.top_p} if args.temperature else {}
    tokens = engine.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=args.max_new_tokens,
        eos_token_id=ends or None,
        pad_token_id=tokenizer.pad_token_id,
        streamer=TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True),
        **(sampling or {"do_sample": False}),
    )
    return tokenizer.decode(tokens[0, ids.shape[1] :], skip_special_tokens=True)


def encode_prompt(
    tokenizer: PreTrainedTokenizerBase, messages: Messages, settings: dict[str, Any] | None = None
) -> torch.Tensor:
    """The conversation as token ids, int64 [1, tokens]; without a chat template the last message alone.

    settings: keyword arguments of the chat template.
    """
    if tokenizer.chat_template is not None:
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **(settings or {}))
        start = []
    else:
        text = messages[-1]["content"]
        start = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
    return torch.tensor([start + tokenizer(text, add_special_tokens=False)["input_ids"]], device=device())


if __name__ == "__main__":
    main()
