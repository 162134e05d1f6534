"""The laws: training storage is read-only, snapshots carry versions, modes are exception-safe, no collective while
decoding."""

import contextlib
import gc
import itertools
import os
import weakref

import pytest
import torch
import torch.distributed as dist
from transformers import StoppingCriteria, StoppingCriteriaList

import hybrid
from tests.engines import LARGE, CollectiveCount, engine_of, settings, storage_digest, train_step
from tests.marks import slow_but
from tests.tiny_models import ADAPTERS, prompts, tiny_model, twin, with_peft


class Stop(RuntimeError):
    """Raised by a test in the middle of generation."""


class RaiseAt(StoppingCriteria):
    """Raises once the sequences have `length` tokens."""

    def __init__(self, length: int):
        self.length = length

    def __call__(self, input_ids, scores, **kwargs):
        if input_ids.shape[1] >= self.length:
            raise Stop
        return torch.zeros(len(input_ids), dtype=torch.bool)


def nudge_adapters(engine: hybrid.HybridEngine) -> None:
    """Change the adapters by hand, as a step would, without touching the base."""
    from deepspeed.runtime.zero import GatheredParameters

    factors = [p for name, p in engine.module.named_parameters() if "lora_" in name]
    with GatheredParameters(factors, modifier_rank=0, enabled=hasattr(factors[0], "ds_id")):
        for factor in factors:
            factor.data.add_(torch.randn_like(factor) * 0.01)
    engine.mark_weights_changed()


def base_digest(engine: hybrid.HybridEngine) -> str:
    """storage_digest of the frozen base alone."""

    class Base:
        module = engine.module

    names = {name: p for name, p in engine.module.named_parameters() if "lora_" not in name}
    Base.module = type("Frozen", (), {"named_parameters": lambda self: list(names.items())})()
    return storage_digest(Base)


def check_base_never_moves(stage: int, threshold: int, cycles: int) -> None:
    torch.manual_seed(0)
    engine = engine_of(with_peft(tiny_model("llama", num_hidden_layers=2)), settings(stage, threshold, torch.bfloat16))
    ids, mask = prompts(2, 5, padded=True, seed=dist.get_rank())
    before, everything = base_digest(engine), storage_digest(engine)
    outputs = set()
    for cycle in range(cycles):
        engine.eval()
        outputs.add(str(engine.generate(ids, attention_mask=mask, max_new_tokens=4).tolist()))
        engine.train()
        nudge_adapters(engine) if cycle % 20 else train_step(engine, cycle)
    assert len(outputs) > 1, "the changing adapter never changed what was generated"
    assert base_digest(engine) == before
    assert storage_digest(engine) != everything, "the adapters did not train"


@pytest.mark.parametrize(("threshold", "cycles"), slow_but([(0, 40)], [(0, 40), (0, 200), (LARGE, 60)]))
def test_base_weights_are_byte_identical_over_many_cycles(ranks, threshold, cycles):
    ranks.run(check_base_never_moves, 3, threshold, cycles)


@pytest.mark.parametrize("stage", slow_but([2], [0, 1, 2]))
def test_unpartitioned_base_weights_are_byte_identical_over_many_cycles(ranks, stage):
    ranks.run(check_base_never_moves, stage, 0, 40)


def check_exception(stage: int, adapter: str) -> None:
    """One rank raises during generation: both engines are restored, and train alike."""
    calm, hit = (engine_of(ADAPTERS[adapter](tiny_model("llama")), settings(stage)) for _ in range(2))
    rank = dist.get_rank()
    ids, mask = prompts(2, 5, padded=True, seed=rank)
    digest, training_hooks = storage_digest(hit), hook_table(hit)
    for eval_first in (False, True):
        hit.eval() if eval_first else hit.train()
        hooks = hook_table(hit)
        forwards = [module.__dict__.get("forward") for module in hit.module.modules()]
        criteria = StoppingCriteriaList([RaiseAt(8)] if rank == 1 else [])
        try:
            hit.generate(ids, attention_mask=mask, max_new_tokens=9, stopping_criteria=criteria)
            raised = False
        except Stop:
            raised = True
        assert raised == (rank == 1)
        with pytest.raises(Stop), hit.inference():
            raise Stop
        assert hit.module.training == (not eval_first)
        assert [module.__dict__.get("forward") for module in hit.module.modules()] == forwards
        assert hook_table(hit) == hooks
        assert storage_digest(hit) == digest
    hit.train()
    assert hook_table(hit) == training_hooks
    assert torch.equal(train_step(hit), train_step(calm))
    assert storage_digest(hit) == storage_digest(calm)
    # And it still generates.
    request = {"attention_mask": mask, "max_new_tokens": 5}
    assert torch.equal(hit.generate(ids, **request), calm.generate(ids, **request))


