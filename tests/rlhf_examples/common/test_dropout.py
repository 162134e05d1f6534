"""Scripts that compare policies disable dropout: training forwards repeat, and first losses have their known values."""

import math
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

from rlhf_examples.common.models import without_dropout
from rlhf_examples.data.synthetic import synthetic_tokenizer
from tests.marks import slow_but
from tests.rlhf_examples.scripts import SCRIPTS, models_of, run_in_this_rank
from tests.tiny_models import ALL_FAMILIES

# The families' names of dropout settings; a configuration uses those that it has.
NAMES = ("resid_pdrop", "embd_pdrop", "attn_pdrop", "dropout", "attention_dropout", "hidden_dropout", "layerdrop")
NAMES += ("embd_dropout", "activation_dropout", "router_jitter_noise")


def config_with_dropout(family: str, **changes):
    own = AutoConfig.for_model(family, **{**ALL_FAMILIES[family], **changes})
    for name in NAMES:
        if hasattr(own, name):
            setattr(own, name, 0.5)
    return own


@pytest.mark.parametrize("family", slow_but(["llama", "gpt2", "bloom", "falcon", "opt", "mixtral"], ALL_FAMILIES))
def test_without_dropout_training_forwards_repeat(family):
    """Dropout modules and functions, layerdrop, and Mixtral's router jitter."""
    torch.manual_seed(0)
    ids = torch.randint(3, 90, (2, 9))
    noisy = AutoModelForCausalLM.from_config(config_with_dropout(family)).train()
    assert (noisy(ids).logits - noisy(ids).logits).abs().max() > 1e-3, "the model has no dropout: the test is vacuous"
    model = AutoModelForCausalLM.from_config(without_dropout(config_with_dropout(family)))
    assert torch.equal(model.train()(ids).logits, model.eval()(ids).logits)


def directory_with_dropout(family: str, directory: Path) -> Path:
    """Like `make_small_models`, of a family with dropout."""
    torch.manual_seed(0)
    tokenizer = synthetic_tokenizer()
    config = config_with_dropout(family, vocab_size=len(tokenizer), pad_token_id=tokenizer.pad_token_id)
    config.eos_token_id = tokenizer.eos_token_id
    model = AutoModelForCausalLM.from_config(config)
    for name in ("model", "reward_model"):
        model.save_pretrained(directory / name)
        tokenizer.save_pretrained(directory / name)
    AutoModelForSequenceClassification.from_pretrained(directory / "model", num_labels=1).save_pretrained(
        directory / "reward_model"
    )
    return directory


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "family"), slow_but([("dpo", "gpt2")], [("dpo", "gpt2"), ("ppo", "opt"), ("grpo", "gpt2")])
)
def test_the_first_loss_is_that_of_equal_policies(script, family, ranks, tmp_path):
    """DPO's first loss is log 2, and the first ratio of PPO and GRPO is 1, within float32 rounding."""
    models = models_of(script, directory_with_dropout(family, tmp_path))
    first = {"max_steps": 1} if script == "dpo" else {"num_iterations": 1, "num_mini_batches": 1}
    if script == "ppo":
        first["ppo_epochs"] = 1
    metrics = ranks.run(run_in_this_rank, script, {**first, **models, "output_dir": str(tmp_path / "run")})[0]
    if script == "dpo":
        assert metrics["loss"] == pytest.approx(math.log(2), abs=1e-5)
    else:
        assert metrics["val/first_ratio_error"] < 1e-3


def test_sft_keeps_the_models_dropout():
    """As in TRL: SFT compares no policies."""
    assert [name for name, (_, kind) in SCRIPTS.items() if not hasattr(kind(), "disable_dropout")] == ["sft"]
