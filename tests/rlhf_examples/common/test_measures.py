"""A run's measures: explained variance, FLOPs, phases, tokens, scores by source, gradient norm."""

import math
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForSequenceClassification

from rlhf_examples.common.arguments import SFTArguments
from rlhf_examples.common.engines import backward_and_step, make_engine
from rlhf_examples.common.losses import explained_variance
from rlhf_examples.common.measures import (
    Phases,
    TokenCount,
    TrainingFlops,
    data_source,
    flops_metrics,
    scores_by_source,
)
from rlhf_examples.common.models import LoRA, ValueModel, load_policy
from rlhf_examples.common.run_log import read_metrics
from rlhf_examples.common.scorers import Rewards, Scorer
from tests.marks import slow_but
from tests.rlhf_examples.common.test_models import on_first_rank, training
from tests.rlhf_examples.scripts import make_small_models, models_of, run_in_this_rank
from tests.tiny_models import prompts, tiny_model, with_peft

alone = pytest.mark.usefixtures("alone")


def test_explained_variance_matches_the_formula():
    generator = torch.Generator().manual_seed(0)
    values, returns = torch.randn(2, 3, 5, generator=generator).double()
    mask = torch.tensor([[1, 1, 1, 0, 0], [1, 1, 0, 0, 0], [0, 0, 0, 0, 0]])
    kept = mask.bool()
    expected = 1 - (returns - values)[kept].var(unbiased=False) / returns[kept].var(unbiased=False)
    values[~kept] = math.nan
    assert explained_variance(values, returns, mask) == pytest.approx(expected.item(), rel=1e-12)
    assert explained_variance(returns + 3, returns, mask) == pytest.approx(1.0), (
        "a constant offset reduces the explained variance"
    )
    assert explained_variance(torch.zeros_like(returns), returns, mask) == pytest.approx(0.0)
    assert math.isnan(explained_variance(values, torch.ones_like(returns), mask))


def counted(model, ids: torch.Tensor) -> float:
    """FLOPs of a forward and backward by torch's counter."""
    with FlopCounterMode(display=False) as counter:
        model(input_ids=ids).logits.sum().backward()
    return counter.get_total_flops()


@pytest.mark.parametrize(("family", "tied"), [("llama", False), ("qwen2", True), ("gpt2", True)])
def test_flops_match_torchs_counter(family, tied):
    """Matrix products are exact; norms and biases count as weights, and attention without the causal mask."""
    model = tiny_model(family, tie_word_embeddings=tied)
    model.set_attn_implementation("eager")
    flops, ids = TrainingFlops.of(model), prompts(2, 16, padded=False)[0]
    assert flops([16, 16]) == pytest.approx(counted(model, ids), rel=0.05)


def test_flops_exclude_gradients_of_frozen_weights():
    base = TrainingFlops.of(tiny_model("llama"))
    adapted = TrainingFlops.of(with_peft(tiny_model("llama")))
    assert 4 / 6 < adapted.per_token / base.per_token < 0.9
    config = tiny_model("llama").config
    config.num_labels = 1
    critic = TrainingFlops.of(ValueModel(AutoModelForSequenceClassification.from_config(config)))
    assert critic.per_pair == base.per_pair and critic.per_token < base.per_token, (
        "FLOPs of a vocabulary head were counted"
    )


@alone
def test_mfu_is_a_share_of_the_peak():
    metrics = flops_metrics(3e12, seconds=2.0, peak_tflops=6.0)
    assert metrics == {"time/tflops_per_s": 1.5, "time/mfu": 0.25}
    if not torch.cuda.is_available():
        assert "time/mfu" not in flops_metrics(3e12, 2.0, 0.0), "MFU without a known peak"


@alone
def test_token_counts_continue_in_resumed_runs():
    count = TokenCount()
    assert [count.add(tokens)["num_tokens"] for tokens in (3, torch.tensor(4))] == [3, 7]
    resumed = TokenCount()
    resumed.load_state_dict(count.state_dict())
    assert resumed.add(1) == {"num_tokens": 8}


def test_phases_are_consecutive(monkeypatch):
    times = iter([0.0, 1.0, 3.0, 6.0, 10.0, 15.0])
    monkeypatch.setattr("rlhf_examples.common.measures.time.perf_counter", lambda: next(times))
    phases = Phases()
    for name in ("rollout", "score", "rollout"):
        phases.end(name)
    with phases.timed("eval"):
        pass
    assert phases.metrics() == {"time/rollout_s": 4.0, "time/score_s": 2.0, "time/eval_s": 5.0}


