"""Engines for trained and frozen models, and exporting a trained model."""

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from transformers import PreTrainedTokenizerBase, get_scheduler

import hybrid
from rlhf_examples.common.arguments import RolloutArguments, RunArguments, TrainArguments
from rlhf_examples.common.batches import require_exact
from rlhf_examples.common.ema import MovingAverage
from rlhf_examples.common.models import LoRA, ValueModel
from rlhf_examples.common.ranks import end_preparation
from rlhf_examples.data.conversations import stop_at_turn_end

FrozenModel = hybrid.InferenceEngine | hybrid.HybridEngine
# Loads a model from a directory or hub name, for an engine with the given DeepSpeed configuration.
Load = Callable[[str, dict[str, Any]], nn.Module]


@dataclass(frozen=True)
class Training:
    """How one model of a run is trained.  total_steps: of the optimizer, for the learning rate schedule."""

    zero_stage: int
    micro_batch_size: int
    learning_rate: float
    weight_decay: float
    lr_scheduler_type: str
    num_warmup_steps: int
    total_steps: int
    gradient_checkpointing: bool
    lora: LoRA

    @classmethod
    def from_args(
        cls, args: TrainArguments | RolloutArguments, role: str, micro_batch_size: int, total_steps: int
    ) -> "Training":
        """From the arguments whose names begin with `role`: "actor_", "critic_" or nothing."""
        return cls(
            zero_stage=getattr(args, f"{role}zero_stage"),
            micro_batch_size=micro_batch_size,
            learning_rate=getattr(args, f"{role}learning_rate"),
            weight_decay=getattr(args, f"{role}weight_decay"),
            lr_scheduler_type=args.lr_scheduler_type,
            num_warmup_steps=args.num_warmup_steps,
            total_steps=total_steps,
            gradient_checkpointing=getattr(args, f"{role}gradient_checkpointing"),
            lora=LoRA(
                getattr(args, f"{role}lora_dim"),
                args.lora_alpha,
                getattr(args, f"{role}lora_module_name"),
                args.lora_dropout,
                export_adapter=args.lora_export == "adapter" and role != "critic_",  # the critic is not exported
            ),
        )

    def config(self, args: RunArguments) -> dict[str, Any]:
        """The engine's DeepSpeed configuration. `backward_and_step` counts the backwards of an optimizer step."""
        zero = args.dtype, self.zero_stage, args.offload, args.stage3_param_persistence_threshold
        optimizer = {"lr": self.learning_rate, "weight_decay": self.weight_decay, "torch_adam": True}
        return {
            **deepspeed_config(*zero, self.micro_batch_size),
            "optimizer": {"type": "AdamW", "params": optimizer},
            "gradient_clipping": args.max_grad_norm,
        }


def make_engine(model: nn.Module, args: RunArguments, training: Training, **blocks: Any) -> hybrid.HybridEngine:
    """An engine that trains what requires gradients.  blocks: configuration of `hybrid_engine`, `rollout`."""
    end_preparation()
    return hybrid.initialize(
        model=model,
        model_parameters=[parameter for parameter in model.parameters() if parameter.requires_grad],
        lr_scheduler=lambda optimizer: get_scheduler(
            training.lr_scheduler_type, optimizer, training.num_warmup_steps, training.total_steps
        ),
        config={**training.config(args), **blocks},
    )[0]


def make_policy_engine(model: nn.Module, args: RunArguments, training: Training, **blocks: Any) -> hybrid.HybridEngine:
    """`make_engine`, for a language model, whose logits may be computed in chunks and rows packed without padding.

    Raises ValueError if that differs from the model's own forward.
    """
    engine = make_engine(model, args, training, **blocks)
    if args.logit_chunk:
        require_exact(engine, args.padding_free)
    return engine


