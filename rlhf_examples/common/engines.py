"""Engines for trained and frozen models, and exporting a trained model."""

import shutil
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    ProcessorMixin,
    get_scheduler,
)

import hybrid
from rlhf_examples.common.arguments import RolloutArguments, RunArguments, TrainArguments
from rlhf_examples.common.ema import MovingAverage
from rlhf_examples.common.input_errors import end_startup
from rlhf_examples.common.models import LoRA, ValueModel, load_policy
from rlhf_examples.common.optimizers import client_optimizer, optimizer_config, parameter_groups, require_device
from rlhf_examples.common.ranks import device
from rlhf_examples.data.conversations import stop_at_turn_end

FrozenModel = hybrid.InferenceEngine | hybrid.HybridEngine
# Loads a model from a directory or hub name, for an engine with the given DeepSpeed configuration.
Load = Callable[[str, dict[str, Any]], nn.Module]


@dataclass(frozen=True)
class Training:
    """Training of one model of a run.  total_steps: of the optimizer, for the learning rate schedule."""

    zero_stage: int
    micro_batch_size: int
    learning_rate: float
    weight_decay: float
    lr_scheduler_type: str
    num_warmup_steps: int
    total_steps: int
    gradient_checkpointing: bool
    lora: LoRA
    optimizer: str = "adamw"
    muon_adam_learning_rate: float = 0.0
    decay: str = "all"

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
                bits=0 if role == "critic_" else 4 if args.load_in_4bit else 8 * args.load_in_8bit,
                quant_type=args.bnb_4bit_quant_type,
                nested_quant=args.use_bnb_nested_quant,
            ),
            optimizer=args.optimizer,
            muon_adam_learning_rate=args.muon_adam_learning_rate,
            decay=args.decay,
        )

    def schedule(self, optimizer: torch.optim.Optimizer) -> Any:
        """The learning rate schedule."""
        return get_scheduler(self.lr_scheduler_type, optimizer, self.num_warmup_steps, self.total_steps)

    def warn_about_schedule(self) -> None:
        """Warn on rank 0 if the learning rate never reaches its peak, and why."""
        optimizer = torch.optim.SGD([torch.zeros(())], lr=1.0)
        schedule = self.schedule(optimizer)
        if dist.get_rank() or not isinstance(schedule, torch.optim.lr_scheduler.LambdaLR):
            return
        (factor_at,) = schedule.lr_lambdas
        highest = max(map(factor_at, range(self.total_steps)), default=1.0)
        if self.num_warmup_steps > self.total_steps:
            reason = f"num_warmup_steps: {self.num_warmup_steps} given for {self.total_steps} optimizer steps"
        else:
            reason = f"lr_scheduler_type: {self.lr_scheduler_type}, {self.num_warmup_steps} of {self.total_steps} steps"
        if self.num_warmup_steps and self.lr_scheduler_type == "constant":
            warnings.warn("num_warmup_steps has no effect with constant; give constant_with_warmup", stacklevel=2)
        if highest < 1:
            warnings.warn(
                f"{reason}: the learning rate never reaches its peak, but {highest:.0%} of it; give fewer "
                "num_warmup_steps, or train for more steps",
                stacklevel=2,
            )

    def config(self, args: RunArguments) -> dict[str, Any]:
        """The engine's DeepSpeed configuration. `backward_and_step` counts the backwards of an optimizer step."""
        zero = args.dtype, self.zero_stage, args.offload, args.stage3_param_persistence_threshold
        rates = self.learning_rate, self.weight_decay, self.muon_adam_learning_rate
        config = deepspeed_config(*zero, self.micro_batch_size)
        if self.optimizer == "muon":
            config["zero_optimization"]["reduce_scatter"] = False  # DeepSpeed's Muon needs whole gradients
        return {
            **config,
            **optimizer_config(self.optimizer, *rates),
            "gradient_clipping": args.max_grad_norm,
        }


def make_engine(model: nn.Module, args: RunArguments, training: Training, **blocks: Any) -> hybrid.HybridEngine:
    """An engine that trains what requires gradients.  blocks: configuration of `hybrid_engine`, `rollout`.

    Raises ValueError if the optimizer has no kernel for this device, and NotImplementedError if `torch_compile` cannot
    compile the layers.
    """
    require_device(training.optimizer, args.offload and training.zero_stage > 0, device())
    end_startup()
    training.warn_about_schedule()
    config = {**training.config(args), **blocks}
    if args.torch_compile and training.zero_stage == 3:
        config["zero_optimization"]["leaf_module"] = {"classes": layer_classes(model)}
    engine = hybrid.initialize(
        model=model,
        optimizer=client_optimizer(training.optimizer, training.learning_rate, training.weight_decay),
        model_parameters=parameter_groups(model, training.weight_decay, training.decay),
        lr_scheduler=training.schedule,
        config=config,
    )[0]
    if args.torch_compile:
        engine.compile()
    return engine


