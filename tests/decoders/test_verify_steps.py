"""Verification steps give the tokens, logprobs and ends of single steps, whatever is drafted: to the bit on CPUs.

The oracle is the decoder's own single steps. Drafts come from the expected text itself, so that they are accepted
always, never or half of the time.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch
import torch.distributed as dist

from hybrid.decoders.batch import BLOCK_SIZE, PackedBatch, packed
from hybrid.decoders.cpu_decoder import CpuDecoder
from hybrid.decoders.drafts import SEPARATOR, Drafting, GrowingText, VerifiedTokens, verify_steps
from hybrid.decoders.streamed_decoder import StreamedDecoder
from hybrid.decoders.torch_decoder import TorchDecoder, WholeDecoder
from hybrid.kernels.cpu_library import built, cpu_library, opened
from hybrid.models.reader import read_decoder
from hybrid.sampling.params import RowParams, SamplingParams
from hybrid.sampling.sampler import sample_tokens, stream_keys
from hybrid.sampling.state import SamplingState
from tests.decoders import test_sharded_decoder, test_torch_decoder, test_unmerged_lora
from tests.decoders.test_cpu_decoder import decoder_of, threads
from tests.decoders.test_int8_copy import copy_of, decoder_over
from tests.decoders.test_torch_decoder import VARIANTS
from tests.engines import engine_of, settings
from tests.host_groups import host_groups, on_every_rank
from tests.kernels.test_cpu_bfloat16 import BUILDS
from tests.marks import slow_but
from tests.sampling_params import params_of
from tests.tiny_models import RECURRENT, VOCABULARY, tiny_model

pytestmark = pytest.mark.skipif(cpu_library() is None, reason="no C++ compiler here")
CPU = torch.device("cpu")
SAMPLING = {
    "greedy": params_of(0),
    "plain": params_of(0.8),
    "truncated": params_of(1.3, top_k=12, top_p=0.9, min_p=0.01),
}
LENGTHS = (30, 5, 1, 33)  # of prompts: rows cross the ends of blocks while they decode
NEW = 24


@dataclass(frozen=True)
class Task:
    """Prompts to complete.  limits: of each row.  stops: tokens that end a row."""

    prompts: list[torch.Tensor]
    limits: list[int]
    sampling: SamplingParams
    stops: torch.Tensor

    @property
    def blocks(self) -> list[list[int]]:
        """Each row's blocks, all that it needs and no more; block 0 is nobody's."""
        counts = [
            -(-(len(ids) + limit - 1) // BLOCK_SIZE) for ids, limit in zip(self.prompts, self.limits, strict=True)
        ]
        order = iter((1 + torch.randperm(sum(counts), generator=torch.Generator().manual_seed(2))).tolist())
        return [[next(order) for _ in range(count)] for count in counts]


def task_of(sampling: str = "plain", lengths: tuple[int, ...] = LENGTHS, new: int = NEW, stops: int = 1) -> Task:
    """Rows with limits of their own; `stops` of the vocabulary's tokens end a row."""
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(3, VOCABULARY, (length,), generator=generator) for length in lengths]
    limits = [new - 3 * (row % 3) for row in range(len(lengths))]
    stop_ids = torch.randperm(VOCABULARY, generator=generator)[:stops]
    return Task(prompts, limits, SAMPLING[sampling], stop_ids)


@dataclass(frozen=True)
class Completion:
    """A row's new tokens, and their logprobs, float32 [3, tokens]."""

    tokens: list[int]
    logps: torch.Tensor


