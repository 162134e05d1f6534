"""GRPO over several turns: what is learned from, what is logged, and that it learns both environments that ship."""

import json
import math
from dataclasses import replace
from pathlib import Path

import httpx2
import pytest
import torch
import torch.distributed as dist
import yaml
from transformers import AutoTokenizer

import hybrid
from rlhf_examples.agent import Games, HarnessGames, load_harness, rows_of, scores_of, transcript
from rlhf_examples.common.actor import Actor
from rlhf_examples.common.advantages import group_advantages
from rlhf_examples.common.arguments import AgentArguments
from rlhf_examples.common.parsing import arguments_of
from rlhf_examples.common.rollouts import sampling
from rlhf_examples.common.run_log import read_completions
from rlhf_examples.data.examples import tokenize_records
from rlhf_examples.data.records import load_records
from rlhf_examples.environments import environment_tokenizer, load_environment
from rlhf_examples.grpo import make_experience
from rlhf_examples.report.write import write_report
from tests.rlhf_examples.scripts import TALK, TINY, iterations_of, models_of, run_in_this_rank
from tests.rlhf_examples.test_demos import ROOT, run_pipeline


def check_experience(directory: str) -> None:
    """Under ZeRO-3 the learned tokens are the sampled ones, whose logprobs the trainer's own forward gives again."""
    settings = {**TINY["agent"], **models_of("agent", Path(directory)), "output_dir": directory}
    args = arguments_of(AgentArguments, settings)
    actor = Actor.load(args, total_steps=4, needs_reference=False)
    tokenizer = AutoTokenizer.from_pretrained(args.actor_model_name_or_path)
    games, rank = Games(TALK.make(tokenizer), tokenizer, args), dist.get_rank()
    own = rows_of(TALK.records("train", size=9))[3 * rank :: 2][:3]  # unequal numbers of turns on the ranks
    actor.policy.eval()
    with actor.policy.inference():
        batch, episodes = games.play(actor.policy, own, sampling(args, seed=0), args.num_generations)
        old_logps = actor.old_logps(batch)
    turns = [row["record"]["turns"] for row in own for _ in range(args.num_generations)]
    assert batch.turn_ids.amax(dim=1).add(1).tolist() == turns and len(set(turns)) > 1
    assert [len(messages) for messages in episodes.completions] == [2 * n for n in turns]
    scores = scores_of(batch, episodes)
    assert scores.tolist() == pytest.approx([sum(rewards) for rewards in batch.turn_rewards])
    experience, metrics = make_experience(batch, old_logps, None, scores, ~scores.isnan(), args)
    observed = batch.observation_mask.bool()
    assert observed.any() and not experience.mask[observed].any()
    assert experience.attention_mask[:, -observed.shape[1] :][observed].all(), "observations are context"
    assert torch.equal(experience.mask, batch.completion_mask)
    sampled = experience.mask.bool()
    torch.testing.assert_close(old_logps[sampled], batch.old_per_token_logps[sampled], atol=1e-5, rtol=1e-5)
    assert torch.equal(experience.advantages, group_advantages(scores, args.num_generations, "group", lambda x: x))
    assert metrics["completions/mean_length"] < 24
    actor.destroy()


def talk_by_requests(base_url: str, record: dict) -> float:
    """The conversation of TALK as a program that calls OpenAI's API."""
    messages, reward = list(record["prompt"]), 0.0
    for _ in range(record["turns"]):
        body = {"messages": messages, "max_tokens": 4}
        answer = httpx2.post(f"{base_url}/chat/completions", json=body, timeout=60, trust_env=False).json()
        text = answer["choices"][0]["message"]["content"]
        reward += len(set(text.split())) / 4
        messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "higher"}]
    return reward