def layer_classes(model: nn.Module) -> list[str]:
    """The names of the classes of a model's transformer layers, as transformers declares them."""
    declared = (module._no_split_modules or () for module in model.modules() if isinstance(module, PreTrainedModel))
    return sorted({name for names in declared for name in names})


def make_policy_engine(model: nn.Module, args: RunArguments, training: Training, **blocks: Any) -> hybrid.HybridEngine:
    """`make_engine`, for a language model, whose logprobs `args.training_forward` computes.

    Raises ValueError if it needs a model without dropout, and NotImplementedError if the model does not support exact.
    """
    engine = make_engine(model, args, training, **blocks)
    require_training_forward(partial(engine.logps, forward=args.training_forward), engine, args.training_forward)
    return engine


def make_value_engine(model: ValueModel, args: RunArguments, training: Training) -> hybrid.HybridEngine:
    """`make_engine`, for a critic or a reward model, whose values `args.training_forward` computes: exact as packed.

    Raises ValueError if it needs a model without dropout.
    """
    engine = make_engine(model, args, training)
    forward = "model" if args.training_forward == "model" else "packed"
    require_training_forward(partial(engine.values, forward=forward), engine, args.training_forward)
    return engine


@torch.no_grad()
def require_training_forward(compute: Callable, engine: hybrid.HybridEngine, forward: str) -> None:
    """Raises `compute`'s error for a model that the training forward does not support; before the first rollout."""
    ids = torch.zeros(1, 2, dtype=torch.int64, device=engine.device)
    try:
        compute(ids, torch.ones_like(ids))
    except (ValueError, NotImplementedError) as error:
        raise type(error)(f"training_forward: {forward!r} given; give 'model' for this model: {error}") from error


def load_frozen_model(load: Load, name: str, dtype: str, offload: bool = False) -> FrozenModel:
    """A frozen model in an InferenceEngine, whole on every rank.

    offload: partition it by ZeRO-3 in host memory instead, and gather it layer by layer.
    """
    if not offload:
        model = load(name, deepspeed_config(dtype, 0))
        end_startup()
        return hybrid.init_inference(model, dtype=dtype, replace_with_kernel_inject=True)
    return load_rollout_engine(load, name, dtype, zero_stage=3, offload=True, hybrid_engine={"pin_parameters": False})


def load_policy_and_reference(
    name: str,
    args: Any,
    training: Training,
    needs_reference: bool = True,
    kind: Any = AutoModelForCausalLM,
    **blocks: Any,
) -> tuple[hybrid.HybridEngine, FrozenModel | None]:
    """The engine of a policy, and its frozen reference: None if none is needed, or if the policy without its adapter is
    the reference.

    args: DPOArguments or RolloutArguments.  kind: as in `load_policy`.  blocks: as in `make_engine`.
    """
    load, reference = partial(load_policy, attn_implementation=args.attn_implementation, kind=kind), None
    if needs_reference and not training.lora.rank:
        reference = load_frozen_model(load, name, args.dtype, args.offload_reference_model)
    loading = training.config(args), training.lora, training.gradient_checkpointing, args.disable_dropout
    return make_policy_engine(load(name, *loading), args, training, **blocks), reference


def load_rollout_engine(
    load: Load, name: str, dtype: str, zero_stage: int = 0, offload: bool = False, **blocks: Any
) -> hybrid.HybridEngine:
    """A frozen model in a HybridEngine, which can roll out and score."""
    config = deepspeed_config(dtype, zero_stage, offload)
    model = load(name, config).requires_grad_(False)
    end_startup()
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
    tokenizer: PreTrainedTokenizerBase | ProcessorMixin,
    directory: str | Path,
    merged: bool = True,
    average: MovingAverage | None = None,
) -> None:
    """Write the engine's model as a directory that Hugging Face loads, gathering one layer at a time. Every rank takes
    part.

    The generation configuration lists the token that ends a turn in the tokenizer's chat template among the end tokens.
    A kill at any moment leaves the old directory, a complete new one, or none.
    tokenizer: or a processor, whose tokenizer it is then.
    merged: write a LoRA merged into a whole model; else as an adapter, which PEFT loads.
    average: moving average that is written in place of the trained weights.
    """
    directory, model = Path(directory), engine.module
    plain_tokenizer: Any = getattr(tokenizer, "tokenizer", None) or tokenizer
    stop_at_turn_end(model, plain_tokenizer)
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
