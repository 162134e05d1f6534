"""The scheduler over a model's own forward: rows leave, join and wait, whatever the model's caches allow, and their
tokens are those of Hugging Face's `generate()` for each row alone."""

import contextlib
import warnings
from dataclasses import replace

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

import hybrid
from hybrid.environments.stepping import EnvironmentLoop
from hybrid.generation.block_pool import BLOCK_SIZE, BlockPool
from hybrid.generation.completions import Completions
from hybrid.generation.hf_cache import KVCache
from hybrid.generation.native_check import check_rows
from hybrid.generation.native_scheduler import NativeModel, NativeScheduler, RowTraits
from hybrid.generation.request import Request, padded_left, stop_conditions
from hybrid.rollout import EnvironmentLimits, Observation, StopAfter
from hybrid.sampling.params import SamplingParams
from hybrid.sampling.sampler import stream_keys
from tests.marks import slow_but
from tests.tiny_models import END, SIZES, VOCABULARY, tiny_model, with_larger_weights

DELTA_NET = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
MAMBA_2 = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8}
MIXED = ["mamba", "attention", "mamba", "attention"]
BART = {"d_model": 32, "decoder_layers": 2, "decoder_attention_heads": 4, "decoder_ffn_dim": 48}
# Model type: its sizes, and whether its rows may be selected and joined, and be padded.
MODELS = {
    "gpt_oss": ({"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 6}, True, True),
    "qwen3_5_text": (DELTA_NET, True, True),
    "lfm2": ({}, True, True),
    "granitemoehybrid": ({**MAMBA_2, "layer_types": MIXED, "num_local_experts": 0}, True, True),
    "bamba": ({**MAMBA_2, "attn_layer_indices": [1, 3]}, True, True),
    "falcon_h1": ({**MAMBA_2, "mamba_d_ssm": 64, "mamba_n_groups": 1}, True, True),
    "mamba": ({"state_size": 4}, True, True),
    "mamba2": ({"num_heads": 4, "head_dim": 16, "state_size": 8, "n_groups": 1, "chunk_size": 16}, True, True),
    "openai-gpt": ({"n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 96}, False, True),
    "recurrent_gemma": ({"lru_width": 32, "attention_window_size": 16}, False, False),
    "rwkv": ({"attention_hidden_size": 32}, False, False),
    "bart": ({**BART, "is_encoder_decoder": False}, True, False),
    "xglm": ({"d_model": 32, "num_layers": 3, "attention_heads": 4, "ffn_dim": 48}, True, True),
}
QUICK = ["gpt_oss", "qwen3_5_text", "granitemoehybrid", "mamba", "openai-gpt", "recurrent_gemma", "bart"]
ENDS = [END, *range(60, 70)]  # so many that rows end at different lengths
GREEDY = SamplingParams(max_new_tokens=12, temperature=0.0)
SAMPLED = SamplingParams(max_new_tokens=12, temperature=0.9, top_k=20)


def model_of(name: str) -> nn.Module:
    """A random model of MODELS in eval mode."""
    torch.manual_seed(0)
    special = {"vocab_size": VOCABULARY, "bos_token_id": 1, "eos_token_id": END, "pad_token_id": 0}
    config = AutoConfig.for_model(name, **{**SIZES, "num_hidden_layers": 4, **special, **MODELS[name][0]})
    model = with_larger_weights(AutoModelForCausalLM.from_config(config)).eval()
    model.generation_config.forced_eos_token_id = None  # of BART: SamplingParams alone decide
    return model


def prompts_of(*lengths: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(3, VOCABULARY, (length,), generator=generator) for length in lengths]


def request_of(prompts: list[torch.Tensor], params: SamplingParams, generations: int, **changes) -> Request:
    """A request for `generations` completions of each prompt, int64 [n] each."""
    count, width = len(prompts) * generations, max(map(len, prompts))
    row, sample = torch.arange(count) // generations, torch.arange(count) % generations
    request = Request(
        prompt_ids=torch.stack([padded_left(prompt, width) for prompt in prompts])[row],
        prompt_lengths=[len(prompts[index]) for index in row.tolist()],
        sampling_keys=stream_keys(0, row, sample),
        groups=row,
        max_new_tokens=params.max_new_tokens,
        limits=torch.full((count,), params.max_new_tokens),
        stop_token_ids=torch.tensor(ENDS),
        pad_token_id=0,
        sampling_params=params,
    )
    return replace(request, **changes)


class Counting(NativeModel):
    """Records the rows of each forward, and the most rows in caches."""

    def __init__(self, model: nn.Module, traits: RowTraits):
        config = SamplingParams(40, temperature=0.0, stop_token_ids=tuple(ENDS)).generation_config(model, 1)
        super().__init__(model, config, KVCache(16), torch.device("cpu"), traits)
        self.prefilled, self.extended = [], []

    def prefill(self, prompts, model_inputs=()):
        self.prefilled.append([len(prompt) for prompt in prompts])
        return super().prefill(prompts, model_inputs)

    def extend(self, rows, tokens):
        self.extended.append(tuple(tokens.shape))
        return super().extend(rows, tokens)


@torch.no_grad()
def run(model: nn.Module, request: Request, max_num_seqs: int = 100, traits: RowTraits | None = None, **more):
    """The completions of a request, and the model that counted its forwards."""
    native = Counting(model, RowTraits(True, True) if traits is None else traits)
    if traits is None:
        check_rows(native, max(request.prompts(), key=len))
        native.prefilled, native.extended = [], []
    phase = lambda name: contextlib.nullcontext()  # noqa: E731
    scheduler = NativeScheduler(request, native, BlockPool(BLOCK_SIZE), max_num_seqs, phase, **more)
    return scheduler.run(), native


def greedy(model: nn.Module, prompt: torch.Tensor, max_new_tokens: int) -> list[int]:
    """The tokens that Hugging Face's `generate()` gives after a prompt, int64 [n]."""
    more = {"do_sample": False, "max_new_tokens": max_new_tokens, "eos_token_id": ENDS}
    return model.generate(prompt[None], attention_mask=torch.ones_like(prompt[None]), **more)[0, len(prompt) :].tolist()


def tokens_of(done: Completions) -> list[list[int]]:
    return [row[:length].tolist() for row, length in zip(done.tokens, done.lengths.tolist(), strict=True)]


@pytest.mark.parametrize("name", slow_but(QUICK, MODELS))
def test_rows_leave_and_join(name):
    """Prompts of three lengths, two completions each, all at once and three rows at a time; tokens are a function of
    the row alone, and raw logprobs those of the model's own forward over the row alone."""
    model, prompts = model_of(name), prompts_of(11, 5, 8)
    done, native = run(model, request_of(prompts, GREEDY, 2))
    _, selects, pads = MODELS[name]
    assert (native.traits.selects, native.traits.pads) == (selects, pads)
    expected = [greedy(model, prompt, 12) for prompt in prompts for _ in range(2)]
    assert tokens_of(done) == expected
    if selects and pads:
        assert native.prefilled == [[11, 5, 8]], "equal prompts are computed once"
        ended = sorted(map(len, expected))
        assert native.extended[-1][0] < 6 or ended[0] == ended[-1], "ended rows stay"
    sampled, _ = run(model, request_of(prompts, SAMPLED, 3))
    waves, native = run(model, request_of(prompts, SAMPLED, 3), 3, native.traits)
    assert tokens_of(waves) == tokens_of(sampled)
    assert max(len(lengths) for lengths in native.prefilled) <= 3
    assert max(rows for rows, _ in native.extended) <= 3
    for tokens, prompt, logps in zip(
        tokens_of(waves), [p for p in prompts for _ in range(3)], waves.raw_logps, strict=True
    ):
        ids = torch.cat([prompt, torch.tensor(tokens)])
        with torch.no_grad():
            logits = hybrid.padded_forward(model)(ids[None], torch.ones_like(ids[None])).logits[0]
        own = logits.log_softmax(-1)[:-1].gather(1, ids[1:, None])[len(prompt) - 1 :, 0]
        torch.testing.assert_close(logps[: len(tokens)], own, atol=2e-4, rtol=1e-3)


class Tool:
    """Two turns more for each row: an observation whose length depends on the row, or the history rewritten."""

    def __init__(self, rewrites: bool = False):
        self.turns: dict[int, int] = {}
        self.rewrites = rewrites

    def step(self, row: int, completion_ids: torch.Tensor) -> Observation:
        self.turns[row] = self.turns.get(row, 0) + 1
        ids = [10 + row, 20, 30 + self.turns[row]][: 1 + row % 3]
        done = self.turns[row] == 3
        if self.rewrites and self.turns[row] == 2:
            return Observation(prompt_ids=[5, 6, 7, 8, 9 + row])
        return Observation(ids, reward=float(row), done=done)


@pytest.mark.parametrize(
    "name", slow_but(["llama", "lfm2"], ["llama", "gemma3_text", "lfm2", "bart", "recurrent_gemma"])
)
@pytest.mark.parametrize("rewrites", [False, True], ids=["", "rewritten"])
def test_rows_wait_for_their_environment_and_go_on(name, rewrites):
    """Turns of an environment: the tokens of every turn are those that greedy search gives after the row's whole
    context. A row that waits keeps its cache: only new tokens run, where several may follow a cache at once."""
    model = model_of(name) if name in MODELS else tiny_model(name).eval()
    prompts, limits = prompts_of(7, 4, 9), EnvironmentLimits(max_turns=5, max_turn_tokens=4)
    request = request_of(prompts, replace(GREEDY, max_new_tokens=30), 1, environment_limits=limits)
    loop = EnvironmentLoop(limits, VOCABULARY, Tool(rewrites), range(3))
    with contextlib.closing(loop):
        done, native = run(model, request, 3, environment=loop)
    for row, (sequence, tokens) in enumerate(zip(done.sequences, tokens_of(done), strict=True)):
        assert sequence.num_turns == 3 and not sequence.error
        parts = [(fork.prompt_ids.tolist(), fork.tokens.tolist(), fork.turns) for fork in sequence.forks]
        prompt = prompts[row] if sequence.prompt_ids is None else sequence.prompt_ids
        for prompt_ids, completion, turns in [*parts, (prompt.tolist(), tokens, sequence.turns)]:
            for turn in turns:
                context = torch.tensor(prompt_ids + completion[: turn.begin])
                assert completion[turn.begin : turn.end] == greedy(model, context, 4), (row, turn)
    if name in ("llama", "gemma3_text"):  # recurrent states are computed again
        assert sum(map(len, native.prefilled)) == 3 + 3 * rewrites
        assert any(count > 1 for _, count in native.extended)


def test_stopped_rows_and_limits_of_rows():
    """`stop_after` stops rows with the tokens that they have; rows have limits of their own, and are reported when they
    end."""
    model, prompts = tiny_model("llama", eos_token_id=None).eval(), prompts_of(6, 6, 3)
    whole, _ = run(model, request_of(prompts, SAMPLED, 2, stop_token_ids=torch.tensor([], dtype=torch.int64)))
    limits = torch.tensor([3, 12, 5, 7, 9, 12])
    request = request_of(prompts, SAMPLED, 2, limits=limits, stop_token_ids=torch.tensor([], dtype=torch.int64))
    reported: list[list[int]] = []
    done, native = run(model, request, on_end=lambda rows, done: reported.append(rows))
    assert done.lengths.tolist() == limits.tolist()
    assert [tokens[:length] for tokens, length in zip(tokens_of(whole), limits, strict=True)] == tokens_of(done)
    assert reported == [[0], [2], [3], [4], [1, 5]]
    rows = [rows for rows, _ in native.extended]
    assert rows == sorted(rows, reverse=True) and rows[-1] <= 2
    request = replace(request, stop_conditions=stop_conditions(request.groups, StopAfter(rows=3)))
    stopped, _ = run(model, request)
    assert stopped.lengths.tolist() == [3, 7, 5, 7, 7, 7]
    assert [sequence.reason for sequence in stopped.sequences] == ["length", "unfinished", "length", "length"] + [
        "unfinished"
    ] * 2


@pytest.mark.parametrize("kind", slow_but(["qwen2_5_vl"], ["qwen2_5_vl", "gemma3"]))
def test_the_text_part_of_a_vision_language_model_shares_prompts(kind):
    torch.manual_seed(0)
    text = {**SIZES, "vocab_size": 120, "num_hidden_layers": 2}
    vision = {"depth": 1, "num_hidden_layers": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2}
    vision |= {"num_attention_heads": 2, "out_hidden_size": 32, "image_size": 28, "patch_size": 14}
    if kind == "qwen2_5_vl":
        text["rope_parameters"] = {"rope_type": "default", "mrope_section": [2, 1, 1], "rope_theta": 10000.0}
    ends = {"bos_token_id": 1, "eos_token_id": END, "pad_token_id": 0}
    names = "image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id", "image_token_index"
    tokens = {name: 110 + index for index, name in enumerate(names)}
    config = AutoConfig.for_model(kind, text_config={**text, **ends}, vision_config=vision, **tokens, **ends)
    model, prompts = AutoModelForImageTextToText.from_config(config).eval(), prompts_of(11, 5, 8)
    done, native = run(model, request_of(prompts, GREEDY, 2), 4)
    assert native.prefilled == [[11, 5], [8]]
    for prompt, tokens in zip([prompt for prompt in prompts for _ in range(2)], tokens_of(done), strict=True):
        assert tokens == greedy(model, prompt, 12)


class Drifting(nn.Module):
    """A layer whose decode step differs from its prefill."""

    def __init__(self, layer: nn.Module):
        super().__init__()
        self.layer = layer

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.layer(hidden) * (0.5 if hidden.shape[1] == 1 else 1.0)


def test_a_decode_step_unlike_the_forward_is_warned_about():
    model = tiny_model("llama").eval()
    native = Counting(model, RowTraits(True, True))
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("error")
        check_rows(native, prompts_of(9)[0])
    model.model.layers[1].mlp = Drifting(model.model.layers[1].mlp)
    text = r"own decode step differs from its own forward .* by [\d.e-]+ nats"
    with pytest.warns(UserWarning, match=text), torch.no_grad():
        check_rows(native, prompts_of(9)[0])
    assert native.traits == RowTraits(True, True)
