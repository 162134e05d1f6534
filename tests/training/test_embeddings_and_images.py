"""Embeddings and images in `generate` match Hugging Face; `rollout` and `score` raise."""

import contextlib
import warnings

import pytest
import torch
import torch.distributed as dist
from transformers import AutoConfig, AutoModelForSeq2SeqLM, LlavaConfig, LlavaForConditionalGeneration

import hybrid
from tests.engines import CollectiveCount, engine_of, settings, storage_digest, train_step
from tests.marks import slow_but
from tests.tiny_models import END, SIZES, VOCABULARY, prompts, tiny_model, tiny_non_decoder, twin, with_larger_weights

SAMPLING = hybrid.SamplingParams(max_new_tokens=3)


def check_embeddings(family: str, blocks: dict) -> None:
    model = tiny_model(family)
    reference = twin(model)
    engine = engine_of(model, settings(3, **blocks))
    rank = dist.get_rank()
    ids, mask = prompts(2 + rank, 5 + rank, padded=True, seed=rank)
    embeddings = reference.get_input_embeddings()(ids).detach()
    request = {"attention_mask": mask, "max_new_tokens": 4 + 2 * rank, "pad_token_id": 0}
    cases = [
        {"inputs_embeds": embeddings},
        {"inputs_embeds": embeddings, "input_ids": ids},
        {"inputs_embeds": embeddings, "input_ids": ids[:, -2:]},
        {"inputs_embeds": embeddings, "repetition_penalty": 1.3},
        {"inputs_embeds": embeddings, "return_dict_in_generate": True, "output_logits": True},
    ]
    for case in cases:
        expected, actual = (module.generate(**case, **request) for module in (reference, engine))
        if "output_logits" in case:
            torch.testing.assert_close(actual.logits, expected.logits, atol=1e-5, rtol=1e-4)
            expected, actual = expected.sequences, actual.sequences
        assert torch.equal(actual, expected), case.keys()
        with_ids = case.get("input_ids", ids[:, :0]).shape[1]
        assert actual.shape[1] <= with_ids + request["max_new_tokens"]
    # Several samples per row: sampled tokens from embeddings equal those from ids.
    draw = {**request, "do_sample": True, "num_return_sequences": 2, "seed": 3}
    sampled = engine.generate(inputs_embeds=embeddings, **draw)
    assert torch.equal(sampled, engine.generate(ids, **draw)[:, ids.shape[1] :])
    with pytest.raises(ValueError, match=r"a prompt of 5[0-9]* tokens \+ 600 new tokens"):
        engine.generate(inputs_embeds=embeddings.repeat(1, 10, 1)[:, :50], max_new_tokens=600)
    train_step(engine)


@pytest.mark.parametrize(
    ("family", "blocks"),
    slow_but(
        [("gpt2", {}), ("llama", {"hybrid_engine": {"pin_parameters": False}})],
        [
            ("gpt2", {}),
            ("llama", {}),
            ("gpt2", {"rollout": {"containers": "native"}}),
            ("llama", {"hybrid_engine": {"pin_parameters": False}}),
        ],
    ),
)
def test_inputs_embeds_match_hugging_face(ranks, family, blocks):
    ranks.run(check_embeddings, family, blocks)


def test_inputs_embeds_in_an_inference_engine():
    model = tiny_model("llama").eval()
    reference = twin(model)
    engine = hybrid.init_inference(model, dtype=torch.float32, replace_with_kernel_inject=True)
    ids, mask = prompts(3, 6, padded=True)
    request = {"inputs_embeds": reference.get_input_embeddings()(ids), "attention_mask": mask, "max_new_tokens": 5}
    assert torch.equal(engine.generate(**request), reference.generate(**request))


