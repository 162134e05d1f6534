"""Environments at the level of messages in real rollouts, at ZeRO-3 and in tensor parallel.

The oracle plays the sampled turns again, by the protocol alone: same tokens, masks and rewards.
"""

import pytest
import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM

import hybrid
from hybrid.environments.stepping import EnvironmentLoop, reset_rows
from hybrid.runtime.background_loop import BACKGROUND
from rlhf_examples.environments import ENVIRONMENTS, environment_tokenizer
from tests.engines import engine_of, settings
from tests.scripted_rollouts import roll_out

TOKENIZER = environment_tokenizer()
ROOM = 200  # more tokens than three turns have


def playing_model(name: str) -> LlamaForCausalLM:
    """A tiny model that has seen the environment's demonstrations for a while."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=len(TOKENIZER), tie_word_embeddings=True, **sizes))
    model.config.eos_token_id = model.generation_config.eos_token_id = TOKENIZER.eos_token_id
    conversations = [record["messages"] for record in ENVIRONMENTS[name].demonstrations(size=32 * 60, wrong=0.2)]
    texts = TOKENIZER.apply_chat_template(conversations, tokenize=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(60):
        batch = TOKENIZER(texts[32 * step : 32 * step + 32], padding=True, return_tensors="pt")
        batch.pop("token_type_ids", None)
        model(**batch, labels=batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def sampled_turns(batch: hybrid.RolloutBatch, row: int) -> list[list[int]]:
    """The sampled tokens of each of a row's turns."""
    sampled, turns = batch.completion_mask[row] == 1, batch.turn_ids[row]
    return [batch.completion_ids[row][sampled & (turns == turn)].tolist() for turn in range(int(turns.max()) + 1)]


def check_rollouts(name: str, blocks: dict) -> None:
    rank, (make, records_of) = dist.get_rank(), (ENVIRONMENTS[name].make, ENVIRONMENTS[name].records)
    engine = engine_of(playing_model(name), settings(3, **blocks))
    records, environment = records_of("train", seed=rank, size=3 + rank), make(TOKENIZER)
    sampling = hybrid.SamplingParams(max_new_tokens=ROOM, seed=3)
    limits = hybrid.EnvironmentLimits(max_turns=6, max_turn_tokens=8)  # also cuts turns off
    for first in (True, False):  # the environment is used again, after a step
        episodes = environment.episodes(records, num_generations=4)
        calls = {"environment": episodes, "environment_limits": limits}
        batch = engine.rollout(*episodes.prompts(engine.device), sampling, num_generations=4, **calls)
        assert batch.errors == [""] * 4 * len(records)
        turns = [sampled_turns(batch, row) for row in range(4 * len(records))]
        again = make(TOKENIZER).episodes(records, num_generations=4)
        rows = roll_out(again, [[0]] * len(records), lambda row, turn: turns[row][turn], 4, limits.max_turns)  # noqa: B023
        for row, played in enumerate(rows):
            length = int(batch.completion_mask[row].sum() + batch.observation_mask[row].sum())
            prompt = batch.prompt_ids[row][batch.prompt_mask[row].bool()].tolist()
            assert prompt == played.training[0].prompt_ids
            assert batch.completion_ids[row, :length].tolist() == played.training[0].completion_ids[:length]
            assert batch.completion_mask[row, :length].tolist() == played.training[0].mask[:length]
            assert batch.turn_rewards[row] == played.rewards[: len(batch.turn_rewards[row])]
        assert episodes.rewards() == again.rewards() and episodes.metrics() == again.metrics()
        assert episodes.completions == again.completions
        if first:
            assert max(map(len, turns)) >= 3
            frequency = episodes.metrics()["tools/call_frequency"]
            assert frequency > 0.5 if name == "calculator" else sum(episodes.rewards()) > 0
        train_step_of(engine)


def train_step_of(engine: hybrid.HybridEngine) -> None:
    """A step on random tokens of the tokenizer's vocabulary."""
    ids = torch.randint(6, len(TOKENIZER), (2, 8), generator=torch.Generator().manual_seed(dist.get_rank()))
    engine.backward(engine(input_ids=ids, labels=ids).loss)
    engine.step()


TENSOR_PARALLEL = {"hybrid_engine": {"enabled": True, "inference_tp_size": 2}}


@pytest.mark.parametrize(
    ("name", "blocks"),
    [("calculator", {}), ("guessing", {}), ("calculator", TENSOR_PARALLEL)],
    ids=["calculator", "guessing", "tensor parallel"],
)
def test_rollouts_are_the_turns_played_again(ranks, name, blocks):
    ranks.run(check_rollouts, name, blocks)


def test_a_step_of_a_rollout_crosses_the_event_loop_once(monkeypatch):
    """What the engine submits to the background loop runs there to its end, and is not submitted again."""
    submitted, submit = [], BACKGROUND.submit
    monkeypatch.setattr(BACKGROUND, "submit", lambda work: (submitted.append(work.__name__), submit(work))[1])
    calculator, limits = ENVIRONMENTS["calculator"], hybrid.EnvironmentLimits()
    episodes = calculator.make(TOKENIZER).episodes(calculator.records("train", seed=0, size=1))
    (reset,) = reset_rows(episodes, limits, [torch.tensor([1])], len(TOKENIZER), ROOM)
    loop = EnvironmentLoop(limits, len(TOKENIZER), episodes, range(1))
    loop.submit(0, torch.tensor(TOKENIZER("4").input_ids))
    (step,) = loop.collect(waits=True)
    loop.close()
    assert not reset.error and not step.error and submitted == ["_call", "_call"]
