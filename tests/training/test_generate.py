"""Greedy tokens equal Hugging Face's on the unpartitioned model in every ZeRO stage."""

import pytest
import torch
import torch.distributed as dist
from deepspeed.runtime.zero import GatheredParameters
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.engines import LARGE, Recorder, engine_of, settings, train_step
from tests.marks import slow_but
from tests.tiny_models import ADAPTERS, FAMILIES, ChatLoRA, prompts, tiny_model, twin, with_peft
from tests.weights.test_lora import SETTINGS, shake

STAGES = [(0, 0), (1, 0), (2, 0), (3, 0), (3, LARGE)]  # ZeRO stage, persistence threshold


def check_family(family: str, adapter: str, stages: list[tuple[int, int]]) -> None:
    rank = dist.get_rank()
    for stage, threshold in stages:
        model = ADAPTERS[adapter](tiny_model(family))
        reference = twin(model)
        engine = engine_of(model, settings(stage, threshold))
        engine.eval()
        for padded in (False, True):
            # Ranks differ in rows, prompt length and number of new tokens.
            ids, mask = prompts(rows=3 + rank, length=7 + rank, padded=padded, seed=rank)
            request = {"attention_mask": mask, "max_new_tokens": 8 + 4 * rank, "do_sample": False}
            expected = reference.generate(ids, **request)
            where = f"{family}, ZeRO {stage}, threshold {threshold}, {adapter}, padded {padded}, rank {rank}"
            assert torch.equal(engine.generate(ids, **request), expected), where
            full_mask = torch.ones_like(expected)
            full_mask[:, : ids.shape[1]] = mask
            with torch.no_grad():
                logits = reference(expected, attention_mask=full_mask).logits
            actual = engine(expected, attention_mask=full_mask).logits
            # The same operations in the same order; merging an adapter sums in another one, hence 1e-3 of logits
            # that span tens.
            torch.testing.assert_close(
                actual[full_mask.bool()], logits[full_mask.bool()], atol=1e-3, rtol=1e-4, msg=where
            )
        engine.destroy()


# GPT-2 has no nn.Linear for DeepSpeed-Chat's LoRA to adapt.
# Its LoRA is the same in every family: most of these cases are slow tests.
CASES = [(family, adapter) for family in FAMILIES for adapter in ADAPTERS if (family, adapter) != ("gpt2", "chat")]
QUICK = [(family, "peft") for family in ("llama", "gpt2", "gpt_neox", "bloom", "gemma3_text", "mixtral")]
QUICK += [("opt", "chat"), ("gptj", "none"), ("phi3", "none"), ("qwen3", "none")]


@pytest.mark.parametrize(("family", "adapter"), slow_but(QUICK, CASES))
def test_greedy_equals_hugging_face(ranks, family, adapter):
    ranks.run(check_family, family, adapter, STAGES if family == "llama" else [(3, 0)])


@pytest.mark.slow
@pytest.mark.parametrize("family", [family for family in FAMILIES if family != "llama"])
def test_greedy_equals_hugging_face_at_every_stage(ranks, family):
    ranks.run(check_family, family, "none", STAGES)
    ranks.run(check_family, family, "peft", STAGES)


@pytest.mark.parametrize("family", [family for family in FAMILIES if family != "gpt2"])
def test_chat_lora_changes_the_logits(family):
    model = ADAPTERS["chat"](tiny_model(family))
    ids, _ = prompts(2, 7, padded=False)
    assert sum(isinstance(module, ChatLoRA) for module in model.modules()) >= 3
    assert (model(ids).logits - tiny_model(family)(ids).logits).abs().max() > 1e-2


def check_lora_settings() -> None:
    """Every way to configure a LoRA, on partitioned weights, before and after a step."""
    for name, changes in SETTINGS.items():
        model = shake(with_peft(tiny_model("opt" if name == "lora bias" else "llama"), **changes))
        reference = twin(model)
        engine = engine_of(model, settings(3))
        ids, mask = prompts(2, 6, padded=True, seed=dist.get_rank())
        request = {"attention_mask": mask, "max_new_tokens": 6, "do_sample": False}
        first = engine.generate(ids, **request)
        assert torch.equal(first, reference.generate(ids, **request)), name
        train_step(engine)
        own = list(model.parameters())
        with torch.no_grad(), GatheredParameters(own):
            for copy, parameter in zip(reference.parameters(), own, strict=True):
                copy.copy_(parameter)
        assert torch.equal(engine.generate(ids, **request), reference.generate(ids, **request)), f"{name}, trained"


