"""Frozen models that sleep: their weights leave the device; afterwards they compute what they did before."""

from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.multiprocessing.reductions import StorageWeakRef

import hybrid
from hybrid.kernels.cuda_graph import GraphedForward
from tests.inference.test_deepspeed_experts import COUNT, replicated_model, require_same_outputs, sharded_model
from tests.inference.test_graphs import Capture
from tests.marks import slow_but
from tests.tiny_models import SIZES, prompts, tiny_model, tiny_non_decoder, twin, with_peft

ASLEEP = r"while the engine sleeps at level {}.*call engine\.wake\(\) first"
REQUEST = {"max_new_tokens": 5, "do_sample": True, "seed": 3}


def engine_of(model: torch.nn.Module, **settings) -> hybrid.InferenceEngine:
    return hybrid.init_inference(model, **{"dtype": torch.float32, "kernel_inject": True, **settings})


def outputs(engine: hybrid.InferenceEngine) -> list[torch.Tensor]:
    """Logits and sampled tokens; the ranks of a group have the same prompts."""
    ids, mask = prompts(3, 7, padded=True)
    logits = hybrid.padded_forward(engine.module, engine)(ids, mask).logits
    return [logits[mask.bool()], engine.generate(ids, attention_mask=mask, **REQUEST)]


def weights_of(engine: hybrid.InferenceEngine) -> list[torch.Tensor]:
    """The model's own weights, or a rank's slices of them."""
    slices = [part for parts in engine._snapshot.parts.values() for part in parts.values() if part is not None]
    held = [*engine.module.parameters(), *engine.module.buffers(), *slices]
    return [tensor for tensor in held if tensor.numel()]


def require_sleep(engine: hybrid.InferenceEngine) -> None:
    """Results after each level equal those before, and at level 2 every weight's memory was freed."""
    expected = outputs(engine)
    for level in (1, 2, 2):
        content = [weight.clone() for weight in weights_of(engine)] if level == 2 else []
        memory = [StorageWeakRef(weight.untyped_storage()) for weight in weights_of(engine)]
        engine.sleep(level)
        assert engine.asleep == level and engine._generator.kv_bytes() == 0
        if level == 2:
            assert len(memory) > 3 and all(ref.expired() for ref in memory)
            assert all(map(torch.equal, weights_of(engine), content))
            with pytest.raises(RuntimeError, match=ASLEEP.format(2)):
                engine.coverage()
        ids = prompts(3, 7, padded=False)[0]
        for call in (engine, engine.generate, engine.module, engine.module.generate):
            with pytest.raises(RuntimeError, match=ASLEEP.format(level)):
                call(ids)
        engine.sleep(1)
        assert engine.asleep == level
        for _ in range(2):
            engine.wake()
            assert engine.asleep == 0
        assert all(map(torch.equal, outputs(engine), expected))
    engine.destroy()


ALONE = {
    "fused": lambda: engine_of(tiny_model("llama")),
    "native": lambda: engine_of(tiny_model("llama"), kernel_inject=False),
    "bfloat16": lambda: engine_of(tiny_model("gpt2"), dtype=torch.bfloat16),
    "int8": lambda: engine_of(tiny_model("llama", hidden_size=64), dtype=torch.int8),
    "adapters": lambda: engine_of(with_peft(tiny_model("llama"))),
    "tied weights": lambda: engine_of(tiny_model("llama", tie_word_embeddings=True)),
}


@pytest.mark.parametrize("name", ALONE)
def test_results_are_the_same_after_sleep(name):
    require_sleep(ALONE[name]())


def check_shared(name: str) -> None:
    settings = {"tp": {"tp_size": 2}}
    if name == "fused slices":
        require_sleep(engine_of(tiny_model("llama"), **settings))
    elif name == "sliced modules":
        require_sleep(engine_of(tiny_model("starcoder2", sizes=SIZES), **settings))
    else:
        reference = replicated_model()
        moe = {"ep_size": 2, "moe_experts": [COUNT], "type": "standard"}
        engine = hybrid.init_inference(sharded_model(reference), dtype=torch.float32, moe=moe)
        engine.sleep(2)
        engine.wake()
        require_same_outputs(engine, reference)


@pytest.mark.parametrize("name", slow_but(["fused slices"], ["fused slices", "sliced modules", "experts"]))
def test_ranks_that_share_weights_sleep_together(ranks, name):
    ranks.run(check_shared, name)


def check_one_rank() -> None:
    """Ranks that do not share weights sleep each for itself; those that do must make the same calls."""
    alone, rank = engine_of(tiny_model("llama")), dist.get_rank()
    expected = outputs(alone)
    if rank == 0:
        alone.sleep(2)
        alone.wake()
    assert all(map(torch.equal, outputs(alone), expected))
    shared = engine_of(tiny_model("llama"), tp={"tp_size": 2})
    with pytest.raises(RuntimeError, match=r"rank 0 calls sleep\(1\); rank 1 calls sleep\(2\)"):
        shared.sleep(1 + rank)
    assert shared.asleep == 0
    outputs(shared)


def test_which_ranks_must_call_it(ranks):
    ranks.run(check_one_rank)


def test_a_wrong_level_and_a_sleep_inside_a_request_raise():
    engine = engine_of(tiny_model("llama"), kernel_inject=False)
    with pytest.raises(ValueError, match=r"sleep: level=3 given; it must be 1 or 2"):
        engine.sleep(3)
    handle = engine.module.lm_head.register_forward_hook(lambda *_: engine.sleep())
    with pytest.raises(RuntimeError, match=r"sleep\(1\) inside a request, by a hook or a streamer"):
        outputs(engine)
    handle.remove()
    outputs(engine)
    assert engine.asleep == 0


def test_graphs_are_dropped_and_captured_again():
    engine = engine_of(tiny_non_decoder("bert"), kernel_inject=False)
    ids, mask = prompts(3, 7, padded=True)
    expected = engine(ids, attention_mask=mask).logits
    captures: list[Capture] = []

    def graphed(module: torch.nn.Module) -> GraphedForward:
        captures.append(Capture())
        return GraphedForward(module, capture=captures[-1])

    engine._graphs = graphed(engine.module)
    with mock.patch("hybrid.inference.engine.GraphedForward", graphed):
        for _ in range(2):
            assert torch.equal(engine(ids, attention_mask=mask).logits, expected)
        engine.sleep()
        assert not engine.cuda_graph_created
        with pytest.raises(RuntimeError, match=ASLEEP.format(1)):
            engine(ids, attention_mask=mask)
        engine.wake()
        assert torch.equal(engine(ids, attention_mask=mask).logits, expected)
    assert [capture.captured for capture in captures] == [1, 1]


def test_a_sleeping_engine_can_be_destroyed():
    model = tiny_model("llama")
    reference, engine = twin(model), engine_of(model)
    engine.sleep(2)
    engine.destroy()
    ids, mask = prompts(3, 7, padded=True)
    with torch.no_grad():
        assert torch.equal(model(ids, attention_mask=mask).logits, reference(ids, attention_mask=mask).logits)