class Decode:
    """A task in a decoder's cache, which holds NaN where nothing was written; prefilled, with a first token drawn."""

    def __init__(self, decoder: WholeDecoder, task: Task):
        self.decoder, self.task, self.device = decoder, task, decoder.device
        longest = max(len(ids) + limit for ids, limit in zip(task.prompts, task.limits, strict=True))
        decoder.reserve(longest)
        self.kv = decoder.kv(1 + max(map(max, task.blocks)))
        for tensor in (*self.kv.keys, *self.kv.values):
            tensor.fill_(torch.nan)
        rows = torch.arange(len(task.prompts))
        self.slots: list[int] | None = None
        if decoder.spec.is_recurrent:  # rows' states, then their copies
            self.slots = rows.tolist()
            self.kv = replace(self.kv, states=decoder.states(2 * len(rows)))
        self.keys = stream_keys(7, rows, torch.zeros_like(rows)).to(self.device)
        prompts = [ids.to(self.device) for ids in task.prompts]
        batch = packed(prompts, [0] * len(rows), task.blocks, self.device, self.slots)
        logits = decoder.logits(decoder.forward(batch, self.kv)[batch.cu_seqlens[1:].long() - 1])
        self.tokens: list[list[int]] = [[] for _ in rows]
        self.logps: list[list[torch.Tensor]] = [[] for _ in rows]
        self.add(rows.tolist(), logits)

    def add(self, rows: list[int], logits: torch.Tensor) -> None:
        """Draw each row's next token."""
        positions = torch.tensor([len(self.tokens[row]) for row in rows], device=self.device)
        settings = self.task.sampling, self.decoder.vocabulary
        drawn = sample_tokens(logits, self.keys[rows], positions, *settings)
        for index, row in enumerate(rows):
            self.tokens[row].append(int(drawn.tokens[index]))
            self.logps[row].append(drawn.per_token()[:, index].cpu())

    def running(self) -> list[int]:
        """The rows that have not ended."""
        stops = set(self.task.stops.tolist())
        pairs = enumerate(zip(self.tokens, self.task.limits, strict=True))
        return [row for row, (tokens, limit) in pairs if len(tokens) < limit and tokens[-1] not in stops]

    def batch(self, rows: list[int]) -> PackedBatch:
        """The latest token of each row."""
        latest = [torch.tensor(self.tokens[row][-1:]) for row in rows]
        at = [len(self.task.prompts[row]) + len(self.tokens[row]) - 1 for row in rows]
        return packed(latest, at, [self.task.blocks[row] for row in rows], self.device, self.slots and rows)

    def spare(self, rows: list[int]) -> dict[str, list[int]]:
        """The argument that recurrent states need in addition."""
        return {} if self.slots is None else {"spare_slots": [row + len(self.slots) for row in rows]}

    def draws(self, rows: list[int]) -> SamplingState:
        positions = torch.tensor([len(self.tokens[row]) for row in rows], device=self.device)
        limits = torch.tensor([self.task.limits[row] for row in rows], device=self.device)
        stops = self.task.stops.to(self.device)
        return SamplingState(
            self.keys[rows],
            positions,
            limits,
            stops,
            0,
            RowParams.of(self.task.sampling),
            vocabulary=self.decoder.vocabulary,
        )

    def completions(self) -> list[Completion]:
        """What is drawn so far."""
        return [
            Completion(tokens, torch.stack(logps, dim=1)) for tokens, logps in zip(self.tokens, self.logps, strict=True)
        ]


@torch.no_grad()
def single_steps(decoder: WholeDecoder, task: Task) -> list[Completion]:
    """A token for each running row at a time."""
    decode = Decode(decoder, task)
    while rows := decode.running():
        decode.add(rows, decoder.decode(decode.batch(rows), decode.kv))
    return decode.completions()


@dataclass
class Counted:
    """Counts of verification.  steps: of all rows together."""

    drafted: int = 0
    accepted: int = 0
    steps: int = 0

    def add(self, verified: VerifiedTokens) -> None:
        assert [verified.sequences.tolist().count(index) for index in range(len(verified.counts))] == verified.counts
        self.drafted += verified.drafted
        self.accepted += verified.accepted
        self.steps += verified.steps


Corpora = Callable[[Task, list[Completion]], list[list[torch.Tensor]]]


@torch.no_grad()
def verified_steps(
    decoder: WholeDecoder, task: Task, others: list[list[torch.Tensor]], most: list[int], steps: int = 4
) -> tuple[list[Completion], Counted]:
    """Verification steps, up to `steps` in a call.  others, most: of each row, as Drafting's."""
    decode, counted = Decode(decoder, task), Counted()
    pairs = zip(task.prompts, decode.tokens, task.limits, strict=True)
    own = [GrowingText.of(torch.tensor(ids.tolist() + tokens), limit) for ids, tokens, limit in pairs]
    while rows := decode.running():
        drafting = drafting_of([own[r] for r in rows], [others[r] for r in rows], [most[r] for r in rows])
        batch, spare = decode.batch(rows), decode.spare(rows)
        verified = verify_steps(decoder, batch, decode.kv, decode.draws(rows), drafting, steps, **spare)
        counted.add(verified)
        for index, row in enumerate(rows):
            new = verified.sequences == index
            assert verified.offsets[new].tolist() == list(range(verified.counts[index]))
            decode.tokens[row] += verified.tokens[new].tolist()
            decode.logps[row] += verified.logps[:, new].cpu().unbind(1)
            text = own[row].since().tolist()
            assert text == task.prompts[row].tolist() + decode.tokens[row], "the own text is not what was drawn"
        assert verified.steps == steps or decode.running() != rows, "it ended before a row did"
    return decode.completions(), counted