@pytest.mark.slow
def test_every_lora_setting_under_zero_3(ranks):
    ranks.run(check_lora_settings)


def check_story(path: str) -> str:
    tokenizer = AutoTokenizer.from_pretrained(path)
    engine = engine_of(AutoModelForCausalLM.from_pretrained(path), settings(3))
    ids = torch.tensor([[1]])
    tokens = engine.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=80, do_sample=False)
    return tokenizer.decode(tokens[0], skip_special_tokens=True)


def test_stories260k_generates_the_published_story(ranks, stories260k):
    published = (
        "Once upon a time, there was a little girl named Lily. She loved to play outside in the park. One day, she saw "
        "a big, red ball. She wanted to play with it, but it was too high."
    )
    for story in ranks.run(check_story, str(stories260k)):
        assert story.startswith(published)


def check_contract() -> None:
    model = tiny_model("llama")
    reference = twin(model)
    engine = engine_of(model, settings(3))
    rank = dist.get_rank()
    ids, mask = prompts(2, 6, padded=True, seed=rank)
    requests = [
        {"inputs": ids, "attention_mask": mask, "max_new_tokens": 6},
        {"input_ids": ids, "attention_mask": mask, "max_length": 11},
        {"inputs": ids, "attention_mask": mask, "max_new_tokens": 9, "min_new_tokens": 5, "eos_token_id": [2, 7, 11]},
        {"inputs": ids, "attention_mask": mask, "max_new_tokens": 9, "repetition_penalty": 1.7},
        {"inputs": ids, "attention_mask": mask, "max_new_tokens": 6, "num_return_sequences": 1, "use_cache": False},
        {"inputs": ids, "attention_mask": mask, "max_new_tokens": 9, "no_repeat_ngram_size": 2, "bad_words_ids": [[5]]},
    ]
    for request in requests:
        assert torch.equal(engine.generate(**request), reference.generate(**request)), request
    request = {
        "attention_mask": mask,
        "max_new_tokens": 5,
        "return_dict_in_generate": True,
        "output_scores": True,
        "output_logits": True,
        "output_attentions": True,
        "output_hidden_states": True,
    }
    for implementation in (engine.module, reference):
        implementation.set_attn_implementation("eager")
    actual, expected = engine.generate(ids, **request), reference.generate(ids, **request)
    assert type(actual) is type(expected)
    assert actual.keys() == expected.keys()
    torch.testing.assert_close(actual.scores, expected.scores, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(actual.logits, expected.logits, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(actual.attentions, expected.attentions, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(actual.hidden_states, expected.hidden_states, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(actual.past_key_values.layers[0].keys, expected.past_key_values.layers[0].keys)
    # A sequence continues from its returned cache.
    continued = [
        implementation.generate(
            output.sequences,
            past_key_values=output.past_key_values,
            max_new_tokens=3,
            use_cache=True,
            attention_mask=torch.cat([mask, torch.ones(2, 5, dtype=torch.long)], dim=1),
        )
        for implementation, output in ((engine, actual), (reference, expected))
    ]
    assert torch.equal(*continued)
    # A returned cache belongs to the caller: the next call does not write into it.
    kept = actual.past_key_values.layers[0].keys.clone()
    engine.generate(ids.flip(1), attention_mask=torch.ones_like(mask), max_new_tokens=5)
    assert torch.equal(actual.past_key_values.layers[0].keys, kept)


def test_generate_arguments_and_outputs_match_hugging_face(ranks):
    ranks.run(check_contract)


def check_streamer_and_stop_strings(path: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(path)
    model = AutoModelForCausalLM.from_pretrained(path)
    reference = twin(model)
    engine = engine_of(model, settings(3))
    ids = torch.tensor([[1]])
    actual, expected = Recorder(), Recorder()
    engine.generate(ids, max_new_tokens=6, streamer=actual)
    reference.generate(ids, max_new_tokens=6, streamer=expected)
    assert actual.pieces == expected.pieces
    assert actual.ended
    stop = {"max_new_tokens": 60, "stop_strings": ["park"], "tokenizer": tokenizer}
    stopped = engine.generate(ids, **stop)
    assert torch.equal(stopped, reference.generate(ids, **stop))
    assert tokenizer.decode(stopped[0]).endswith("park")


def test_streamer_and_stop_strings(ranks, stories260k):
    ranks.run(check_streamer_and_stop_strings, str(stories260k))


def check_checkpointing_keeps_the_cache() -> None:
    model = tiny_model("llama")
    reference = twin(model)
    model.gradient_checkpointing_enable()
    model.config.use_cache = model.generation_config.use_cache = False  # which trainers set together with checkpointing
    engine = engine_of(model, settings(3))
    ids, mask = prompts(2, 6, padded=True)
    request = {"attention_mask": mask, "max_new_tokens": 6}
    assert torch.equal(engine.generate(ids, **request), reference.generate(ids, **request))
    assert engine.stats()["kv_bytes"] > 0
    assert all(layer.gradient_checkpointing for layer in model.model.layers)
    assert model.config.use_cache is False


def test_gradient_checkpointing_keeps_the_kv_cache_on(ranks):
    ranks.run(check_checkpointing_keeps_the_cache)


def check_bf16(adapter: str) -> None:
    for stage in (0, 1, 2, 3):
        model = ADAPTERS[adapter](tiny_model("qwen2"))
        reference = twin(model)
        for parameter in reference.parameters():  # buffers, such as rotary frequencies, stay as DeepSpeed leaves them
            parameter.data = parameter.data.bfloat16()
        if adapter == "peft":
            reference = reference.merge_and_unload()
        engine = engine_of(model, settings(stage, dtype=torch.bfloat16))
        ids, mask = prompts(3, 7, padded=True, seed=dist.get_rank())
        with engine.inference():
            actual = engine(ids, attention_mask=mask).logits
        assert actual.dtype == torch.bfloat16
        with torch.no_grad():
            expected = reference(ids, attention_mask=mask).logits
        # Without an adapter the same bits; merged, PEFT rounds its delta before it adds, we round once.
        tolerance = 0 if adapter == "none" else 0.05 * expected.abs().max().item()
        torch.testing.assert_close(actual[mask.bool()], expected[mask.bool()], atol=tolerance, rtol=0)
        assert engine.generate(ids, attention_mask=mask, max_new_tokens=5).shape == (3, 12)


@pytest.mark.parametrize("adapter", slow_but(["peft"], ["none", "peft"]))
def test_bfloat16(ranks, adapter):
    ranks.run(check_bf16, adapter)


def check_encoder_decoder() -> None:
    from transformers import T5Config, T5ForConditionalGeneration

    torch.manual_seed(0)
    sizes = {"vocab_size": 97, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}
    model = T5ForConditionalGeneration(T5Config(**sizes, decoder_start_token_id=0, eos_token_id=2, pad_token_id=0))
    reference = twin(model)
    engine = engine_of(model, settings(3))
    ids, mask = prompts(2, 6, padded=False, seed=dist.get_rank())
    request = {"attention_mask": mask, "max_new_tokens": 6 + dist.get_rank(), "do_sample": False}
    assert torch.equal(engine.generate(ids, **request), reference.generate(ids, **request))


def test_an_encoder_decoder_runs_natively(ranks):
    ranks.run(check_encoder_decoder)


def check_streaming() -> None:
    """pin_parameters=false: layers are gathered while they run; a rank that is done runs dummy steps for the others."""
    for adapter in ("none", "peft", "chat"):
        model = ADAPTERS[adapter](tiny_model("llama"))
        reference = twin(model)
        engine = engine_of(model, settings(3, hybrid_engine={"pin_parameters": False}))
        rank = dist.get_rank()
        ids, mask = prompts(2 + rank, 6 + rank, padded=True, seed=rank)
        request = {"attention_mask": mask, "max_new_tokens": 4 + 5 * rank, "do_sample": False}
        assert torch.equal(engine.generate(ids, **request), reference.generate(ids, **request))
        assert engine.stats()["snapshot_bytes"] == 0


@pytest.mark.slow
def test_streaming_ranks_with_different_lengths_match_hugging_face(ranks):
    ranks.run(check_streaming)
