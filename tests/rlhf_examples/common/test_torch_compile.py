"""`--torch_compile`: the engines of `rlhf_examples` have compiled layers. What these compute: tests/training."""

from functools import partial

import pytest
import torch
from transformers import AutoModelForSequenceClassification

from rlhf_examples.common.arguments import SFTArguments
from rlhf_examples.common.engines import Training, layer_classes, make_engine
from rlhf_examples.common.forwards import token_values
from rlhf_examples.common.models import LoRA, ValueModel
from rlhf_examples.common.parsing import arguments_of
from tests.marks import slow_but
from tests.rlhf_examples.common.test_optimizers import trained_by_engine
from tests.tiny_models import tiny_model, with_peft


def engine_of(model: torch.nn.Module, stage: int, **settings):
    training = Training(stage, 2, 1e-2, 0.0, "constant", 0, 10, False, LoRA(0, 16, "all-linear"))
    return make_engine(model, arguments_of(SFTArguments, {"zero_stage": stage, **settings}), training)


def check_engines(stage: int) -> None:
    with torch.compiler.set_stance("force_eager"):  # the bits are then those of the uncompiled layers
        compiled = engine_of(tiny_model("llama"), stage, torch_compile=True)
        assert all(type(layer.forward).__name__ == "CompiledForward" for layer in compiled.module.model.layers)
        weights = [trained_by_engine(each) for each in (compiled, engine_of(tiny_model("llama"), stage))]
        # ZeRO-3 reduces the gradients of whole layers together, in another order.
        close = torch.equal if stage < 3 else partial(torch.allclose, rtol=0, atol=1e-4)
        assert all(close(*pair) for pair in zip(*(each.values() for each in weights), strict=True))
        config = tiny_model("llama").config
        config.num_labels = 1
        classifier = AutoModelForSequenceClassification.from_config(config)
        critic = engine_of(ValueModel(classifier), stage, torch_compile=True)
        assert all(type(layer.forward).__name__ == "CompiledForward" for layer in classifier.model.layers)
        ids = torch.randint(3, 90, (2, 9))
        critic.backward(token_values(critic, ids, torch.ones_like(ids), 4, "packed").sum())


@pytest.mark.parametrize("stage", slow_but([3], [0, 3]))
def test_engines_have_compiled_layers(ranks, stage):
    ranks.run(check_engines, stage)


def test_classes_of_layers():
    assert layer_classes(with_peft(tiny_model("llama"))) == ["LlamaDecoderLayer"]