def check_harness(directory: str) -> None:
    """A program plays as the environment does: greedily, to the token, with its rewards; then it trains."""
    harness = "tests.rlhf_examples.test_agent:talk_by_requests"
    settings = {**TINY["agent"], **models_of("agent", Path(directory)), "output_dir": directory}
    args = arguments_of(AgentArguments, settings)
    actor = Actor.load(args, total_steps=4, needs_reference=False)
    tokenizer = AutoTokenizer.from_pretrained(args.actor_model_name_or_path)
    own = rows_of(TALK.records("train", size=9))[3 * dist.get_rank() :: 2][:3]
    greedy = replace(sampling(args, seed=0), temperature=0.0)
    actor.policy.eval()
    with actor.policy.inference():
        expected, episodes = Games(TALK.make(tokenizer), tokenizer, args).play(actor.policy, own, greedy, 1)
        batch, played = HarnessGames(None, tokenizer, args, load_harness(harness)).play(actor.policy, own, greedy, 1)
    assert scores_of(batch, played).tolist() == scores_of(expected, episodes).tolist()
    for row in range(len(own)):
        texts = []
        for each in (expected, batch):
            mask = each.completion_mask[row] | each.observation_mask[row]
            sampled = each.completion_ids[row][each.completion_mask[row] > 0].tolist()
            texts.append((each.completion_ids[row][mask > 0].tolist(), sampled))
        assert texts[0] == texts[1]
    turns = [row["record"]["turns"] for row in own]
    assert [sum(each["role"] == "assistant" for each in messages) for messages in played.completions] == turns
    actor.destroy()


def test_a_harness_plays_as_the_environment_does(ranks, small):
    pytest.importorskip("fastapi", reason="the extra `server` has it")
    ranks.run(check_harness, str(small))


def refuse(base_url: str, record: dict) -> float:
    raise KeyError("my own mistake")


def ask_nothing(base_url: str, record: dict) -> float:
    return 1.0


def check_programs_without_requests(directory: str) -> None:
    settings = {**TINY["agent"], **models_of("agent", Path(directory)), "output_dir": directory}
    args = arguments_of(AgentArguments, settings)
    actor = Actor.load(args, total_steps=4, needs_reference=False)
    tokenizer = AutoTokenizer.from_pretrained(args.actor_model_name_or_path)
    own, greedy = rows_of(TALK.records("train", size=2)), replace(sampling(args, seed=0), temperature=0.0)
    actor.policy.eval()
    for program, reason in (
        (refuse, "KeyError: 'my own mistake'"),
        (ask_nothing, "it sent no request to its base_url"),
    ):
        with pytest.raises(ValueError, match=f"harness: a program ended before its first completion: {reason}"):
            HarnessGames(None, tokenizer, args, program).play(actor.policy, own, greedy, 1)
    actor.destroy()


def test_what_a_program_raises_before_its_first_completion_is_reported(ranks, small):
    """A wrong model name, an error in the program: not that its session is unknown."""
    pytest.importorskip("fastapi", reason="the extra `server` has it")
    ranks.run(check_programs_without_requests, str(small))


def test_it_trains_on_a_harness(ranks, small, tmp_path):
    pytest.importorskip("fastapi", reason="the extra `server` has it")
    harness = {"harness": "rlhf_examples.harnesses:calculator", "environment": "calculator"}
    settings = {**models_of("agent", small), **harness, "output_dir": str(tmp_path), "num_iterations": 2}
    first, second = ranks.run(run_in_this_rank, "agent", settings)
    assert first["reward"] == second["reward"] and math.isfinite(first["loss"])


def test_the_learned_tokens_are_the_sampled_ones(ranks, small):
    ranks.run(check_experience, str(small))


@pytest.fixture(scope="module")
def run_directory(ranks, small, tmp_path_factory) -> Path:
    """A short run on two ranks under ZeRO-3."""
    directory = tmp_path_factory.mktemp("agent")
    settings = {**models_of("agent", small), "output_dir": str(directory), "eval_every": 2}
    first, second = ranks.run(run_in_this_rank, "agent", settings)
    assert first["reward"] == second["reward"] and first["eval_reward"] == second["eval_reward"]
    return directory


def test_metrics_of_a_run(run_directory):
    rows = iterations_of(run_directory)
    assert len(rows) == 4
    for row in rows:
        assert row["val/first_ratio_error"] < 1e-5 and row["sampling/sampling_logp_difference/max"] < 1e-5
        assert row["reward_std"] > 0 and row["tools/call_frequency"] == row["tools/failure_frequency"] == 0
        assert all(math.isfinite(value) for value in row.values() if isinstance(value, float))
    assert (run_directory / "model" / "model.safetensors").is_file()
    assert AutoTokenizer.from_pretrained(run_directory / "model").response_template