def load_frozen_model(load: Load, name: str, dtype: str, offload: bool = False) -> FrozenModel:
    """A frozen model in an InferenceEngine, whole on every rank.

    offload: partition it by ZeRO-3 in host memory instead, and gather it layer by layer.
    """
    if not offload:
        model = load(name, deepspeed_config(dtype, 0))
        end_preparation()
        return hybrid.init_inference(model, dtype=dtype, replace_with_kernel_inject=True)
    return load_rollout_engine(load, name, dtype, zero_stage=3, offload=True, hybrid_engine={"pin_parameters": False})


def load_rollout_engine(
    load: Load, name: str, dtype: str, zero_stage: int = 0, offload: bool = False, **blocks: Any
) -> hybrid.HybridEngine:
    """A frozen model in a HybridEngine, which can roll out and score."""
    config = deepspeed_config(dtype, zero_stage, offload)
    model = load(name, config).requires_grad_(False)
    end_preparation()
    return hybrid.initialize(model=model, config={**config, **blocks})[0]


def deepspeed_config(
    dtype: str, zero_stage: int, offload: bool = False, persistence_threshold: int = 0, micro_batch_size: int = 1
) -> dict[str, Any]:
    """The part of the DeepSpeed configuration that all engines share; models are loaded by it too."""
    zero: dict[str, Any] = {"stage": zero_stage, "stage3_param_persistence_threshold": persistence_threshold}
    if offload and zero_stage:
        zero["offload_optimizer"] = {"device": "cpu"}
    if offload and zero_stage == 3:
        zero["offload_param"] = {"device": "cpu"}
    return {
        "zero_optimization": zero,
        "zero_force_ds_cpu_optimizer": False,  # torch's AdamW can step offloaded states
        "bf16": {"enabled": dtype == "bfloat16"},
        "train_micro_batch_size_per_gpu": micro_batch_size,
        "steps_per_print": 10**9,
    }


def backward_and_step(
    engine: hybrid.HybridEngine, loss: torch.Tensor, index: int, num_micro_batches: int
) -> list[float]:
    """The backward of micro batch `index` of `num_micro_batches`, and after the last one the optimizer step.

    Gradients are averaged over micro batches and ranks. Returns the global gradient norm before clipping in a list
    after the last micro batch, else an empty list.
    """
    last = index == num_micro_batches - 1
    engine.set_gradient_accumulation_boundary(last)
    engine.backward(loss / num_micro_batches)
    # Without ZeRO in float32 every rank has all gradients, and DeepSpeed reports no norm (0.19.8).
    whole = last and not hasattr(engine.optimizer, "_global_grad_norm")
    gradients = [p.grad for p in engine.module.parameters() if p.grad is not None] if whole else []
    norm = torch.nn.utils.get_total_norm(gradients) if whole else 0.0
    engine.step()
    return [float(norm if whole else engine.get_global_grad_norm())] if last else []


def export(
    engine: hybrid.HybridEngine,
    tokenizer: PreTrainedTokenizerBase,
    directory: str | Path,
    merged: bool = True,
    average: MovingAverage | None = None,
) -> None:
    """Write the engine's model as a directory that Hugging Face loads, gathering one layer at a time. Every rank takes
    part.

    The generation configuration lists the token that ends a turn in the tokenizer's chat template among the end tokens.
    A kill at any moment leaves the old directory, a complete new one, or none.
    merged: write a LoRA merged into a whole model; else as an adapter, which PEFT loads.
    average: moving average that is written in place of the trained weights.
    """
    directory, model = Path(directory), engine.module
    stop_at_turn_end(model, tokenizer)
    unfinished = directory.with_name(f"{directory.name}.unfinished")
    if dist.get_rank() == 0:
        shutil.rmtree(unfinished, ignore_errors=True)
    engine.save_pretrained(
        unfinished,
        part=model.classifier if isinstance(model, ValueModel) else model,
        merged=merged,
        instead=None if average is None else average.full_tensor,
    )
    if dist.get_rank() == 0:
        tokenizer.save_pretrained(unfinished)
        shutil.rmtree(directory, ignore_errors=True)
        unfinished.rename(directory)
    dist.barrier()