def hook_table(engine: hybrid.HybridEngine) -> list:
    """Every forward hook of every module, in order."""
    modules = engine.module.modules()
    return [(list(module._forward_pre_hooks), list(module._forward_hooks)) for module in modules]


@pytest.mark.parametrize("adapter", slow_but(["peft", "chat"], ADAPTERS))
@pytest.mark.parametrize("stage", slow_but([3], [0, 3]))
def test_an_exception_on_one_rank_restores_mode_forwards_and_hooks(ranks, stage, adapter):
    ranks.run(check_exception, stage, adapter)


def check_orders(stage: int, threshold: int, adapter: str) -> None:
    """eval() and train() in every order of length 4, generation in between: training is bitwise undisturbed."""
    make = lambda: engine_of(ADAPTERS[adapter](tiny_model("llama", num_hidden_layers=2)), settings(stage, threshold))  # noqa: E731
    plain, switched = make(), make()
    ids, mask = prompts(2, 5, padded=True, seed=dist.get_rank())
    for step, order in enumerate(itertools.product(("eval", "train"), repeat=4)):
        for mode in order:
            getattr(switched, mode)()
            assert switched.module.training == (mode == "train")
            switched.generate(ids, attention_mask=mask, max_new_tokens=2)
            assert switched.module.training == (mode == "train")
        switched.train()
        assert not any("forward" in module.__dict__ for module in switched.module.modules())
        losses = [train_step(engine, step) for engine in (plain, switched)]
        assert torch.equal(*losses), (order, losses)
        assert storage_digest(plain) == storage_digest(switched), order


@pytest.mark.parametrize(
    ("stage", "threshold", "adapter"),
    slow_but(
        [(2, 0, "chat"), (3, 0, "peft")],
        [(*stage, adapter) for stage in ((0, 0), (1, 0), (2, 0), (3, 0), (3, LARGE)) for adapter in ADAPTERS],
    ),
)
def test_training_is_bit_identical_for_every_order_of_modes(ranks, stage, threshold, adapter):
    ranks.run(check_orders, stage, threshold, adapter)


def gradients(engine: hybrid.HybridEngine, seed: int) -> list[torch.Tensor]:
    """Every gradient of one backward on this rank's random tokens, whole."""
    from deepspeed.utils import safe_get_full_grad

    ids = prompts(2, 9, padded=False, seed=seed * 10 + dist.get_rank())[0]
    engine.backward(engine(input_ids=ids, labels=ids).loss)
    grads = [safe_get_full_grad(parameter) for parameter in engine.module.parameters() if parameter.requires_grad]
    engine.step()
    return grads


def check_gradients(stage: int) -> None:
    shape = {"num_hidden_layers": 2, "attention_dropout": 0.2}
    plain, switched = (engine_of(tiny_model("llama", **shape), settings(stage)) for _ in range(2))
    ids, mask = prompts(2, 5, padded=True, seed=dist.get_rank())
    for step in range(3):
        torch.manual_seed(step)  # dropout's generator; the rollouts below must not draw from it
        switched.eval()
        switched.generate(ids, attention_mask=mask, max_new_tokens=3)
        switched.rollout(ids, mask, hybrid.SamplingParams(max_new_tokens=3, seed=4))
        switched.train()
        actual = gradients(switched, step)
        torch.manual_seed(step)
        expected = gradients(plain, step)
        assert len(actual) > 10
        assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))


@pytest.mark.parametrize("stage", slow_but([3], [0, 1, 2, 3]))
def test_gradients_are_bit_identical_to_an_engine_always_in_train_mode(ranks, stage):
    ranks.run(check_gradients, stage)