def drafting_of(own: list[GrowingText], others: list[list[torch.Tensor]], lengths: list[int]) -> Drafting:
    """Drafts of these lengths, whatever was accepted."""
    drafting = Drafting(own, others, lengths, max(lengths), 2)
    drafting.lengths = Constant(lengths)
    return drafting


class Constant(list):
    """A list that keeps its entries."""

    def __setitem__(self, index, value):
        pass


def text_of(tokens: list[int]) -> torch.Tensor:
    return torch.tensor(tokens, dtype=torch.int32)


def whole(task: Task, expected: list[Completion], row: int) -> list[int]:
    return task.prompts[row].tolist() + expected[row].tokens


def right(task: Task, expected: list[Completion]) -> list[list[torch.Tensor]]:
    """Each row's whole text."""
    return [[text_of(whole(task, expected, row))] for row in range(len(expected))]


def followed_by(wrong: Callable[[int], int]) -> Corpora:
    """After every 16 tokens of a row's text, tokens that are not the next ones. Of equally long matches the latest is
    of the right place."""

    def corpora(task: Task, expected: list[Completion]) -> list[list[torch.Tensor]]:
        texts = []
        for row in range(len(expected)):
            ids, text = whole(task, expected, row), []
            for at in reversed(range(1, len(ids))):
                text += [*ids[max(0, at - 16) : at], *map(wrong, ids[at : at + 6]), SEPARATOR]
            texts.append([text_of(text)])
        return texts

    return corpora


def half(task: Task, expected: list[Completion]) -> list[list[torch.Tensor]]:
    """Each row's text with every fifth new token replaced, in a text of its own."""
    texts = []
    for row, completion in enumerate(expected):
        changed = [(t + 1) % VOCABULARY if i % 5 == 4 else t for i, t in enumerate(completion.tokens)]
        ids = whole(task, expected, row)
        texts.append([text_of(task.prompts[row].tolist() + changed), text_of(ids[-9:])])
    return texts


CORPORA: dict[str, Corpora] = {
    "right": right,
    "half": half,
    "wrong": followed_by(lambda token: 3 + (token - 2) % (VOCABULARY - 3)),
    "unknown": followed_by(lambda token: token + 10**6),
    "none": lambda task, expected: [[] for _ in expected],
}
DRAFTS = [7, 3, 0, 5]  # of each row


def require_equal_bits(actual: list[Completion], expected: list[Completion]) -> None:
    for row, (own, other) in enumerate(zip(actual, expected, strict=True)):
        assert own.tokens == other.tokens, row
        assert torch.equal(own.logps, other.logps), row


def check(decoder: WholeDecoder, task: Task, corpora: str = "half", steps: int = 4) -> Counted:
    expected = single_steps(decoder, task)
    most = [DRAFTS[row % len(DRAFTS)] for row in range(len(expected))]
    actual, counted = verified_steps(decoder, task, CORPORA[corpora](task, expected), most, steps)
    require_equal_bits(actual, expected)
    return counted


@pytest.mark.parametrize("corpora", CORPORA)
@pytest.mark.parametrize("sampling", SAMPLING)
def test_tokens_and_logprobs_equal_those_of_single_steps(sampling, corpora):
    decoder, task = decoder_of(tiny_model("llama")), task_of(sampling, stops=3)
    counted = check(decoder, task, corpora)
    share = counted.accepted / max(counted.drafted, 1)
    least, most = {"right": (1, 1), "half": (0.3, 0.9), "wrong": (0, 0.1)}.get(
        corpora, (0, 1)
    )  # rows may repeat themselves
    assert least <= share <= most and (counted.drafted > 20 or corpora in ("unknown", "none")), counted


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("variant", slow_but(["gemma2", "bloom", "mixtral", "opt"], VARIANTS))
def test_every_family(variant, dtype):
    family, changes = VARIANTS[variant]
    counted = check(decoder_of(tiny_model(family, **changes).to(dtype).eval(), dtype), task_of())
    assert 0 < counted.accepted < counted.drafted


@pytest.mark.parametrize("corpora", ["right", "half", "wrong"])
@pytest.mark.parametrize("family", slow_but(["qwen3_5_text", "falcon_h1"], RECURRENT))
def test_recurrent_states(family, corpora):
    """A call ends with the states after its tokens, whether the last draft was accepted or refused."""
    for steps in (1, 4):
        counted = check(decoder_of(tiny_model(family).eval()), task_of(), corpora, steps)
        least, most = {"right": (1, 1), "half": (0.01, 0.99), "wrong": (0, 0.2)}[corpora]
        assert least <= counted.accepted / counted.drafted <= most, counted


