"""Settings that contradict each other: whether they do, and the error, for `ScriptArguments.refusals`."""

import importlib.util
from collections.abc import Iterator
from dataclasses import fields
from typing import Any

from rlhf_examples.common.choices import LOSS_SETTINGS, WITH_SEQUENCE_RATIOS


def refused_losses(args: Any) -> Iterator[tuple[Any, str]]:
    """The refusals of settings that the loss type does not read, or that contradict it."""
    read, level = LOSS_SETTINGS[args.loss_type], args.importance_sampling_level
    defaults = {item.name: item.default for item in fields(args)}
    for name in dict.fromkeys(name for names in LOSS_SETTINGS.values() for name in names):
        readers = ", ".join(loss_type for loss_type, names in LOSS_SETTINGS.items() if name in names)
        value = getattr(args, name)
        yield (
            name not in read and value != defaults[name],
            f"{name}: {value} given with loss_type: {args.loss_type!r}, which has none; give one of {readers}",
        )
    yield (
        level != "token" and args.loss_type not in WITH_SEQUENCE_RATIOS,
        f"importance_sampling_level: {level!r} given with loss_type: {args.loss_type!r}; give 'token', or one of "
        f"{', '.join(WITH_SEQUENCE_RATIOS)}",
    )
    yield (
        level == "token" and args.loss_type == "luspo",
        "importance_sampling_level: 'token' given with loss_type: 'luspo', a loss of sequences; give 'sequence'",
    )
    yield (
        args.loss_type == "cispo" and args.epsilon_high < 1,
        f"epsilon_high: {args.epsilon_high} given with loss_type: 'cispo', where it is the upper bound of the ratio "
        "itself; give at least 1, such as 5",
    )
    mode = args.importance_sampling_mode
    yield (
        args.loss_type == "vespo" and args.importance_sampling_correction and mode.startswith("sequence"),
        f"importance_sampling_mode: {mode!r} given with loss_type: 'vespo', which multiplies tokens' ratios itself; "
        "give token_truncate or token_mask",
    )
    for name in ("entropy_target", "entropy_coef_delta", "entropy_coef_min", "entropy_coef_max"):
        value = getattr(args, name)
        yield (
            value != defaults[name] and not args.use_adaptive_entropy,
            f"{name}: {value} given with use_adaptive_entropy: false; give true, or leave it out",
        )
    yield (
        args.use_adaptive_entropy and not args.entropy_coef_min <= args.entropy_coef <= args.entropy_coef_max,
        f"entropy_coef: {args.entropy_coef} given with use_adaptive_entropy; it must lie between entropy_coef_min, "
        f"{args.entropy_coef_min}, and entropy_coef_max, {args.entropy_coef_max}",
    )


def refused_preference_losses(args: Any) -> Iterator[tuple[Any, str]]:
    """The refusals of settings of `dpo.py` that its loss type does not read."""
    loss_type = args.loss_type
    readers = {
        "label_smoothing": ("sigmoid", 0.0),
        "desirable_weight": ("kto", 1.0),
        "undesirable_weight": ("kto", 1.0),
    }
    for name, (reader, default) in readers.items():
        value = getattr(args, name)
        yield (
            loss_type != reader and value != default,
            f"{name}: {value} given with loss_type: {loss_type!r}, which has none; give {reader}, or leave it out",
        )
    yield (
        loss_type == "kto" and args.per_device_train_batch_size < 2,
        f"per_device_train_batch_size: {args.per_device_train_batch_size} given with loss_type: 'kto', whose KL is of "
        "completions of other prompts of the batch; give at least 2",
    )
    yield (
        loss_type == "orpo" and args.offload_reference_model,
        "offload_reference_model: true given with loss_type: 'orpo', which has no reference; leave it out",
    )


def refused_advantages(args: Any) -> Iterator[tuple[Any, str]]:
    """The refusals of settings that contradict the advantages."""
    name, scale = args.advantages, args.scale_rewards
    scales = {"group": ("group", "batch", "none"), "grpo_passk": ("group", "none")}.get(name, ("group",))
    yield (
        scale not in scales,
        f"scale_rewards: {scale!r} given with advantages: {name!r}; allowed: {', '.join(scales)}",
    )
    yield (
        args.gamma != 1 and name != "reinforce_plus_plus",
        f"gamma: {args.gamma} given with advantages: {name!r}; only reinforce_plus_plus discounts: leave it out",
    )
    yield (
        args.use_kl_in_reward and not args.beta,
        "use_kl_in_reward: true given with beta: 0; give the KL's coefficient as beta",
    )
    yield (
        name == "remax" and (args.dynamic_sampling or args.partial_rollout),
        "advantages: 'remax' given with dynamic_sampling or partial_rollout, which roll out no greedy completions; "
        "leave them out",
    )
    for of_sum, value in {
        "advantages": name != "group" and name,
        "scale_rewards": scale != "group" and scale,
        "soft_punish_cache": args.soft_punish_cache,
        "use_kl_in_reward": args.use_kl_in_reward,
    }.items():
        yield (
            value and args.multi_objective_aggregation == "normalize_then_sum",
            f"{of_sum}: {value!r} given with multi_objective_aggregation: 'normalize_then_sum', which normalizes each "
            "reward by itself; leave it out",
        )


