"""`coverage()`, `stats()`, and DeepSpeed's log line of an iteration."""

import contextlib
import io
import os
import re

import pytest
import torch
import torch.distributed as dist

from hybrid.kernels.cpu_library import cpu_library
from tests.engines import CONTAINERS, engine_of, settings, train_step
from tests.marks import slow_but
from tests.tiny_models import FAMILIES, prompts, tiny_model, with_peft

LINE = re.compile(
    r"\|E2E latency=(?P<latency>[\d.]+)s \|Gather latency=(?P<gather>[\d.]+)s \([\d.]+%\) "
    r"\|Generate time=(?P<generate>[\d.]+)s \([\d.]+%\) \|Training time=(?P<train>[\d.]+)s \([\d.]+%\) "
    r"\|Others=(?P<others>-?[\d.]+) \(-?[\d.]+%\) \|CurSamplesPerSec=(?P<current>[\d.]+) "
    r"\|AvgSamplesPerSec=(?P<average>[\d.]+)"
)


def check_coverage(family: str) -> None:
    engine = engine_of(with_peft(tiny_model(family)), settings(3))
    rows = engine.coverage()
    kinds = [row["kind"] for row in rows]
    assert kinds.count("layer") == 3
    assert kinds.count("model") == 1
    assert kinds.count("embedding") >= 1
    assert kinds.count("norm") >= 1
    assert kinds.count("head") == 1
    assert {row["container"] for row in rows} == {os.environ.get(CONTAINERS, "fused")}
    assert all(row["why"] for row in rows)
    names = dict(engine.module.named_modules())
    own = [type(names[row["module"]]).forward for row in rows]
    engine.eval()
    assert all("forward" in names[row["module"]].__dict__ for row in rows), "eval() switches every part"
    engine.train()
    assert [names[row["module"]].forward.__func__ for row in rows] == own


@pytest.mark.parametrize("family", slow_but(["gpt2", "bloom", "gemma3_text", "mixtral"], FAMILIES))
def test_coverage_lists_every_module(ranks, family):
    ranks.run(check_coverage, family)


def check_stats() -> None:
    engine = engine_of(tiny_model("llama", eos_token_id=None), settings(3))
    ids, mask = prompts(3, 5, padded=False, seed=dist.get_rank())
    engine.eval()
    engine.generate(ids, attention_mask=mask, max_new_tokens=7)
    engine.generate(ids, attention_mask=mask, max_new_tokens=4)
    stats = engine.stats()
    assert stats["tokens"] == 3 * 11
    model_bytes = sum(parameter.ds_numel for parameter in engine.module.parameters()) * 4
    assert stats["gathered_bytes"] == stats["snapshot_bytes"] == model_bytes
    if os.environ.get(CONTAINERS) == "native":  # keys and values of 3 layers, 3 rows, 2 heads of size 8, 128 tokens
        assert stats["kv_bytes"] == 2 * 3 * 3 * 2 * 8 * 128 * 4
    else:  # blocks of 32 tokens, one for each row and block 0; heads of values are padded to whole vectors
        assert stats["kv_bytes"] == 4 * 32 * 3 * 2 * (8 + max(8, cpu_library().lanes())) * 4
    activations = engine._runtime.fused.peak_activation_bytes()
    assert model_bytes < stats["peak_bytes"] <= 2 * model_bytes + stats["kv_bytes"] + activations
    assert stats["gather_s"] > 0 and stats["prefill_s"] > 0 and stats["decode_s"] > 0
    assert stats["train_s"] == stats["wait_s"] == stats["merge_s"] == 0
    inside = sum(stats[f"{name}_s"] for name in ("gather", "merge", "prefill", "decode", "wait", "release", "train"))
    assert inside <= stats["elapsed_s"]
    assert stats["tokens_per_s"] == pytest.approx(33 / (stats["prefill_s"] + stats["decode_s"]))
    engine.train()
    train_step(engine)
    assert engine.stats()["train_s"] > 0
    engine.eval()
    assert engine.stats()["tokens"] == engine.stats()["train_s"] == 0, "a new iteration begins at eval()"


