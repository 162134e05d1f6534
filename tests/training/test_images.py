"""Prompts with images in `rollout`, `score` and `logps`, against Hugging Face's `generate` and forward."""

import warnings
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from deepspeed.utils import safe_get_full_grad

import hybrid
from hybrid.decoders.batch import BLOCK_SIZE
from hybrid.generation import input_prefill
from hybrid.kernels.torch_ops import rotated
from hybrid.models.model_inputs import InputSplitter, joined_inputs
from hybrid.models.placeholders import Placeholders
from tests.engines import engine_of, settings
from tests.marks import slow_but
from tests.tiny_models import tiny_model, twin, with_peft
from tests.vision_models import IMAGE, WITH_IMAGES, rows_with_images, vision_model

COUNTS = [1, 2, 0, 1]  # images of each prompt


def padded_left(prompts: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Prompts as a batch, and its mask."""
    width = max(map(len, prompts))
    ids = torch.stack([torch.cat([prompt.new_zeros(width - len(prompt)), prompt]) for prompt in prompts])
    return ids, torch.stack([torch.arange(width) >= width - len(prompt) for prompt in prompts]).long()


def logps_of(model, prompt: torch.Tensor, completion: torch.Tensor, inputs: dict, temperature: float) -> torch.Tensor:
    """Logprobs of a completion by a forward of its row alone."""
    ids = torch.cat([prompt, completion])[None]
    more = {name: value for name, value in inputs.items() if not name.endswith("token_type_ids")}
    for name in inputs.keys() - more.keys():
        more[name] = torch.cat([inputs[name], torch.zeros(1, len(completion), dtype=torch.long)], dim=1)
    logits = model(input_ids=ids, attention_mask=torch.ones_like(ids), **more).logits[0, len(prompt) - 1 : -1]
    return (logits / temperature).log_softmax(-1).gather(1, completion[:, None])[:, 0]


def check_images(kind: str, blocks: dict) -> None:
    model = vision_model(kind)
    reference = twin(model)
    engine = engine_of(model, settings(3, rollout={"max_num_seqs": 3}, **blocks))
    prompts, inputs = rows_with_images(kind, COUNTS, seed=dist.get_rank(), words=14)
    ids, mask = padded_left(prompts)
    assert len(prompts[-1]) > BLOCK_SIZE + 8, "no prompt is longer than a block and a window"
    assert len({len(prompt) for prompt in prompts}) > 1, "no prompt is padded"

    with engine.inference():
        greedy = engine.rollout(ids, mask, hybrid.SamplingParams(5, temperature=0), model_inputs=inputs)
        batch = joined_inputs([flat(row) for row in inputs], mask)
        if kind == "smolvlm":  # its processor gives rows without an image one of zeros, which the model leaves out
            batch = {
                name: torch.cat([value[:2], torch.zeros_like(value[:1]), value[2:]]) for name, value in batch.items()
            }
        same = engine.rollout(ids, mask, hybrid.SamplingParams(5, temperature=0), model_inputs=batch)
        sampling = hybrid.SamplingParams(6, temperature=0.7, seed=5)
        sampled = engine.rollout(ids, mask, sampling, num_generations=4, model_inputs=inputs)
        runs_fused = not engine.stats()["fallback_reason"]
        scores = engine.score(
            sampled.sequences, sampled.attention_mask, temperature=0.7, model_inputs=sampled.model_inputs
        )
    assert runs_fused == (not blocks), engine.stats()["fallback_reason"]
    placeholders = sorted(Placeholders(model.config).settings)
    assert not torch.isin(sampled.completion_ids, torch.tensor(placeholders)).any()
    assert torch.equal(greedy.completion_ids, same.completion_ids), "a dict of the batch is split wrongly"
    for row, (prompt, of_row) in enumerate(zip(prompts, inputs, strict=True)):
        more = {"max_new_tokens": 5, "do_sample": False, "suppress_tokens": placeholders, **of_row}
        expected = reference.generate(prompt[None], attention_mask=torch.ones_like(prompt)[None], **more)
        actual = greedy.completion_ids[row][greedy.completion_mask[row].bool()]
        assert torch.equal(actual, expected[0, len(prompt) :]), f"row {row}"
    width, widest = sampled.completion_ids.shape[1], 0.0
    for row in range(len(sampled.prompt_ids)):
        kept = sampled.completion_mask[row].bool()
        of_row = prompts[row // 4], sampled.completion_ids[row][kept], inputs[row // 4]
        with torch.no_grad():
            expected = logps_of(reference, *of_row, 0.7)
        for actual in (sampled.old_per_token_logps[row], scores.per_token_logps[row, -width:]):
            widest = max(widest, float((actual[kept] - expected).abs().max()))
    assert widest < 1e-4, widest
    assert len(sampled.completion_ids.unique(dim=0)) > len(prompts), "samples of a prompt are equal: vacuous"
    drawn, other = sampled.completion_ids[0], {**inputs[0], "pixel_values": -inputs[0]["pixel_values"]}
    with torch.no_grad():
        seen = [logps_of(reference, prompts[0], drawn, of_row, 0.7) for of_row in (inputs[0], other)]
    assert (seen[0] - seen[1]).abs().max() > 1e-3, "another image changes nothing: vacuous"
    train(engine, reference, sampled, prompts, inputs)


def flat(inputs: dict) -> dict:
    """A row's inputs with token types of one dimension."""
    return {name: value.flatten() if name.endswith("token_type_ids") else value for name, value in inputs.items()}


def train(engine, reference, batch: hybrid.RolloutBatch, prompts: list, inputs: list) -> None:
    """`logps` and its gradients are those of a forward of each row."""
    rows = [0, 5, 8]
    batch = batch.select_rows(rows)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        logps = engine.logps(batch, temperature=0.7).per_token_logps
    assert any("rows with model_inputs, such as images, are not packed" in str(each.message) for each in caught)
    engine.backward(logps.sum())
    total = 0.0
    for index, row in enumerate(rows):
        kept = batch.completion_mask[index].bool()
        completion = batch.completion_ids[index][kept]
        expected = logps_of(reference, prompts[row // 4], completion, inputs[row // 4], 0.7)
        torch.testing.assert_close(logps[index][kept].detach(), expected.detach(), atol=1e-4, rtol=1e-4)
        total = total + expected.sum()
    total.backward()
    compared = 0
    for (name, parameter), of_reference in zip(engine.module.named_parameters(), reference.parameters(), strict=True):
        gradient = safe_get_full_grad(parameter)
        expected = of_reference.grad if of_reference.grad is not None else torch.zeros_like(of_reference)
        dist.all_reduce(expected)
        expected /= dist.get_world_size()
        gradient = torch.zeros_like(expected) if gradient is None else gradient
        assert (gradient - expected).abs().max() <= 1e-4 * max(1.0, float(expected.abs().max())), name
        compared += "vision" in name or "visual" in name
    assert compared, "no parameter of the vision tower was compared"
    with pytest.raises(NotImplementedError, match="forward='exact' is not available: rows with model_inputs"):
        engine.logps(batch, forward="exact")


@pytest.mark.parametrize(
    ("kind", "blocks"),
    slow_but(
        [("llava", {}), ("qwen2_5_vl", {}), ("gemma3", {}), ("qwen3_vl", {}), ("qwen3_5", {})],
        [*((kind, {}) for kind in WITH_IMAGES), ("qwen3_vl", {"hybrid_engine": {"pin_parameters": False}})],
    ),
)
def test_images_match_hugging_face(ranks, kind, blocks):
    ranks.run(check_images, kind, blocks)


def check_shared_images() -> None:
    """The vision tower computes the image of each prompt once for all generations, another image gives other tokens,
    and a batch keeps each row's inputs."""
    model = vision_model("llava")
    engine = engine_of(model, settings(2))
    prompts, inputs = rows_with_images("llava", [1, 1], seed=1)
    ids, mask = padded_left(prompts)
    sampling = hybrid.SamplingParams(6, temperature=1.0, seed=3, repetition_penalty=1.2)
    tower, seen = type(model.model.vision_tower), []
    forward = tower.forward

    def counted(self, pixel_values, **kwargs):
        seen.append(len(pixel_values))
        return forward(self, pixel_values, **kwargs)

    with engine.inference():
        engine.rollout(ids, mask, sampling, model_inputs=inputs)  # with the self-check
        with patch.object(tower, "forward", counted):
            batch = engine.rollout(ids, mask, sampling, num_generations=5, model_inputs=inputs)
        assert sum(seen) == 2, seen
        other = engine.rollout(ids, mask, sampling, num_generations=5, model_inputs=inputs[::-1])
        assert not torch.equal(batch.raw_per_token_logps[:, 0], other.raw_per_token_logps[:, 0]), (
            "images change nothing"
        )
        # One question about two images: its tokens are equal, and are not one prompt.
        twice = engine.rollout(ids[[0, 0]], mask[[0, 0]], sampling, num_generations=2, model_inputs=inputs)
        scores = engine.score(twice.sequences, twice.attention_mask, model_inputs=twice.model_inputs).per_token_logps
        scores = scores[:, -twice.completion_ids.shape[1] :] * twice.completion_mask
        torch.testing.assert_close(twice.raw_per_token_logps, scores, atol=1e-4, rtol=0)
        assert not torch.equal(twice.raw_per_token_logps[0, 0], twice.raw_per_token_logps[2, 0]), "one image for both"
        text = engine.rollout(ids[:, -3:], mask[:, -3:], sampling)
        joined = hybrid.RolloutBatch.cat([text, batch.select_rows([7, 2])])
        assert joined.model_inputs == [{}, {}, inputs[1], inputs[0]] and text.model_inputs == []
        alone = engine.score(joined.sequences, joined.attention_mask, model_inputs=joined.model_inputs)
        whole = engine.score(batch.sequences, batch.attention_mask, model_inputs=batch.model_inputs)
        width = batch.completion_ids.shape[1]
        torch.testing.assert_close(alone.per_token_logps[2, -width:], whole.per_token_logps[7, -width:])
        few = engine.rollout(ids[:0], mask[:0], sampling, model_inputs=[])
        assert len(few.prompt_ids) == 0

        refused = {
            (ValueError, rf"rollout: row 1 has the token {IMAGE} .* none is given"): {"model_inputs": [inputs[0], {}]},
            (ValueError, "a list of 1 given for 2 rows"): {"model_inputs": inputs[:1]},
            (TypeError, "model_inputs: Tensor given; it must be a dict"): {"model_inputs": torch.zeros(2)},
            (TypeError, "pixel_values is a list"): {"model_inputs": {"pixel_values": [1, 2]}},
            (ValueError, "input_ids given; give it as"): {"model_inputs": {"input_ids": ids}},
            (NotImplementedError, "model_inputs with stop_after is not"): {
                "model_inputs": inputs,
                "stop_after": hybrid.StopAfter(rows=1),
            },
        }
        for (error, message), arguments in refused.items():
            with pytest.raises(error, match=message):
                engine.rollout(ids, mask, sampling, **arguments)
        with pytest.raises(ValueError, match=f"score: row 0 has the token {IMAGE}"):
            engine.score(ids, mask)
    page = (Path(__file__).parents[2] / "docs/jobs/images.md").read_text()
    code = page.split("```python\n")[1].split("```")[0].replace("SamplingParams(256)", "SamplingParams(5)")
    of_batch = {"input_ids": ids, "attention_mask": mask, **joined_inputs(inputs, mask)}
    processor = SimpleNamespace(apply_chat_template=lambda conversations, **kwargs: of_batch)
    names = {"processor": processor, "conversations": [], "engine": engine, "hybrid": hybrid}
    exec(code, names)
    of_page, width = names["batch"], names["batch"].completion_ids.shape[1]
    torch.testing.assert_close(names["logps"], names["reference"].per_token_logps[:, -width:] * of_page.completion_mask)
    assert len(of_page.prompt_ids) == 16 and names["logps"].requires_grad
    with pytest.raises(ValueError, match=f"logps: row 0 has the token {IMAGE}"):
        engine.logps(ids, mask)


def test_an_image_is_computed_once_for_all_generations(ranks):
    ranks.run(check_shared_images)


def check_refusal() -> None:
    """Where a decoder would go on from keys at other positions, the self-check refuses, and the model's own layers
    run."""
    model = vision_model("qwen2_5_vl")
    reference, engine = twin(model), engine_of(model, settings(2))
    prompts, inputs = rows_with_images("qwen2_5_vl", [1, 0, 2], seed=4)
    ids, mask = padded_left(prompts)
    with patch.object(input_prefill, "moved", lambda keys, *args: keys), engine.inference():
        batch = engine.rollout(ids, mask, hybrid.SamplingParams(4, temperature=0), model_inputs=inputs)
    assert "self-check: a decode step behind an image differs" in engine.stats()["fallback_reason"]
    tokens = sorted(Placeholders(model.config).settings)
    for row, (prompt, of_row) in enumerate(zip(prompts, inputs, strict=True)):
        more = {"max_new_tokens": 4, "do_sample": False, "suppress_tokens": tokens, **of_row}
        expected = reference.generate(prompt[None], attention_mask=torch.ones_like(prompt)[None], **more)
        assert torch.equal(batch.completion_ids[row][batch.completion_mask[row].bool()], expected[0, len(prompt) :])


def test_a_decoder_that_would_not_see_the_image_is_refused(ranks):
    ranks.run(check_refusal)


def check_generate(kind: str) -> None:
    """`generate` as TRL calls it: images by their own names, each prompt several times."""
    model = vision_model(kind)
    reference, engine = twin(model), engine_of(model, settings(3))
    prompts, inputs = rows_with_images(kind, [1, 2, 1], seed=dist.get_rank(), words=9)
    ids, mask = padded_left(prompts)
    more = joined_inputs([flat(row) for row in inputs], mask)
    repeated = [index for index in range(3) for _ in range(2)]
    many, many_mask = ids[repeated], mask[repeated]
    of_many = joined_inputs([flat(inputs[index]) for index in repeated], many_mask)
    forward, calls = input_prefill.InputPrefill.prefill, []
    counted = lambda self, *args: calls.append(1) or forward(self, *args)  # noqa: E731
    greedy = {"max_new_tokens": 6, "pad_token_id": 0}
    with engine.inference(), patch.object(input_prefill.InputPrefill, "prefill", counted):
        engine.generate(ids, attention_mask=mask, **more, **greedy, do_sample=False)  # with the self-check
        calls.clear()
        actual = engine.generate(many, attention_mask=many_mask, **of_many, **greedy, do_sample=False)
        assert len(calls) == 3 and engine.stats()["fallback_reason"] == "", "each prompt is computed once, and fused"
        several = engine.generate(ids, attention_mask=mask, **more, **greedy, do_sample=True, num_return_sequences=2)
        assert len(calls) == 6 and engine.stats()["fallback_reason"] == "" and len(several) == 6
        expected = reference.generate(ids, attention_mask=mask, **more, **greedy, do_sample=False)
        assert torch.equal(actual, expected[repeated])
        calls.clear()
        streamed = []
        streamer = SimpleNamespace(put=streamed.append, end=lambda: None)
        alone = {**inputs[0]}
        one = engine.generate(prompts[0][None], **alone, **greedy, do_sample=False, streamer=streamer)
        own = reference.generate(prompts[0][None], **alone, **greedy, do_sample=False)
        assert torch.equal(one, own) and streamed and not calls, "a streamer sees every step of the model's own layers"
    assert "streamer" in engine.stats()["fallback_reason"]


@pytest.mark.parametrize("kind", slow_but(["qwen3_vl"], WITH_IMAGES))
def test_generate_with_images_decodes_fused(ranks, kind):
    ranks.run(check_generate, kind)


def check_adapters(lora: str) -> None:
    """The model's own forward before the decoder has the adapters that the decoder has."""
    model = with_peft(vision_model("qwen2_5_vl"), target_modules="all-linear", exclude_modules=".*visual.*")
    engine = engine_of(model, settings(3, rollout={"lora": lora}))
    prompts, inputs = rows_with_images("qwen2_5_vl", [1, 2, 0], seed=dist.get_rank())
    ids, mask = padded_left(prompts)
    with engine.inference():
        for adapters in (True, False):
            sampling = hybrid.SamplingParams(5, temperature=1.0, seed=2)
            batch = engine.rollout(ids, mask, sampling, num_generations=2, model_inputs=inputs, adapters=adapters)
            assert "rollout" not in engine.stats()["fallback_reason"], engine.stats()["fallback_reason"]
            scores, other = (
                engine.score(batch.sequences, batch.attention_mask, model_inputs=batch.model_inputs, adapters=each)
                .per_token_logps[:, -batch.completion_ids.shape[1] :]
                .mul(batch.completion_mask)
                for each in (adapters, not adapters)
            )
            torch.testing.assert_close(batch.raw_per_token_logps, scores, atol=1e-4, rtol=0)
            assert (scores - other).abs().max() > 1e-2, "the adapters change nothing: vacuous"


@pytest.mark.parametrize("lora", ["merged", "unmerged"])
def test_images_with_adapters(ranks, lora):
    ranks.run(check_adapters, lora)


def check_unchecked() -> None:
    """A prompt that ends with its image cannot be checked: it runs in the model's own layers, until one can be."""
    engine = engine_of(vision_model("llava"), settings(2))
    prompts, inputs = rows_with_images("llava", [1], seed=1)
    ending = prompts[0][: int((prompts[0] == IMAGE).nonzero()[-1]) + 1][None]
    with engine.inference():
        for ids, runs_fused in ((ending, False), (prompts[0][None], True), (ending, True)):
            mask, sampling = torch.ones_like(ids), hybrid.SamplingParams(4, temperature=0)
            before = engine.stats()["fallback_reason"]
            engine.rollout(ids, mask, sampling, model_inputs=inputs)
            reason = engine.stats()["fallback_reason"]
            assert (reason == before) if runs_fused else "no prompt has two tokens of text behind" in reason


def test_a_prompt_that_cannot_be_checked_runs_in_the_models_own_layers(ranks):
    ranks.run(check_unchecked)


def check_token_types() -> None:
    """Token types of a text model are part of its forward, and stay there."""
    model = tiny_model("gpt2")
    reference, engine = twin(model), engine_of(model, settings(2))
    ids, types = torch.tensor([[5, 6, 7, 8]]), torch.tensor([[0, 9, 9, 0]])
    mask, more = torch.ones_like(ids), {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    with torch.no_grad():
        logits = [reference(ids, token_type_ids=each).logits for each in (types, 0 * types)]
    assert (logits[0] - logits[1]).abs().max() > 1e-3
    with engine.inference():
        actual = engine.generate(ids, attention_mask=mask, token_type_ids=types, **more)
        assert "token_type_ids" in engine.stats()["fallback_reason"]
    assert torch.equal(actual, reference.generate(ids, attention_mask=mask, token_type_ids=types, **more))


def test_token_types_of_a_text_model_are_not_dropped(ranks):
    ranks.run(check_token_types)


def check_prefixes() -> None:
    """A text that begins as a prompt with an image, whose keys were moved, has the bits that it has alone."""
    fresh, engine = (engine_of(vision_model("qwen2_5_vl"), settings(3)) for _ in range(2))
    (prompt,), (inputs,) = rows_with_images("qwen2_5_vl", [1], seed=3)
    generator = torch.Generator().manual_seed(5)
    begin, end = torch.randint(5, 90, (2, BLOCK_SIZE + 3), generator=generator)
    text, image = torch.cat([begin, end])[None], torch.cat([begin, prompt])[None]
    inputs = inputs | {"mm_token_type_ids": (image == IMAGE).long()}
    sampling = hybrid.SamplingParams(6, temperature=1.0, seed=1)
    alone = fresh.rollout(text, torch.ones_like(text), sampling)
    with engine.inference():
        seen = engine.rollout(image, torch.ones_like(image), sampling, num_generations=2, model_inputs=[inputs])
        after = engine.rollout(text, torch.ones_like(text), sampling)
    assert engine.stats()["fallback_reason"] == "" and len(seen.prompt_ids) == 2
    assert torch.equal(after.completion_ids, alone.completion_ids)
    assert torch.equal(after.raw_per_token_logps, alone.raw_per_token_logps)


def test_a_text_does_not_continue_the_blocks_of_an_image(ranks):
    ranks.run(check_prefixes)


def check_bfloat16(kind: str) -> None:
    """In bfloat16 rollouts and scores differ by rounding, and an image of another call is not taken for this one's."""
    model = vision_model(kind)
    engine = engine_of(model, settings(3, dtype=torch.bfloat16))
    prompts, inputs = rows_with_images(kind, [1, 1], seed=2, words=20)
    ids, mask = padded_left(prompts)
    sampling, first = hybrid.SamplingParams(6, temperature=1.0, seed=1), []
    with engine.inference():
        for image in (inputs[0], inputs[0] | {"pixel_values": -inputs[0]["pixel_values"]}):
            batch = engine.rollout(ids[:1], mask[:1], sampling, num_generations=3, model_inputs=[image])
            assert "rollout" not in engine.stats()["fallback_reason"]
            scores = engine.score(batch.sequences, batch.attention_mask, model_inputs=batch.model_inputs)
            scores = scores.per_token_logps[:, -batch.completion_ids.shape[1] :] * batch.completion_mask
            assert (batch.raw_per_token_logps - scores).abs().mean() < 0.05
            first.append(batch.raw_per_token_logps)
            assert engine._generator.block_pool.num_used == 0, "blocks are lost"
    assert not torch.equal(*first), "the prefix cache took the first image for the second"


@pytest.mark.parametrize("kind", slow_but(["qwen2_5_vl"], ["qwen2_5_vl", "gemma3", "qwen3_vl", "qwen3_5"]))
def test_images_in_bfloat16(ranks, kind):
    ranks.run(check_bfloat16, kind)


@pytest.mark.parametrize("interleaved", [False, True])
def test_moved_keys_are_keys_at_later_positions(interleaved):
    """Whatever factor the tables have, on a part of the head, and to earlier positions too."""
    frequencies = 10000.0 ** -(torch.arange(4) / 4)

    def table(positions, dtype):
        angles = positions[:, None].double() * frequencies
        return (1.3 * angles.cos()).to(dtype), (1.3 * angles.sin()).to(dtype)

    keys, positions = torch.randn(5, 2, 12, generator=torch.Generator().manual_seed(0)), torch.arange(5)
    before = rotated(keys, *table(positions, torch.float32), interleaved)
    for by in (7, -3):
        expected = rotated(keys, *table(positions + by, torch.float32), interleaved)
        actual = input_prefill.moved(before, by, table, interleaved)
        torch.testing.assert_close(actual, expected, atol=1e-6, rtol=1e-5)


def splitter(kind: str, prompts: list[torch.Tensor]) -> tuple[InputSplitter, torch.Tensor]:
    ids, mask = padded_left(prompts)
    return InputSplitter(vision_model(kind).config, ids, mask), mask


@pytest.mark.parametrize("kind", WITH_IMAGES)
@pytest.mark.parametrize("counts", [[1, 1, 1], [2, 0, 1], [0, 3, 0]])
def test_a_processors_batch_is_split_into_rows(kind, counts):
    """Images of several sizes too, and rows without any."""
    if kind == "smolvlm":
        counts = [1] * len(counts)  # a row of its processor has equally many images, with padding
    prompts, inputs = rows_with_images(kind, counts, seed=3)
    inputs = [flat(row) for row in inputs]
    of_batch, mask = splitter(kind, prompts)
    rows = of_batch.rows(joined_inputs(inputs, mask))
    for row, expected in zip(rows, inputs, strict=True):
        assert row.keys() == expected.keys()
        assert all(torch.equal(row[name], expected[name]) for name in row)


def test_images_that_do_not_fit_the_prompts_are_refused():
    prompts, inputs = rows_with_images("qwen3_vl", [1, 1])
    of_batch, mask = splitter("qwen3_vl", prompts)
    batch = joined_inputs([flat(row) for row in inputs], mask)
    with pytest.raises(ValueError, match=r"image_grid_thw .* does not fit the rows' placeholder tokens, \[4, 4\]"):
        of_batch.rows({**batch, "image_grid_thw": batch["image_grid_thw"] * torch.tensor([1, 1, 2])})
    prompts, inputs = rows_with_images("llava", [2, 1])
    of_batch, mask = splitter("llava", prompts)
    with pytest.raises(ValueError, match=r"pixel_values of shape \(5, 3, 8, 8\) does not fit .* give a list"):
        of_batch.rows({"pixel_values": torch.zeros(5, 3, 8, 8)})


def test_images_of_several_sizes_are_padded_as_processors_pad_them():
    rows = [{"pixel_values": torch.ones(1, 3, 4, 8)}, {}, {"pixel_values": torch.ones(2, 3, 8, 4)}]
    joined = joined_inputs(rows, torch.ones(3, 2))["pixel_values"]
    assert joined.shape == (3, 3, 8, 8) and joined[0, :, :4].all() and not joined[0, :, 4:].any()
    assert joined[1:, ..., :4].all() and not joined[1:, ..., 4:].any()


def check_texts_with_empty_inputs() -> None:
    """Model inputs without any input are as none, in every call; rows of text in a list with images are text."""
    engine = engine_of(vision_model("llava"), settings(2))
    ids, mask = padded_left(rows_with_images("llava", [0, 0], seed=1)[0])
    sampling = hybrid.SamplingParams(4, seed=2)
    batch = engine.rollout(ids, mask, sampling)
    for empty in ([], {}, None):
        again = engine.rollout(ids, mask, sampling, model_inputs=empty)
        assert torch.equal(again.completion_ids, batch.completion_ids) and engine.stats()["fallback_reason"] == ""
        whole = again.sequences, again.attention_mask
        scores = engine.score(*whole, model_inputs=empty).per_token_logps
        engine.train()
        logps = engine.logps(*whole, again.completion_mask, model_inputs=empty).per_token_logps
        width = logps.shape[1]
        torch.testing.assert_close(logps.detach(), scores[:, -width:] * again.completion_mask, atol=1e-4, rtol=0)
    natively = engine.rollout(ids, mask, hybrid.SamplingParams(4, temperature=0), model_inputs=[{}, {}])
    fused = engine.rollout(ids, mask, hybrid.SamplingParams(4, temperature=0))
    assert torch.equal(natively.completion_ids, fused.completion_ids)


def test_empty_model_inputs_are_none(ranks):
    ranks.run(check_texts_with_empty_inputs)
