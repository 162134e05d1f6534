"""Automatic tensor parallelism: models outside our families at two ranks, by their tp_plan or by layer names."""

import pytest
import torch
import torch.distributed as dist
from transformers import LlamaConfig, PreTrainedModel

import hybrid
from tests.execution.test_native_tensor_parallel import FAMILIES
from tests.marks import slow_but
from tests.tiny_models import prompts, tiny_model, twin

IDS, MASK = prompts(3, 7, padded=True)
SETTINGS = {"dtype": torch.float32, "tp": {"tp_size": 2}}
# Decoders without a tp_plan, of none of our families.
NAMED = {
    "xglm": {"d_model": 32, "num_layers": 2, "attention_heads": 4, "ffn_dim": 64, "vocab_size": 97},
    "biogpt": {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64},
    # A part of each layer is replicated: its attention.
    "codegen": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "rotary_dim": 4},
}
# Models in which no layer is known to be sliceable.
REPLICATED = {
    "mamba": {"hidden_size": 32, "num_hidden_layers": 2, "state_size": 8},
}


def model_without_plan(name: str) -> torch.nn.Module:
    """A tiny model without a tp_plan."""
    return tiny_model(name, sizes={"max_position_embeddings": 64, **NAMED[name]}).eval()


def check_auto_tp(reference: torch.nn.Module, folder: str, how: str) -> None:
    """Logits and greedy tokens equal the unsharded model's, from its own weights and from a file; ranks sample the same
    tokens; each holds about half of the weights."""
    request = {"attention_mask": MASK, "max_new_tokens": 6}
    with torch.no_grad():
        expected = reference(IDS, attention_mask=MASK).logits[MASK.bool()]
    for checkpoint in (None, folder):
        model = twin(reference)
        if checkpoint:
            with torch.device("meta"):
                model = type(reference)(reference.config)
        engine = hybrid.init_inference(model, checkpoint=checkpoint, **SETTINGS)
        assert not any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
        actual = engine(IDS, attention_mask=MASK).logits[MASK.bool()]
        torch.testing.assert_close(actual, expected, atol=1e-4, rtol=1e-4)
        assert torch.equal(engine.generate(IDS, **request), reference.generate(IDS, **request))
        drawn = engine.generate(IDS, do_sample=True, min_new_tokens=6, **request)
        draws = [torch.zeros_like(drawn) for _ in range(2)]
        dist.all_gather(draws, drawn)
        assert torch.equal(*draws)
        assert all(f"sharded over 2 ranks by {how}" in row["why"] for row in engine.coverage())
        local_params, all_params = (
            sum(param.numel() for param in module.parameters()) for module in (model, reference)
        )
        assert local_params < 0.8 * all_params
        engine.destroy()


def check_planned(family: str, folder: str) -> None:
    check_auto_tp(tiny_model(family, sizes=FAMILIES[family]).eval(), folder, "the model's tp_plan")


QUICK = ("glm", "apertus")


@pytest.mark.parametrize("family", slow_but(QUICK, FAMILIES))
def test_two_ranks_match_hugging_face(ranks, tmp_path, family):
    tiny_model(family, sizes=FAMILIES[family]).save_pretrained(tmp_path)
    ranks.run(check_planned, family, str(tmp_path))


def check_without_injection() -> None:
    """A model of a fused family: its own modules by its tp_plan if it has one, else the decoder's slices."""
    for family, container in (("llama", "native"), ("gpt2", "fused")):
        reference = tiny_model(family).eval()
        engine = hybrid.init_inference(twin(reference), **SETTINGS)
        rows = engine.coverage()
        assert {row["container"] for row in rows} == {container}
        assert all("sharded over 2 ranks" in row["why"] for row in rows)
        request = {"attention_mask": MASK, "max_new_tokens": 6}
        assert torch.equal(engine.generate(IDS, **request), reference.generate(IDS, **request))
        engine.destroy()


def test_without_kernel_injection_the_tp_plan_is_used(ranks):
    ranks.run(check_without_injection)


def check_named(name: str, folder: str) -> None:
    check_auto_tp(model_without_plan(name), folder, "the names of its layers' projections")


@pytest.mark.parametrize("name", slow_but(["xglm", "codegen"], NAMED))
def test_models_without_a_tp_plan_are_sliced_by_layer_names(ranks, tmp_path, name):
    model_without_plan(name).save_pretrained(tmp_path)
    ranks.run(check_named, name, str(tmp_path))


