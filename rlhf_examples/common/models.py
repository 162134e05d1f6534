"""Policies, critics and frozen models as Hugging Face modules, loaded into partitions."""

import copy
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import peft
import torch
from deepspeed import zero
from peft.tuners.tuners_utils import BaseTunerLayer
from safetensors import SafetensorError
from tokenizers.processors import TemplateProcessing
from torch import nn
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BitsAndBytesConfig,
    LlamaConfig,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.integrations import HfDeepSpeedConfig
from transformers.modeling_outputs import TokenClassifierOutput
from transformers.utils import find_adapter_config_file

import hybrid
from rlhf_examples.common.choices import named_reward
from rlhf_examples.common.ranks import gather_objects
from rlhf_examples.environments import environment_tokenizer
from rlhf_examples.rewards import REWARDS_ALLOWED

ENVIRONMENT_TOKENIZER = "synthetic:environments"


def load_tokenizer(name: str, chat_template: str = "") -> PreTrainedTokenizerBase:
    """The tokenizer, with a padding token, and adding nothing after a text.

    chat_template: a file with a Jinja template that replaces its own.
    name: a directory, a hub name, or `synthetic:environments` for that of `rlhf_examples.environments`.
    Raises ValueError if there is no such file, or if the tokenizer cannot be kept from adding an end token.
    """
    tokenizer = environment_tokenizer() if name == ENVIRONMENT_TOKENIZER else AutoTokenizer.from_pretrained(name)
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    add_nothing_after_texts(tokenizer, name)
    if chat_template:
        if not Path(chat_template).is_file():
            raise ValueError(f"chat_template: no file at {chat_template!r}")
        tokenizer.chat_template = Path(chat_template).read_text()
    return tokenizer


def tokenizer_of(args: Any, argument: str) -> PreTrainedTokenizerBase:
    """The tokenizer of a script, by its arguments; the model's own unless another is given.

    argument: the one that names the model. Raises ValueError as `require_model` and `load_tokenizer` do.
    """
    name = getattr(args, argument)
    require_model(argument, name, args.attn_implementation)
    return load_tokenizer(args.tokenizer_name_or_path or name, args.chat_template)


def add_nothing_after_texts(tokenizer: PreTrainedTokenizerBase, name: str) -> None:
    """Stop a tokenizer from adding a token after a text, as T5's does, and Llama's with `add_eos_token`: a prompt would
    end with it, in training and in `generate(**tokenizer(prompt))` of what is exported. What it adds before a text
    stays.

    Raises ValueError for one without a tokenizer.json, which has no setting for that.
    """
    texts = (token for token in tokenizer.get_vocab() if token not in tokenizer.all_special_tokens)
    text, plain = next((text, ids) for text in texts if (ids := tokenizer(text, add_special_tokens=False)["input_ids"]))
    whole = tokenizer(text)["input_ids"]
    start = next((i for i in range(len(whole)) if whole[i : i + len(plain)] == plain), len(whole))
    after = tokenizer.convert_ids_to_tokens(whole[start + len(plain) :])
    if not after:
        return
    if not tokenizer.is_fast:
        raise ValueError(
            f"tokenizer: {name!r} given, which ends every text with {''.join(after)!r}, prompts too; give one with a "
            "tokenizer.json, from which that can be removed"
        )
    before = [(tokenizer.convert_ids_to_tokens(token), token) for token in whole[:start]]
    first, second = ([*(f"{token}:{part}" for token, _ in before), f"${'AB'[part]}:{part}"] for part in (0, 1))
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(first, first + second, before)


@dataclass(frozen=True)
class LoRA:
    """A PEFT LoRA.  rank: 0 for none.  modules: PEFT's `target_modules`, names separated by commas.  dropout: of its
    inputs.
    export_adapter: exported as an adapter, without its base model.
    bits: 4 or 8 if its base is quantized; quant_type, nested_quant: of a base in 4 bits.
    """

    rank: int
    alpha: int
    modules: str
    dropout: float = 0.0
    export_adapter: bool = False
    bits: int = 0
    quant_type: str = "nf4"
    nested_quant: bool = False

    def quantization(self, ds_config: dict[str, Any]) -> dict[str, Any]:
        """Arguments of `from_pretrained` for the base.  ds_config: the engine's DeepSpeed configuration."""
        if not self.rank or not self.bits:
            return {}
        config = BitsAndBytesConfig(
            load_in_4bit=self.bits == 4,
            load_in_8bit=self.bits == 8,
            bnb_4bit_compute_dtype=dtype_of(ds_config),
            bnb_4bit_quant_type=self.quant_type,
            bnb_4bit_use_double_quant=self.nested_quant,
        )
        return {"quantization_config": config}

    def apply(self, model: nn.Module, task: str) -> nn.Module:
        """`model` with the adapter, its own weights frozen; `model` itself if the rank is 0.  task: PEFT's
        `task_type`.
        """
        if not self.rank:
            return model
        names = self.modules if self.modules == "all-linear" else self.modules.split(",")
        config = peft.LoraConfig(
            r=self.rank,
            lora_alpha=self.alpha,
            lora_dropout=self.dropout,
            target_modules=names,
            task_type=task,
        )
        # Factors in the weights' dtype: `rollout.lora: unmerged` would merge others.
        return peft.get_peft_model(model, config, autocast_adapter_dtype=False)


