"""Rollouts: logprobs equal the training forward's, masks come from lengths, and tokens depend only on seed, row id,
sample index, position and logits."""

import copy

import pytest
import torch
import torch.distributed as dist
from deepspeed.runtime.zero import GatheredParameters

import hybrid
from tests.engines import engine_of, settings, train_step
from tests.marks import slow_but
from tests.tiny_models import ADAPTERS, FAMILIES, prompts, tiny_model, twin, with_peft

SAMPLING = hybrid.SamplingParams(max_new_tokens=12, seed=11, temperature=0.8)


def check_logprobs(family: str, adapter: str) -> None:
    engine = engine_of(ADAPTERS[adapter](tiny_model(family)), settings(3))
    rank = dist.get_rank()
    ids, mask = prompts(3 + rank, 6, padded=True, seed=rank)
    batch = engine.rollout(ids, mask, SAMPLING, num_generations=2)
    width = batch.completion_ids.shape[1]
    scores = engine.score(batch.sequences, batch.attention_mask, temperature=0.8)
    raw = engine.score(batch.sequences, batch.attention_mask, rows_per_forward=3)
    # DeepSpeed's training forward, for which ZeRO-3 gathers layer by layer.
    engine.train()
    forward = hybrid.padded_forward(engine.module, engine)
    with torch.no_grad():
        logits = forward(batch.sequences, batch.attention_mask).logits[:, :-1] / 0.8
    train = hybrid.selective_log_softmax(logits, batch.sequences[:, 1:])[:, -width:] * batch.completion_mask
    # float32: attention over a cache sums in another order than over a whole sequence.
    for name, actual, expected in (
        ("old", batch.old_per_token_logps, train),
        ("scored", scores.per_token_logps[:, -width:] * batch.completion_mask, train),
        ("raw", batch.raw_per_token_logps, raw.per_token_logps[:, -width:] * batch.completion_mask),
    ):
        torch.testing.assert_close(
            actual, expected, atol=1e-5, rtol=1e-5, msg=lambda m, label=name: f"{family} {label}: {m}"
        )
    distribution = torch.log_softmax(logits.double(), -1)
    scored_mask = batch.attention_mask[:, 1:] * batch.attention_mask[:, :-1]  # nothing precedes the first token
    entropy = -(distribution.exp() * distribution).sum(-1) * scored_mask
    torch.testing.assert_close(scores.entropies.double(), entropy, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("family", slow_but(["llama", "opt", "bloom", "gemma3_text", "mixtral"], FAMILIES))
def test_rollout_logprobs_match_the_training_forward(ranks, family):
    ranks.run(check_logprobs, family, "none")


@pytest.mark.parametrize("adapter", slow_but(["peft"], ["peft", "chat"]))
def test_rollout_logprobs_with_an_adapter_match_the_training_forward(ranks, adapter):
    ranks.run(check_logprobs, "qwen3", adapter)


def check_masks() -> None:
    """The first end token belongs to the completion, even where it is also the padding token."""
    model = tiny_model("llama", eos_token_id=[2, 9], pad_token_id=2)
    engine = engine_of(model, settings(3))
    ids, mask = prompts(8, 5, padded=True, seed=dist.get_rank())
    batch = engine.rollout(ids, mask, hybrid.SamplingParams(40, temperature=1.5, seed=1, stop_token_ids=(17,)), 2)
    assert batch.completion_ids.shape[0] == len(batch.finish_reason) == 16
    assert torch.equal(batch.prompt_ids, ids.repeat_interleave(2, dim=0))
    lengths = []
    for tokens, kept, reason in zip(
        batch.completion_ids.tolist(), batch.completion_mask, batch.finish_reason, strict=True
    ):
        ends = [i for i, token in enumerate(tokens) if token in (2, 9, 17)]
        length = ends[0] + 1 if ends else len(tokens)
        lengths.append(length)
        assert kept.tolist() == [1] * length + [0] * (len(tokens) - length)
        assert reason == ("stop" if ends else "length")
    assert len(set(lengths)) > 3, "all completions have the same length: the test is vacuous"
    assert (batch.sampling_per_token_logps[batch.completion_mask == 0] == 0).all()
    assert (batch.sampling_per_token_logps[batch.completion_mask == 1] < 0).all()


def test_masks_come_from_lengths_not_from_padding_ids(ranks):
    ranks.run(check_masks)


def check_limits(blocks: dict) -> None:
    """A prompt's completions are those without limits, cut at its limit; ranks have other limits. Some end before."""
    config = settings(3, **blocks)
    engine, rank = engine_of(tiny_model("llama"), config), dist.get_rank()
    ids, mask = prompts(6, 5, padded=True, seed=rank)
    params = hybrid.SamplingParams(20, seed=3, stop_token_ids=tuple(range(40, 46)))
    limits = torch.tensor([1, 20, 7, 16, 17, 2]).roll(rank)
    whole = engine.rollout(ids, mask, params, num_generations=2)
    batch = engine.rollout(ids, mask, params, num_generations=2, max_new_tokens=limits)
    width = batch.completion_ids.shape[1]  # of the longest row
    kept = whole.completion_mask * (torch.arange(whole.completion_mask.shape[1]) < limits.repeat_interleave(2)[:, None])
    assert kept[:, width:].sum() == 0 and torch.equal(batch.completion_mask, kept[:, :width])
    assert torch.equal(batch.completion_ids, (whole.completion_ids * kept)[:, :width]), "other tokens, or no padding"
    for name in ("sampling_per_token_logps", "old_per_token_logps", "raw_per_token_logps"):
        expected = (getattr(whole, name) * kept)[:, :width]
        torch.testing.assert_close(getattr(batch, name), expected, atol=1e-5, rtol=1e-5)
    was_cut = kept.sum(dim=1) < whole.completion_mask.sum(dim=1)
    expected = ["length" if cut else reason for cut, reason in zip(was_cut.tolist(), whole.finish_reason, strict=True)]
    assert batch.finish_reason == expected and set(expected) == {"stop", "length"} and 2 < was_cut.sum() < 12


LIMITED = {
    "fused": {},
    "waiting": {"rollout": {"max_num_seqs": 3}},
    "native": {"rollout": {"containers": "native"}},
    "tensor parallel": {"hybrid_engine": {"enabled": True, "inference_tp_size": 2}},
}


@pytest.mark.parametrize("case", LIMITED)
def test_limits_of_prompts_cut_their_completions(ranks, case):
    ranks.run(check_limits, LIMITED[case])


def check_sampling_keys() -> dict:
    engine = engine_of(tiny_model("llama"), settings(3))
    rank = dist.get_rank()
    ids, mask = prompts(4, 5, padded=False)
    sampling = hybrid.SamplingParams(max_new_tokens=8, min_new_tokens=8, seed=5)
    rows = torch.tensor([40, 41, 42, 43])

    def draw(order, seed=5, **more):
        order = torch.tensor(order)
        params = hybrid.SamplingParams(max_new_tokens=8, min_new_tokens=8, seed=seed)
        return engine.rollout(ids[order], mask[order], params, row_ids=rows[order], **more).completion_ids

    tokens_of_all = draw([0, 1, 2, 3])
    assert torch.equal(draw([3, 1]), tokens_of_all[[3, 1]]), "a token depends on the batch around it"
    assert torch.equal(draw([2], num_generations=3)[:1], tokens_of_all[[2]]), "a sample depends on how many there are"
    assert not torch.equal(draw([0, 1, 2, 3], seed=6), tokens_of_all)
    samples = draw([0], num_generations=4)
    assert len({str(row.tolist()) for row in samples}) == 4, "samples share their sampling keys"

    torch.manual_seed(3)
    state = torch.get_rng_state()
    unseeded = [hybrid.SamplingParams(max_new_tokens=8, min_new_tokens=8)] * 2
    first, second = (engine.rollout(ids, mask, params).completion_ids for params in unseeded)
    assert not torch.equal(first, second)
    assert torch.equal(torch.get_rng_state(), state), "torch's generator was drawn from"
    torch.manual_seed(4)
    assert not torch.equal(engine.rollout(ids, mask, unseeded[0]).completion_ids, first)
    torch.manual_seed(3)
    for expected in (first, second):
        assert torch.equal(engine.rollout(ids, mask, unseeded[0]).completion_ids, expected)
    request = {"do_sample": True, "max_new_tokens": 8, "min_new_tokens": 8, "top_k": 0}
    sampled = engine.generate(ids, attention_mask=mask, seed=5, **request)[:, 5:]
    params = hybrid.SamplingParams(max_new_tokens=8, min_new_tokens=8, seed=5)
    assert torch.equal(sampled, engine.rollout(ids, mask, params).completion_ids), (
        "generate and rollout sample different tokens"
    )
    own_rows = engine.rollout(ids, mask, sampling).completion_ids
    return {"whole": tokens_of_all.tolist(), "rows": draw([rank * 2, rank * 2 + 1]).tolist(), "own": own_rows.tolist()}


def test_sampled_tokens_depend_only_on_seed_row_sample_and_position(ranks):
    first, second = ranks.run(check_sampling_keys)
    assert first["whole"] == second["whole"], "the same rows differ between ranks"
    assert first["rows"] + second["rows"] == first["whole"], "rows depend on how they are split over ranks"
    assert first["own"] != second["own"], "ranks share their sampling keys"


def check_distribution() -> None:
    """Sampled tokens follow the model's probabilities."""
    model = tiny_model("llama")
    reference = twin(model)
    engine = engine_of(model, settings(3))
    ids = torch.tensor([[5, 6, 7]])
    sampling = hybrid.SamplingParams(max_new_tokens=1, temperature=2.0, seed=dist.get_rank(), top_k=12)
    tokens = engine.rollout(ids, torch.ones_like(ids), sampling, num_generations=4000).completion_ids[:, 0]
    with torch.no_grad():
        logits = reference(ids).logits[0, -1] / 2.0
    logits[logits < logits.topk(12).values[-1]] = -torch.inf
    expected = torch.softmax(logits, 0)
    actual = torch.bincount(tokens, minlength=97) / 4000
    assert (actual[expected == 0] == 0).all()
    assert (actual - expected).abs().max() < 0.04  # five standard deviations of a share of 1/2 in 4000


def test_samples_follow_the_models_distribution(ranks):
    ranks.run(check_distribution)


def check_empty_ranks() -> None:
    """A rank without prompts takes part, pinned or streaming, and gives an empty batch."""
    for pinned in (True, False):
        engine = engine_of(tiny_model("llama"), settings(3, hybrid_engine={"pin_parameters": pinned}))
        rows = 0 if dist.get_rank() == 0 else 3
        ids, mask = prompts(3, 5, padded=False)
        ids, mask = ids[:rows], mask[:rows]
        with engine.inference():
            batch = engine.rollout(ids, mask, hybrid.SamplingParams(max_new_tokens=7, min_new_tokens=7, seed=0), 2)
            scores = engine.score(batch.sequences, batch.attention_mask)
        assert batch.completion_ids.shape[0] == len(batch.finish_reason) == rows * 2
        assert scores.per_token_logps.shape[0] == rows * 2
        assert batch.sequences.shape[0] == batch.attention_mask.shape[0] == rows * 2
        train_step(engine)


def test_a_rank_without_prompts_does_not_hang(ranks):
    ranks.run(check_empty_ranks, timeout_s=60)


def check_reference(kind: str) -> None:
    """adapters=False, and PEFT's own disable_adapter, are the base model."""
    model = ADAPTERS[kind](tiny_model("llama"))
    base, adapted = tiny_model("llama").eval(), twin(model)
    engine = engine_of(model, settings(3))
    ids, mask = prompts(3, 6, padded=True, seed=dist.get_rank())
    request = {"attention_mask": mask, "max_new_tokens": 6}
    version = engine.weight_version
    for _ in range(2):
        assert torch.equal(engine.generate(ids, **request), adapted.generate(ids, **request))
        assert torch.equal(engine.generate(ids, adapters=False, **request), base.generate(ids, **request))
    assert engine.weight_version == version, "adapters=False made a new weight version"
    if kind == "peft":
        with model.disable_adapter():
            assert engine.weight_version > version
            assert torch.equal(engine.generate(ids, **request), base.generate(ids, **request))
        assert torch.equal(engine.generate(ids, **request), adapted.generate(ids, **request))
    with engine.inference():
        logits = hybrid.padded_forward(base)(ids, mask).logits[:, :-1].detach()
        expected = hybrid.selective_log_softmax(logits, ids[:, 1:]) * mask[:, 1:] * mask[:, :-1]
        actual = engine.score(ids, mask, adapters=False).per_token_logps
        torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-5)
        with engine.inference(adapters=False):  # windows nest
            actual = engine.score(ids, mask).per_token_logps
        torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-5)
        assert torch.equal(engine.generate(ids, **request), adapted.generate(ids, **request))


