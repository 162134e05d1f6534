"""The imports and calls of DeepSpeed-Chat's utils.py."""

import json
import os

import deepspeed
import torch
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from transformers import AutoTokenizer


def gathered(params):
    """Those of `params` that must be gathered before they are read: `_z3_params_to_fetch`."""
    return [p for p in params if hasattr(p, "ds_id") and p.ds_status == ZeroParamStatus.NOT_AVAILABLE]


def get_tokenizer(name, fast_tokenizer=True):
    if "llama" in name:
        from transformers.models.llama import LlamaTokenizer

        tokenizer = LlamaTokenizer.from_pretrained(name, fast_tokenizer=fast_tokenizer)
        if tokenizer.pad_token is None:
            tokenizer.add_special_tokens({"pad_token": "[PAD]"})
            tokenizer.padding_side = "right"
    else:
        tokenizer = AutoTokenizer.from_pretrained(name, fast_tokenizer=fast_tokenizer)
        tokenizer.pad_token = tokenizer.eos_token
        tokenizer.padding_side = "right"
    return tokenizer


def load_hf_tokenizer(name, fast_tokenizer=True):
    with open(os.path.join(name, "config.json")) as file:
        return get_tokenizer(json.load(file).get("_name_or_path", name), fast_tokenizer=fast_tokenizer)


def save_hf_format(model, tokenizer, folder):
    model = model.module if hasattr(model, "module") else model
    os.makedirs(folder, exist_ok=True)
    weights = {key: value for key, value in model.state_dict().items() if "lora" not in key}
    torch.save(weights, os.path.join(folder, "pytorch_model.bin"))
    model.config.to_json_file(os.path.join(folder, "config.json"))
    tokenizer.save_vocabulary(folder)


def save_zero_three_model(model, global_rank, folder, zero_stage=0):
    os.makedirs(folder, exist_ok=True)
    path = os.path.join(folder, "pytorch_model.bin")
    model = model.module if hasattr(model, "module") else model
    weights = {}
    for name, param in model.named_parameters():
        with deepspeed.zero.GatheredParameters(gathered([param]), enabled=zero_stage == 3):
            value = param.data.cpu()
        if global_rank == 0 and "lora" not in name:
            weights[name] = value
    if global_rank == 0:
        torch.save(weights, path)


def load_state_dict_into_model(model, state_dict, start_prefix="", zero_stage=0):
    def load(module, prefix):
        own = dict(module.named_parameters(prefix=prefix[:-1], recurse=False))
        present = [own[key] for key in state_dict if key in own]
        if present:
            with deepspeed.zero.GatheredParameters(present, modifier_rank=0, enabled=zero_stage == 3):
                if zero_stage != 3 or torch.distributed.get_rank() == 0:
                    module._load_from_state_dict(state_dict, prefix, {}, True, [], [], [])
        for name, child in module._modules.items():
            if child is not None:
                load(child, prefix + name + ".")

    load(model, start_prefix)
