"""`attn_implementation` reaches every model of a script; training does not depend on it; rollouts stay fused."""

from unittest import mock

import pytest
from transformers import AutoConfig, LlamaConfig
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama import modeling_llama

from hybrid.decoders import foreign_code
from rlhf_examples import chat, evaluate, pairs, throughput
from rlhf_examples.common.arguments import (
    ChatArguments,
    EvaluateArguments,
    PairsArguments,
    PPOArguments,
    RunArguments,
    ThroughputArguments,
)
from rlhf_examples.common.models import require_attention, require_model
from tests.rlhf_examples.scripts import SCRIPTS, logged, models_of, run_in_this_rank
from tests.rlhf_examples.test_coverage import FUSED, recorded_coverage

TOLERANCE = 1e-4  # attention weights and sums in another order, in float32, over three updates
ROUNDING = ("sampling/", "control/", "val/first_ratio_error", "val/clipfrac_avg")  # as test_same_curves
SHORT = {
    "sft": {"max_steps": 3, "packing": True, "max_seq_len": 64},
    "reward_model": {"max_steps": 3},
    "dpo": {"max_steps": 3},
    "ppo": {"num_iterations": 3},
    "grpo": {"num_iterations": 3, "beta": 0.1},
}


def run_counting_eager(script: str, settings: dict, refuse: str) -> int:
    """Run a script in which the attention `refuse` raises; returns the number of eager attention calls."""
    own, eager = ALL_ATTENTION_FUNCTIONS["sdpa"], modeling_llama.eager_attention_forward
    count = 0

    def counting(*args, **kwargs):
        nonlocal count
        assert refuse != "eager", "a model of this run has eager attention"
        count += 1
        return eager(*args, **kwargs)

    def sdpa(*args, **kwargs):
        assert refuse != "sdpa", "a model of this run has sdpa"
        return own(*args, **kwargs)

    modeling_llama.eager_attention_forward = counting
    ALL_ATTENTION_FUNCTIONS["sdpa"] = sdpa
    try:
        known = (*foreign_code.KNOWN_PACKAGES, "tests")  # else this counting itself makes the rollouts native
        with recorded_coverage() as coverages, mock.patch.object(foreign_code, "KNOWN_PACKAGES", known):
            run_in_this_rank(script, settings)
    finally:
        modeling_llama.eager_attention_forward = eager
        ALL_ATTENTION_FUNCTIONS["sdpa"] = own
    for coverage in coverages:
        if coverage.containers:  # DPO's and SFT's engines generate nothing
            assert (coverage.containers, coverage.fallback_reason) == FUSED, coverage
    return count


def require_the_same_curves(script: str, ranks, small, tmp_path, **changes) -> None:
    settings = {**(models_of(script, small) if script != "sft" else {}), **SHORT[script], **changes}
    for name, refuse in (("eager", "sdpa"), ("sdpa", "eager")):
        of_run = {"attn_implementation": name, "output_dir": str(tmp_path / name)}
        (count, *_) = ranks.run(run_counting_eager, script, {**settings, **of_run}, refuse)
        assert (count > 0) == (name == "eager")
    rows = [logged(tmp_path / name) for name in ("eager", "sdpa")]
    assert [len(of_run) for of_run in rows] == [3, 3]
    for eager, sdpa in zip(*rows, strict=True):
        assert eager.keys() == sdpa.keys()
        for name, value in eager.items():
            if name == "rewards/accuracies" and abs(eager["rewards/margins"]) < TOLERANCE:
                continue  # before the first step margins are 0, and their signs rounding
            if isinstance(value, float | int) and not name.startswith(ROUNDING):
                assert sdpa[name] == pytest.approx(value, rel=TOLERANCE, abs=TOLERANCE), name


@pytest.mark.slow
def test_sft_with_packing_trains_alike_with_every_attention(ranks, small, tmp_path):
    require_the_same_curves("sft", ranks, small, tmp_path)


@pytest.mark.slow
def test_ppo_trains_alike_with_every_attention(ranks, small, tmp_path):
    reward = {"reward": [str(small / "reward_model")]}
    require_the_same_curves("ppo", ranks, small, tmp_path, **reward)


@pytest.mark.slow
@pytest.mark.parametrize("script", ["reward_model", "dpo", "grpo"])
def test_other_scripts_train_alike_with_every_attention(script, ranks, small, tmp_path):
    require_the_same_curves(script, ranks, small, tmp_path)


def test_every_script_has_attn_implementation():
    kinds = [kind for _, kind in SCRIPTS.values()]
    kinds += [EvaluateArguments, PairsArguments, ThroughputArguments, ChatArguments]
    for kind in kinds:
        assert kind(attn_implementation="eager").attn_implementation == "eager"
        with pytest.raises(ValueError, match=r"'flash_attention_2' given with dtype: 'float32'; it needs bfloat16"):
            kind(attn_implementation="flash_attention_2")
        kind(attn_implementation="flash_attention_2", dtype="bfloat16")


@pytest.mark.parametrize(
    ("script", "kind", "model"),
    [
        (evaluate, EvaluateArguments, "model_name_or_path"),
        (pairs, PairsArguments, "model_name_or_path"),
        (throughput, ThroughputArguments, "model_name_or_path"),
        (chat, ChatArguments, "path"),
        *((module, kind, "") for module, kind in SCRIPTS.values()),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_an_unsupported_attention_raises_before_records_are_read(script, kind, model, small, tmp_path):
    name = str(small / "model")
    model_settings = {model: [name] if kind is EvaluateArguments else name} if model else {}
    if not model:
        model_settings = {
            key: str(small / "model")
            for key in ("model_name_or_path", "actor_model_name_or_path")
            if hasattr(kind(), key) and kind is not SCRIPTS["sft"][1]  # SFT builds its own small model
        }
    output = {"output_dir": str(tmp_path / "run")} if issubclass(kind, RunArguments) else {}
    reward = {"reward": ["rlhf_examples.rewards:cheerful"]} if kind is PPOArguments else {}
    args = kind(**model_settings, **output, **reward, attn_implementation="flash")
    allowed = (
        r"attn_implementation: 'flash' given; allowed for this model on this machine: eager, sdpa, .*flex_attention \("
    )
    with pytest.raises(ValueError, match=allowed):
        script.run(args)
    assert not (tmp_path / "run").exists()


def test_an_attention_that_a_family_lacks_raises(small):
    config = AutoConfig.for_model("bloom", hidden_size=16, n_layer=1, n_head=2, vocab_size=16)
    with pytest.raises(ValueError, match=r"'sdpa' given; allowed for this model on this machine: eager \(BloomModel"):
        require_attention(config, "sdpa")
    require_attention(config, "eager")
    require_attention(LlamaConfig(num_hidden_layers=1), "flex_attention")
    require_model("path", str(small / "model"), "eager")