def test_logs_and_the_report_mark_the_turns(run_directory):
    completions = read_completions(run_directory)
    assert set(completions["iteration"]) == {0, 2, 4}
    for text in completions["completion"]:
        assert [turn["role"] for turn in text] == ["assistant", "user"] * (len(text) // 2)
        assert all(turn["text"] == "higher" for turn in text if turn["role"] == "user")
    assert {len(text) for text in completions["completion"]} == {2, 4, 6}
    samples = json.loads((run_directory / "samples.json").read_text())
    assert {"prompt", "before", "after", "reward_before", "reward_after"} == samples[0].keys()
    page = write_report(run_directory).read_text()
    assert '<div class="turn answer"><span class="tag">user</span><p class="text" dir="auto">higher</p></div>' in page
    assert '<div class="turn"><span class="tag">assistant</span>' in page


def test_tool_calls_are_shown_with_their_arguments():
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 3, "b": 4}}}
    messages = [{"role": "assistant", "content": "", "tool_calls": [call]}, {"role": "tool", "content": "7"}]
    assert transcript(messages) == [{"role": "assistant", "text": "add(a=3, b=4)"}, {"role": "tool", "text": "7"}]


def test_a_row_without_a_reward_is_lost_and_one_whose_environment_failed_is_not_learned_from():
    class Rewards:
        def rewards(self) -> list[float | None]:
            return [1.0, None, None]

    batch = replace(blank_batch(3), errors=["", "", "OSError: gone"])
    scores = scores_of(batch, Rewards())
    assert scores[:2].tolist() == [1.0, 0.0] and scores[2].isnan()


def blank_batch(rows: int) -> hybrid.RolloutBatch:
    zeros = torch.zeros(rows, 1, dtype=torch.int64)
    return hybrid.RolloutBatch(*[zeros] * 4, *[zeros.float()] * 3, ["stop"] * rows, 0)


@pytest.mark.parametrize("name", ["calculator", "guessing"])
def test_demonstrations_are_learned_on_the_assistants_turns(name, tmp_path):
    """The oracle: the tokens after "<assistant>", through the end of the turn."""
    tokenizer = environment_tokenizer()
    records = load_records(f"synthetic:{name}@train").select(range(50))
    examples = tokenize_records(records, tokenizer, "turns", cache_dir=tmp_path)
    assert len(examples) == 50
    for row in examples.rows:
        words = tokenizer.convert_ids_to_tokens(row["prompt_ids"] + row["completion_ids"])
        expected, inside = [], False
        for word in words:
            expected.append(int(inside))
            inside = word == "<assistant>" or (inside and word != "</s>")
        assert row["assistant_mask"] == expected and 0 < sum(expected) < len(expected)


def test_errors_name_what_is_allowed():
    for name in ("calculators", "tests.rlhf_examples.scripts:NOBODY", "no.module:x"):
        with pytest.raises(
            ValueError, match=f"environment: '{name}' given; it must be calculator, guessing, or module"
        ):
            load_environment(name)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("reward", "rlhf_examples.rewards:exact_match"),
        ("overlap_rewards", True),
        ("partial_rollout", True),
        ("over_sampling_batch_size", 8),
    ],
)
def test_arguments_about_rewards_and_prompts_of_data_sets_are_refused(name, value):
    with pytest.raises(ValueError, match=f"{name}: .* given; prompts and rewards are the environment's: leave it out"):
        arguments_of(AgentArguments, {name: value})


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_both_environments_are_learned(tmp_path):
    settings = yaml.safe_load((ROOT / "configs" / "demo.yaml").read_text())
    names = ("moves", "calculator", "guessing", "openai_client")
    settings["steps"] = {name: settings["steps"][name] for name in names}
    settings["summary"] = {key: path for key, path in settings["summary"].items() if path.startswith(names)}
    config = tmp_path / "demo.yaml"
    config.write_text(yaml.safe_dump({**settings, "servers": {}}, sort_keys=False))
    summary = run_pipeline(config, tmp_path / "run")
    assert summary["openai_client_reward"] >= 0.7, summary
    for name in names[1:3]:
        assert summary[f"{name}_reward_before"] < 0.3 and summary[f"{name}_reward_after"] >= 0.8, summary
    samples = json.loads((tmp_path / "run" / "calculator" / "samples.json").read_text())
    assert any(turn["role"] == "tool" for sample in samples for turn in sample["after"])