def check_undisturbed(stage: int, containers: str, blocks: dict) -> None:
    """With dropout and no seeding between the steps, as trainers run: rollouts draw from no global generator."""
    shape = {"num_hidden_layers": 2, "attention_dropout": 0.3}
    device_draws = []
    states = []
    for rolls_out in (False, True):
        engine = engine_of(
            with_peft(tiny_model("llama", **shape), lora_dropout=0.4),
            settings(stage, rollout={"containers": containers}, **blocks),
        )
        ids, mask = prompts(2, 5, padded=True, seed=dist.get_rank())
        torch.manual_seed(11 + dist.get_rank())
        losses, rng_states, tokens = [], [], []
        with mock_device_generator(device_draws):
            for step in range(3):
                if rolls_out:
                    before = torch.get_rng_state()
                    request = {"do_sample": True, "max_new_tokens": 4, "top_k": 0, "min_new_tokens": 4}
                    tokens.append(engine.generate(ids, attention_mask=mask, **request))
                    engine.generate(ids, attention_mask=mask, repetition_penalty=1.3, **request)
                    with engine.inference():
                        batch = engine.rollout(ids, mask, hybrid.SamplingParams(max_new_tokens=4), num_generations=2)
                        engine.score(batch.sequences, batch.attention_mask)
                        engine.score(batch.sequences, batch.attention_mask, adapters=False)
                    assert torch.equal(torch.get_rng_state(), before)
                losses.append(train_step(engine, step))
                rng_states.append(torch.get_rng_state())
        assert not torch.equal(rng_states[0], rng_states[1]), "dropout drew nothing: the test is vacuous"
        states.append((losses, rng_states, storage_digest(engine)))
    assert not torch.equal(tokens[0], tokens[1]), "unseeded calls draw the same tokens"
    assert device_draws == []
    (losses, rng_states, digest), (other_losses, other_rng_states, other_digest) = states
    assert all(torch.equal(*pair) for pair in zip(losses + rng_states, other_losses + other_rng_states, strict=True))
    assert digest == other_digest


@contextlib.contextmanager
def mock_device_generator(draws: list):
    """Stands in for a device that this machine may lack: records every draw without an explicit generator."""

    class Watch(torch.overrides.TorchFunctionMode):
        NAMES = ("rand", "randn", "randint", "multinomial", "bernoulli", "randperm", "normal", "rand_like")

        def __torch_function__(self, function, types, args=(), kwargs=None):
            kwargs = kwargs or {}
            if getattr(function, "__name__", "") in self.NAMES and kwargs.get("generator") is None:
                draws.append(function.__name__)
            return function(*args, **kwargs)

    with Watch():
        yield


@pytest.mark.parametrize(
    ("stage", "containers", "blocks"),
    slow_but(
        [(3, "native", {}), (3, "fused", {"hybrid_engine": {"inference_tp_size": 2}})],
        [
            (0, "fused", {}),
            (3, "fused", {}),
            (0, "native", {}),
            (3, "native", {}),
            (3, "fused", {"hybrid_engine": {"inference_tp_size": 2}}),
            (3, "fused", {"hybrid_engine": {"pin_parameters": False}}),
        ],
    ),
)
def test_training_with_dropout_is_bit_identical_with_and_without_rollouts(ranks, stage, containers, blocks):
    ranks.run(check_undisturbed, stage, containers, blocks)


def check_versions(stage: int, threshold: int, folder: str) -> None:
    engine = engine_of(tiny_model("llama"), settings(stage, threshold))
    ids, mask = prompts(2, 5, padded=False, seed=dist.get_rank())
    request = {"attention_mask": mask, "max_new_tokens": 8}

    def equals_the_weights() -> bool:
        """Whether generation is what Hugging Face makes of the weights as they are now, read by DeepSpeed."""
        from deepspeed.runtime.zero import GatheredParameters

        reference = tiny_model("llama").eval()
        own = list(engine.module.parameters())
        with torch.no_grad(), GatheredParameters(own, enabled=stage == 3):
            for copy, parameter in zip(reference.parameters(), own, strict=True):
                copy.copy_(parameter)
        return torch.equal(engine.generate(ids, **request), reference.generate(ids, **request))

    versions = [engine.weight_version]
    first = engine.generate(ids, **request)
    assert equals_the_weights()
    engine.save_checkpoint(folder, tag="start")
    for step in range(3):
        train_step(engine, step)
        versions.append(engine.weight_version)
        assert equals_the_weights()
    assert not torch.equal(engine.generate(ids, **request), first)
    engine.load_checkpoint(folder, tag="start")
    versions.append(engine.weight_version)
    assert equals_the_weights()
    assert torch.equal(engine.generate(ids, **request), first)
    assert versions == sorted(set(versions)), versions


@pytest.mark.parametrize(
    ("stage", "threshold"), slow_but([(2, 0), (3, 0)], [(0, 0), (1, 0), (2, 0), (3, 0), (3, LARGE)])
)
def test_the_next_generate_uses_changed_weights(ranks, stage, threshold, tmp_path):
    ranks.run(check_versions, stage, threshold, str(tmp_path))