@alone
def test_scores_are_averaged_by_source():
    sets = ["data/one.jsonl", "data", "org/set@train"]
    sources = ["data/one.jsonl", "data/two/x.parquet", "org/set@train", "org/set@train"]
    assert [data_source(source, sets) for source in sources] == ["data/one.jsonl", "data", *["org/set@train"] * 2]
    rows = [{"source": source} for source in sources]
    means = scores_by_source(rows, torch.tensor([1.0, math.nan, 2.0, 4.0]), sets)
    assert means == {"rewards_by_source/data/one.jsonl": 1.0, "rewards_by_source/org/set@train": 3.0}
    assert scores_by_source(rows, torch.zeros(4), sets[:1]) == {}


@alone
def test_minimum_and_maximum_of_every_reward_and_of_their_sum():
    scored = {"a": [1.0, 3.0, None], "b": [0.5, -1.0, None]}
    scorers = [Scorer(name, function=lambda *_, name=name, **__: scored[name]) for name in scored]
    rewards, rows = Rewards(scorers, [1.0, 10.0]), [{"prompt": "", "columns": "{}"}] * 3
    rewards.scores_by_name(None, rows, [""] * 3)
    metrics = rewards.metrics()
    edges = {name: (metrics[f"rewards/{name}/min"], metrics[f"rewards/{name}/max"]) for name in ("a", "b", "reward")}
    assert edges == {"a": (1.0, 3.0), "b": (-1.0, 0.5), "reward": (-7.0, 6.0)}
    assert metrics["rewards/reward/mean"] == -0.5 and metrics["rewards/a/std"] == pytest.approx(2**0.5)
    scored |= {"a": [None] * 3, "b": [None] * 3}
    rewards.scores_by_name(None, rows, [""] * 3)
    assert rewards.metrics() == {}


def check_gradient_norm(folder: str, stage: int, dtype: str) -> None:
    """The norm of a step over both ranks' rows, in two backwards, equals that of an unpartitioned model in one
    process."""
    on_first_rank(lambda: tiny_model("llama").save_pretrained(f"{folder}/base"))
    args, settings = SFTArguments(dtype=dtype), training(stage)
    engine = make_engine(load_policy(f"{folder}/base", settings.config(args), LoRA(0, 16, "")), args, settings)
    ids = torch.cat([prompts(2, 8, padded=False, seed=rank)[0] for rank in range(dist.get_world_size())])
    own_ids, norms = ids[2 * dist.get_rank() :][:2], []
    for number in range(2):
        row = own_ids[number : number + 1]
        norms += backward_and_step(engine, engine(input_ids=row, labels=row).loss, number, 2)
    model = tiny_model("llama")
    model(input_ids=ids, labels=ids).loss.backward()
    expected = torch.cat([p.grad.flatten() for p in model.parameters()]).norm().item()
    assert norms == pytest.approx([expected], rel=1e-4 if dtype == "float32" else 0.05)
    assert expected > 1.5, "clipping would have no effect"


@pytest.mark.parametrize(("stage", "dtype"), [(0, "float32"), (0, "bfloat16"), (2, "float32"), (3, "float32")])
def test_grad_norm_is_over_all_ranks_before_clipping(ranks, tmp_path, stage, dtype):
    ranks.run(check_gradient_norm, str(tmp_path), stage, dtype)


EVERYWHERE = {"grad_norm", "num_tokens", "time/tflops_per_s", "time/mfu", "time/train_s", "time/eval_s", "time/save_s"}
OF_PPO = {"val/var_explained", "val/grad_norm", "rewards/number_of_words/min", "rewards/number_of_words/max"}
OF_PPO |= {f"time/{phase}_s" for phase in ("rollout", "old_logps", "ref_logps", "values", "rewards", "advantages")}


def run_and_read(script: str, folder: str) -> list[dict]:
    on_first_rank(lambda: make_small_models(Path(folder)))
    more = {"num_iterations": 2, "reward": ["tests.rlhf_examples.scripts:number_of_words"]} if script == "ppo" else {}
    more |= {"output_dir": f"{folder}/run", "save_every": 1, "eval_every": 1, "peak_tflops": 1.0}
    run_in_this_rank(script, {**models_of(script, Path(folder)), **more})
    return read_metrics(Path(folder) / "run")


@pytest.mark.parametrize("script", slow_but(["ppo"], ["ppo", "sft"]))
def test_a_run_logs_its_measures(ranks, tmp_path, script):
    (rows, _) = ranks.run(run_and_read, script, str(tmp_path))
    names = EVERYWHERE | (OF_PPO if script == "ppo" else set())
    assert names <= rows[-1].keys(), names - rows[-1].keys()
    assert all(math.isfinite(rows[-1][name]) for name in names)
    assert 0 < rows[-1]["time/mfu"] < 1 and rows[-1]["grad_norm"] > 0
    tokens = [row["num_tokens"] for row in rows if row["iteration"]]
    assert tokens[0] > 0 and tokens == sorted(set(tokens))