def refused_outside_of_grpo(args: Any) -> Iterator[tuple[Any, str]]:
    """The refusals of advantages for which only `grpo.py` computes the rewards."""
    for name, value in {"advantages": "remax", "multi_objective_aggregation": "normalize_then_sum"}.items():
        problem = f"{name}: {value!r} given; leave it out here, or run rlhf_examples.grpo"
        yield getattr(args, name) == value, problem


def refused_pass_at_k(args: Any, greedy: bool) -> Iterator[tuple[Any, str]]:
    """The refusals of a k above `eval_num_generations` or below 1, and of several greedy completions."""
    count = args.eval_num_generations
    for k in args.pass_at_k:
        problem = f"pass_at_k: {k} given with eval_num_generations: {count}; it must be from 1 to {count}"
        yield not 1 <= k <= count, problem
    problem = f"eval_num_generations: {count} given with greedy decoding, where they are all equal"
    yield count > 1 and greedy, problem


def attention_of_another_dtype(args: Any) -> tuple[bool, str]:
    """The refusal of FlashAttention in another dtype than bfloat16: its kernels compute in 16 bits only."""
    return (
        args.attn_implementation.startswith("flash_attention") and args.dtype != "bfloat16",
        f"attn_implementation: {args.attn_implementation!r} given with dtype: {args.dtype!r}; it needs bfloat16, "
        "or give eager, sdpa or flex_attention",
    )


def resume_and_overwrite(args: Any) -> tuple[bool, str]:
    """The refusal of `resume` together with `overwrite`."""
    problem = "overwrite: true given with resume: true; give overwrite to delete the old run, or resume to continue it"
    return args.resume and args.overwrite, problem


def refused_bits(args: Any) -> Iterator[tuple[Any, str]]:
    """The refusals of a policy in 4 or 8 bits together with other arguments, or without its package."""
    name = "load_in_4bit" if args.load_in_4bit else "load_in_8bit"
    given = f"{name}: true given"
    loads = args.load_in_4bit or args.load_in_8bit
    yield args.load_in_4bit and args.load_in_8bit, "load_in_4bit: true given with load_in_8bit: true; give one of them"
    rank = next((value for value in ("actor_lora_dim", "lora_dim") if hasattr(args, value)), "")
    yield (
        loads and rank and not getattr(args, rank),
        f"{given} with {rank}: 0; quantized weights do not learn: give the rank of an adapter on them",
    )
    yield (
        loads and importlib.util.find_spec("bitsandbytes") is None,
        f"{given}, whose package is not installed; run: pip install 'hybrid-engine[qlora]'",
    )
    stage = next((value for value in ("actor_zero_stage", "zero_stage") if hasattr(args, value)), "")
    yield (
        args.load_in_8bit and getattr(args, stage, 0) == 3,
        f"{given} with {stage}: 3, which cannot free what bitsandbytes holds; give 0, 1 or 2, or load_in_4bit",
    )
    yield (
        loads and args.torch_compile,
        f"{given} with torch_compile: true; the kernels of quantized layers are not compiled: leave one of the two out",
    )
    for option, default in (("bnb_4bit_quant_type", "nf4"), ("use_bnb_nested_quant", False)):
        value = getattr(args, option)
        yield (
            value != default and not args.load_in_4bit,
            f"{option}: {value!r} given without load_in_4bit; give load_in_4bit: true, or leave it out",
        )


def refused_optimizers(args: Any, zero_stages: dict[str, int]) -> Iterator[tuple[Any, str]]:
    """The refusals of an optimizer's name together with other arguments, or without its package.

    zero_stages: the trained models' ZeRO stages by the name of the argument.
    """
    name, given = args.optimizer, f"optimizer: {args.optimizer!r} given"
    yield (
        args.muon_adam_learning_rate and name != "muon",
        f"muon_adam_learning_rate: {args.muon_adam_learning_rate} given with optimizer: {name!r}; it is muon's",
    )
    missing = name == "adamw8bit" and importlib.util.find_spec("bitsandbytes") is None
    yield missing, f"{given}, whose package is not installed; run: pip install bitsandbytes"
    yield (
        name == "adamw8bit" and args.offload,
        f"{given} with offload: true; its states are on the device: give fused, whose states are in host memory",
    )
    yield (
        name == "muon" and args.max_grad_norm,
        f"{given} with max_grad_norm: {args.max_grad_norm}; DeepSpeed clips what muon has orthogonalized, whose norm "
        "grows with the model: give max_grad_norm: 0",
    )
    for argument, stage in zero_stages.items():
        yield (
            name == "muon" and stage == 0 and args.dtype == "bfloat16",
            f"{given} with {argument}: 0 and dtype: 'bfloat16', where DeepSpeed flattens the matrices that muon "
            "orthogonalizes; give ZeRO stage 1, 2 or 3, or float32",
        )