def check_replicated(name: str) -> None:
    """Every rank keeps the whole model, with a warning."""
    reference = tiny_model(name, sizes=REPLICATED[name]).eval()
    with pytest.warns(UserWarning, match="no attention and no MLP that can be sliced; every rank keeps the full"):
        engine = hybrid.init_inference(twin(reference), **SETTINGS)
    request = {"attention_mask": torch.ones_like(IDS), "max_new_tokens": 6, "do_sample": False}
    assert torch.equal(engine.generate(IDS, **request), reference.generate(IDS, **request))
    assert "nothing: every rank keeps all of its layers" in engine.coverage()[0]["why"]


@pytest.mark.parametrize("name", REPLICATED)
def test_a_model_without_known_layers_is_replicated(ranks, name):
    ranks.run(check_replicated, name)


def check_int8(name: str) -> None:
    """Close to the float model, within the rounding of int8; attention and MLP are sliced."""
    reference = tiny_model(name).eval()
    engine = hybrid.init_inference(twin(reference), **{**SETTINGS, "dtype": "int8"})
    with torch.no_grad():
        expected = reference(IDS, attention_mask=MASK).logits[MASK.bool()]
    actual = engine(IDS, attention_mask=MASK).logits[MASK.bool()]
    assert (actual - expected).abs().max() < 0.02 * expected.abs().max()
    local_params, all_params = (
        sum(param.numel() for param in module.parameters()) for module in (engine.module, reference)
    )
    assert local_params < 0.65 * all_params


@pytest.mark.parametrize("name", ["bloom", "gpt2"])
def test_int8_at_two_ranks(ranks, name):
    """BLOOM's positions are biases of heads; gpt2's queries, keys and values are one matrix."""
    ranks.run(check_int8, name)


def check_restored() -> None:
    """After an error once weights have moved, the model has its own modules, forwards and bytes again."""
    for model in (PackedModel(),):
        before = twin(model)
        with pytest.raises(NotImplementedError, match="differs from the whole one"):
            hybrid.init_inference(model, injection_policy={PackedLayer: "down"}, **SETTINGS)
        assert [type(module) for module in model.modules()] == [type(module) for module in before.modules()]
        assert not any("forward" in module.__dict__ for module in model.modules())
        state = before.state_dict()
        assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())
        with torch.no_grad():
            assert torch.equal(model(IDS)[0], before(IDS)[0])


class PackedLayer(torch.nn.Module):
    """Gate and up in one matrix, which a policy by names slices wrongly."""

    def __init__(self):
        super().__init__()
        self.gate_up, self.down = torch.nn.Linear(32, 96), torch.nn.Linear(48, 32)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        gate, up = self.gate_up(hidden).chunk(2, dim=-1)
        return hidden + self.down(gate.sigmoid() * up)


class PackedModel(PreTrainedModel):
    """One such layer between an embedding and a head."""

    config_class = LlamaConfig

    def __init__(self):
        super().__init__(LlamaConfig(vocab_size=97, hidden_size=32))
        torch.manual_seed(0)
        self.embedding, self.head = torch.nn.Embedding(97, 32), torch.nn.Linear(32, 97)
        self.layers = torch.nn.ModuleList([PackedLayer()])
        self.eval()

    def forward(self, input_ids: torch.Tensor) -> tuple[torch.Tensor]:
        return (self.head(self.layers[0](self.embedding(input_ids))),)


def test_a_rejected_model_is_restored(ranks):
    ranks.run(check_restored)


def check_heads_that_do_not_divide() -> None:
    odd = tiny_model("cohere", sizes={**FAMILIES["cohere"], "num_attention_heads": 3, "num_key_value_heads": 3})
    with pytest.raises(ValueError, match="tensor_parallel.tp_size: 2 given; the model's 3 attention heads"):
        hybrid.init_inference(odd, **SETTINGS)
    odd = tiny_model("biogpt", sizes={**NAMED["biogpt"], "hidden_size": 36, "num_attention_heads": 3})
    with pytest.raises(ValueError, match="tp_size: 2 given; it must divide num_heads=3 of BioGptAttention"):
        hybrid.init_inference(odd, **SETTINGS)
    odd = tiny_model("falcon_h1", num_key_value_heads=1)
    policy = {type(odd.model.layers[0]): ("self_attn.o_proj", "feed_forward.down_proj")}
    with pytest.raises(ValueError, match="tp_size: 2 given; it must divide the 1 heads of .*k_proj"):
        hybrid.init_inference(odd, injection_policy=policy, **SETTINGS)


def test_heads_that_tp_size_does_not_divide_raise(ranks):
    ranks.run(check_heads_that_do_not_divide)
