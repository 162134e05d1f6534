"""Token-balanced micro batches, packed rows and chunked logits give the numbers of plain padded batches."""

import copy
import functools
import itertools
import math

import deepspeed
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from rlhf_examples.common.batches import (
    balanced_batches,
    chunked_logps,
    pack_rows,
    per_token_logps_and_entropies,
    require_exact,
    token_budget_batches,
    unpack_rows,
)
from rlhf_examples.common.losses import language_model_loss, loss_denominator
from tests.engines import CollectiveCount, engine_of, settings
from tests.marks import slow_but
from tests.tiny_models import ALL_FAMILIES, SIZES, prompts, tiny_model, twin, with_chat_lora, with_peft

# ZeRO-3 that releases each parameter as soon as its module has run (deferred in models this small) and prefetches none;
# no clipping, whose default is 1 (deepspeed 0.19.8).
RELEASE_AT_ONCE = {
    "zero_optimization": {
        "stage": 3,
        "stage3_param_persistence_threshold": 0,
        "stage3_max_reuse_distance": 0,
        "stage3_max_live_parameters": 0,
        "stage3_prefetch_bucket_size": 0,
    },
    "gradient_clipping": 0.0,
}
MIXES_ROWS = {"bloom", "falcon", "opt"}  # transformers 5.23 does not pass cu_seqlens of packed rows to their attention


def test_balanced_batches_match_an_example():
    """9 | 5, 4 | then 3 to the batch with fewer rows, then 2 and 1 to the one with fewer tokens."""
    assert balanced_batches([3, 9, 5, 4, 1, 2], 2) == [[0, 1], [2, 3, 4, 5]]
    assert balanced_batches(torch.tensor([5, 0, 0]), 3) == [[0], [1], [2]], "a batch has no rows"
    with pytest.raises(ValueError, match="num_batches: 3 given for 2 rows; every batch needs a row"):
        balanced_batches([4, 4], 3)


@pytest.mark.parametrize("seed", range(12))
def test_balanced_batches_are_within_grahams_bound(seed):
    """Longest first is within 4/3 - 1/(3m) of the optimum (Graham 1969), found by trying all assignments."""
    generator = torch.Generator().manual_seed(seed)
    rows, number = 4 + seed % 5, 2 + seed % 2
    lengths = torch.randint(1, 100, (rows,), generator=generator).tolist()
    batches = balanced_batches(lengths, number)
    assert sorted(row for batch in batches for row in batch) == list(range(rows))
    assert len(batches) == number and all(batches)
    best = math.inf
    for places in itertools.product(range(number), repeat=rows):
        best = min(best, max(sum(lengths[row] for row in range(rows) if places[row] == b) for b in range(number)))
    assert max(sum(lengths[row] for row in batch) for batch in batches) <= (4 / 3 - 1 / (3 * number)) * best
    assert balanced_batches(lengths, number) == batches


def on_two_ranks(lengths: tuple[torch.Tensor, torch.Tensor], max_tokens: int) -> list:
    """The batches, or the error, of `token_budget_batches` on each of two ranks."""
    requests, results = [], []
    for own in (*lengths, *lengths):  # first each rank's own request, then its result with the maximum over ranks

        def over_ranks_max(values):
            requests.append(values)
            return values if len(requests) <= 2 else torch.maximum(requests[0], requests[1])

        try:
            results.append(token_budget_batches(own, max_tokens, over_ranks_max))
        except ValueError as error:
            results.append(str(error))
    assert len(requests) == 4, "a rank skipped the collective, so the other would hang"
    return results[2:]


def test_token_budget_batches_are_as_many_on_every_rank():
    lengths = torch.tensor([30, 2, 30, 15, 30, 3]), torch.tensor([8, 9, 10, 7, 6, 5])
    needy, other = on_two_ranks(lengths, 40)
    assert len(needy) == len(other) == 4  # 110 tokens, but 15 fits with none of 30; the other rank's 45 would fit in 2
    for own, batches in zip(lengths, (needy, other), strict=True):
        assert sorted(row for batch in batches for row in batch) == list(range(6))
        assert all(own[batch].sum() <= 40 for batch in batches)
    assert max(lengths[0][batch].sum() for batch in balanced_batches(lengths[0], 3)) > 40, "more batches than necessary"
    assert on_two_ranks(lengths, 1000) == [[[0, 1, 2, 3, 4, 5]]] * 2