def encoder_decoder(kind: str):
    """A tiny random encoder-decoder."""
    if kind == "t5":
        return tiny_non_decoder("t5")
    torch.manual_seed(0)
    special = {"bos_token_id": 1, "eos_token_id": END, "pad_token_id": 0, "decoder_start_token_id": 1}
    sizes = {"d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "max_position_embeddings": 64}
    heads = {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48}
    config = AutoConfig.for_model("bart", vocab_size=VOCABULARY, **special, **sizes, **heads, forced_eos_token_id=None)
    return with_larger_weights(AutoModelForSeq2SeqLM.from_config(config)).eval()


def check_encoder_decoder(kind: str) -> None:
    model = encoder_decoder(kind)
    reference = twin(model)
    engine = engine_of(model, settings(3))
    ids, mask = prompts(2, 6, padded=False, seed=dist.get_rank())
    before, training = storage_digest(engine), engine.module.training
    with CollectiveCount() as collectives:
        for call, refused in (
            ("rollout", lambda: engine.rollout(ids, mask, SAMPLING)),
            ("score", lambda: engine.score(ids, mask)),
        ):
            with pytest.raises(NotImplementedError, match=rf"{call}: {type(model).__name__} is an encoder-decoder"):
                refused()
    assert collectives.count == 0, "weights were gathered before the error"
    assert storage_digest(engine) == before
    assert engine.module.training == training
    request = {"attention_mask": mask.bool(), "max_new_tokens": 6, "do_sample": False}
    assert torch.equal(engine.generate(ids.int(), **request), reference.generate(ids, **request))
    embeds = {"inputs_embeds": torch.randn(2, 6, 32), "max_new_tokens": 5, "do_sample": False}
    assert torch.equal(engine.generate(**embeds), reference.generate(**embeds))


@pytest.mark.parametrize("kind", ["t5", "bart"])
def test_encoder_decoders_generate_and_raise_in_rollout_and_score(ranks, kind):
    ranks.run(check_encoder_decoder, kind)


IMAGE = VOCABULARY - 1  # the image's placeholder token


def llava():
    """A tiny random vision-language model: an image of 8 x 8 in patches of 4 is 4 tokens."""
    torch.manual_seed(0)
    vision = {"model_type": "clip_vision_model", "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
    vision |= {"num_attention_heads": 2, "image_size": 8, "patch_size": 4, "projection_dim": 16}
    special = {"bos_token_id": 1, "eos_token_id": END, "pad_token_id": 0}
    text = {"model_type": "llama", "vocab_size": VOCABULARY, **SIZES, **special}
    config = LlavaConfig(vision_config=vision, text_config=text, image_token_index=IMAGE, image_seq_length=4)
    return with_larger_weights(LlavaForConditionalGeneration(config))


def check_images(blocks: dict) -> None:
    """Prompts with images run natively, prompts of text fused."""
    model = llava()
    reference = twin(model)
    engine = engine_of(model, settings(3, **blocks))
    rank = dist.get_rank()
    ids, mask = prompts(2, 9, padded=False, seed=rank)
    ids[ids == IMAGE] = 5
    ids[:, 1:5] = IMAGE
    pixels = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(rank))
    request = {"attention_mask": mask, "pixel_values": pixels, "max_new_tokens": 5, "do_sample": False}
    expected = reference.generate(ids, **request)
    assert torch.equal(engine.generate(ids, **request), expected)
    swapped = reference.generate(ids, **{**request, "pixel_values": pixels.flip(0)})
    assert not torch.equal(swapped, expected), "the images change nothing: the test is vacuous"
    unexpected = pytest.raises(TypeError, match="unexpected keyword argument 'pixel_values'")
    with CollectiveCount() as collectives, unexpected:
        engine.rollout(ids, mask, SAMPLING, pixel_values=pixels)
    assert collectives.count == 0
    text = prompts(2, 6, padded=True, seed=rank)
    text[0][text[0] == IMAGE] = 5
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="the model runs in native containers")
        batch = engine.rollout(*text, hybrid.SamplingParams(max_new_tokens=4, temperature=0.0))
    expected_text = reference.generate(text[0], attention_mask=text[1], max_new_tokens=4, do_sample=False)
    assert torch.equal(batch.sequences[:, : expected_text.shape[1]], expected_text)
    assert engine.coverage()[0]["container"] == "fused"


