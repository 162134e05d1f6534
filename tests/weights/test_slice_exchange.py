"""Where ranks share no memory, each receives its slices of partitioned weights only, bit-identical to slices of the
whole weights; temporaries are as planned."""

import contextlib
import random

import deepspeed
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from hybrid.models.model_info import ModelInfo
from hybrid.models.reader import read_decoder
from hybrid.models.spec import ParamRef
from hybrid.runtime.parallel import all_gather_objects
from hybrid.weights.gather import AsyncAllGather, missing
from hybrid.weights.joined import joined_refs
from hybrid.weights.model_weights import read_weights
from hybrid.weights.slice_exchange import ContiguousRanges, layout_of, runs_of
from hybrid.weights.slices import Shard, Slice, SliceSpec, planned_slices, slices_of
from hybrid.weights.snapshot import Snapshot
from tests.engines import LARGE, engine_of, settings, storage_digest, train_step
from tests.rank_pool import pool_of
from tests.tiny_models import SIZES, tiny_model, twin
from tests.training.test_memory_modes import LiveBytes
from tests.training.test_tensor_parallel import check_family

# ------------------------------------------------------------ arithmetic


def random_slice(rng: random.Random) -> tuple[Slice, torch.Size]:
    """A rank's slice of a parameter, of random kind and sizes; perhaps of some columns or rows, or transposed."""
    heads, width, size = rng.choice([1, 2, 4]), rng.randint(1, 4), rng.choice([1, 2, 3, 4])
    shape = [2 * heads * width, rng.randint(1, 9)][: rng.choice([1, 2, 2])]
    selects = [
        None,
        None,
        lambda tensor: tensor.T if tensor.dim() == 2 else tensor,
        lambda tensor: tensor[len(tensor) // 2 :],
    ]
    kinds = ["rows", "columns", "once", "whole", "halves"]
    if rng.random() < 0.3:
        shape, selects = [rng.randint(1, 4), 2 * width, rng.randint(1, 9)], [None]
    elif size % heads == 0 or heads % size == 0:
        kinds, selects = [*kinds, "kv"], selects[:2] if len(shape) == 1 else selects
    kind = rng.choice(kinds)
    select = rng.choice(selects) if kind not in ("kv", "halves") else None
    cut = None if kind == "whole" else SliceSpec(kind, Shard(size, rng.randrange(size)), heads)
    return Slice(ParamRef(nn.Module(), "weight", select), (), cut), torch.Size(shape)


def copied(all_runs: list[ContiguousRanges], whole: torch.Tensor, part: torch.Tensor, shard_numel: int) -> torch.Tensor:
    """`part`, filled from the shards of `whole`."""
    for first in range(0, whole.numel(), shard_numel):
        shard = whole.view(-1)[first : first + shard_numel].clone()
        for runs in all_runs:
            pieces = runs.within(first, first + shard_numel)
            assert len(pieces) <= 3
            for piece in pieces:
                piece.of_slice(part).copy_(piece.of_shard(shard, first))
    return part


def test_runs_of_shards_make_up_every_slice():
    """Against the slice of a tensor of element numbers, for random shapes, cuts and shards."""
    rng, kinds = random.Random(0), set()
    for _ in range(3000):
        part, shape = random_slice(rng)
        whole = torch.arange(1, shape.numel() + 1).view(shape)  # 0 is padding
        expected, runs = part.of(whole), runs_of(part, shape)
        kinds.add((part.cut and part.cut.kind, len(shape), part.ref.select is None))
        if expected is None:
            assert runs == []
            continue
        actual = copied(
            runs, whole, torch.zeros_like(expected, memory_format=torch.contiguous_format), rng.randint(1, 40)
        )
        assert torch.equal(actual, expected), (part, shape)
        assert sum(run.numel for run in runs) == expected.count_nonzero()
    assert len(kinds) >= 20


def test_a_large_weight_has_few_runs():
    for kind in ("rows", "columns"):
        part = Slice(ParamRef(nn.Module(), "weight"), (), SliceSpec(kind, Shard(8, 3)))
        (runs,) = runs_of(part, torch.Size([8192, 28672]))
        assert runs.numel == 8192 * 28672 // 8
        assert len(runs.within(10**7, 2 * 10**7)) <= 3


def test_rows_interleaved_by_head_have_no_layout():
    """Fused q, k, v as in GPT-NeoX are gathered whole; those of GPT-2 lie in runs."""
    for family, supported in (("gpt_neox", False), ("bloom", False), ("gpt2", True), ("phi3", True)):
        layout = read_decoder(tiny_model(family))
        ref = layout.layers[0]["q.weight"]
        part = slices_of(layout, Shard(2, 0))[ref]
        assert (layout_of(ref.module._parameters[ref.parameter].shape, [part], 2) is not None) == supported, family


# ----------------------------------------------------------------- ranks


@contextlib.contextmanager
def separate_hosts():
    """Inside the block ranks share no memory."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("hybrid.kernels.host_memory.host_key", lambda: None)
        yield


class Received:
    """Inside the block counts the bytes that other ranks send this one, and records what is gathered whole."""

    def __enter__(self) -> "Received":
        self.nbytes, self.collectives, self.whole = 0, 0, []
        self.patch = pytest.MonkeyPatch()
        exchange, receive = dist.all_to_all_single, dist.irecv

        def all_to_all(output, sending, sizes, *args, group, **more):
            self.collectives += 1
            self.nbytes += (output.numel() - sizes[dist.get_rank(group)]) * output.element_size()
            return exchange(output, sending, sizes, *args, group=group, **more)

        def irecv(tensor, **more):
            self.nbytes += tensor.nbytes
            return receive(tensor, **more)

        def fetch(storage, *args):
            self.whole += storage
            return AsyncAllGather(storage, *args)

        self.patch.setattr(dist, "all_to_all_single", all_to_all)
        self.patch.setattr(dist, "irecv", irecv)
        self.patch.setattr("hybrid.weights.snapshot.AsyncAllGather", fetch)
        return self

    def __exit__(self, *exc) -> None:
        self.patch.undo()


def snapshot_of(model: nn.Module, size: int, own_modules: bool = False) -> Snapshot:
    """A snapshot of this rank's slices: for a decoder on a GPU, or for the model's own modules."""
    info, shard = ModelInfo(model), Shard(size, dist.get_rank() % size)
    weights = read_weights(info, layers_per_group=2)
    if own_modules:
        return Snapshot(weights, planned_slices(info.tp_plan, shard))
    return Snapshot(weights, slices_of(info.layout, shard), decoder_only=True, joined=joined_refs(info.layout))


def refreshed(snapshot: Snapshot) -> Received:
    """What a refresh received."""
    with Received() as received:
        received.gathered = snapshot.refresh(lambda name: contextlib.nullcontext(), adapters=True)
    return received


def kept_tensors(snapshot: Snapshot) -> list[torch.Tensor]:
    """All slices that a snapshot holds."""
    return [part for parts in snapshot.parts.values() for part in parts.values() if part is not None]


def require_slices(snapshot: Snapshot, reference: nn.Module) -> None:
    """Every slice equals that of the reference's whole parameter, bit for bit."""
    whole = dict(reference.named_parameters())
    for name, param in snapshot.weights.info.model.named_parameters():
        for part in snapshot.kept.get(param, ()):
            expected, actual = part.of(whole[name]), snapshot.parts[param][part.key]
            assert (expected is None) == (actual is None), name
            assert expected is None or torch.equal(actual, expected), (name, part.key)


# Family, and what differs from its tiny model. The vocabulary of 97 is uneven in all.
CASES = {
    "llama": ("llama", {}),
    "tied": ("llama", {"tie_word_embeddings": True}),
    "one kv head": ("llama", {"num_key_value_heads": 1}),
    "uneven": ("llama", {"intermediate_size": 49, "attention_bias": True, "mlp_bias": True}),
    "qwen3": ("qwen3", {}),
    "experts": ("mixtral", {}),
    "uneven experts": ("mixtral", {"intermediate_size": 47}),
    "gpt2": ("gpt2", {}),
    "phi3": ("phi3", {}),
    "bloom": ("bloom", {}),
    "modules": ("starcoder2", {"sizes": SIZES}),
    "modules with experts": ("olmoe", {"sizes": {**SIZES, "num_experts": 4, "num_experts_per_tok": 2}}),
}
GATHERED_WHOLE = {  # name endings; weights that every rank keeps whole, but for bloom's fused q, k and v
    "experts": ["mlp.gate.weight"],
    "uneven experts": ["mlp.gate.weight"],
    "gpt2": ["wpe.weight"],
    "bloom": ["query_key_value.weight", "query_key_value.bias"],
    "modules with experts": ["mlp.gate.weight"],
}


def check_slices(case: str, sizes: list[int], dtype: torch.dtype = torch.float32, **zero: int) -> None:
    family, changes = CASES[case]
    model = tiny_model(family, dtype=dtype, **changes)
    reference = twin(model)
    config = settings(3, dtype=dtype)
    config["zero_optimization"] |= zero
    engine = engine_of(model, config)
    before = storage_digest(engine)
    for size in sizes:
        with separate_hosts():
            snapshot = snapshot_of(engine.module, size, case.startswith("modules"))
            received = refreshed(snapshot)
        require_slices(snapshot, reference)
        assert received.collectives == len(snapshot.weights.groups), case
        whole = {name for name, param in engine.module.named_parameters() if param in {*received.whole}}
        endings = tuple(GATHERED_WHOLE.get(case, ()))
        assert whole == {name for name, _ in reference.named_parameters() if name.endswith(endings or ("-",))}, case
    assert storage_digest(engine) == before
    engine.destroy()


@pytest.mark.parametrize("case", CASES)
def test_slices_are_those_of_whole_weights(ranks, case):
    ranks.run(check_slices, case, [2])


@pytest.mark.parametrize("case", ["llama", "experts"])
def test_slices_in_bfloat16(ranks, case):
    ranks.run(check_slices, case, [2], torch.bfloat16)


four_ranks = pool_of(4)


@pytest.mark.parametrize("case", ["uneven", "tied", "experts", "bloom", "modules"])
def test_slices_at_four_ranks(four_ranks, case):
    """In groups of two, and in one of four, which share two kv heads."""
    four_ranks.run(check_slices, case, [2, 4])


def test_slices_with_hpz(four_ranks):
    four_ranks.run(check_slices, "llama", [2], zero_hpz_partition_size=2)


def check_bytes(size: int) -> None:
    """A rank receives, sends and holds 1/size of the weights, besides what every rank keeps; as planned."""
    changes = {"hidden_size": 64, "intermediate_size": 160, "num_key_value_heads": 4, "head_dim": 16}
    engine = engine_of(tiny_model("llama", **changes), settings(3))
    with separate_hosts():
        by_slices, by_whole = (snapshot_of(engine.module, size) for _ in range(2))
        received = refreshed(by_slices)
        by_whole._exchangeable = lambda params: {}
        before = refreshed(by_whole)
        # The ranks' own parts included, which they do not send themselves: of rows at `size` ranks nearly all.
        assert 1 / size <= received.gathered / before.gathered < 1 / size + 0.02
        sent, sent_before = (sum(all_gather_objects(way.nbytes)) for way in (received, before))
        assert sent / sent_before < 1 / size + 0.02, (sent, sent_before)
        for snapshot, way in ((by_whole, "whole"), (by_slices, "slices")):
            snapshot.stamps.clear()
            snapshot.fresh.clear()
            snapshot.peak_bytes = 0
            with torch.no_grad(), LiveBytes(engine.module) as live:
                live.before |= {StorageWeakRef(part.untyped_storage()) for part in kept_tensors(snapshot)}
                snapshot.refresh(lambda name: contextlib.nullcontext(), adapters=True)
            temporary = snapshot.planned()[1]
            assert 0.9 * live.peak <= temporary <= 1.1 * live.peak, (way, temporary, live.peak)
            assert snapshot.peak_bytes == snapshot.nbytes() + temporary
    planned = [snapshot.planned()[1] for snapshot in (by_whole, by_slices)]  # ranks may share memory: the larger way
    assert planned[0] <= planned[1]
    engine.destroy()


@pytest.mark.parametrize("size", [2, 4])
def test_a_rank_receives_its_slices_only(four_ranks, size):
    four_ranks.run(check_bytes, size)


def check_refreshes() -> None:
    """After a step the new weights are exchanged, into the same memory; persistent weights are not exchanged."""
    for threshold in (0, 50, LARGE):
        engine = engine_of(tiny_model("llama"), settings(3, threshold))
        params = list(engine.module.parameters())
        with separate_hosts():
            snapshot = snapshot_of(engine.module, 2)
            refreshed(snapshot)
            addresses = [part.data_ptr() for part in kept_tensors(snapshot)]
            train_step(engine)
            snapshot.weights.version.steps += 1
            exchanged = {*missing(params)}
            assert {*refreshed(snapshot).whole} == {*params} - exchanged
        assert addresses == [part.data_ptr() for part in kept_tensors(snapshot)]
        with deepspeed.zero.GatheredParameters(list(exchanged), enabled=bool(exchanged)):
            require_slices(snapshot, engine.module)
        engine.destroy()


def test_refreshes_follow_the_weights(ranks):
    ranks.run(check_refreshes)


def check_tokens() -> None:
    with separate_hosts():
        for family, adapter in (("llama", "none"), ("llama", "peft"), ("gpt2", "peft"), ("mixtral", "none")):
            check_family(family, adapter, 2)


def test_ranks_of_several_hosts_match_hugging_face(ranks):
    ranks.run(check_tokens)
