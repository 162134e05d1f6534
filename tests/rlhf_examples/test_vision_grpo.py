"""GRPO on prompts with images: a tiny model learns by rewards alone to tell dark images from bright ones."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from PIL import Image
from transformers import (
    AutoConfig,
    AutoModelForImageTextToText,
    AutoProcessor,
)

from rlhf_examples import vision_grpo
from rlhf_examples.common.arguments import VisionGRPOArguments
from rlhf_examples.common.parsing import arguments_of
from rlhf_examples.data.image_prompts import load_prompts, prompt_of
from tests.marks import slow_but
from tests.rank_pool import pool_of
from tests.rlhf_examples.scripts import make_small_models
from tests.vision_models import save_model

ANSWERS = {"dark": 0, "bright": 255}  # answer → the mean of an image's pixels


def save_records(directory: Path) -> Path:
    """Images of noise around dark and bright, in a folder of their own, and the file of their records."""
    generator = torch.Generator().manual_seed(1)
    records = []
    (directory / "images").mkdir(parents=True)
    for number in range(16):
        answer = list(ANSWERS)[number % 2]
        noise = 60 * torch.randn(9, 11, 3, generator=generator)
        name = f"images/{number}.png"
        Image.fromarray((ANSWERS[answer] + noise).clamp(0, 255).byte().numpy()).save(directory / name)
        columns = {"images": [name] * (1 + number % 3 // 2)} if number % 3 else {"image": name}
        records.append({"prompt": "is it dark or bright", **columns, "answer": answer})
    records.append({"prompt": "is it dark or bright " * 5, "image": "images/0.png", "answer": "dark"})
    records.append({"prompt": "is it dark or bright", "answer": "dark"})
    path = directory / "records.jsonl"
    path.write_text("\n".join(map(json.dumps, records)))
    return path


def settings_in(directory: Path, **more) -> dict:
    return {
        "actor_model_name_or_path": str(directory / "model"),
        "data_path": [str(directory / "records.jsonl")],
        "output_dir": str(directory / "run"),
        "reward": "rlhf_examples.rewards:exact_match",
        "num_iterations": 26,
        "num_generations": 8,
        "per_device_generation_batch_size": 4,
        "per_device_training_batch_size": 16,
        "max_prompt_seq_len": 24,
        "max_answer_seq_len": 2,
        "actor_learning_rate": 5e-3,
        **more,
    }


one_rank = pool_of(1)


def run(settings: dict) -> list[dict[str, float]]:
    return vision_grpo.run(arguments_of(VisionGRPOArguments, settings))


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A folder with the model and the records."""
    directory = tmp_path_factory.mktemp("vision")
    AutoConfig.for_model("llama", architectures=["LlamaForSequenceClassification"]).save_pretrained(
        directory / "rewarding"
    )
    save_model(directory / "model")
    save_records(directory)
    return directory


def without_times(rows: list[dict[str, float]]) -> list[dict[str, float]]:
    return [{name: value for name, value in row.items() if not name.startswith("time/")} for row in rows]


def test_a_model_learns_to_see(ranks, folder):
    """Without seeing the images it can earn half of the reward."""
    first, second = ranks.run(run, settings_in(folder))
    assert without_times(first) == without_times(second) and len(first) == 26
    rewards = [row["reward"] for row in first]
    assert sum(rewards[:3]) / 3 < 0.3 and sum(rewards[-5:]) / 5 > 0.8, rewards
    assert all(row["grad_norm"] > 0 and row["completions/mean_length"] <= 2 for row in first)

    directory = folder / "run" / "model"
    processor, model = AutoProcessor.from_pretrained(directory), AutoModelForImageTextToText.from_pretrained(directory)
    for answer, pixel in ANSWERS.items():
        image = Image.new("RGB", (20, 30), (pixel,) * 3)
        content = [{"type": "image", "image": image}, {"type": "text", "text": "is it dark or bright"}]
        inputs = processor.apply_chat_template(
            [{"role": "user", "content": content}],
            tokenize=True,
            add_generation_prompt=True,
            return_dict=True,
            return_tensors="pt",
        )
        output = model.generate(**inputs, max_new_tokens=1, do_sample=False)
        assert processor.batch_decode(output[:, inputs["input_ids"].shape[1] :]) == [answer]


@pytest.mark.parametrize("lora_dim", slow_but([2], [0, 2]))
def test_the_kl_is_to_the_model_before_training(ranks, folder, tmp_path, lora_dim):
    """That of a reference engine, and that of the policy without its adapter."""
    more = {"num_iterations": 2, "beta": 0.1, "actor_lora_dim": lora_dim, "output_dir": str(tmp_path)}
    more |= {"per_device_training_batch_size": 5, "actor_zero_stage": 2 if lora_dim else 3}
    rows, _ = ranks.run(run, settings_in(folder, **more))
    assert abs(rows[0]["kl"]) < 1e-6 and rows[1]["kl"] > 1e-5
    assert AutoModelForImageTextToText.from_pretrained(tmp_path / "model").num_parameters() > 0
    more = {"num_iterations": 1, "num_grpo_iterations": 2, "num_mini_batches": 3, "output_dir": str(tmp_path)}
    (row,), _ = ranks.run(run, settings_in(folder, **more))
    assert row["lr"] > 0 and row["clip_ratio/region_mean"] >= 0