def small_model(
    hidden_size: int, num_hidden_layers: int, tokenizer: PreTrainedTokenizerBase, attn_implementation: str = ""
) -> PreTrainedModel:
    """A new Llama of a few million parameters.  attn_implementation: as in `load`."""
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=hidden_size,
        intermediate_size=hidden_size * 3,
        num_hidden_layers=num_hidden_layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return AutoModelForCausalLM.from_config(config, attn_implementation=attn_implementation or None)


def load(
    kind: Any,
    name: str,
    ds_config: dict[str, Any],
    new_prefix: str = "",
    config: PretrainedConfig | None = None,
    disable_dropout: bool = False,
    attn_implementation: str = "",
    **quantization: Any,
) -> PreTrainedModel:
    """A model from a directory or hub name, in the dtype of its engine. Every rank takes part.

    Under ZeRO-3 parameters are partitioned from the start, and the first rank maps the files and broadcasts one
    module's weights at a time: no rank ever holds the whole model. Under ZeRO 0 to 2 every rank holds it, as it will in
    training.
    kind: one of Hugging Face's Auto classes.  ds_config: the engine's DeepSpeed configuration.
    new_prefix: prefix of the names of weights that may be missing; they are initialized, equally on every rank.
    config: replaces the model's own.  disable_dropout: see `without_dropout`.
    attn_implementation: transformers'; empty for its default.
    quantization: of `LoRA.quantization`; every rank then loads the whole quantized model, under ZeRO-3 too.
    Raises ValueError on every rank if weights are missing, have other shapes or cannot be read.
    """
    dtype = dtype_of(ds_config)
    hf_ds_config = HfDeepSpeedConfig(ds_config)  # transformers holds a weak reference, so keep it alive while loading
    error = ""
    model: Any = None
    try:
        config = config or AutoConfig.from_pretrained(name)
        config = without_dropout(config) if disable_dropout else config
        settings = {"config": config, "dtype": dtype, "attn_implementation": attn_implementation or None}
        settings |= quantization
        model, report = kind.from_pretrained(name, **settings, output_loading_info=True)
        if missing := sorted(key for key in report["missing_keys"] if not new_prefix or not key.startswith(new_prefix)):
            error = f"it has no {', '.join(missing[:20])}; give the checkpoint of a {type(model).__name__}"
    except (ImportError, OSError, RuntimeError, ValueError, SafetensorError) as raised:
        error = f"{type(raised).__name__}: {raised}"
    finally:
        del hf_ds_config
    # Only the rank that reads a weight sees that it does not fit; the others would wait for ever.
    if error := next(filter(None, gather_objects(error)), ""):
        raise ValueError(f"{name!r} cannot be loaded: {error}")
    return model


def dtype_of(ds_config: dict[str, Any]) -> torch.dtype:
    """The dtype of an engine's weights, by its DeepSpeed configuration."""
    return torch.bfloat16 if ds_config["bf16"]["enabled"] else torch.float32


def load_merged(
    kind: Any, name: str, ds_config: dict[str, Any], new_prefix: str = "", **kwargs: Any
) -> PreTrainedModel:
    """`load` of a whole model, or of a PEFT adapter that is merged into its base. Weights whose names begin with
    `new_prefix` are set to zero, unless the adapter has them.
    """
    base = base_model_of(name)
    model = load(kind, base, ds_config, new_prefix, **kwargs)
    zero_(model, new_prefix)
    return model if base == name else merge_adapter_weights(model, name)


def base_model_of(name: str) -> str:
    """The base model of the adapter in a directory or of a hub name; `name` itself if it is no adapter."""
    try:
        if find_adapter_config_file(name) is None:
            return name
    except OSError:  # there is no such model either; `load` raises the error
        return name
    return peft.PeftConfig.from_pretrained(name).base_model_name_or_path


def zero_(model: PreTrainedModel, new_prefix: str) -> None:
    """Set the parameters whose names begin with `new_prefix` to zero; none if `new_prefix` is empty."""
    parameters = [
        parameter for name, parameter in model.named_parameters() if new_prefix and name.startswith(new_prefix)
    ]
    with zero.GatheredParameters(parameters, modifier_rank=0):
        for parameter in parameters:
            nn.init.zeros_(parameter)


