"""Exported models, values, references and moving averages equal their oracles."""

from pathlib import Path

import peft
import pytest
import torch
import torch.distributed as dist
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from rlhf_examples.common.actor import Actor
from rlhf_examples.common.arguments import PPOArguments, SFTArguments
from rlhf_examples.common.ema import MovingAverage
from rlhf_examples.common.engines import Training, deepspeed_config, export, load_frozen_model, make_engine
from rlhf_examples.common.forwards import frozen_values, token_values, values_of_tokens
from rlhf_examples.common.losses import last_token_values
from rlhf_examples.common.models import LoRA, ValueModel, load_exported, load_policy, load_value_model
from rlhf_examples.common.models import merged as merged_adapter
from rlhf_examples.common.parsing import arguments_of
from rlhf_examples.common.rollouts import rank_row_ids, roll_out, sampling
from rlhf_examples.common.scorers import Scorer
from rlhf_examples.data.synthetic import synthetic_tokenizer
from tests.engines import train_step
from tests.marks import slow_but
from tests.rlhf_examples.scripts import make_small_models, models_of, run_in_this_rank
from tests.tiny_models import prompts, tiny_model


def training(stage: int, lora_rank: int = 0, learning_rate: float = 1e-2) -> Training:
    return Training(stage, 2, learning_rate, 0.0, "constant", 0, 10, False, LoRA(lora_rank, 16, "all-linear"))


def on_first_rank(make) -> None:
    if dist.get_rank() == 0:
        make()
    dist.barrier()


def check_export(folder: str, stage: int, lora_rank: int, merge: bool) -> None:
    base, out, settings = f"{folder}/base", f"{folder}/policy", training(stage, lora_rank)
    on_first_rank(lambda: tiny_model("llama").save_pretrained(base))
    engine = make_engine(load_policy(base, settings.config(SFTArguments()), settings.lora), SFTArguments(), settings)
    ids, mask = prompts(2, 7, padded=False, seed=dist.get_rank())
    untrained = engine(ids, attention_mask=mask).logits.detach()
    for step in range(2):
        train_step(engine, step)
    export(engine, synthetic_tokenizer(), out, merge)
    with engine.inference():
        expected = engine(ids, attention_mask=mask).logits
    assert (expected - untrained).abs().max() > 1e-2, "training changed nothing"
    if merge or not lora_rank:
        loaded = AutoModelForCausalLM.from_pretrained(out)
    else:
        loaded = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), out)
        assert not (Path(out) / "model.safetensors").exists()
    for model in (loaded, merged_adapter(load_exported(out, deepspeed_config("float32", 0)))):
        with torch.no_grad():
            # The engine merges the LoRA that PEFT adds unmerged.
            torch.testing.assert_close(model.eval()(ids).logits, expected, atol=1e-3, rtol=1e-4)


@pytest.mark.parametrize(
    ("stage", "lora_rank", "merged"),
    slow_but(
        [(2, 4, True), (3, 4, False)],
        [(0, 0, True), (2, 4, True), (3, 0, True), (3, 4, True), (3, 4, False)],
    ),
)
def test_an_exported_policy_equals_the_trained_one(ranks, tmp_path, stage, lora_rank, merged):
    ranks.run(check_export, str(tmp_path), stage, lora_rank, merged)


