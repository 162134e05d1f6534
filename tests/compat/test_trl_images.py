"""TRL's GRPO trainer on prompts with images: with this engine it trains as by itself."""

import warnings

import pytest
import torch
import torch.distributed as dist
from datasets import Dataset
from deepspeed.runtime.engine import DeepSpeedEngine
from PIL import Image
from transformers import AutoModelForImageTextToText, AutoProcessor

import hybrid
from hybrid.generation import input_prefill
from tests.compat.test_install import fresh_accelerate_state, quietly, without_rollout_block
from tests.compat.test_trl import SMALL, STEPS, needs_trl
from tests.engines import settings, storage_digest
from tests.vision_models import save_model


def picture(number: int) -> Image.Image:
    generator = torch.Generator().manual_seed(number)
    return Image.fromarray(torch.randint(0, 256, (9, 11, 3), generator=generator, dtype=torch.uint8).numpy())


def prompts() -> Dataset:
    questions = ["is it dark", "is it bright or dark", "bright", "dark or bright"]
    messages = [[{"role": "user", "content": question}] for question in questions]
    return Dataset.from_dict({"prompt": messages, "image": [picture(number) for number in range(len(questions))]})


def trained(engine_class: type, folder: str, **options) -> dict:
    """A short training: completions, losses and a digest of the weights."""
    import trl

    completions: list = []

    def reward(completion_ids: list[list[int]], **kwargs) -> list[float]:
        completions.append(completion_ids)
        return [float(sum(ids) % 7) for ids in completion_ids]

    enabled = engine_class is hybrid.HybridEngine
    with fresh_accelerate_state(), hybrid.installed():
        deepspeed = settings(3, train_micro_batch_size_per_gpu="auto", hybrid_engine={"enabled": enabled})
        arguments = trl.GRPOConfig(
            folder,
            deepspeed=without_rollout_block(deepspeed),
            generation_kwargs={"do_sample": False},
            **SMALL,
            **options,
        )
        trainer = trl.GRPOTrainer(
            model=AutoModelForImageTextToText.from_pretrained(folder),
            reward_funcs=reward,
            args=arguments,
            train_dataset=prompts(),
            processing_class=AutoProcessor.from_pretrained(folder),
        )
        prefill, count = input_prefill.InputPrefill.prefill, []
        with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            patch.setattr(input_prefill.InputPrefill, "prefill", lambda *args: count.append(1) or prefill(*args))
            quietly(trainer.train)
        engine = trainer.model_wrapped
        assert type(engine) is engine_class
        if enabled:
            assert engine.stats()["tokens"] > 0 and engine.stats()["fallback_reason"] == ""
            # Of a rank's 4 rows of 2 prompts each, and a self-check.
            assert len(count) == 2 * STEPS + 1, "each prompt of a step is computed once"
        losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
        return {"completions": completions, "losses": losses, "weights": storage_digest(engine)}


def check_trains_alike(folder: str) -> None:
    if dist.get_rank() == 0:
        save_model(folder)
    dist.barrier()
    expected = trained(DeepSpeedEngine, folder, beta=0.1)
    assert len({str(completion) for step in expected["completions"] for completion in step}) > 2
    assert len(expected["losses"]) == STEPS and any(expected["losses"]), "all losses are 0: the test is vacuous"
    assert trained(hybrid.HybridEngine, folder, beta=0.1) == expected


@needs_trl
def test_grpo_with_images_trains_bit_identically_to_trl_alone(ranks, tmp_path):
    ranks.run(check_trains_alike, str(tmp_path))
