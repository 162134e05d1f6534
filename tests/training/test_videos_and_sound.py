"""Prompts with videos, sound and several kinds of inputs in `rollout`, `score` and `logps`, against Hugging Face's
`generate` and forward."""

import pytest
import torch
import torch.distributed as dist

import hybrid
from hybrid.models.model_inputs import joined_inputs
from hybrid.models.placeholders import Placeholders
from tests.engines import engine_of, settings
from tests.marks import slow_but
from tests.tiny_models import twin
from tests.training.test_images import flat, logps_of, padded_left, splitter
from tests.vision_models import rows_with_media, vision_model

# By type: the inputs of each prompt.
MEDIA = {
    "qwen2_vl": ["v", "iv", "", "ii", "vv"],
    "qwen2_5_vl": ["v", "iv", "", "ii", "vv"],
    "qwen3_vl": ["v", "iv", "", "ii", "vv"],
    "qwen3_5": ["v", "iv", "", "ii", "vv"],
    "glm4v": ["v", "", "vv"],  # its forward takes no images beside videos (transformers 5.23)
    "qwen2_5_omni_thinker": ["a", "iia", "", "iaa", "v"],
    "qwen2_audio": ["a", "aa", "", "a", "aa"],
}


def check_media(kind: str) -> None:
    model = vision_model(kind)
    reference, engine = twin(model), engine_of(model, settings(3, rollout={"max_num_seqs": 3}))
    prompts, inputs = rows_with_media(kind, MEDIA[kind], seed=dist.get_rank())
    ids, mask = padded_left(prompts)
    greedy = hybrid.SamplingParams(5, temperature=0)
    with engine.inference():
        batch = engine.rollout(ids, mask, greedy, model_inputs=inputs)
        whole = joined_inputs([flat(row) for row in inputs], mask)
        same = engine.rollout(ids, mask, greedy, model_inputs=whole)
        sampling = hybrid.SamplingParams(6, temperature=0.7, seed=5)
        sampled = engine.rollout(ids, mask, sampling, num_generations=3, model_inputs=inputs)
        assert engine.stats()["fallback_reason"] == ""
        of_batch = sampled.sequences, sampled.attention_mask
        scores = engine.score(*of_batch, temperature=0.7, model_inputs=sampled.model_inputs).per_token_logps
    assert torch.equal(batch.completion_ids, same.completion_ids), "a dict of the batch is split wrongly"
    placeholders = sorted(Placeholders(model.config).settings)
    for row, (prompt, of_row) in enumerate(zip(prompts, inputs, strict=True)):
        more = {"max_new_tokens": 5, "do_sample": False, "suppress_tokens": placeholders, **of_row}
        expected = reference.generate(prompt[None], attention_mask=torch.ones_like(prompt)[None], **more)
        actual = batch.completion_ids[row][batch.completion_mask[row].bool()]
        assert torch.equal(actual, expected[0, len(prompt) :]), f"row {row}"
    engine.train()
    logps = engine.logps(sampled, forward="model", temperature=0.7).per_token_logps.detach()
    width, changed = logps.shape[1], 0.0
    for row in range(len(sampled.prompt_ids)):
        kept = sampled.completion_mask[row].bool()
        of_row = prompts[row // 3], sampled.completion_ids[row][kept]
        with torch.no_grad():
            expected = logps_of(reference, *of_row, inputs[row // 3], 0.7)
            for name in inputs[row // 3].keys() & {"pixel_values", "pixel_values_videos", "input_features"}:
                other = {**inputs[row // 3], name: -inputs[row // 3][name]}
                changed = max(changed, float((logps_of(reference, *of_row, other, 0.7) - expected).abs().max()))
        for actual in (sampled.old_per_token_logps[row], scores[row, -width:], logps[row]):
            torch.testing.assert_close(actual[kept], expected, atol=1e-4, rtol=0)
    assert changed > 1e-3, "other inputs change nothing: vacuous"


@pytest.mark.parametrize("kind", slow_but(["qwen3_vl", "glm4v", "qwen2_5_omni_thinker"], MEDIA))
def test_videos_and_sound_match_hugging_face(ranks, kind):
    ranks.run(check_media, kind)


@pytest.mark.parametrize("kind", MEDIA)
def test_a_batch_of_several_kinds_is_split_into_rows(kind):
    """Rows with two images and one sound, and with one image and two sounds, too: as many of each in the batch."""
    prompts, inputs = rows_with_media(kind, MEDIA[kind], seed=3)
    inputs = [flat(row) for row in inputs]
    of_batch, mask = splitter(kind, prompts)
    rows = of_batch.rows(joined_inputs(inputs, mask))
    for row, expected in zip(rows, inputs, strict=True):
        assert row.keys() == expected.keys() | (row.keys() & {"mm_token_type_ids"})
        assert all(torch.equal(row[name], expected[name]) for name in expected)
