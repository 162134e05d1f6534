"""What is exported is what was trained: the directory's logits are the engine's."""

import peft
import pytest
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

from rlhf_examples.arguments import PPOArguments
from rlhf_examples.data import corpus_tokenizer
from rlhf_examples.models import export, load_critic, load_policy, trained
from rlhf_examples.rollouts import token_values
from tests.engines import train_step
from tests.models import prompts, tiny_model


def check_export(folder: str, stage: int, lora_r: int) -> None:
    base, out = f"{folder}/base", f"{folder}/policy"
    if dist.get_rank() == 0:
        tiny_model("llama").save_pretrained(base)
    dist.barrier()
    args = PPOArguments(model=base, zero_stage=stage, lora_r=lora_r)
    engine = trained(load_policy(args), args, 1e-2, {"micro": 2, "accumulation": 1})
    ids, mask = prompts(2, 7, padded=False, seed=dist.get_rank())
    untrained = engine(ids, attention_mask=mask).logits.detach()
    for step in range(2):
        train_step(engine, step)
    export(engine, corpus_tokenizer(), out)
    with engine.inference():
        expected = engine(ids, attention_mask=mask).logits
    assert (expected - untrained).abs().max() > 1e-2, "nothing was trained"
    if lora_r:
        loaded = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), out)
    else:
        loaded = AutoModelForCausalLM.from_pretrained(out)
    with torch.no_grad():
        # Of a LoRA the engine has merged what PEFT adds on the side.
        torch.testing.assert_close(loaded.eval()(ids).logits, expected, atol=1e-3, rtol=1e-4)


@pytest.mark.parametrize("lora_r", [0, 4])
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_the_exported_policy_is_the_trained_one(ranks, tmp_path, stage, lora_r):
    ranks.run(check_export, str(tmp_path), stage, lora_r)


def check_critic(folder: str) -> None:
    if dist.get_rank() == 0:
        tiny_model("qwen2").save_pretrained(folder)
    dist.barrier()
    args = PPOArguments(model=folder)
    critic = trained(load_critic(args), args, 1e-2, {"micro": 2, "accumulation": 1})
    ids, mask = prompts(2, 7, padded=True, seed=dist.get_rank())
    with critic.inference():
        assert (token_values(critic, ids, mask, 4) == 0).all(), "values begin at zero"
    for _ in range(2):
        critic.backward((token_values(critic, ids, mask, 4) - 1).square().mean())
        critic.step()
    with critic.inference():
        inferred = token_values(critic, ids, mask, 4)
    assert inferred.shape == (2, 4)
    assert inferred.abs().max() > 1e-3
    torch.testing.assert_close(inferred, token_values(critic, ids, mask, 4).detach(), atol=1e-6, rtol=1e-6)


def test_the_critic_begins_at_zero_and_learns(ranks, tmp_path):
    ranks.run(check_critic, str(tmp_path))
