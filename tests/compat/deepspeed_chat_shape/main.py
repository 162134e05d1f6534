"""Steps 1, 2 and 3 with the imports and calls of DeepSpeed-Chat's three main.py and its rlhf_engine.py.

Argument `steps` is ours: DeepSpeed-Chat has a script for each. Step 3 saves its models before it trains them, too.
"""

import argparse
import json
import os

import deepspeed
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam
from models import (
    convert_linear_layer_to_lora,
    convert_lora_to_linear_layer,
    create_critic_model,
    create_hf_model,
)
from saving import load_hf_tokenizer, save_hf_format, save_zero_three_model
from transformers import AutoModelForCausalLM, SchedulerType, default_data_collator, get_scheduler

TEXTS = [("red cat", "blue dog run"), ("dog", "tree"), ("sun sleep", "cat"), ("good tree red", "bad")]
PROMPT_TOKENS, ANSWER_TOKENS, ROWS = 8, 4, 2


def parse_args():
    parser = argparse.ArgumentParser()
    parser.add_argument("steps", type=int, nargs="+")
    parser.add_argument("--model_name_or_path")
    parser.add_argument("--output_dir")
    parser.add_argument("--zero_stage", type=int, default=0)
    parser.add_argument("--offload", action="store_true")
    parser.add_argument("--lora_dim", type=int, default=0)
    parser.add_argument("--enable_hybrid_engine", action="store_true")
    parser.add_argument("--lr_scheduler_type", type=SchedulerType, default="cosine")
    parser.add_argument("--local_rank", type=int, default=-1)
    return deepspeed.add_config_arguments(parser).parse_args()


def get_train_ds_config(args, enable_hybrid_engine=False, training=True):
    device = "cpu" if args.offload and training else "none"
    zero = {
        "stage": args.zero_stage if training or args.zero_stage == 3 else 0,
        "overlap_comm": True,
        "offload_param": {"device": device},
        "offload_optimizer": {"device": device},
        "stage3_param_persistence_threshold": 0,
        "stage3_max_live_parameters": 3e7,
        "stage3_prefetch_bucket_size": 3e7,
        "memory_efficient_linear": False,
    }
    hybrid_engine = {
        "enabled": enable_hybrid_engine,
        "max_out_tokens": PROMPT_TOKENS + ANSWER_TOKENS,
        "inference_tp_size": 1,
        "release_inference_cache": False,
        "pin_parameters": True,
        "tp_gather_partition_size": 8,
    }
    config = {
        "train_batch_size": ROWS * torch.distributed.get_world_size(),
        "train_micro_batch_size_per_gpu": ROWS,
        "steps_per_print": 10,
        "zero_optimization": zero,
        "bfloat16": {"enabled": True},
        "gradient_clipping": 1.0,
        "prescale_gradients": False,
        "wall_clock_breakdown": False,
    }
    tensorboard = {"enabled": False, "output_path": "/ds_tensorboard_logs/", "job_name": "_tensorboard"}
    return {**config, "hybrid_engine": hybrid_engine, "tensorboard": tensorboard} if training else config


def training_engine(model, args, ds_config):
    adam = DeepSpeedCPUAdam if args.offload else FusedAdam
    params = [param for param in model.parameters() if param.requires_grad]
    optimizer = adam([{"params": params, "weight_decay": 0.0}], lr=1e-2, betas=(0.9, 0.95))
    scheduler = get_scheduler(args.lr_scheduler_type, optimizer=optimizer, num_warmup_steps=0, num_training_steps=4)
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=optimizer, args=args, config=ds_config, lr_scheduler=scheduler, dist_init_required=True
    )
    return engine


def encoded(tokenizer, texts, padding_side=None):
    """Texts of this rank, padded on the tokenizer's own side if none is given."""
    start = ROWS * torch.distributed.get_rank()
    texts = texts[start : start + ROWS]
    settings = {"max_length": PROMPT_TOKENS, "padding": "max_length", "truncation": True, "padding_side": padding_side}
    rows = [tokenizer(text, **settings) for text in texts]
    return default_data_collator([{key: row[key] for key in ("input_ids", "attention_mask")} for row in rows])


def train(engine, loss):
    engine.backward(loss)
    engine.step()
    return loss.item()


def save(model, tokenizer, args, folder):
    if args.global_rank == 0:
        save_hf_format(model, tokenizer, folder)
    if args.zero_stage == 3:
        save_zero_three_model(model, args.global_rank, folder, zero_stage=args.zero_stage)


