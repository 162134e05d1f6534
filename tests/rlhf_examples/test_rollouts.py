"""An iteration's experience: one gather, whatever is asked of the policy in the window; rows alone are the batch's."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from rlhf_examples.arguments import PPOArguments
from rlhf_examples.data import corpus_tokenizer, load_prompts
from rlhf_examples.models import Models, load_tokenizer, small_model
from rlhf_examples.ppo import ppo_iteration, update
from rlhf_examples.rollouts import collect, token_logps, token_logps_alone
from tests.engines import CollectiveCount, engine_of, settings
from tests.models import prompts, tiny_model

TEXTS = load_prompts("", embedded=True)


@pytest.fixture(scope="module")
def small(tmp_path_factory) -> Path:
    """The directory of a small random model."""
    directory, tokenizer = tmp_path_factory.mktemp("small"), corpus_tokenizer()
    torch.manual_seed(0)
    small_model(PPOArguments(hidden_size=16, num_hidden_layers=2), tokenizer).save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


def arguments(directory: Path, **changes) -> PPOArguments:
    """Of a run of two optimizer steps an iteration."""
    few = {"per_device_rollout_batch_size": 4, "per_device_train_batch_size": 2, "response_length": 6}
    return PPOArguments(model=str(directory), **few, **changes)


def length_of(texts: list[str], completions: list[str]) -> list[float]:
    """A reward."""
    return [float(len(completion)) for completion in completions]


def check_bytes(directory: Path, lora_r: int, logprob_mode: str) -> None:
    """What a whole PPO iteration gathers of the policy outside training: each parameter once, or only the adapters."""
    args = arguments(directory, lora_r=lora_r, logprob_mode=logprob_mode)
    models, tokenizer = Models.load(args), load_tokenizer(args.model)
    sizes = {name: p.ds_numel * p.element_size() for name, p in models.policy.module.named_parameters()}
    adapters = sum(size for name, size in sizes.items() if "lora_" in name)
    assert (adapters > 0) == (lora_r > 0)
    for iteration in (1, 2, 3):
        models.policy.eval()
        ppo_iteration(models, tokenizer, length_of, TEXTS[:4], iteration, args)
        expected = adapters if lora_r and iteration > 1 else sum(sizes.values())
        assert models.policy.stats()["gathered_bytes"] == expected


@pytest.mark.parametrize("logprob_mode", ["recompute", "sampling"])
@pytest.mark.parametrize("lora_r", [0, 4])
def test_an_iteration_gathers_the_policy_once(ranks, small, lora_r, logprob_mode):
    ranks.run(check_bytes, small, lora_r, logprob_mode)


def count_collectives(directory: Path, zero_stage: int, lora_r: int) -> list[tuple[int, int]]:
    """For each of three iterations: collectives of opening a window on each engine, where that is done (in the second),
    and of `collect`."""
    args = arguments(directory, zero_stage=zero_stage, lora_r=lora_r)
    models, tokenizer = Models.load(args), load_tokenizer(args.model)
    engines = [engine for engine in (models.policy, models.critic, models.reference) if engine is not None]
    counts = []
    for iteration in (1, 2, 3):
        with CollectiveCount() as opening:
            for engine in engines if iteration == 2 else ():
                with engine.inference():
                    pass
        with CollectiveCount() as collecting:
            experience, _ = collect(models, tokenizer, length_of, TEXTS[:4], iteration, args)
        update(models, experience, iteration, args)
        counts.append((opening.count, collecting.count))
    return counts


@pytest.mark.parametrize("lora_r", [0, 4])
def test_rollout_old_and_reference_logprobs_share_one_gather(ranks, small, lora_r):
    """Counted at torch.distributed: collecting needs what opening a window once needs, and the metrics' reductions,
    which are all that there is where nothing is partitioned."""
    partitioned = ranks.run(count_collectives, small, 3, lora_r)[0]
    whole = ranks.run(count_collectives, small, 0, lora_r)[0]
    (_, reductions), *_ = whole
    assert whole == [(0, reductions)] * 3
    (_, first), (opening, opened), (_, both) = partitioned
    assert opening > 0
    assert opened == reductions
    assert both == opening + reductions
    assert first > both, "the frozen reference, or a LoRA's base, is not gathered again"


def check_rows_alone() -> None:
    engine = engine_of(tiny_model("llama"), settings(3))
    ids, mask = prompts(4, 9, padded=True, seed=dist.get_rank())
    lengths = torch.tensor([5, 1, 3, 4])
    mask[:, 4:] = (torch.arange(5) < lengths[:, None]).long()  # completions, right padded
    batch = token_logps(engine, ids, mask, 5, 0.7).detach()
    alone = token_logps_alone(engine, ids, mask, 5, 0.7)
    torch.testing.assert_close(alone, batch * mask[:, 4:], atol=1e-5, rtol=1e-5)  # sums in another order
    assert (alone[mask[:, 4:] == 0] == 0).all()
    assert token_logps_alone(engine, ids[:0], mask[:0], 5, 0.7).shape == (0, 5)


def test_rows_alone_have_the_batchs_logprobs(ranks):
    ranks.run(check_rows_alone)
