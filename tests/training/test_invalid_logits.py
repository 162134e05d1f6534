"""NaN and infinity in a model's logits: the row ends, the others are done, then the call raises; the engine goes on."""

import deepspeed
import pytest
import torch
import torch.distributed as dist
from transformers import LogitsProcessor, LogitsProcessorList

import hybrid
from tests.engines import engine_of, settings, train_step
from tests.execution.test_faults import MODES, QUICK
from tests.marks import slow_but
from tests.tiny_models import SIZES, prompts, tiny_model

MESSAGE = (
    "probability tensor contains either `inf`, `nan` or element < 0: row {row} at step {step}, under weight version"
)


def set_embedding(engine: hybrid.HybridEngine, token: int, row: torch.Tensor) -> None:
    """Write a token's embedding, on all ranks."""
    weight = engine.module.get_input_embeddings().weight
    with deepspeed.zero.GatheredParameters([weight], modifier_rank=0), torch.no_grad():
        weight[token] = row
    engine.mark_weights_changed()


def unused_token(*batches: torch.Tensor) -> int:
    """A token that no rank has in these."""
    used = [None] * dist.get_world_size()
    dist.all_gather_object(used, {token for ids in batches for token in ids.flatten().tolist()})
    return min(set(range(3, 97)).difference(*used))


def check_rollouts(mode: str) -> None:
    """Rank 0's row 1 has no softmax from its first token on; where ranks decode together, all raise."""
    family, stage, blocks = MODES[mode]
    model = tiny_model(family, sizes=None if family == "llama" else SIZES, tie_word_embeddings=False)
    rank, shares, embeddings = dist.get_rank(), mode.startswith("tp"), model.get_input_embeddings().weight.clone()
    engine = engine_of(model, settings(stage, **{"rollout": {"containers": "fused"}, **blocks}))
    ids, mask = prompts(3, 6, padded=True, seed=rank)
    sampling = hybrid.SamplingParams(max_new_tokens=6 + 2 * rank, temperature=0, repetition_penalty=1.1)
    sampled = {"attention_mask": mask, "max_new_tokens": 4, "do_sample": True, "seed": 4}
    token = unused_token(engine.rollout(ids, mask, sampling).completion_ids, engine.generate(ids, **sampled), ids)
    if rank == 0:
        ids[1, 4] = token
    expected, whole = engine.rollout(ids, mask, sampling), engine.generate(ids, **sampled)
    own = embeddings[token].detach()
    version = engine.weight_version
    set_embedding(engine, token, torch.full_like(own, torch.nan))
    seen: list[hybrid.RolloutBatch] = []
    for _ in range(2):
        seen.clear()
        for call in (
            lambda: engine.rollout(ids, mask, sampling, on_rows=seen.append),
            lambda: seen.extend(engine.rollout_iter(ids, mask, sampling)),
            lambda: engine.generate(ids, **sampled),
        ):
            if rank == 0 or shares:
                with pytest.raises(RuntimeError) as raised:
                    call()
                text = MESSAGE.format(row=1, step=0) if rank == 0 else "rows of another rank"
                assert text in str(raised.value), raised.value
                assert f"weight version {version + 2}" in str(raised.value)
            else:
                call()
        own_modules = "own modules" in mode
        for batch in seen if not own_modules else ():  # the other rows, with the tokens that they always have
            index = batch.row_index[0]
            assert rank or index != 1
            assert torch.equal(batch.completion_ids[0], expected.completion_ids[index][: batch.completion_ids.shape[1]])
        assert own_modules or {int(batch.row_index[0]) for batch in seen} == ({0, 2} if rank == 0 else {0, 1, 2})
        scores = engine.score(ids, mask).per_token_logps
        assert scores.isnan().any(dim=1).tolist() == [False, rank == 0, False]
    set_embedding(engine, token, own)
    assert torch.equal(engine.rollout(ids, mask, sampling).completion_ids, expected.completion_ids)
    assert torch.equal(engine.generate(ids, **sampled), whole)
    engine.train()
    train_step(engine)


@pytest.mark.parametrize("mode", slow_but(QUICK, MODES))
def test_a_row_with_nan_logits_ends_and_the_call_raises_once_the_others_are_done(ranks, mode):
    ranks.run(check_rollouts, mode)


class Broken(LogitsProcessor):
    """Scores in `dtype`; of row 1 NaN from the second step on if `fails`."""

    def __init__(self, dtype: torch.dtype, fails: bool, rowwise: bool):
        self.dtype, self.fails, self.rowwise = dtype, fails, rowwise

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        scores = scores.to(self.dtype, copy=True)
        if self.fails and input_ids.shape[1] > IDS.shape[1]:
            scores[(input_ids[:, : IDS.shape[1]] == IDS[1]).all(dim=1)] = torch.nan
        return scores


IDS = prompts(2, 6, padded=False)[0]


def check_steps(blocks: dict) -> None:
    """A token that is drawn has an embedding of NaN: the next token of its row cannot be drawn."""
    engine = engine_of(tiny_model("llama", tie_word_embeddings=False), settings(3, rollout=blocks))
    engine.module.generation_config.eos_token_id = engine.module.config.eos_token_id = None
    sampling = hybrid.SamplingParams(max_new_tokens=40, temperature=0)
    ids, mask = IDS[:1].repeat(1, 3), torch.ones(1, 18, dtype=torch.int64)
    completion = engine.rollout(ids, mask, sampling).completion_ids[0].tolist()
    at, token = next(
        (at, token) for at, token in enumerate(completion) if at > 2 and token not in (*completion[:at], *ids[0])
    )
    set_embedding(engine, token, torch.tensor(torch.nan))
    with pytest.raises(RuntimeError, match=f"row 0 at step {at + 1}, under"):
        engine.rollout(ids, mask, sampling)
    with pytest.raises(RuntimeError, match=f"row 0 at step {at + 1}, under"):
        engine.generate(ids, max_new_tokens=40, do_sample=False)
    set_embedding(engine, token, torch.tensor(0.1))
    for rowwise in (True, False):
        with pytest.raises(RuntimeError, match="row 1 at step 1, under"):
            engine.generate(
                IDS, max_new_tokens=5, logits_processor=LogitsProcessorList([Broken(torch.float32, True, rowwise)])
            )
        for dtype in (torch.float16, torch.bfloat16):
            processor = LogitsProcessorList([Broken(dtype, False, rowwise)])
            first = engine.generate(IDS, max_new_tokens=1, do_sample=False, logits_processor=processor)[:, -1]
            scores = engine(IDS).logits[:, -1].to(dtype).float() if engine.eval() is None else None
            assert (scores.gather(1, first[:, None])[:, 0] == scores.amax(dim=1)).all()
    engine.train()
    train_step(engine)


BLOCKS = {"kernels": {}, "speculation": {"speculation": {"max_draft": 4}}, "own modules": {"containers": "native"}}


@pytest.mark.parametrize("name", BLOCKS)
def test_the_error_names_the_step_of_the_first_token_that_cannot_be_drawn(ranks, name):
    ranks.run(check_steps, BLOCKS[name])