def check_values(folder: str, family: str, lora_rank: int) -> None:
    base, out, settings = f"{folder}/base", f"{folder}/reward", training(3, lora_rank)
    on_first_rank(lambda: tiny_model(family).save_pretrained(base))
    critic = make_engine(
        load_value_model(base, settings.config(SFTArguments()), settings.lora), SFTArguments(), settings
    )
    ids, mask = prompts(2, 7, padded=True, seed=dist.get_rank())
    with critic.inference():
        assert (frozen_values(critic, ids, mask, 1) == 0).all(), "initial values are not zero"
    for _ in range(3):
        critic.backward((token_values(critic, ids, mask, 4, "packed") - 1).square().mean())
        critic.step()
    with critic.inference():
        values = frozen_values(critic, ids, mask, 1)
    wanted = mask[:, -5:-1] * mask[:, -4:]  # a value is of the state before its token
    actual = token_values(critic, ids, mask, 4, "model").detach()
    torch.testing.assert_close(values[:, -5:-1] * wanted, actual, atol=1e-5, rtol=1e-5)
    assert values[mask.bool()].abs().max() > 1e-2
    padded, packed = (token_values(critic, ids, mask, 4, forward).detach() for forward in ("model", "packed"))
    torch.testing.assert_close(packed, padded, atol=1e-5, rtol=1e-5)
    assert (packed[wanted == 0] == 0).all() and (padded[wanted == 0] == 0).all()
    of_all = values_of_tokens(critic, ids, mask, "packed").detach()
    expected = values_of_tokens(critic, ids, mask, "model").detach()
    torch.testing.assert_close(of_all, expected * mask, atol=1e-5, rtol=1e-5)
    export(critic, synthetic_tokenizer(), out)
    # Hugging Face's classifier scores the last unpadded token: rows without padding.
    classifier = AutoModelForSequenceClassification.from_pretrained(out, num_labels=1).eval()
    engine = load_frozen_model(load_value_model, out, "float32")
    reward_scores = last_token_values(frozen_values(engine, ids, mask, 2), mask)
    for row, kept, value, reward_score in zip(
        ids, mask.bool(), last_token_values(values, mask), reward_scores, strict=True
    ):
        with torch.no_grad():
            expected = classifier(row[kept][None]).logits[0, 0]
        torch.testing.assert_close(value, expected, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(reward_score, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(("family", "lora_rank"), slow_but([("qwen2", 4)], [("llama", 0), ("qwen2", 4), ("gpt2", 0)]))
def test_critic_and_reward_model_match_hugging_faces_classifier(ranks, tmp_path, family, lora_rank):
    ranks.run(check_values, str(tmp_path), family, lora_rank)


def test_models_without_a_classifier_raise_as_value_models():
    two_labels = AutoModelForSequenceClassification.from_config(tiny_model("llama").config)
    with pytest.raises(ValueError, match="has 2 labels; it must have 1"):
        ValueModel(two_labels)


def check_reference(folder: str, lora_rank: int, offload: bool) -> None:
    """After the policy is trained, the reference's logprobs still equal Hugging Face's with the base model."""
    base = f"{folder}/base"
    on_first_rank(lambda: tiny_model("llama").save_pretrained(base))
    args = PPOArguments(
        actor_model_name_or_path=base,
        actor_lora_dim=lora_rank,
        offload_reference_model=offload,
        temperature=0.7,
        max_answer_seq_len=6,
        actor_learning_rate=1e-2,
    )
    actor = Actor.load(args, total_steps=10, needs_reference=True)
    assert (actor.reference is None) == (lora_rank > 0)
    for step in range(2):
        train_step(actor.policy, step)
    tokenizer = synthetic_tokenizer()
    rows = [{"prompt_ids": [5, 6, 7 + i, 9][: 4 - i]} for i in range(2)]
    batch = roll_out(actor.policy, tokenizer, rows, rank_row_ids(2), sampling(args, 3))
    actual, policy_logps = actor.reference_logps(batch), actor.old_logps(batch)
    model = AutoModelForCausalLM.from_pretrained(base).eval()
    expected = torch.zeros_like(actual)
    for row in range(2):
        kept = batch.attention_mask[row].bool()
        ids, length = batch.sequences[row][kept], int(batch.completion_mask[row].sum())
        with torch.no_grad():
            logps = (model(ids[None]).logits[0, :-1] / 0.7).log_softmax(dim=-1)
        expected[row, :length] = logps.gather(1, ids[1:, None])[-length:, 0]
    kept = batch.completion_mask.bool()
    torch.testing.assert_close(actual[kept], expected[kept], atol=1e-4, rtol=1e-4)
    assert (policy_logps - expected)[kept].abs().max() > 1e-2, "the policy is still the base"


@pytest.mark.parametrize(
    ("lora_rank", "offload"), slow_but([(0, True), (4, False)], [(0, False), (0, True), (4, False)])
)
def test_the_reference_is_the_model_before_training(ranks, tmp_path, lora_rank, offload):
    ranks.run(check_reference, str(tmp_path), lora_rank, offload)


def gathered_average(average: MovingAverage, engine) -> dict[str, torch.Tensor]:
    return {name: average.full_tensor(parameter).clone() for name, parameter in engine.module.named_parameters()}


def check_average(folder: str, stage: int, family: str, tied: bool) -> None:
    """Against float64, over the weights gathered after every step."""
    base, out, settings, beta = f"{folder}/base", f"{folder}/average", training(stage), 0.75
    on_first_rank(lambda: tiny_model(family, tie_word_embeddings=tied).save_pretrained(base))
    engine = make_engine(load_policy(base, settings.config(SFTArguments())), SFTArguments(), settings)
    average = MovingAverage(engine, beta)
    shadow = MovingAverage(engine, 0.0)  # the weights themselves
    expected = {name: values.double() for name, values in gathered_average(shadow, engine).items()}
    model = AutoModelForCausalLM.from_pretrained(base)
    for name, values in expected.items():
        assert torch.equal(values, model.get_parameter(name).double())
    for step in range(4):
        train_step(engine, step)
        average.update()
        shadow.update()
        weights = gathered_average(shadow, engine)
        expected = {name: beta * old + (1 - beta) * weights[name].double() for name, old in expected.items()}
    for name, values in gathered_average(average, engine).items():
        torch.testing.assert_close(values.double(), expected[name], atol=1e-6, rtol=1e-6)
    assert max((weights[name] - values).abs().max() for name, values in expected.items()) > 1e-3
    if stage == 3:  # a rank keeps only its partitions
        kept = sum(part.numel() for part in average.parts.values())
        assert kept <= 0.6 * sum(values.numel() for values in expected.values())
    export(engine, synthetic_tokenizer(), out, average=average)
    loaded = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    for name, values in expected.items():
        torch.testing.assert_close(loaded.get_parameter(name).double(), values, atol=1e-6, rtol=1e-6)
    with safe_open(f"{out}/model.safetensors", "pt") as file:  # a head in the file would be loaded as one
        heads = [file.get_tensor(name) for name in file.keys() if name.startswith("lm_head")]  # noqa: SIM118
    assert len(heads) == (not tied)
    head = average.full_tensor(engine.module.get_output_embeddings().weight)
    for written in (*heads, loaded.get_output_embeddings().weight):
        assert torch.equal(written, head)
    restored = MovingAverage(engine, beta)
    restored.load_state_dict(average.state_dict())
    assert all(torch.equal(restored.parts[name], part) for name, part in average.parts.items())


@pytest.mark.parametrize(
    ("stage", "family", "tied"),
    slow_but(
        [(3, "gpt2", True)],
        [(0, "qwen2", True), (2, "llama", False), (2, "llama", True), (3, "llama", False), (3, "gpt2", True)],
    ),
)
def test_the_moving_average_matches_float64(ranks, tmp_path, stage, family, tied):
    ranks.run(check_average, str(tmp_path), stage, family, tied)


def test_offload_reference_model_partitions_reward_models(ranks, tmp_path):
    ranks.run(check_offloaded_scorers, str(tmp_path))


def check_offloaded_scorers(folder: str) -> None:
    """Scorers of GRPO and its evaluation: partitioned on the host, or full on every rank."""
    if dist.get_rank() == 0:
        make_small_models(Path(folder))
    dist.barrier()
    built, own = [], Scorer.load.__func__

    def load(cls, *args):
        built.append(own(cls, *args))
        return built[-1]

    Scorer.load = classmethod(load)
    reward = {"reward": [f"{folder}/reward_model"], "eval_reward": [f"{folder}/reward_model"]}
    try:
        for offload in (False, True):
            more = {"output_dir": f"{folder}/run-{offload}", "num_iterations": 1, "offload_reference_model": offload}
            run_in_this_rank("grpo", {**models_of("grpo", Path(folder)), **reward, **more})
    finally:
        Scorer.load = classmethod(own)
    assert [type(scorer.model).__name__ for scorer in built] == ["InferenceEngine"] * 2 + ["HybridEngine"] * 2


def test_lora_dropout_is_set_by_its_flag():
    model = LoRA(2, 4, "all-linear", dropout=0.25).apply(tiny_model("llama"), "CAUSAL_LM")
    rates = {module.p for name, module in model.named_modules() if name.endswith("lora_dropout.default")}
    assert rates == {0.25}
    args = arguments_of(SFTArguments, {"lora_dim": 2, "lora_dropout": 0.1, "training_forward": "model"})
    assert Training.from_args(args, "", 1, 1).lora.dropout == 0.1