def test_a_token_budget_that_fails_on_one_rank_raises_on_all():
    short, long = torch.tensor([3, 4]), torch.tensor([3, 41])
    for pair in ((short, long), (long, short)):
        assert on_two_ranks(pair, 40) == ["max_tokens: 40 given; the longest row has 41 tokens"] * 2
    few_rows, many_rows = torch.tensor([30]), torch.tensor([30, 30])
    message = "max_tokens: 40 given; a rank needs 2 batches, and one has 1 rows"
    assert on_two_ranks((few_rows, many_rows), 40) == [message] * 2


def padded_rows() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Left-padded prompts with right-padded completions: ids, mask, completion mask."""
    ids, mask = prompts(4, 12, padded=True, seed=3)
    completion = (torch.arange(12) >= 6).long().expand(4, 12)
    mask[:, 6:] = (torch.arange(6) < torch.tensor([6, 1, 4, 0])[:, None]).long()
    return ids * mask, mask, completion


def test_packing_and_unpacking_round_trip():
    sequences = torch.tensor([[0, 0, 5, 6, 7], [8, 9, 0, 0, 0], [0, 4, 3, 2, 0]])
    mask = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 0, 0, 0], [0, 1, 1, 1, 0]])
    ids, positions = pack_rows(sequences, mask)
    assert ids.tolist() == [[5, 6, 7, 8, 9, 4, 3, 2]]
    assert positions.tolist() == [[0, 1, 2, 0, 1, 0, 1, 2]]
    assert torch.equal(unpack_rows(ids, mask), sequences)
    hidden = torch.randn(1, 8, 3, dtype=torch.float64, requires_grad=True)
    rows = unpack_rows(hidden, mask)
    assert rows.shape == (3, 5, 3) and torch.equal(rows[mask.bool()], hidden[0]) and (rows[mask == 0] == 0).all()
    assert torch.autograd.gradcheck(lambda values: unpack_rows(values, mask), hidden)


def plain_logps(model: nn.Module, ids: torch.Tensor, mask: torch.Tensor, temperature: float) -> tuple:
    """Logprobs of tokens 1, 2, … and entropies from the model's own logits of each row alone, without padding."""
    logps, entropies = [torch.zeros(ids.shape) for _ in range(2)]
    for row in range(len(ids)):
        kept = mask[row].bool()
        distribution = torch.log_softmax(
            model(input_ids=ids[row][kept][None]).logits[0, :-1].double() / temperature, -1
        )
        places = kept.nonzero()[1:, 0]
        chosen = distribution.gather(1, ids[row][places][:, None])[:, 0]
        logps = logps.index_put((torch.tensor(row), places), chosen.float())
        entropy = -(distribution.exp() * distribution).sum(-1)
        entropies = entropies.index_put((torch.tensor(row), places), entropy.float())
    return logps, entropies


@pytest.mark.parametrize("padding_free", [False, True])
@pytest.mark.parametrize(
    "family", slow_but(["llama", "gpt2", "bloom", "falcon", "mixtral", "cohere"], [*sorted(ALL_FAMILIES), "cohere"])
)
def test_batched_logprobs_match_each_row_alone(family, padding_free):
    """With chunked logits and padded or packed rows, or a ValueError; families include capped and scaled logits."""
    model = tiny_model(family, sizes=SIZES if family == "cohere" else None).train()
    if padding_free and family in MIXES_ROWS:
        for dtype in (torch.bfloat16, torch.float32):
            with pytest.raises(ValueError, match=f"{type(model).__name__} mixes packed rows.* give false"):
                require_exact(model.to(dtype), padding_free)
        return
    require_exact(model, padding_free)
    require_exact(copy.deepcopy(model).bfloat16(), padding_free)
    assert model.training
    ids, mask, completion = padded_rows()
    with torch.no_grad():
        expected = plain_logps(model, ids, mask, 0.7)
        request = {"temperature": 0.7, "chunk_size": 3, "padding_free": padding_free}
        logps_and_entropies = per_token_logps_and_entropies(model, ids, mask, completion, **request)
    for actual, values in zip(logps_and_entropies, expected, strict=True):
        # Float32 forwards of other shapes, with logits up to 30.
        torch.testing.assert_close(actual, values * completion * mask, atol=1e-5, rtol=1e-5)


