"""Every script with tiny models on two ranks, as steps of a pipeline that is interrupted and resumed."""

import gc
import json
import math
import subprocess
import sys

import pytest
import torch
from deepspeed.runtime.engine import DeepSpeedEngine
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

import hybrid
from rlhf_examples import chat, evaluate, pipeline
from rlhf_examples.common.arguments import ChatArguments, EvaluateArguments
from rlhf_examples.common.run_log import read_metrics
from rlhf_examples.common.steps import parse
from tests.marks import slow_but
from tests.rank_pool import run_script
from tests.rlhf_examples.scripts import (
    ROLLOUTS,
    TIMES,
    TINY,
    TRAINING,
    iterations_of,
    load_with_transformers,
    make_small_models,
    models_of,
    number_of_words,
    run_in_this_rank,
)

REWARD = "tests.rlhf_examples.scripts:number_of_words"
OPENING = "anna found a red ball in the garden ."
STEPS = {
    "sft": {**TINY["sft"], "max_steps": 6, "enable_ema": True},
    "pairs": {
        "model_name_or_path": "step:sft/model",
        "data_path": ["synthetic:stories@test"],
        "reward": REWARD,
        "rounds": 1,
        "max_answer_seq_len": 12,
    },
    "reward_model": {**TRAINING, "model_name_or_path": "step:sft/model", "data_path": ["step:pairs/pairs.jsonl"]},
    "ppo": {
        **ROLLOUTS,
        "num_iterations": 2,
        "actor_model_name_or_path": "step:sft/model",
        "critic_model_name_or_path": "step:reward_model/model",
        "eval_reward": "rlhf_examples.data.synthetic:gold_score",
        "eval_every": 1,
    },
    "grpo": {
        **ROLLOUTS,
        "num_iterations": 2,
        "num_generations": 2,
        "actor_model_name_or_path": "step:sft/model",
        "reward": REWARD,
        "actor_lora_dim": 2,
    },
    "dpo": {
        **TRAINING,
        "max_steps": 2,
        "model_name_or_path": "step:sft/model",
        "lora_dim": 2,
        "lora_export": "adapter",
    },
    "throughput": {"model_name_or_path": "step:ppo/model", "rounds": 1, "per_device_generation_batch_size": 2},
}
SUMMARY = {"loss": "sft/eval_loss", "gold_score": "ppo/eval_gold_score", "speed": "throughput/tokens_per_second"}


def settings_of(*steps: str) -> dict:
    return {"steps": {name: STEPS[name] for name in steps}, "common": {"print_every": 0}}


def run_pipeline(settings: dict, flags: list[str]) -> dict[str, float]:
    summary = pipeline.run(parse(settings, flags))
    engines = [type(obj) for obj in gc.get_objects() if issubclass(type(obj), DeepSpeedEngine | hybrid.InferenceEngine)]
    assert not engines, "engines of finished steps are still referenced"
    return summary


@pytest.fixture(scope="module")
def done(ranks, tmp_path_factory):
    """The directory of a pipeline that was interrupted after its second step and resumed."""
    directory = tmp_path_factory.mktemp("pipeline")
    flags = ["--output_dir", str(directory)]
    ranks.run(run_pipeline, settings_of("sft", "pairs"), flags)
    written = (directory / "sft" / "model" / "model.safetensors").stat().st_mtime_ns
    settings = {**settings_of(*STEPS), "summary": SUMMARY}
    (summary, other) = ranks.run(run_pipeline, settings, [*flags, "--resume", "true"], timeout_s=500)
    assert summary == other == json.loads((directory / "summary.json").read_text())
    assert (directory / "sft" / "model" / "model.safetensors").stat().st_mtime_ns == written, "a step was run again"
    return directory


