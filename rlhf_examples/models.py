"""What is trained and what judges, as Hugging Face modules."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import peft
import torch
from deepspeed import zero
from safetensors import SafetensorError
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.integrations import HfDeepSpeedConfig
from transformers.modeling_outputs import TokenClassifierOutput

import hybrid
from rlhf_examples.ranks import from_all_ranks

ADAPTER_CONFIG = "adapter_config.json"


def load_tokenizer(name: str, chat_template: str = "") -> PreTrainedTokenizerBase:
    """The tokenizer, with a padding token.  chat_template: file of one, in the place of its own."""
    tokenizer = AutoTokenizer.from_pretrained(name)
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    if chat_template:
        if not Path(chat_template).is_file():
            raise ValueError(f"chat_template: no file at {chat_template!r}")
        tokenizer.chat_template = Path(chat_template).read_text()
    return tokenizer


@dataclass(frozen=True)
class LoRA:
    """A PEFT LoRA.  rank: 0 is none.  modules: PEFT's `target_modules`, names with commas between."""

    rank: int
    alpha: int
    modules: str

    def on(self, model: nn.Module, task: str) -> nn.Module:
        """`model`, frozen under the adapter; or as it is, where the rank is 0.  task: PEFT's `task_type`."""
        if not self.rank:
            return model
        names = self.modules if self.modules == "all-linear" else self.modules.split(",")
        config = peft.LoraConfig(r=self.rank, lora_alpha=self.alpha, target_modules=names, task_type=task)
        # Factors in the weights' dtype: DeepSpeed refuses a partitioned model with parameters of two (0.19.8).
        return peft.get_peft_model(model, config, autocast_adapter_dtype=False)


def small_model(hidden_size: int, num_hidden_layers: int, tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
    """A new Llama of a few million parameters."""
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
    return LlamaForCausalLM(config)


def load(kind: type, name: str, engine: dict[str, Any], new: str = "", **kwargs: Any) -> PreTrainedModel:
    """A model from a directory or hub name, in the dtype of the engine that it is for. Every rank takes part.

    Under ZeRO-3 parameters are partitioned from the start, and the first rank maps the files and hands out a module's
    weights at a time: no rank ever holds the model. Under ZeRO 0 to 2 every rank holds it, as it will in training.

    kind: one of Hugging Face's Auto classes.  engine: the engine's DeepSpeed configuration.
    new: beginning of the names of weights that the files need not have; they are initialized, alike on every rank.
    Raises ValueError on every rank where weights are missing, do not fit or cannot be read.
    """
    dtype = torch.bfloat16 if engine["bf16"]["enabled"] else torch.float32
    partitioned = HfDeepSpeedConfig(engine)  # transformers looks for it as long as it lives
    error, model = "", None
    try:
        model, report = kind.from_pretrained(name, dtype=dtype, output_loading_info=True, **kwargs)
        if missing := sorted(key for key in report["missing_keys"] if not new or not key.startswith(new)):
            error = f"it has no {', '.join(missing[:20])}; give the checkpoint of a {type(model).__name__}"
    except (OSError, RuntimeError, ValueError, SafetensorError) as raised:
        error = f"{type(raised).__name__}: {raised}"
    finally:
        del partitioned
    # A weight that does not fit shows on the rank that reads it alone, and the others would wait for it.
    if error := next(filter(None, from_all_ranks(error)), ""):
        raise ValueError(f"{name!r} cannot be loaded: {error}")
    return model


def load_policy(
    name: str, engine: dict[str, Any], lora: LoRA | None = None, gradient_checkpointing: bool = False
) -> nn.Module:
    """A language model from a directory or hub name, as `load`."""
    model = load(AutoModelForCausalLM, name, engine)
    checkpoint_gradients(model, gradient_checkpointing)
    return model if lora is None else lora.on(model, "CAUSAL_LM")


class ValueModel(nn.Module):
    """A number for every token, by a sequence classifier with one label: a reward model, or a critic.

    classifier: of any family whose head is a linear layer over the last hidden states, with PEFT's adapters or without.
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

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor, use_cache: bool = False):
        """input_ids, attention_mask int64 [rows, tokens], padded on either side; logits [rows, tokens, 1]."""
        model = self.classifier
        model = model.get_base_model() if isinstance(model, peft.PeftModel) else model
        hidden = hybrid.padded_forward(model.base_model)(input_ids, attention_mask).last_hidden_state
        return TokenClassifierOutput(logits=model.score(hidden))


def load_value_model(
    name: str,
    engine: dict[str, Any],
    lora: LoRA | None = None,
    gradient_checkpointing: bool = False,
    new_head: bool = False,
) -> ValueModel:
    """The reward model in a directory or of a hub name, as `load`; or any language model, whose head then begins at
    zero.

    new_head: begin at zero where there is a head, too.
    """
    config = AutoConfig.from_pretrained(name, num_labels=1)
    for dropout in ("classifier_dropout", "classifier_hidden_dropout"):  # values in eval and train mode must agree
        if getattr(config, dropout, None):
            setattr(config, dropout, 0.0)
    has_head = any("SequenceClassification" in kind for kind in config.architectures or [])
    model = load(AutoModelForSequenceClassification, name, engine, new="" if has_head else "score.", config=config)
    value_model = ValueModel(model)
    if new_head or not has_head:
        with zero.GatheredParameters(list(model.score.parameters()), modifier_rank=0):
            for parameter in model.score.parameters():
                nn.init.zeros_(parameter)
    checkpoint_gradients(model, gradient_checkpointing)
    return value_model if lora is None else ValueModel(lora.on(model, "SEQ_CLS"))


def checkpoint_gradients(model: PreTrainedModel, enabled: bool) -> None:
    """Compute activations again in the backward, where `enabled`."""
    if enabled:
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.enable_input_require_grads()  # under a LoRA nothing before the first adapter would have gradients


def is_reward_model(name: str) -> bool:
    """Whether a directory holds a sequence classifier."""
    path = Path(name) / "config.json"
    return path.is_file() and any("SequenceClassification" in k for k in json.loads(path.read_text())["architectures"])


def require_model(argument: str, name: str) -> None:
    """Raise ValueError where no model is named, or where the name is of none."""
    if not name:
        raise ValueError(f"{argument}: nothing given; give the directory or hub name of a model")
    if (Path(name) / ADAPTER_CONFIG).is_file():
        return
    try:
        AutoConfig.from_pretrained(name)
    except (OSError, ValueError) as error:
        raise ValueError(f"{argument}: {name!r} given, and there is no model ({error})") from error


def load_exported(name: str, engine: dict[str, Any]) -> nn.Module:
    """A language model for inference, as `load`: a whole one, or the base of an adapter's directory under the adapter.

    PEFT's own Auto classes also resize the embeddings to the tokenizer that lies there (0.21).
    """
    if not (Path(name) / ADAPTER_CONFIG).is_file():
        return load(AutoModelForCausalLM, name, engine)
    base = load(AutoModelForCausalLM, peft.PeftConfig.from_pretrained(name).base_model_name_or_path, engine)
    return peft.PeftModel.from_pretrained(base, name, autocast_adapter_dtype=False)


def merged(model: nn.Module) -> PreTrainedModel:
    """`model` with the adapter that it is under in its weights, which must be whole; or `model` where it has none."""
    return model.merge_and_unload() if isinstance(model, peft.PeftModel) else model