def step_1(args):
    tokenizer = load_hf_tokenizer(args.model_name_or_path)
    ds_config = get_train_ds_config(args)
    model = create_hf_model(AutoModelForCausalLM, args.model_name_or_path, tokenizer, ds_config)
    if args.lora_dim:
        model = convert_linear_layer_to_lora(model, "layers.", args.lora_dim)
    engine = training_engine(model, args, ds_config)
    batch = encoded(tokenizer, [" ".join(pair) for pair in TEXTS])
    engine.train()
    train(engine, engine(**batch, labels=batch["input_ids"], use_cache=False).loss)
    save(convert_lora_to_linear_layer(engine), tokenizer, args, f"{args.output_dir}/step1")


def step_2(args):
    tokenizer = load_hf_tokenizer(args.model_name_or_path)
    ds_config = get_train_ds_config(args)
    model = create_critic_model(args.model_name_or_path, tokenizer, ds_config, zero_stage=args.zero_stage)
    engine = training_engine(model, args, ds_config)
    chosen, rejected = (encoded(tokenizer, [pair[side] for pair in TEXTS]) for side in (0, 1))
    batch = {key: torch.cat([chosen[key], rejected[key]]) for key in chosen}
    engine.train()
    outputs = engine(**batch, use_cache=False)
    assert outputs["scores"].unique().numel() > 1, outputs["scores"]
    train(engine, outputs["loss"])
    save(engine, tokenizer, args, f"{args.output_dir}/step2")


def step_3(args):
    actor_path, critic_path = f"{args.output_dir}/step1", f"{args.output_dir}/step2"
    tokenizer = load_hf_tokenizer(actor_path)
    ds_config, eval_config = (
        get_train_ds_config(args, args.enable_hybrid_engine),
        get_train_ds_config(args, training=False),
    )
    model = create_hf_model(AutoModelForCausalLM, actor_path, tokenizer, ds_config)
    if args.lora_dim:
        model = convert_linear_layer_to_lora(model, "layers.", args.lora_dim)
    actor = training_engine(model, args, ds_config)
    ref, *_ = deepspeed.initialize(
        model=create_hf_model(AutoModelForCausalLM, actor_path, tokenizer, eval_config), config=eval_config
    )
    critic = create_critic_model(critic_path, tokenizer, eval_config, True, args.zero_stage)
    critic = training_engine(critic, args, get_train_ds_config(args))
    reward = create_critic_model(critic_path, tokenizer, eval_config, True, args.zero_stage)
    reward, *_ = deepspeed.initialize(model=reward, config=eval_config)
    for name, engine in (("actor", actor), ("critic", critic), ("reward", reward)):
        save_zero_three_model(engine, args.global_rank, f"{args.output_dir}/loaded_{name}", args.zero_stage)

    # generate_experience
    for engine in (actor, critic, reward, ref):
        engine.eval()
    prompts = encoded(tokenizer, [prompt for prompt, _ in TEXTS], padding_side="left")
    with torch.no_grad():
        seq = actor.module.generate(
            prompts["input_ids"],
            attention_mask=prompts["attention_mask"],
            max_length=PROMPT_TOKENS + ANSWER_TOKENS,
            pad_token_id=tokenizer.pad_token_id,
            synced_gpus=args.zero_stage == 3,
            do_sample=False,
        )
    print_rank(args, actor, seq)
    actor.train(), critic.train()
    mask = seq.not_equal(tokenizer.pad_token_id).long()
    with torch.no_grad():
        ref_logits = ref(seq, attention_mask=mask).logits
        scores = reward.forward_value(seq, mask, prompt_length=PROMPT_TOKENS)["chosen_end_scores"]
    # train_rlhf
    logits = actor(input_ids=seq, attention_mask=mask, use_cache=False).logits
    train(actor, (logits - ref_logits).float().square().mean() - logits.float().log_softmax(-1)[:, -1, 3].mean())
    values = critic.forward_value(seq, mask, return_value_only=True, use_cache=False)[:, -1]
    train(critic, (values - scores).float().square().mean() + values.float().mean())
    save(convert_lora_to_linear_layer(actor), tokenizer, args, f"{args.output_dir}/actor")
    save(critic, tokenizer, args, f"{args.output_dir}/critic")


def print_rank(args, actor, seq):
    """Return what the test compares on each rank: the actor's class, its containers and its sequences."""
    coverage = actor.coverage() if args.enable_hybrid_engine else []
    record = {"actor": type(actor).__name__, "containers": sorted({row["container"] for row in coverage})}
    with open(f"{args.output_dir}/rank{args.global_rank}.json", "w") as file:
        json.dump({**record, "sequences": seq.tolist()}, file)


def main():
    args = parse_args()
    get_accelerator().set_device(args.local_rank)
    deepspeed.init_distributed()
    args.global_rank = torch.distributed.get_rank()
    torch.manual_seed(0)
    os.makedirs(args.output_dir, exist_ok=True)
    for step in args.steps:
        (step_1, step_2, step_3)[step - 1](args)
        torch.distributed.barrier()


if __name__ == "__main__":
    main()