def test_every_step_saves_metrics_and_a_model(done):
    for name in ("sft", "reward_model", "ppo", "grpo", "dpo"):
        rows = iterations_of(done / name)
        (before,) = (row for row in read_metrics(done / name) if not row["iteration"])
        held_out = {key for key in before if key != "iteration"}
        assert held_out and held_out == {key for key in rows[-1] if key.startswith("eval_")}
        assert len(rows) == STEPS[name].get("num_iterations", STEPS[name].get("max_steps"))
        assert all(math.isfinite(value) for value in rows[-1].values() if isinstance(value, float))
        assert (done / name / "model" / "config.json").is_file() == (name != "dpo")
    rows = iterations_of(done / "sft")
    assert rows[-1]["loss"] < rows[0]["loss"]
    sft_metrics = json.loads((done / "sft" / "done.json").read_text())
    assert sft_metrics["eval_loss"] < sft_metrics["before_eval_loss"]
    assert all("eval_reward_model" in row and "eval_gold_score" in row for row in iterations_of(done / "ppo"))
    samples = json.loads((done / "ppo" / "samples.json").read_text())
    assert len(samples) == 2 and samples[0]["prompt"].endswith(" .")
    summary = json.loads((done / "summary.json").read_text())
    assert summary["loss"] == sft_metrics["eval_loss"] and summary["speed"] > 0


def test_the_first_ratio_of_an_iteration_is_one(done):
    for name in ("ppo", "grpo"):
        for row in iterations_of(done / name):
            assert row["val/first_ratio_error"] < 1e-5
            for kind in ("sampling", "control"):
                assert row[f"{kind}/sampling_logp_difference/max"] < 1e-5
                assert row[f"{kind}/ratio_outside"] == 0
            assert sum(row["sampling/sampling_logp_difference"].counts) > 0


def test_plain_transformers_loads_every_model(done):
    tokenizer = AutoTokenizer.from_pretrained(done / "ppo" / "model")
    ids = tokenizer(OPENING, return_tensors="pt")["input_ids"]
    with torch.no_grad():
        first = load_with_transformers(done / "sft" / "model")(ids).logits
        for name in ("sft/model_ema", "ppo/model", "grpo/model"):
            assert (load_with_transformers(done / name)(ids).logits - first).abs().max() > 1e-4, (
                f"{name} is what it began as"
            )
        # transformers' PEFT integration: the adapter's directory names its base.
        assert (load_with_transformers(done / "dpo" / "model")(ids).logits - first).abs().max() > 1e-6
        reward_model = AutoModelForSequenceClassification.from_pretrained(done / "reward_model" / "model")
        assert reward_model(ids).logits.shape == (1, 1)


def test_pairs_follow_the_reward_function(done):
    pairs = [json.loads(line) for line in (done / "pairs" / "pairs.jsonl").read_text().splitlines()]
    assert len(pairs) == json.loads((done / "pairs" / "done.json").read_text())["pairs"] > 20
    for pair in pairs:
        chosen, rejected = number_of_words([""] * 2, [pair["chosen"], pair["rejected"]])
        assert chosen > rejected


def run_evaluate(models: list[str], reward: str) -> list[dict]:
    return evaluate.run(EvaluateArguments(model_name_or_path=models, reward=reward, eval_rows=5, max_answer_seq_len=8))


def test_evaluate_compares_models_on_the_same_prompts(ranks, done):
    models = [str(done / name / "model") for name in ("sft", "ppo", "sft", "dpo")]
    results, other_results = ranks.run(run_evaluate, models, REWARD)
    assert results == other_results
    assert [len(of_model["samples"]) for of_model in results] == [5] * 4
    assert results[0] == results[2] != results[1]
    scores = [sample["score"] for sample in results[0]["samples"]]
    assert results[0]["number_of_words"] == pytest.approx(sum(scores) / 5)
    by_model, _ = ranks.run(run_evaluate, models[:1], str(done / "reward_model" / "model"))
    assert by_model[0]["samples"][0]["completion"] == results[0]["samples"][0]["completion"]
    assert by_model[0]["reward_model"] != results[0]["number_of_words"]


def run_chat(path: str, inputs: list[str], template: str) -> tuple[list, str, list]:
    args = ChatArguments(path=path, temperature=0.0, max_new_tokens=6, system="be brief")
    speaker = chat.load(path, args)
    speaker.tokenizer.chat_template = template or None
    lines = iter(inputs)

    def ask() -> str:
        try:
            return next(lines)
        except StopIteration:
            raise EOFError from None

    messages = chat.Chat([speaker], args).talk(ask)
    prompt = chat.encode_prompt(speaker.tokenizer, messages[:-1])
    return messages, speaker.tokenizer.decode(prompt[0]), prompt[0].tolist()