def test_gradients_of_packed_and_padded_rows_are_equal():
    model = tiny_model("llama", dtype=torch.float64).train()
    ids, mask, _ = padded_rows()
    first = (mask.cumsum(dim=1) == 1) & mask.bool()
    weights = torch.randn(2, *ids.shape, dtype=torch.float64)
    gradients = []
    for padding_free in (False, True):
        actual = per_token_logps_and_entropies(model, ids, mask, mask, chunk_size=4, padding_free=padding_free)
        for values in actual:
            assert torch.equal(values != 0, mask.bool() & ~first), "a row's first token has a logprob"
        loss = sum((values * weight).sum() for values, weight in zip(actual, weights, strict=True))
        gradients.append(torch.autograd.grad(loss, list(model.parameters())))
    for padded, unpadded in zip(*gradients, strict=True):
        torch.testing.assert_close(unpadded, padded, atol=1e-10, rtol=1e-9)


def test_a_model_that_changes_its_logits_raises_with_chunked_logits():
    model = tiny_model("llama")
    forward = model.forward

    def scaled(*args, **kwargs):
        output = forward(*args, **kwargs)
        output.logits = output.logits * 1.5
        return output

    model.forward = functools.wraps(forward)(scaled)
    with pytest.raises(
        ValueError, match="LlamaForCausalLM's logprobs with logits in chunks differ .* give logit_chunk: 0"
    ):
        require_exact(model, padding_free=False)


class Head(nn.Linear):
    """A head that records the most rows of a forward."""

    largest = 0

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        self.largest = max(self.largest, len(hidden))
        return super().forward(hidden)


def capped(logits: torch.Tensor) -> torch.Tensor:
    return 3 * torch.tanh(logits / 3)


@pytest.mark.parametrize("after_head", [None, capped], ids=["no function", "capped"])
@pytest.mark.parametrize(("rows", "chunk_size"), [(13, 4), (12, 4), (13, 1), (3, 50), (0, 4)])
def test_chunked_logprobs_have_equal_values_and_gradients(rows, chunk_size, after_head):
    torch.manual_seed(0)
    head, hidden = Head(5, 11).double(), torch.randn(rows, 5, dtype=torch.float64, requires_grad=True)
    ids = torch.randint(11, (rows,))
    weights = torch.randn(2, rows, dtype=torch.float64)
    logits = nn.functional.linear(hidden, head.weight, head.bias)
    distribution = torch.log_softmax((capped(logits) if after_head else logits) / 0.7, dim=-1)
    expected = distribution[range(rows), ids], -(distribution.exp() * distribution).sum(dim=-1)
    chunked = chunked_logps(hidden, head, ids, 0.7, chunk_size, after_head)
    assert "forward" not in vars(head), "the head's forward was not restored"
    gradients = []
    for values in (expected, chunked):
        loss = (torch.stack(values) * weights).sum()
        gradients.append(torch.autograd.grad(loss, (hidden, head.weight, head.bias)))
    for actual, value in zip((*chunked, *gradients[1]), (*expected, *gradients[0]), strict=True):
        torch.testing.assert_close(actual, value, atol=1e-12, rtol=1e-12)
    assert head.largest == min(rows, chunk_size)


def test_a_failing_heads_forward_is_restored():
    head, own = nn.Linear(5, 11), lambda hidden: hidden @ torch.zeros(4, 4)
    head.forward = own
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        chunked_logps(torch.zeros(3, 5), head, torch.zeros(3, dtype=torch.long))
    assert vars(head)["forward"] is own


class PeakBytes(TorchDispatchMode):
    """Peak bytes of live tensors allocated inside the block, in forward and backward."""

    def __enter__(self):
        self.peak, self.live = 0, {}
        return super().__enter__()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in torch.utils._pytree.tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                self.live.setdefault(storage._cdata, (StorageWeakRef(storage), storage.nbytes()))
        self.live = {key: kept for key, kept in self.live.items() if not kept[0].expired()}
        self.peak = max(self.peak, sum(size for _, size in self.live.values()))
        return result