def check_accumulation() -> None:
    """A step that applies nothing, inside gradient accumulation, does not make the snapshot stale."""
    engine = engine_of(tiny_model("llama"), settings(3, gradient_accumulation_steps=2))
    ids, mask = prompts(2, 5, padded=False)
    engine.generate(ids, attention_mask=mask, max_new_tokens=2)
    version = engine.weight_version
    train_step(engine)
    assert engine.weight_version == version
    train_step(engine)
    assert engine.weight_version == version + 1


def test_only_an_applied_step_makes_a_new_weight_version(ranks):
    ranks.run(check_accumulation)


ROOM = {"memory_limit": 2**40}  # for the base and the merged weights; without it see test_one_copy.py


def check_collectives(adapter: str, stage: int) -> None:
    engine = engine_of(ADAPTERS[adapter](tiny_model("llama")), settings(stage, rollout=ROOM))
    rank = dist.get_rank()
    ids, mask = prompts(2 + rank, 5 + rank, padded=True, seed=rank)
    request = {"attention_mask": mask, "max_new_tokens": 4 + 3 * rank}
    with CollectiveCount() as first:
        engine.generate(ids, **request)
    with CollectiveCount() as second:
        engine.generate(ids, **request)
        with engine.inference():
            batch = engine.rollout(ids, mask, hybrid.SamplingParams(max_new_tokens=3 + rank), num_generations=2)
            engine.score(batch.sequences, batch.attention_mask)
            engine.score(batch.sequences, batch.attention_mask, adapters=False)
        engine.eval()
        engine.generate(ids, **request)
        engine(ids, attention_mask=mask)
        engine.module(input_ids=ids, attention_mask=mask)
        engine.train()
    assert (first.count > 0) == (stage == 3)
    assert second.count == 0
    train_step(engine)
    with CollectiveCount() as after_step:
        engine.generate(ids, **request)
    assert (after_step.count > 0) == (stage == 3)
    if adapter != "none" and stage == 3:  # the frozen base is not gathered again, only the adapters
        assert engine.stats()["gathered_bytes"] > 0
        assert after_step.count < first.count or adapter == "chat"


@pytest.mark.parametrize("stage", slow_but([3], [0, 3]))
@pytest.mark.parametrize("adapter", slow_but(["peft", "chat"], ADAPTERS))
def test_weights_are_gathered_once_per_version(ranks, adapter, stage):
    ranks.run(check_collectives, adapter, stage)


def check_frozen_weights_stay() -> None:
    engine = engine_of(with_peft(tiny_model("llama")), settings(3, rollout=ROOM))
    ids, mask = prompts(2, 5, padded=False)
    engine.eval()
    engine.generate(ids, attention_mask=mask, max_new_tokens=2)
    everything = engine.stats()["gathered_bytes"]
    engine.train()
    train_step(engine)
    engine.eval()
    engine.generate(ids, attention_mask=mask, max_new_tokens=2)
    adapters = sum(p.ds_numel * 4 for name, p in engine.module.named_parameters() if "lora_" in name)
    total = sum(p.ds_numel * 4 for p in engine.module.parameters())
    assert everything == total
    assert engine.stats()["gathered_bytes"] == adapters < total / 2


def test_lora_training_gathers_only_adapters_again(ranks):
    ranks.run(check_frozen_weights_stay)


def check_groups() -> None:
    """No more than one group of layers is gathered at a time."""
    from hybrid.weights import gather, snapshot

    model = tiny_model("llama", num_hidden_layers=5)
    engine = engine_of(model, settings(3, hybrid_engine={"tp_gather_partition_size": 2}))
    layer = [sum(p.ds_numel for p in block.parameters()) for block in model.model.layers]
    outer = [model.model.embed_tokens.weight.ds_numel + model.model.norm.weight.ds_numel, model.lm_head.weight.ds_numel]
    sizes = []

    def watched(storage):
        sizes.append(sum(p.ds_numel for p in storage))
        return gather.AsyncAllGather(storage)

    snapshot.AsyncAllGather = watched
    try:
        engine.generate(torch.tensor([[3, 4]]), max_new_tokens=1)
    finally:
        snapshot.AsyncAllGather = gather.AsyncAllGather
    assert sizes == [*outer, 2 * layer[0], 2 * layer[0], layer[0]]


def test_weights_are_gathered_in_groups_of_layers(ranks):
    ranks.run(check_groups)