TEMPLATE = "{% for m in messages %}{{ m['role'] }} : {{ m['content'] }} {% endfor %}"


def test_chat_matches_transformers(ranks, done, capfd):
    path = str(done / "sft" / "model")
    (messages, prompt, ids), _ = ranks.run(run_chat, path, ["", "gone", "/new", OPENING], "")
    assert [message["role"] for message in messages] == ["system", "user", "assistant"]
    expected = load_with_transformers(done / "sft" / "model").generate(
        torch.tensor([ids]), max_new_tokens=6, do_sample=False
    )
    tokenizer = AutoTokenizer.from_pretrained(path)
    assert messages[-1]["content"] == tokenizer.decode(expected[0, len(ids) :], skip_special_tokens=True)
    (messages, prompt, _), _ = ranks.run(run_chat, path, ["anna", "ben", "/quit", "not heard"], TEMPLATE)
    assert [message["role"] for message in messages] == ["system"] + ["user", "assistant"] * 2
    assert messages[2]["content"] in prompt, "an answer is missing in the next prompt"


@pytest.mark.parametrize("script", slow_but(["grpo"], ["sft", "grpo"]))
def test_streamed_records_with_bfloat16(ranks, tmp_path, script):
    """Records are streamed from a file, and the model trains and generates in bfloat16."""
    texts = ({"prompt": f"anna found {number} red balls .", "completion": "ben was happy ."} for number in range(40))
    path = tmp_path / "records.jsonl"
    path.write_text("\n".join(map(json.dumps, texts)))
    settings = {
        **models_of(script, make_small_models(tmp_path / "small")),
        "data_path": [str(path)],
        "streaming": True,
        "dtype": "bfloat16",
        "output_dir": str(tmp_path / "run"),
    }
    first, second = (
        {name: value for name, value in metrics.items() if not name.startswith(TIMES)}
        for metrics in ranks.run(run_in_this_rank, script, settings)
    )
    assert first == second
    rows = iterations_of(tmp_path / "run")
    assert len(rows) == 4
    assert all(math.isfinite(value) for row in rows for value in row.values() if isinstance(value, float))
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "model", dtype="auto")
    assert model.dtype == torch.bfloat16
    if script == "grpo":
        differences = [row["sampling/sampling_logp_difference/mean"] for row in rows]
        assert all(0 < difference < 0.1 for difference in differences), "not bfloat16, or not the same policy"


@pytest.mark.slow
@pytest.mark.parametrize("script", ["ppo", "evaluate"])
def test_scripts_run_with_their_launcher(done, tmp_path, script):
    """Other scripts start alike, and run above in pooled ranks."""
    flags = {
        "ppo": {
            "actor_model_name_or_path": done / "sft" / "model",
            "critic_model_name_or_path": done / "reward_model" / "model",
            "num_iterations": 1,
            "per_device_generation_batch_size": 2,
            "eval_rows": 2,
            "output_dir": tmp_path,
        },
        "evaluate": {"model_name_or_path": done / "ppo" / "model", "eval_rows": 2, "output_file": tmp_path / "found"},
    }[script]
    argv = [
        "-m",
        f"rlhf_examples.{script}",
        *(text for pair in flags.items() for text in (f"--{pair[0]}", str(pair[1]))),
    ]
    finished = run_script(argv, world_size=2, timeout_s=240)
    assert finished.returncode == 0, finished.stdout[-4000:]
    if script == "evaluate":
        assert json.loads((tmp_path / "found").read_text())[0]["gold_score"] >= 0
    else:
        assert len(iterations_of(tmp_path)) == 1 and list((tmp_path / "tensorboard").iterdir())


@pytest.mark.slow
def test_the_pipelines_command_line_reports_finished_steps(done):
    """All steps are finished, so it only prints the summary and writes the report. One rank, without a launcher."""
    path = done / "again.yaml"
    path.write_text(json.dumps({**settings_of(*STEPS), "summary": SUMMARY, "output_dir": str(done), "resume": True}))
    finished = subprocess.run(
        [sys.executable, "-m", "rlhf_examples.pipeline", str(path)], capture_output=True, text=True, timeout=200
    )
    assert finished.returncode == 0, finished.stderr[-4000:]
    assert '"gold_score"' in finished.stdout
    assert (done / "report.html").stat().st_size > 50_000
