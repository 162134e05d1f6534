"""The models of a run: policy, reference and critic, each in an engine; and the trained policy as a directory."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import peft
import torch
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForTokenClassification,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerBase,
)

import hybrid
from rlhf_examples.arguments import PPOArguments


def load_tokenizer(name: str) -> PreTrainedTokenizerBase:
    """The tokenizer, with a padding token."""
    tokenizer = AutoTokenizer.from_pretrained(name)
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def small_model(args: PPOArguments, tokenizer: PreTrainedTokenizerBase) -> nn.Module:
    """A new Llama of a few million parameters for the embedded corpus."""
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=args.hidden_size,
        intermediate_size=args.hidden_size * 3,
        num_hidden_layers=args.num_hidden_layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return LlamaForCausalLM(config)


def load_policy(args: PPOArguments) -> nn.Module:
    """The policy: whole, or frozen with a LoRA on every linear layer but the head."""
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32)
    if args.lora_r:
        lora = peft.LoraConfig(
            r=args.lora_r, lora_alpha=args.lora_alpha, target_modules="all-linear", task_type="CAUSAL_LM"
        )
        model = peft.get_peft_model(model, lora)
    return model


def load_critic(args: PPOArguments) -> nn.Module:
    """A value for every token: the policy's backbone with a head that begins at zero."""
    config = AutoConfig.from_pretrained(args.model, num_labels=1)
    config.classifier_dropout = 0.0  # values in eval and train mode must agree
    model = AutoModelForTokenClassification.from_pretrained(args.model, config=config, dtype=torch.float32)
    head = [module for module in model.children() if isinstance(module, nn.Linear)][-1]
    nn.init.zeros_(head.weight)
    nn.init.zeros_(head.bias)
    return model


def trained(model: nn.Module, args: PPOArguments, learning_rate: float, steps: dict[str, int]) -> hybrid.HybridEngine:
    """`model` in an engine that trains what requires gradients.

    steps: `micro`, sequences of a rank in a backward, and `accumulation`, backwards in an optimizer step.
    """
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    config = {
        **deepspeed_config(args),
        "train_micro_batch_size_per_gpu": steps["micro"],
        "gradient_accumulation_steps": steps["accumulation"],
        "optimizer": {"type": "AdamW", "params": {"lr": learning_rate, "weight_decay": 0.0, "torch_adam": True}},
        "gradient_clipping": args.max_grad_norm,
    }
    return hybrid.initialize(model=model, model_parameters=parameters, config=config)[0]


def frozen(model: nn.Module, args: PPOArguments) -> hybrid.HybridEngine:
    """`model` in an engine that only runs: partitioned where ZeRO-3 is asked for."""
    stage = {"stage": 3 if args.zero_stage == 3 else 0}
    config = {**deepspeed_config(args), "train_micro_batch_size_per_gpu": 1}
    config["zero_optimization"] = {**config["zero_optimization"], **stage}
    return hybrid.initialize(model=model.requires_grad_(False), config=config)[0]


def deepspeed_config(args: PPOArguments) -> dict[str, Any]:
    """What every engine of the run shares."""
    return {
        "zero_optimization": {
            "stage": args.zero_stage,
            "stage3_param_persistence_threshold": args.persistence_threshold,
        },
        "bf16": {"enabled": args.dtype == "bfloat16"},
        "steps_per_print": 10**9,
        "hybrid_engine": {"enabled": True, "max_out_tokens": 2048},
    }


@dataclass
class Models:
    """The engines of a run.  reference: None where it is the policy without its adapter."""

    policy: hybrid.HybridEngine
    critic: hybrid.HybridEngine
    reference: hybrid.HybridEngine | None

    @classmethod
    def load(cls, args: PPOArguments) -> "Models":
        """Policy and critic to train, and the reference, all from `args.model`."""
        steps = {"micro": args.per_device_train_batch_size, "accumulation": args.gradient_accumulation_steps}
        reference = None if args.lora_r else frozen(AutoModelForCausalLM.from_pretrained(args.model), args)
        policy = trained(load_policy(args), args, args.learning_rate, steps)
        critic = trained(load_critic(args), args, args.critic_learning_rate, steps)
        return cls(policy, critic, reference)

    def reference_scores(self, sequences: torch.Tensor, mask: torch.Tensor, temperature: float) -> hybrid.Scores:
        """The reference's logprobs of sequences [rows, tokens]."""
        if self.reference is None:
            return self.policy.score(sequences, mask, adapters=False, temperature=temperature)
        return self.reference.score(sequences, mask, temperature=temperature)


def export(engine: hybrid.HybridEngine, tokenizer: PreTrainedTokenizerBase, directory: str | Path) -> None:
    """Write the engine's model as a directory that Hugging Face (or, for a LoRA, PEFT) loads. Every rank takes part."""
    if engine.zero_optimization_stage() == 3:
        state = engine._zero3_consolidated_16bit_state_dict()  # DeepSpeed's gather onto rank 0, as accelerate uses it
    else:
        state = engine.module.state_dict()
    if torch.distributed.get_rank() == 0:
        engine.module.save_pretrained(directory, state_dict=state)
        tokenizer.save_pretrained(directory)
    torch.distributed.barrier()