def test_rows_end_inside_drafts():
    """By stop tokens and by limits: right drafts of up to 20 tokens, in one call."""
    decoder, ends = decoder_of(tiny_model("llama")), []
    for stops in (0, 40):
        task = replace(task_of("plain", stops=stops), limits=[11, 4, 9, 2])
        expected = single_steps(decoder, task)
        actual, counted = verified_steps(decoder, task, right(task, expected), [20] * 4, steps=16)
        require_equal_bits(actual, expected)
        assert counted.accepted == counted.drafted > 0
        ends += [len(row.tokens) == limit for row, limit in zip(actual, task.limits, strict=True)]
    assert True in ends and False in ends


def test_a_draft_ends_before_a_stop_token():
    """Nothing is needed after it: its own draft would be a token of the forward in vain."""
    decoder = decoder_of(tiny_model("llama"))
    task = replace(task_of("greedy", (9,), stops=0), limits=[12])
    expected = single_steps(decoder, task)
    stopped = replace(task, stops=torch.tensor(expected[0].tokens[7:8]))
    end = expected[0].tokens.index(expected[0].tokens[7]) + 1
    actual, counted = verified_steps(decoder, stopped, right(task, expected), [20], steps=8)
    assert actual[0].tokens == expected[0].tokens[:end]
    assert counted.drafted == counted.accepted == max(end - 2, 0)