def test_only_one_chunk_of_logits_is_in_memory():
    """Forward and backward of 256 tokens with a vocabulary of 2000: the peak depends on the chunk, not on the
    tokens."""
    torch.manual_seed(0)
    head, hidden, ids = nn.Linear(4, 2000), torch.randn(256, 4, requires_grad=True), torch.randint(2000, (256,))
    peaks = {}
    for chunk_size in (256, 64, 16):
        with PeakBytes() as made:
            logps, entropies = chunked_logps(hidden, head, ids, 0.7, chunk_size)
            (logps.sum() + entropies.sum()).backward()
        peaks[chunk_size] = made.peak / (2000 * 4)  # in rows of logits
        head.weight.grad = hidden.grad = head.bias.grad = None
    assert peaks[256] > 3 * 256, "logits, log_softmax and their gradients were not measured"
    rest = 4 * 5 + 30  # four gradients of the head at once, and small tensors
    assert peaks[64] < peaks[256] / 4 + rest and peaks[16] < peaks[256] / 16 + rest, peaks


def rank_rows(rank: int, step: int, width: int = 9) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A rank's training rows of a step: ids, mask and completion mask, which differ between ranks.

    In step 1 rank 1 has no completion token.
    """
    rows = 2 + 2 * rank
    ids, mask = prompts(rows, width + rank, padded=True, seed=10 * step + rank)
    mask[-1, -2:] = 0
    completion_mask = (torch.arange(width + rank) >= 3).long().expand(rows, -1)
    return ids, mask, completion_mask * (0 if (rank, step) == (1, 1) else 1)


def weighted_loss(logps: torch.Tensor, entropies: torch.Tensor, completion_mask: torch.Tensor) -> torch.Tensor:
    """A loss in which every completion token has a different weight."""
    weights = torch.linspace(-1, 1, completion_mask.numel()).view(completion_mask.shape) * completion_mask
    return (weights * logps).sum() + 0.3 * (weights * entropies).sum()


def check_gradients(kind: str, padding_free: bool) -> None:
    """Under ZeRO-3, gradients of the chunked loss after engine.backward equal those of the plain loss, in every
    step."""
    changes = {"tie_word_embeddings": True} if kind == "tied" else {}
    model = tiny_model("llama", **changes)
    model = {"peft": with_peft, "chat": with_chat_lora}.get(kind, lambda model: model)(model)
    plain = twin(model)
    engine = engine_of(model, settings(**RELEASE_AT_ONCE, gradient_accumulation_steps=2))
    if kind == "checkpointing":
        engine.module.gradient_checkpointing_enable()
    engine.train()
    request = {"temperature": 0.7, "chunk_size": 3, "padding_free": padding_free}
    for start in (0, 2):  # the second time with updated weights
        for step in (start, start + 1):
            ids, mask, completion_mask = rank_rows(dist.get_rank(), step)
            actual = per_token_logps_and_entropies(engine, ids, mask, completion_mask, **request)
            engine.backward(weighted_loss(*actual, completion_mask))
            if step % 2:
                names = [name for name, parameter in plain.named_parameters() if parameter.requires_grad]
                parameters = dict(engine.module.named_parameters())
                grads = {name: deepspeed.utils.safe_get_full_grad(parameters[name]) for name in names}
            engine.step()
        plain.zero_grad()
        for rank, step in itertools.product(range(2), (start, start + 1)):
            ids, mask, completion_mask = rank_rows(rank, step)
            (
                weighted_loss(*plain_logps(plain, ids, mask, 0.7), completion_mask * mask) / 4
            ).backward()  # ranks · accumulation
        expected = dict(plain.named_parameters())
        for name in names:
            scale = expected[name].grad.abs().max()
            assert scale > 1e-3
            torch.testing.assert_close(grads[name] / scale, expected[name].grad / scale, atol=2e-5, rtol=0)
        for name, parameter in expected.items():
            with deepspeed.zero.GatheredParameters([parameters[name]] if name in parameters else []):
                parameter.data.copy_(parameters[name].data)


@pytest.mark.parametrize(
    ("kind", "padding_free"),
    slow_but(
        [("peft", True)],
        [("whole", False), ("whole", True), ("tied", False), ("checkpointing", True), ("peft", True), ("chat", False)],
    ),
)
def test_gradients_of_chunked_logprobs_under_zero_3(ranks, kind, padding_free):
    ranks.run(check_gradients, kind, padding_free)


def count_gathers() -> list[int]:
    """Collectives of a forward and backward with one chunk, many and some, after two for DeepSpeed's trace."""
    engine = engine_of(tiny_model("llama"), settings(**RELEASE_AT_ONCE))
    engine.train()
    ids, mask, completion_mask = rank_rows(0, 0)
    counts = []
    for chunk_size in (1000, 1000, 1000, 1, 4):
        with CollectiveCount() as collectives:
            actual = per_token_logps_and_entropies(engine, ids, mask, completion_mask, chunk_size=chunk_size)
            engine.backward(weighted_loss(*actual, completion_mask))
        counts.append(collectives.count)
        engine.step()
    return counts[2:]


