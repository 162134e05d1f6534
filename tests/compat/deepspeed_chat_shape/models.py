"""The imports and calls of DeepSpeed-Chat's model_utils.py, reward_model.py and lora.py."""

import math
import os
import warnings

import deepspeed
import torch
from saving import gathered, load_state_dict_into_model
from torch import nn
from transformers import AutoConfig, AutoModel
from transformers.integrations.deepspeed import HfDeepSpeedConfig
from transformers.modeling_utils import no_init_weights

warnings.filterwarnings("ignore", "deepspeed.compression.helper is deprecated", FutureWarning)
from deepspeed.compression.helper import recursive_getattr, recursive_setattr  # noqa: E402


def create_hf_model(model_class, name, tokenizer, ds_config=None, rlhf_training=False):
    config = AutoConfig.from_pretrained(name)
    partitioned = ds_config["zero_optimization"]["stage"] == 3
    dschf = HfDeepSpeedConfig(ds_config) if partitioned else None  # noqa: F841 (in effect while it exists)
    if rlhf_training:
        with no_init_weights():
            model = model_class.from_config(config)
    else:
        model = model_class.from_pretrained(name, from_tf=bool(".ckpt" in name), config=config)
    model.config.end_token_id = tokenizer.eos_token_id
    model.config.pad_token_id = model.config.eos_token_id
    model.resize_token_embeddings(int(8 * math.ceil(len(tokenizer) / 8.0)))
    return model


class RewardModel(nn.Module):
    def __init__(self, base_model, tokenizer):
        super().__init__()
        self.config = base_model.config
        self.v_head = nn.Linear(self.config.hidden_size, 1, bias=False)
        self.rwtransformer = base_model
        self.PAD_ID = tokenizer.pad_token_id

    def values(self, input_ids, attention_mask, head_mask=None, use_cache=False):
        kwargs = {} if self.config.model_type == "llama" else {"head_mask": head_mask}
        outputs = self.rwtransformer(
            input_ids,
            past_key_values=None,
            attention_mask=attention_mask,
            inputs_embeds=None,
            use_cache=use_cache,
            **kwargs,
        )
        return self.v_head(outputs[0]).squeeze(-1)

    def end_scores(self, input_ids, values, prompt_length=0):
        """The value at the last token before the padding, which is on the right."""
        padding = [(row[prompt_length:] == self.PAD_ID).nonzero() for row in input_ids]
        ends = [rows[0].item() + prompt_length if len(rows) else input_ids.shape[1] for rows in padding]
        return torch.stack([value[end - 1] for value, end in zip(values, ends, strict=True)])

    def forward(self, input_ids=None, attention_mask=None, use_cache=False):
        scores = self.end_scores(input_ids, self.values(input_ids, attention_mask, use_cache=use_cache))
        chosen, rejected = scores.float().chunk(2)
        return {"loss": -nn.functional.logsigmoid(chosen - rejected).mean(), "scores": scores}

    def forward_value(self, input_ids, attention_mask, return_value_only=False, prompt_length=0, use_cache=False):
        values = self.values(input_ids, attention_mask, use_cache=use_cache)
        if return_value_only:
            return values
        return {"chosen_end_scores": self.end_scores(input_ids, values, prompt_length)}


def create_critic_model(name, tokenizer, ds_config, rlhf_training=False, zero_stage=0):
    model = RewardModel(create_hf_model(AutoModel, name, tokenizer, ds_config, rlhf_training), tokenizer)
    if rlhf_training:
        weights = torch.load(os.path.join(name, "pytorch_model.bin"), map_location="cpu")
        load_state_dict_into_model(model, weights, "", zero_stage=zero_stage)
    return model


class LinearLayer_LoRA(nn.Module):
    def __init__(self, weight, lora_dim, bias=None):
        super().__init__()
        self.weight, self.bias = weight, bias
        rows, columns = getattr(weight, "ds_shape", weight.shape)
        self.lora_right_weight = nn.Parameter(torch.zeros(columns, lora_dim))
        self.lora_left_weight = nn.Parameter(torch.zeros(lora_dim, rows))
        self.lora_scaling = 1 / lora_dim
        nn.init.kaiming_uniform_(self.lora_right_weight, a=math.sqrt(5))
        self.weight.requires_grad = False

    def forward(self, input):
        delta = (input @ self.lora_right_weight @ self.lora_left_weight) * self.lora_scaling
        return nn.functional.linear(input, self.weight, self.bias) + delta


def convert_linear_layer_to_lora(model, part_module_name, lora_dim):
    found = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    for name in (name for name in found if part_module_name in name):
        linear = recursive_getattr(model, name)
        lora = LinearLayer_LoRA(linear.weight, lora_dim, linear.bias)
        recursive_setattr(model, name, lora.to(linear.weight.device).to(linear.weight.dtype))
    return model


def convert_lora_to_linear_layer(model):
    for module in model.modules():
        if isinstance(module, LinearLayer_LoRA):
            partitioned = hasattr(module.weight, "ds_id")
            factors = [module.weight, module.bias, module.lora_left_weight, module.lora_right_weight]
            with deepspeed.zero.GatheredParameters(gathered(factors), modifier_rank=0, enabled=partitioned):
                module.weight.data += module.lora_scaling * (module.lora_left_weight.t() @ module.lora_right_weight.t())
    return model
