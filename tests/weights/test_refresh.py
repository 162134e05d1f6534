"""A refresh under ZeRO-3: a group's weights are on their way while the group before is merged, and an error in between
leaves no transfer behind."""

import contextlib

import pytest
import torch
import torch.distributed as dist
from deepspeed import zero

from hybrid.models.model_info import ModelInfo
from hybrid.weights.gather import AsyncAllGather
from hybrid.weights.model_weights import read_weights
from hybrid.weights.snapshot import Snapshot
from tests.engines import engine_of, settings, train_step
from tests.tiny_models import tiny_model, with_peft

NO_PHASE = lambda name: contextlib.nullcontext()  # noqa: E731


def adapted_snapshot() -> tuple[object, Snapshot]:
    """An engine of four layers with LoRA, and a snapshot of it in groups of one layer."""
    model = with_peft(tiny_model("llama", num_hidden_layers=4))
    engine = engine_of(model, settings(3, stage3_param_persistence_threshold=0))
    return engine, Snapshot(read_weights(ModelInfo(engine.module), 1))


def require_merged(engine, snapshot: Snapshot) -> None:
    """Each adapted weight is base + scale · B A of the training weights, as PEFT computes the delta."""
    assert snapshot.adapted
    for adapted in snapshot.adapted:
        layer = adapted.wrapper
        with zero.GatheredParameters([*layer.parameters()]):
            expected = layer.base_layer.weight + layer.get_delta_weight("default")
            (actual,) = snapshot.parts[adapted, "weight"].values()
            torch.testing.assert_close(actual.data, expected.data, rtol=1e-6, atol=1e-6)


def check_order() -> None:
    """Of group n + 1 the transfers start before group n is merged, after what the merge reads is there."""
    engine, snapshot = adapted_snapshot()
    order, fetch, keep, wait = [], AsyncAllGather.__init__, Snapshot.keep_adapters, AsyncAllGather.wait
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(AsyncAllGather, "__init__", lambda self, *args: (order.append("start"), fetch(self, *args))[1])
        patch.setattr(AsyncAllGather, "wait", lambda self: (order.append("wait"), wait(self))[1])
        patch.setattr(Snapshot, "keep_adapters", lambda self, layer: (order.append("merge"), keep(self, layer))[1])
        snapshot.refresh(NO_PHASE, adapters=True)
    groups = order.count("start")
    steps = [name for index, name in enumerate(order) if name != "merge" or order[index - 1] != "merge"]
    with_layers = [index for index, name in enumerate(steps) if name == "merge"]
    assert groups >= 4 and len(with_layers) == 4, order
    for index in with_layers:
        started, waited = steps[:index].count("start"), steps[:index].count("wait")
        assert started == min(waited + 1, groups), order
    require_merged(engine, snapshot)


def test_the_next_group_is_gathered_while_one_is_merged(ranks):
    ranks.run(check_order)


def check_errors() -> None:
    """An error in a merge, on both ranks, comes when the next group is on its way."""
    engine, snapshot = adapted_snapshot()
    fetches, fetch = [], AsyncAllGather.__init__

    def failing(self, layer):
        raise RuntimeError("no memory")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(AsyncAllGather, "__init__", lambda self, *args: (fetches.append(self), fetch(self, *args))[1])
        patch.setattr(Snapshot, "keep_adapters", failing)
        with pytest.raises(RuntimeError, match="no memory"):
            snapshot.refresh(NO_PHASE, adapters=True)
    assert len(fetches) > 1 and not any(each.works for each in fetches), "transfers are still under way"
    dist.barrier()
    train_step(engine)
    snapshot.weights.version.steps += 1
    snapshot.refresh(NO_PHASE, adapters=True)
    require_merged(engine, snapshot)


def test_an_error_in_a_merge_leaves_no_transfer_behind(ranks):
    ranks.run(check_errors)