@pytest.mark.parametrize(
    "blocks",
    slow_but(
        [{}],
        [{}, {"hybrid_engine": {"pin_parameters": False}}, {"hybrid_engine": {"inference_tp_size": 2}}],
    ),
    ids=["pinned", "streaming", "tensor parallel"],
)
def test_images_generate_and_raise_in_rollout_and_score(ranks, blocks):
    ranks.run(check_images, blocks)


def check_placeholders(blocks: dict, only_rank: int | None) -> None:
    """Ids that name an image without one raise in every call; ranks whose ids do not go on."""
    model = llava()
    reference = twin(model)
    engine = engine_of(model, settings(3, **blocks))
    rank = dist.get_rank()
    ids, mask = prompts(2, 9, padded=False, seed=rank)
    ids[ids == IMAGE] = 5
    blind = ids.clone()
    if only_rank in (None, rank):
        blind[1, 1:5] = IMAGE
    engine.eval()
    message = rf"row 1 has the token {IMAGE} \(config\.image_token_(index|id)\).*kind image, and none is given"
    for call in (
        lambda: engine.rollout(blind, mask, SAMPLING),
        lambda: engine.score(blind, mask),
        lambda: engine.generate(blind, attention_mask=mask, max_new_tokens=3),
        lambda: engine(blind, attention_mask=mask, use_cache=False),
        lambda: engine.module(input_ids=blind, attention_mask=mask),
    ):
        with pytest.raises(ValueError, match=message) if only_rank in (None, rank) else contextlib.nullcontext():
            call()
    hidden = blind * (blind != IMAGE)
    engine.score(hidden, mask * (blind != IMAGE))  # masked: the model does not see them
    if not blocks:
        pixels = torch.randn(2, 3, 8, 8)
        ids[:, 1:5] = IMAGE
        request = {"input_ids": ids, "attention_mask": mask, "pixel_values": pixels}
        with torch.no_grad():
            expected = reference(**request).logits
        torch.testing.assert_close(engine(**request).logits, expected, atol=1e-4, rtol=1e-4)
        with_image = engine.generate(**request, max_new_tokens=2)
        with pytest.raises(ValueError, match=message.replace("row 1", "row 0")):
            engine.score(with_image, torch.ones_like(with_image))


@pytest.mark.parametrize(
    ("blocks", "only_rank"),
    slow_but(
        [({}, None), ({"hybrid_engine": {"pin_parameters": False}}, 1)],
        [
            ({}, None),
            ({}, 0),
            ({"hybrid_engine": {"pin_parameters": False}}, 1),
            ({"hybrid_engine": {"inference_tp_size": 2}}, 0),
        ],
    ),
)
def test_ids_that_name_an_image_without_one_raise(ranks, blocks, only_rank):
    ranks.run(check_placeholders, blocks, only_rank)


def check_sampled_placeholder() -> None:
    """A placeholder that the model draws is a token like others: its sequence can be scored, and go on."""
    model = llava()
    reference = twin(model)
    engine = engine_of(model, settings(3))
    ids, mask = prompts(2, 6, padded=True)
    ids[ids == IMAGE] = 5
    params = hybrid.SamplingParams(max_new_tokens=6, min_new_tokens=6, temperature=50.0, seed=0)
    whole = engine.rollout(ids, mask, params, num_generations=128)
    rows = (whole.completion_ids == IMAGE).any(dim=1).nonzero().flatten().tolist()
    assert len(rows) > 1, "no row drew the placeholder"
    batch = whole.select_rows(rows)
    scores = engine.score(batch.sequences, batch.attention_mask)
    with torch.no_grad():
        logits = reference(batch.sequences, attention_mask=batch.attention_mask).logits
    logps = logits.log_softmax(-1)[:, :-1].gather(2, batch.sequences[:, 1:, None]).squeeze(2)
    torch.testing.assert_close(scores.per_token_logps[:, -6:], logps[:, -6:], atol=1e-4, rtol=1e-4)
    engine.rollout(batch.sequences, batch.attention_mask, SAMPLING)
    blind = batch.sequences.clone()
    blind[:, 5] = IMAGE
    with pytest.raises(ValueError, match="none is given"):
        engine.score(blind, batch.attention_mask)


def test_a_sampled_placeholder_can_be_scored(ranks):
    ranks.run(check_sampled_placeholder)