@pytest.mark.slow
def test_metrics_do_not_depend_on_ranks_and_zero_stage(one_rank, ranks, folder, tmp_path):
    more = {"num_iterations": 3, "max_answer_seq_len": 5, "output_dir": str(tmp_path)}
    alone = {"per_device_generation_batch_size": 8, "actor_zero_stage": 0}
    (expected,) = one_rank.run(run, settings_in(folder, **more, **alone))
    actual, _ = ranks.run(run, settings_in(folder, **more))
    for row, expected_row in zip(without_times(actual), without_times(expected), strict=True):
        assert row == pytest.approx(expected_row, rel=1e-4, abs=1e-5)
    assert expected[0]["completions/min_length"] < expected[0]["completions/max_length"], "nothing is padded"


def arguments_in(folder: Path, tmp_path: Path, **more) -> VisionGRPOArguments:
    return arguments_of(VisionGRPOArguments, settings_in(folder, output_dir=str(tmp_path), **more))


def test_records_that_cannot_be_used_are_left_out_and_counted(alone, folder, tmp_path, capsys):
    args = arguments_in(folder, tmp_path)
    examples = load_prompts(vision_grpo.load_processor(args), args)
    assert len(examples) == 16
    text = capsys.readouterr().out
    assert "2 of 18 records left out" in text and "longer than 24 tokens (" in text
    assert "neither image, a path, nor images, a list of paths (" in text and "record 18" in text
    row = prompt_of(examples.rows[1], vision_grpo.load_processor(args), args)
    assert row["prompt"] == "is it dark or bright" and json.loads(row["columns"]) == {"answer": "bright"}
    assert row["model_inputs"]["pixel_values"].shape == (1, 3, 8, 8) and row["prompt_ids"].count(4) == 4
    row = prompt_of(examples.rows[2], vision_grpo.load_processor(args), args)
    assert row["model_inputs"]["pixel_values"].shape == (2, 3, 8, 8) and row["prompt_ids"].count(4) == 8


def text_model(folder: Path, tmp_path: Path) -> dict:
    return {"actor_model_name_or_path": str(make_small_models(tmp_path) / "model")}


def no_processor(folder: Path, tmp_path: Path) -> dict:
    ignored = shutil.ignore_patterns("processor_config.json")
    return {"actor_model_name_or_path": str(shutil.copytree(folder / "model", tmp_path / "model", ignore=ignored))}


def no_template(folder: Path, tmp_path: Path) -> dict:
    ignored = shutil.ignore_patterns("*.jinja")
    return {"actor_model_name_or_path": str(shutil.copytree(folder / "model", tmp_path / "model", ignore=ignored))}


def records(*rows: dict):
    def write(folder: Path, tmp_path: Path) -> dict:
        (tmp_path / "broken.png").write_text("no image")
        (tmp_path / "some.jsonl").write_text("\n".join(map(json.dumps, rows)))
        return {"data_path": [str(tmp_path / "some.jsonl")]}

    return write


@pytest.mark.parametrize(
    ("settings_for", "message"),
    [
        (text_model, r"actor_model_name_or_path: .* of the type llama, which reads no images; give a vision-language"),
        (no_processor, r"actor_model_name_or_path: .* has no processor of text and images; save the model's there"),
        (no_template, "chat_template: none given, and the processor has none"),
        (records({"prompt": "is it", "image": "no.png"}), r"some.jsonl, record 1: there is no image '.*no.png'"),
        (records({"prompt": "is it", "image": "broken.png"}), r"some.jsonl, record 1: cannot identify image file"),
        (records({"question": "is it"}), "no prompt among the columns question; name the column with --prompt_column"),
        (lambda *_: {"data_path": []}, "data_path: none given; give JSON-lines files"),
        (lambda *_: {"dynamic_sampling": True}, "dynamic_sampling: True given; leave it out here"),
        (lambda *_: {"num_mini_batches": 33}, "num_mini_batches: 33 given; a rank has 32 completions"),
        (lambda *_: {"training_forward": "exact"}, "training_forward: 'exact' given; allowed: model"),
        (lambda folder, _: {"reward": [str(folder / "rewarding")]}, "reward: .* a model, which reads no images"),
    ],
)
def test_invalid_inputs_raise_before_the_model_is_loaded(alone, folder, tmp_path, monkeypatch, settings_for, message):
    monkeypatch.setattr(vision_grpo.Actor, "load", lambda *_, **__: pytest.fail("loaded the model"))
    with pytest.raises(ValueError, match=message):
        run(settings_in(folder, **settings_for(folder, tmp_path)))