def test_rejected_tokens_are_never_read_again():
    """The keys and values of rejected drafts are NaN: they lie behind every row's end, until they are written again."""
    decoder, task = decoder_of(tiny_model("mistral")), task_of("plain")
    expected = single_steps(decoder, task)
    others, own = followed_by(lambda token: 3 + (token - 2) % (VOCABULARY - 3))(task, expected), verify_steps

    def poisoned(decoder, batch, kv, draws, drafting, steps):
        verified = own(decoder, batch, kv, draws, drafting, steps)
        ends = (batch.positions + torch.tensor(verified.counts)).tolist()
        for table, end in zip(batch.block_tables, ends, strict=True):
            for position in range(end, min(end + 8, len(table) * BLOCK_SIZE)):
                block, offset = int(table[position // BLOCK_SIZE]), position % BLOCK_SIZE
                for keys, values in zip(kv.keys, kv.values, strict=True):
                    keys[block, ..., offset], values[block, :, offset] = torch.nan, torch.nan
        return verified

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(f"{__name__}.verify_steps", poisoned)
        actual, counted = verified_steps(decoder, task, others, [7] * 4, steps=1)
    require_equal_bits(actual, expected)
    assert counted.drafted > 100 > 10 > counted.accepted


@pytest.mark.parametrize("family", slow_but(["qwen2"], ["qwen2", "gpt2", "gpt_neox"]))
def test_int8_weights(family):
    decoder = decoder_over(copy_of(tiny_model(family).eval()), "cpu")
    assert check(decoder, task_of()).accepted


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_unmerged_adapters(dtype):
    model = test_unmerged_lora.with_two_adapters(tiny_model("llama").to(dtype)).eval()
    assert check(test_unmerged_lora.decoder_of(CpuDecoder, model), task_of()).accepted


@pytest.mark.parametrize("count", [1, 3])
def test_any_number_of_threads(count):
    decoder, task = decoder_of(tiny_model("llama", dtype=torch.bfloat16), torch.bfloat16), task_of()
    expected = single_steps(decoder, task)
    with threads(count):
        actual, _ = verified_steps(decoder, task, half(task, expected), DRAFTS)
    require_equal_bits(actual, expected)


@pytest.mark.parametrize("build", slow_but(["AMX"], BUILDS))
@pytest.mark.parametrize("dtype", slow_but([torch.bfloat16], [torch.float32, torch.bfloat16]))
def test_every_build_of_the_kernels(build, dtype, monkeypatch):
    """Single steps draw with the same build: the sums of a draw depend on its number of lanes."""
    library = opened(built(BUILDS[build]))
    monkeypatch.setattr("hybrid.sampling.sampler.cpu_library", lambda: library)
    model = tiny_model("llama", dtype=dtype, head_dim=40).eval()
    assert check(decoder_of(model, dtype, library=library), task_of()).accepted


@pytest.mark.parametrize("dtype", slow_but([torch.bfloat16], [torch.float32, torch.bfloat16]))
def test_a_context_of_8k(dtype):
    """Over many splits of the context, of which some queries of a draft see one more than the others."""
    model = tiny_model("llama", num_hidden_layers=1, max_position_embeddings=8400, dtype=dtype).eval()
    decoder = decoder_of(model, dtype)
    counted = check(decoder, task_of("plain", (8186, 1020, 509), new=12))
    assert 0 < counted.accepted < counted.drafted


@pytest.mark.parametrize("family", ["llama", "mixtral"])
@pytest.mark.parametrize("sampling", slow_but(["plain"], SAMPLING))
def test_ranks_with_slices_draw_the_same_tokens(sampling, family):
    layout, groups, task = read_decoder(tiny_model(family)), host_groups(2), task_of(sampling)
    decoders = {group: test_sharded_decoder.cpu_decoder(layout, group) for group in groups}
    expected = on_every_rank(groups, lambda group: single_steps(decoders[group], task))
    corpora = half(task, expected[0])
    actual = on_every_rank(groups, lambda group: verified_steps(decoders[group], task, corpora, DRAFTS))
    for rank in range(2):
        require_equal_bits(actual[rank][0], expected[0])
    assert actual[0][1] == actual[1][1] and actual[0][1].accepted


def test_the_decoder_in_torch_operations():
    """Its sums depend on the batch: tokens are equal, logprobs nearly."""
    decoder, task = test_torch_decoder.decoder_of(tiny_model("llama").eval()), task_of("plain", stops=3)
    assert type(decoder) is TorchDecoder
    expected = single_steps(decoder, task)
    actual, counted = verified_steps(decoder, task, half(task, expected), DRAFTS)
    assert [row.tokens for row in actual] == [row.tokens for row in expected]
    for own, other in zip(actual, expected, strict=True):
        torch.testing.assert_close(own.logps, other.logps, rtol=0, atol=1e-5)
    assert 0 < counted.accepted < counted.drafted


def test_ids_outside_of_the_embedding_raise():
    decoder, task = decoder_of(tiny_model("llama")), task_of()
    decode = Decode(decoder, task)
    decode.tokens[0][-1] = VOCABULARY
    texts = [GrowingText(100) for _ in LENGTHS]
    rows = list(range(len(LENGTHS)))
    drafting = Drafting(texts, [[] for _ in rows], [1] * len(rows), 1, 2)
    with pytest.raises(IndexError, match=f"embedding has rows for 0 to {VOCABULARY - 1}"):
        verify_steps(decoder, decode.batch(rows), decode.kv, decode.draws(rows), drafting, 1)


@pytest.mark.slow
def test_the_decoder_on_triton_kernels_verifies_in_graphs():
    """A verification step is a decode step of more sequences, which share blocks: in a graph of its size, padded. Over
    the end of a block, and in a sliding window."""
    pytest.importorskip("triton", reason="triton is not installed; it comes with torch's CUDA builds")
    from tests.decoders.test_cuda_decoder import DEVICE, cuda_decoder, small

    decoder = cuda_decoder(small("mistral", num_hidden_layers=1), max_capture_size=8)
    task = task_of("plain", (31, 3), new=7, stops=0)
    expected = single_steps(decoder, task)
    assert decoder.device.type == DEVICE
    others, before = half(task, expected), set(decoder.graphs.replays)
    actual, counted = verified_steps(decoder, task, others, [3, 2])  # up to 7 tokens
    assert [row.tokens for row in actual] == [row.tokens for row in expected]
    for own, other in zip(actual, expected, strict=True):
        torch.testing.assert_close(own.logps, other.logps, rtol=0, atol=2e-6)
    assert counted.accepted
    assert {key[1] for key in set(decoder.graphs.replays) - before} == {8}, "no step of several tokens was a graph"


def check_streaming() -> None:
    """Ranks with other rows and drafts; a rank whose rows have ended takes part in the forwards of the other one."""
    rank, model = dist.get_rank(), tiny_model("llama", num_hidden_layers=2)
    engine = engine_of(model, settings(3, hybrid_engine={"pin_parameters": False}))
    task = task_of("plain", LENGTHS[rank:], new=7 + 6 * rank, stops=2)
    with engine.inference():
        decoder = engine._runtime.fused.decoder(False, 64)
        assert isinstance(decoder, StreamedDecoder)
        expected = single_steps(decoder, task)
        actual, counted = verified_steps(decoder, task, half(task, expected), DRAFTS)
        decoder.finish()
    require_equal_bits(actual, expected)
    assert counted.accepted
    engine.destroy()


def test_streamed_layers_are_gathered_once_a_step(ranks):
    ranks.run(check_streaming)