@torch.no_grad()
def merge_adapter_weights(model: PreTrainedModel, name: str) -> PreTrainedModel:
    """`model`, whole or partitioned, with an adapter merged into its weights, one module at a time; weights trained
    next to the adapter (`modules_to_save`) replace the model's own. Every rank takes part.

    Raises ValueError if the adapter belongs to another model.
    """
    config = peft.PeftConfig.from_pretrained(name)
    # A language model's adapter fits its classifier too; the weights of `modules_to_save` are copied below.
    config.task_type, config.modules_to_save, config.inference_mode = None, None, False
    tensors = {key.removeprefix("base_model.model."): value for key, value in peft.load_peft_weights(name).items()}
    parameters = dict(model.named_parameters())
    saved_modules = {parameters[key]: tensors.pop(key) for key in sorted(tensors.keys() & parameters.keys())}
    adapted = peft.get_peft_model(model, config)
    tensors = {f"base_model.model.{key}": value for key, value in tensors.items()}
    loaded: Any = peft.set_peft_model_state_dict(adapted, tensors)
    unexpected = loaded.unexpected_keys
    if unexpected or not tensors:
        raise ValueError(
            f"{name!r} is no adapter of a {type(model).__name__}: it has {', '.join(unexpected[:4]) or 'no weights'}"
        )
    for parameter, values in saved_modules.items():
        with zero.GatheredParameters([parameter], modifier_rank=0):
            parameter.copy_(values)
    for module in adapted.modules():
        if isinstance(module, BaseTunerLayer):
            with zero.GatheredParameters([*module.get_base_layer().parameters()], modifier_rank=0):
                module.merge()
    return adapted.unload().requires_grad_(True)


def without_dropout(config: PretrainedConfig) -> PretrainedConfig:
    """The configuration with every dropout probability and every router's jitter set to 0, changed in place.

    Setting `nn.Dropout` modules is not enough: OPT, BLOOM and Llama's attention pass the probabilities to functions.
    """
    for part in (config, config.get_text_config(), getattr(config, "vision_config", None)):
        for name, value in vars(part).items() if part is not None else ():
            if ("drop" in name or "jitter" in name) and isinstance(value, float):
                setattr(part, name, 0.0)
    return config


def load_policy(
    name: str,
    ds_config: dict[str, Any],
    lora: LoRA | None = None,
    gradient_checkpointing: bool = False,
    disable_dropout: bool = False,
    attn_implementation: str = "",
    kind: Any = AutoModelForCausalLM,
) -> nn.Module:
    """A language model, or an adapter merged into one, from a directory or hub name, with a new LoRA if its rank is not
    0.

    kind: as in `load`; AutoModelForImageTextToText for a model that reads images.
    Raises ValueError for a LoRA over an adapter, to be exported as an adapter: its base would lack the first adapter.
    """
    if lora is not None and lora.rank and lora.export_adapter and base_model_of(name) != name:
        raise ValueError(
            f"lora_export: adapter given, and {name!r} is an adapter itself, and the new one needs it; give merged, "
            "or a whole model"
        )
    settings: dict[str, Any] = {"disable_dropout": disable_dropout, "attn_implementation": attn_implementation}
    if lora is not None and lora.rank and lora.bits:
        settings |= lora.quantization(ds_config)
        if base_model_of(name) != name:
            raise ValueError(
                f"load_in_{lora.bits}bit: {name!r} given, an adapter, which is not merged into quantized weights; give "
                "a whole model, or load in full precision"
            )
    model = load_merged(kind, name, ds_config, **settings)
    checkpoint_gradients(model, gradient_checkpointing)
    return model if lora is None else lora.apply(model, "CAUSAL_LM")


class ValueModel(nn.Module):
    """A value for every token, by a sequence classifier with one label: a reward model or a critic.

    classifier: of any family with a linear head `score` over its last hidden states, with or without a PEFT adapter.
    Raises ValueError for a classifier with several labels or without that head.
    """

    def __init__(self, classifier: nn.Module):
        super().__init__()
        self.classifier = classifier
        model = classifier.get_base_model() if isinstance(classifier, peft.PeftModel) else classifier
        if model.config.num_labels != 1:
            raise ValueError(f"{model.config.name_or_path!r} has {model.config.num_labels} labels; it must have 1")
        if not hasattr(model, "score"):
            raise ValueError(
                f"{type(model).__name__} has no linear head `score` over its last hidden states; give a decoder's "
                "sequence classifier"
            )

    def forward(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        use_cache: bool = False,
        position_ids: torch.Tensor | None = None,
    ) -> TokenClassifierOutput:
        """The output's `logits` are [rows, tokens, 1].  input_ids, attention_mask int64 [rows, tokens], padded on
        either side.

        attention_mask: None: as the model's attention is without one, at `position_ids`.
        """
        model = self.classifier
        model = model.get_base_model() if isinstance(model, peft.PeftModel) else model
        if attention_mask is None:
            output = model.base_model(input_ids=input_ids, position_ids=position_ids, use_cache=False)
        else:
            output = hybrid.padded_forward(model.base_model)(input_ids, attention_mask)
        return TokenClassifierOutput(logits=model.score(output.last_hidden_state))