def check_two_engines() -> None:
    """Two engines in one process share no state."""
    models = [tiny_model("llama", seed=0), with_peft(tiny_model("gpt2", seed=1))]
    references = [twin(model) for model in models]
    engines = [engine_of(model, settings(3)) for model in models]
    ids, mask = prompts(2, 5, padded=True, seed=dist.get_rank())
    request = {"attention_mask": mask, "max_new_tokens": 5}
    with engines[0].inference():
        for _ in range(2):
            for engine, reference in zip(engines, references, strict=True):
                assert torch.equal(engine.generate(ids, **request), reference.generate(ids, **request))
        train_step(engines[1])
    assert engines[0].weight_version == 0
    assert engines[1].weight_version == 1
    assert torch.equal(engines[0].generate(ids, **request), references[0].generate(ids, **request))


def test_two_engines_in_one_process_are_independent(ranks):
    ranks.run(check_two_engines)


def check_user_hooks_stay() -> None:
    """A user's own hooks run during generation; ZeRO's do not, and come back in their order."""
    engine = engine_of(tiny_model("llama"), settings(3))
    seen = []
    handle = engine.module.model.layers[0].register_forward_hook(lambda *args: seen.append("user"))
    table = hook_table(engine)
    engine.generate(torch.tensor([[3, 4, 5]]), max_new_tokens=4)
    assert len(seen) == 4
    assert hook_table(engine) == table
    with engine.inference():
        handle.remove()
    assert handle.id not in engine.module.model.layers[0]._forward_hooks
    train_step(engine)


def test_user_hooks_run_during_generation_and_stay(ranks):
    ranks.run(check_user_hooks_stay)


def check_freed(adapter: str, stage: int, blocks: dict) -> None:
    engine = engine_of(ADAPTERS[adapter](tiny_model("llama")), settings(stage, **blocks))
    ids, mask = prompts(2, 5, padded=True, seed=dist.get_rank())
    for _ in range(2):
        engine.generate(ids, attention_mask=mask, max_new_tokens=4)
        train_step(engine)
    objects = {"engine": engine, "model": engine.module, "optimizer": engine.optimizer}
    objects["parameter"] = next(engine.module.parameters())
    references = {name: weakref.ref(obj) for name, obj in objects.items()}
    engine.destroy()
    del engine, objects
    gc.collect()
    assert [name for name, reference in references.items() if reference() is not None] == []


@pytest.mark.parametrize(
    ("adapter", "stage", "blocks"),
    slow_but(
        [("chat", 3, {"rollout": {"lora": "unmerged"}}), ("none", 3, {"hybrid_engine": {"inference_tp_size": 2}})],
        [
            ("none", 0, {}),
            ("none", 2, {}),
            ("none", 3, {}),
            ("peft", 3, {}),
            ("chat", 3, {"rollout": {"lora": "unmerged"}}),
            ("none", 3, {"hybrid_engine": {"pin_parameters": False}}),
            ("none", 3, {"hybrid_engine": {"inference_tp_size": 2}}),
            ("none", 2, {"rollout": {"offload_states": True}}),
        ],
    ),
)
def test_a_destroyed_engine_frees_its_memory(ranks, adapter, stage, blocks):
    ranks.run(check_freed, adapter, stage, blocks)


def check_ended(stage: int) -> None:
    """Calls of a destroyed engine say so, and its process groups' file descriptors are closed."""
    ids, mask = prompts(2, 5, padded=True)
    sampling = hybrid.SamplingParams(max_new_tokens=3)
    counts = []
    for _ in range(3):  # the first one opens what stays open
        engine = engine_of(tiny_model("llama"), settings(stage, hybrid_engine={"inference_tp_size": 2}))
        engine.rollout(ids, mask, sampling)
        engine.destroy()
        engine.destroy()
        for call in (
            lambda engine=engine: engine.rollout(ids, mask, sampling),
            lambda engine=engine: list(engine.rollout_iter(ids, mask, sampling)),
            lambda engine=engine: engine.generate(ids, attention_mask=mask),
            lambda engine=engine: engine.score(ids, mask),
            lambda engine=engine: engine(ids),
            engine.step,
            engine.eval,
        ):
            with pytest.raises(RuntimeError, match=r"destroy\(\) has ended this engine"):
                call()
        del engine, call
        gc.collect()
        dist.barrier()  # the other rank has closed its ends
        counts.append(len(os.listdir("/proc/self/fd")))
    assert counts[2] == counts[1], counts


@pytest.mark.parametrize("stage", [0, 3])
def test_a_destroyed_engine_refuses_calls_and_closes_its_groups(ranks, stage):
    ranks.run(check_ended, stage)
