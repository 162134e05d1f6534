"""Prompts with videos, sound and several kinds of inputs in `rollout`, `score` and `logps`, against Hugging Face's
`generate` and forward."""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

import hybrid
from hybrid.models.model_inputs import joined_inputs, split_inputs
from hybrid.models.placeholders import FRAMES_ARE_IMAGES, Placeholders
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
    "glm4v": ["v", "", "vv"],  # one forward cannot have images and videos (transformers 5.23)
    "qwen2_5_omni_thinker": ["a", "iia", "", "iaa", "v"],
    "qwen3_omni_moe_thinker": ["a", "iia", "", "iaa", "v"],
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
    undrawn = Placeholders(model.config).undrawn.tolist()
    assert not torch.isin(sampled.completion_ids, torch.tensor(undrawn)).any()
    for row, (prompt, of_row) in enumerate(zip(prompts, inputs, strict=True)):
        more = {"max_new_tokens": 5, "do_sample": False, "suppress_tokens": undrawn, **of_row}
        expected = reference.generate(prompt[None], attention_mask=torch.ones_like(prompt)[None], **more)
        actual = batch.completion_ids[row][batch.completion_mask[row].bool()]
        assert torch.equal(actual, expected[0, len(prompt) :]), f"row {row}"
    engine.train()
    logps = engine.logps(sampled, forward="model", temperature=0.7).per_token_logps.detach()
    width, changed = logps.shape[1], 0.0
    # Its audio encoder pads the sounds of a forward to the longest (transformers 5.23): 1e-4 over several rows.
    tolerance = 3e-4 if kind == "qwen3_omni_moe_thinker" else 1e-5
    for row in range(len(sampled.prompt_ids)):
        kept = sampled.completion_mask[row].bool()
        of_row = prompts[row // 3], sampled.completion_ids[row][kept]
        with torch.no_grad():
            expected = logps_of(reference, *of_row, inputs[row // 3], 0.7)
            for name in inputs[row // 3].keys() & {"pixel_values", "pixel_values_videos", "input_features"}:
                other = {**inputs[row // 3], name: -inputs[row // 3][name]}
                changed = max(changed, float((logps_of(reference, *of_row, other, 0.7) - expected).abs().max()))
        for actual in (sampled.old_per_token_logps[row], scores[row, -width:], logps[row]):
            torch.testing.assert_close(actual[kept], expected, atol=tolerance, rtol=0)
    assert changed > 1e-3, "other inputs change nothing: vacuous"


@pytest.mark.parametrize("kind", slow_but(["qwen3_vl", "glm4v", "qwen2_5_omni_thinker"], MEDIA))
def test_videos_and_sound_match_hugging_face(ranks, kind):
    ranks.run(check_media, kind)


def test_a_video_with_its_sound_inside_is_refused():
    """Their processor puts the sound's tokens behind the video's start; the positions then need a flag."""
    config = vision_model("qwen2_5_omni_thinker").config
    starts = [config.vision_start_token_id, config.audio_start_token_id]
    ids = torch.tensor([[5, 6, 7, 8], [5, *starts, 6]])
    for inputs in ({"video_grid_thw": torch.ones(1, 3)}, [{}, {"video_grid_thw": torch.ones(1, 3)}]):
        with pytest.raises(ValueError, match="row 1 has a video with its sound inside"):
            split_inputs(inputs, config, ids, torch.ones_like(ids))


def test_sounds_masks_belong_to_the_sounds():
    """`padding_mask` of VibeVoice-ASR and MOSS has a row for each sound, not for each image or row."""
    config = vision_model("qwen2_audio").config
    sound = config.audio_token_id
    ids = torch.tensor([[5, sound, sound, 6, sound, 7], [5, 6, 7, 8, 9, 5]])
    inputs = {"input_values": torch.arange(2.0)[:, None], "padding_mask": torch.ones(2, 1)}
    rows = split_inputs(inputs, config, ids, torch.ones_like(ids))
    assert [len(row.get(name, ())) for row in rows for name in inputs] == [2, 2, 0, 0]


def test_patches_of_rows_are_joined_where_a_processor_joins_them():
    """MiniCPM-V's processor returns the patches of all images side by side, and the size of each."""
    rows = [{"pixel_values": torch.full((1, 3, 2, width), width), "target_sizes": torch.ones(1, 2)} for width in (4, 6)]
    joined = joined_inputs([*rows, {}], torch.ones(3, 2))
    assert joined["pixel_values"].shape == (1, 3, 2, 10) and joined["target_sizes"].shape == (2, 2)


def test_tiles_of_a_row_stay_together():
    """Granite Docling's images have masks of tiles, [rows, tiles]."""
    prompts, _ = rows_with_media("qwen2_audio", ["", "", ""])
    of_batch, _ = splitter("qwen2_audio", prompts)
    inputs = {"pixel_values": torch.arange(3.0)[:, None, None, None, None].expand(3, 2, 3, 4, 4)}
    inputs["pixel_attention_mask"] = torch.ones(3, 2)
    for index, row in enumerate(of_batch.rows(inputs)):
        assert row["pixel_values"].unique().tolist() == [index] and row["pixel_attention_mask"].shape == (1, 2)


def test_a_video_of_image_tokens_needs_no_image():
    """GLM's frames have the token of images; a prompt with it and without an input is refused all the same."""
    for kind in FRAMES_ARE_IMAGES:
        placeholders = Placeholders(SimpleNamespace(model_type=kind, image_token_id=9, to_dict=dict))
        ids = torch.tensor([[5, 9, 9, 6]])
        placeholders.require_inputs("rollout", ids, given=["pixel_values_videos"])
        with pytest.raises(ValueError, match="of the kind image, and none is given"):
            placeholders.require_inputs("rollout", ids, given=["mm_token_type_ids"])
    placeholders = Placeholders(SimpleNamespace(model_type="qwen2_vl", image_token_id=9, to_dict=dict))
    with pytest.raises(ValueError, match="of the kind image, and none is given"):
        placeholders.require_inputs("rollout", ids, given=["pixel_values_videos"])


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