def test_stats_report_bytes_seconds_and_tokens(ranks):
    ranks.run(check_stats)


def addresses_of_copies(engine) -> dict[int, list[int]]:
    """Of each parameter's copies in the snapshot."""
    parts = engine._runtime.snapshot.parts.items()
    return {id(parameter): [copy.data_ptr() for copy in copies.values()] for parameter, copies in parts}


def check_release(keep: bool) -> None:
    blocks = {"hybrid_engine": {"release_inference_cache": True}, "rollout": {"keep_snapshot": keep}}
    engine = engine_of(tiny_model("llama"), settings(3, **blocks))
    ids, mask = prompts(2, 5, padded=False)
    engine.eval()
    first = engine.generate(ids, attention_mask=mask, max_new_tokens=3)
    # the cache is freed after every call
    assert engine.stats()["kv_bytes"] == 0 and engine.stats()["snapshot_bytes"] > 0
    address = addresses_of_copies(engine)
    engine.train()
    assert engine.stats()["kv_bytes"] == 0
    assert (engine.stats()["snapshot_bytes"] > 0) == keep
    engine.mark_weights_changed()
    assert torch.equal(engine.generate(ids, attention_mask=mask, max_new_tokens=3), first)
    if keep:  # refreshed in place: a captured address stays valid
        assert addresses_of_copies(engine) == address


@pytest.mark.parametrize("keep", [True, False])
def test_memory_is_released_on_train(ranks, keep):
    ranks.run(check_release, keep)


def check_line() -> list[str]:
    """Three iterations whose batch sizes differ between ranks and iterations; returns what each eval() printed."""
    engine = engine_of(tiny_model("llama"), settings(3))
    printed = []
    for iteration in range(4):
        output = io.StringIO()
        with contextlib.redirect_stdout(output):
            engine.eval()
            engine.eval()  # idempotent: no second line
        printed.append(output.getvalue())
        for _ in range(iteration + 1):
            ids, mask = prompts(2 + dist.get_rank() + iteration, 5, padded=False)
            engine.generate(ids, attention_mask=mask, max_new_tokens=2)
        engine.train()
        train_step(engine)
    return printed


def check_counted_training() -> None:
    """A critic's training is the policy's in `stats()` and in the line; each iteration counts it once."""
    policy, critic = (engine_of(tiny_model("llama"), settings(2)) for _ in range(2))
    policy.count_training_of(critic)
    policy.eval()
    ids, mask = prompts(2, 5, padded=False)
    for _ in range(2):
        policy.generate(ids, attention_mask=mask, max_new_tokens=2)
        policy.train()
        train_step(policy)
        alone, before = policy.stats()["train_s"], critic.stats()["train_s"]
        train_step(critic)
        trained = critic.stats()["train_s"] - before
        assert trained > 0 and policy.stats()["train_s"] == pytest.approx(alone + trained, rel=1e-9)
        stats, output = policy.stats(), io.StringIO()
        with contextlib.redirect_stdout(output):
            policy.eval()
        if dist.get_rank() == 0:
            match = LINE.fullmatch(output.getvalue().strip())
            assert float(match["train"]) == pytest.approx(stats["train_s"], abs=0.006)
        assert policy.stats()["train_s"] == 0


def test_the_line_counts_a_critics_training(ranks):
    ranks.run(check_counted_training)


def test_iteration_line_matches_deepspeeds_format(ranks):
    lines, silent = ranks.run(check_line)
    assert not any(silent), "only rank 0 prints"
    assert lines[0] == ""
    for iteration, line in enumerate(lines[1:]):
        match = LINE.fullmatch(line.strip())
        assert match, line
        latency = float(match["latency"])
        sequences = (iteration + 1) * (2 * (2 + iteration) + 1)  # both ranks', of every generate in the iteration
        # Figures are rounded to hundredths.
        assert float(match["current"]) * latency == pytest.approx(sequences, rel=0.02 + 0.01 / latency)
        parts = sum(float(match[name]) for name in ("gather", "generate", "train", "others"))
        assert parts == pytest.approx(latency, abs=0.03)
        assert float(match["generate"]) > 0 or float(match["train"]) > 0