@pytest.mark.parametrize("kind", slow_but(["peft"], ["peft", "chat"]))
def test_adapters_false_is_the_base_model(ranks, kind):
    ranks.run(check_reference, kind)


def check_switching_adapters() -> None:
    import peft

    model = with_peft(tiny_model("llama"), modules_to_save=["lm_head"])
    model.add_adapter("other", peft.LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False))
    reference = copy.deepcopy(model).eval()
    engine = engine_of(model, settings(3))
    ids, mask = prompts(3, 6, padded=True, seed=dist.get_rank())
    versions, outputs = [], []
    for name in ("default", "other", "default"):
        model.set_adapter(name)
        reference.set_adapter(name)
        versions.append(engine.weight_version)
        outputs.append(engine.generate(ids, attention_mask=mask, max_new_tokens=8))
        assert torch.equal(outputs[-1], reference.generate(ids, attention_mask=mask, max_new_tokens=8)), name
    assert versions == sorted(set(versions)), "changing the active adapter made no new version"
    assert not torch.equal(outputs[0], outputs[1])


def test_the_active_adapter_generates(ranks):
    ranks.run(check_switching_adapters)


def check_inside_a_users_gather() -> None:
    """A rollout works inside a caller's `GatheredParameters`, which TRL opens."""
    model = with_peft(tiny_model("llama"))
    reference = twin(model)
    engine = engine_of(model, settings(3))
    ids, mask = prompts(2, 5, padded=True, seed=dist.get_rank())
    request = {"attention_mask": mask, "max_new_tokens": 6}
    with GatheredParameters(list(model.parameters())):
        assert torch.equal(engine.generate(ids, **request), reference.generate(ids, **request))
    train_step(engine)
    engine.generate(ids, **request)


def test_rollout_inside_a_users_gathered_parameters(ranks):
    ranks.run(check_inside_a_users_gather)