def test_the_number_of_gathers_does_not_depend_on_chunks(ranks):
    (one_chunk, many_chunks, some_chunks), _ = ranks.run(count_gathers)
    assert one_chunk == many_chunks == some_chunks > 0


def check_require_exact() -> None:
    engine = engine_of(tiny_model("llama"), settings(3))
    engine.train()
    for padding_free in (False, True):
        require_exact(engine, padding_free)
    assert engine.module.training
    engine = engine_of(with_peft(tiny_model("llama"), target_modules=["q_proj", "lm_head"]), settings(3))
    with pytest.raises(ValueError, match="has modules inside that ZeRO-3 partitions; take its logits whole"):
        require_exact(engine, padding_free=False)


def test_require_exact_under_zero_3(ranks):
    ranks.run(check_require_exact)


def check_budget_steps(stage: int) -> None:
    """Steps with a varying number of backwards, by `token_budget_batches`, equal SGD on the whole batch."""
    model = tiny_model("llama")
    plain = twin(model)
    config = {
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "gradient_clipping": 0.0,
        "zero_allow_untested_optimizer": True,
    }
    engine = engine_of(model, settings(stage, **config))
    engine.train()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    numbers = []
    for step, max_tokens in enumerate((20, 40, 12)):
        ranks_rows = [prompts(4, 9 + 2 * rank, padded=True, seed=step) for rank in range(2)]
        tokens = sum(int(mask.sum()) - len(mask) for _, mask in ranks_rows)  # a row's first token has no logprob
        ids, mask = ranks_rows[dist.get_rank()]
        batches = token_budget_batches(mask.sum(dim=1), max_tokens, over_both_max)
        numbers.append(len(batches))
        counts = {"sequences": 8, "tokens": tokens, "max_completion_length": 0}
        denominator = loss_denominator("dapo", **counts, micro_batches=dist.get_world_size())
        for number, rows in enumerate(batches):
            engine.set_gradient_accumulation_boundary(number == len(batches) - 1)
            logps, _ = per_token_logps_and_entropies(engine, ids[rows], mask[rows], mask[rows], padding_free=True)
            engine.backward(language_model_loss(logps, mask[rows], denominator).loss)
            engine.step()
        optimizer.zero_grad()
        for ids, mask in ranks_rows:
            logps, _ = plain_logps(plain, ids, mask, 1.0)
            (-logps.sum() / tokens).backward()
        optimizer.step()
    assert engine.global_steps == 3 and len(set(numbers)) == 3, "the number of backwards never changed"
    for name, parameter in engine.module.named_parameters():
        with deepspeed.zero.GatheredParameters([parameter] if stage == 3 else []):
            torch.testing.assert_close(parameter.data, plain.get_parameter(name).data, atol=2e-6, rtol=1e-5)


def over_both_max(values: torch.Tensor) -> torch.Tensor:
    """The maximum over the ranks."""
    values = values.clone()
    dist.all_reduce(values, op=dist.ReduceOp.MAX)
    return values


@pytest.mark.parametrize("stage", slow_but([3], [0, 2, 3]))
def test_token_budget_steps_match_sgd_on_the_whole_batch(ranks, stage):
    ranks.run(check_budget_steps, stage)