def load_value_model(
    name: str,
    ds_config: dict[str, Any],
    lora: LoRA | None = None,
    gradient_checkpointing: bool = False,
    disable_dropout: bool = False,
    attn_implementation: str = "",
) -> ValueModel:
    """A reward model, or an adapter of one merged, from a directory or hub name; or any language model, whose new
    value head is zero.
    """
    config = AutoConfig.from_pretrained(base_model_of(name), num_labels=1)
    has_head = any("SequenceClassification" in kind for kind in config.architectures or [])
    settings = {"config": config, "disable_dropout": disable_dropout, "attn_implementation": attn_implementation}
    model = load_merged(AutoModelForSequenceClassification, name, ds_config, "" if has_head else "score.", **settings)
    value_model = ValueModel(model)
    checkpoint_gradients(model, gradient_checkpointing)
    return value_model if lora is None else ValueModel(lora.apply(model, "SEQ_CLS"))


def checkpoint_gradients(model: PreTrainedModel, enabled: bool) -> None:
    """Turn on gradient checkpointing if `enabled`."""
    if enabled:
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.enable_input_require_grads()  # else, under a LoRA, the first checkpointed layer's inputs need no gradient


def is_reward_model(name: str) -> bool:
    """Whether a directory or hub name holds a sequence classifier, or its adapter; False for the name of a function, a
    server, or one of NAMED_REWARDS.

    Raises ValueError if there is no model of that name.
    """
    if not name or ":" in name or named_reward(name):
        return False
    try:
        if base_model_of(name) != name:
            return peft.PeftConfig.from_pretrained(name).task_type == "SEQ_CLS"
        config = AutoConfig.from_pretrained(name)
    except (OSError, ValueError) as error:
        raise ValueError(f"reward: {name!r} given; it must be {REWARDS_ALLOWED} ({error})") from error
    return any("SequenceClassification" in kind for kind in config.architectures or [])


def require_model(argument: str, name: str, attn_implementation: str = "") -> None:
    """Raises ValueError if `name` is empty or no model's, or if the model does not support the attention."""
    if not name:
        raise ValueError(f"{argument}: none given; give the directory or hub name of a model")
    try:
        config = AutoConfig.from_pretrained(base_model_of(name))
    except (OSError, ValueError) as error:
        raise ValueError(f"{argument}: {name!r} given; there is no such model ({error})") from error
    require_attention(config, attn_implementation)


def require_attention(config: PretrainedConfig, attn_implementation: str) -> None:
    """Raises ValueError, with the supported ones, if transformers rejects an attention implementation for a model."""
    if not attn_implementation:
        return
    try:
        with torch.device("meta"):
            AutoModel.from_config(copy.deepcopy(config), attn_implementation=attn_implementation)
    except (ImportError, OSError, RuntimeError, ValueError) as error:
        allowed = ", ".join(supported_attentions(config))
        raise ValueError(
            f"attn_implementation: {attn_implementation!r} given; allowed for this model on this machine: {allowed} "
            f"({error})"
        ) from error


def supported_attentions(config: PretrainedConfig) -> list[str]:
    """The attention implementations of transformers that work for a model of `config` on this machine."""
    with torch.device("meta"):
        model = AutoModel.from_config(copy.deepcopy(config))
    supported = []
    for name in ("eager", "sdpa", "flash_attention_2", "flash_attention_3", "flash_attention_4", "flex_attention"):
        with suppress(ImportError, ValueError):
            model.get_correct_attn_implementation(name)
            supported.append(name)
    return supported


def load_exported(name: str, ds_config: dict[str, Any], attn_implementation: str = "") -> nn.Module:
    """A language model for inference: a whole one, or an adapter's base with the adapter.

    Does not use PEFT's own Auto classes, which also grow the embeddings to a larger tokenizer in the directory (0.21).
    """
    base = load(AutoModelForCausalLM, base_model_of(name), ds_config, attn_implementation=attn_implementation)
    if base_model_of(name) == name:
        return base
    return peft.PeftModel.from_pretrained(base, name, autocast_adapter_dtype=False)


def merged(model: Any) -> Any:
    """`model` with its adapter merged into its weights, which must be whole; `model` itself without an adapter."""
    return model.merge_and_unload() if isinstance(model, peft.PeftModel) else model
