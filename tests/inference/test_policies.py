"""Injection policies, which name row-parallel projections: encoders, encoder-decoders and decoders at two ranks."""

import pytest
import torch
import torch.distributed as dist
from transformers.models.bert.modeling_bert import BertAttention, BertIntermediate, BertLayer
from transformers.models.bloom.modeling_bloom import BloomBlock
from transformers.models.distilbert.modeling_distilbert import TransformerBlock
from transformers.models.gpt2.modeling_gpt2 import GPT2Block
from transformers.models.llama.modeling_llama import LlamaDecoderLayer
from transformers.models.opt.modeling_opt import OPTDecoderLayer
from transformers.models.roberta.modeling_roberta import RobertaLayer
from transformers.models.t5.modeling_t5 import T5Block

import hybrid
from tests.marks import slow_but
from tests.tiny_models import NON_DECODERS, prompts, tiny_model, tiny_non_decoder, twin

# Policies of DeepSpeed's documentation and tests, with the names of transformers 5.
POLICIES = {
    "bert": {BertLayer: ("output.dense",)},
    "roberta": {RobertaLayer: ("output.dense",)},
    "distilbert": {TransformerBlock: ("attention.out_lin", "ffn.lin2")},
    "t5": {T5Block: ("SelfAttention.o", "EncDecAttention.o", "DenseReluDense.wo")},
}
IDS, MASK = prompts(3, 7, padded=True)


def engine_by_policy(model, name: str, size: int = 2, **settings) -> hybrid.InferenceEngine:
    more = {"tp": {"tp_size": size}, "injection_policy": POLICIES.get(name), **settings}
    return hybrid.init_inference(model, **{"dtype": torch.float32, **more})


def check_policy(name: str, folder: str) -> None:
    """Equal to the unsharded model, from its own weights and from a file; each rank has half of the layers'
    matrices."""
    reference = tiny_non_decoder(name)
    more = {"decoder_input_ids": IDS} if name == "t5" else {}
    with torch.no_grad():
        expected = reference(IDS, attention_mask=MASK, **more).logits
    for checkpoint in (None, folder):
        model = twin(reference)
        if checkpoint:
            with torch.device("meta"):
                model = type(reference)(reference.config)
        engine = engine_by_policy(model, name, checkpoint=checkpoint)
        actual = engine(IDS, attention_mask=MASK, **more).logits
        torch.testing.assert_close(actual, expected, atol=1e-4, rtol=1e-4)
        layers = next(iter(POLICIES[name]))
        matrix_elements = [
            sum(p.numel() for m in module.modules() if isinstance(m, layers) for p in m.parameters() if p.dim() > 1)
            for module in (model, reference)
        ]
        assert matrix_elements[0] * 2 == matrix_elements[1]
        if name == "t5":
            request = {"attention_mask": MASK, "max_new_tokens": 6}
            assert torch.equal(engine.generate(IDS, **request), reference.generate(IDS, **request))
            drawn = engine.generate(IDS, do_sample=True, **request)
            draws = [torch.zeros(3, 9, dtype=torch.int64) for _ in range(2)]
            dist.all_gather(draws, torch.nn.functional.pad(drawn, (0, 9 - drawn.shape[1])))
            assert torch.equal(*draws)
        engine.profile_model_time()
        engine(IDS, attention_mask=MASK, **more)
        assert len(engine.model_times()) == 1
        assert engine.coverage()[0]["container"] == "native"


@pytest.mark.parametrize("name", slow_but(["t5", "bert"], NON_DECODERS))
def test_two_ranks_match_hugging_face(ranks, tmp_path, name):
    tiny_non_decoder(name).save_pretrained(tmp_path)
    ranks.run(check_policy, name, str(tmp_path))


# gpt2's layers are Conv1D, with transposed weights; its queries, keys and values are one matrix, which is replicated.
# Name suffixes may begin with a dot, as in DeepSpeed's policies; bloom's positions are biases of heads.
DECODERS = {
    "llama": {LlamaDecoderLayer: ("self_attn.o_proj", "mlp.down_proj")},
    "opt": {OPTDecoderLayer: hybrid.LayerPolicy(("self_attn.out_proj", "fc2"), counts=("num_heads", "embed_dim"))},
    "bloom": {BloomBlock: (".self_attention.dense", ".mlp.dense_4h_to_h")},
    "gpt2": {GPT2Block: hybrid.LayerPolicy(sums=("mlp.c_proj",), whole=("attn.c_attn", "attn.c_proj"), counts=())},
}


def check_decoder(name: str, folder: str) -> None:
    reference = tiny_model(name).eval()
    real = MASK.bool()
    with torch.no_grad():
        expected = reference(IDS, attention_mask=MASK).logits[real]
    request = {"attention_mask": MASK, "max_new_tokens": 6, "do_sample": False}
    for checkpoint in (None, folder):
        model = twin(reference)
        if checkpoint:
            with torch.device("meta"):
                model = type(reference)(reference.config)
        engine = engine_by_policy(model, name, injection_policy=DECODERS[name], checkpoint=checkpoint)
        actual = engine(IDS, attention_mask=MASK).logits[real]
        torch.testing.assert_close(actual, expected, atol=1e-4, rtol=1e-4)
        assert torch.equal(engine.generate(IDS, **request), reference.generate(IDS, **request))
        assert all("sharded over 2 ranks by the injection policy" in row["why"] for row in engine.coverage())
        local_params, all_params = (
            sum(param.numel() for param in module.parameters()) for module in (model, reference)
        )
        assert local_params < 0.85 * all_params


def check_packed_decoder() -> None:
    """By names alone gpt2's queries, keys and values are each sliced, though they are one matrix."""
    reference = tiny_model("gpt2").eval()
    engine = engine_by_policy(twin(reference), "gpt2", injection_policy={GPT2Block: ("attn.c_proj", ".mlp.c_proj")})
    request = {"attention_mask": MASK, "max_new_tokens": 6, "do_sample": False}
    assert torch.equal(engine.generate(IDS, **request), reference.generate(IDS, **request))
    attention = engine.module.transformer.h[0].attn
    assert attention.c_attn.weight.shape == (48, 32) and attention.split_size == 16


@pytest.mark.parametrize("name", slow_but(["gpt2", "llama"], DECODERS))
def test_decoders_sliced_by_a_policy_match_hugging_face(ranks, tmp_path, name):
    tiny_model(name).save_pretrained(tmp_path)
    ranks.run(check_decoder, name, str(tmp_path))
    if name == "gpt2":
        ranks.run(check_packed_decoder)


def check_object() -> None:
    """A layer that is replicated on every rank: a policy by names alone would slice it."""
    reference = tiny_non_decoder("bert")
    policy = {BertLayer: hybrid.LayerPolicy(sums=("output.dense",), whole=("intermediate.dense",))}
    with pytest.raises(RuntimeError):  # a row-parallel layer would get unsliced inputs
        engine_by_policy(twin(reference), "bert", injection_policy=policy)(IDS, attention_mask=MASK)
    policy = {
        BertAttention: hybrid.LayerPolicy(
            sums=("output.dense",), counts=("num_attention_heads", "num_heads", "all_head_size")
        ),
        BertIntermediate: hybrid.LayerPolicy(sums=(), whole=("dense",)),
    }
    model = twin(reference)
    with torch.no_grad():
        expected = reference(IDS, attention_mask=MASK).logits
    with pytest.raises(ValueError, match="none of"):
        engine_by_policy(twin(reference), "bert", injection_policy={BertIntermediate: policy[BertIntermediate]})
    engine = engine_by_policy(model, "bert", injection_policy=policy)
    torch.testing.assert_close(engine(IDS, attention_mask=MASK).logits, expected, atol=1e-4, rtol=1e-4)
    layer, reference_layer = (module.bert.encoder.layer[0] for module in (model, reference))
    assert layer.intermediate.dense.weight.shape == reference_layer.intermediate.dense.weight.shape
    assert layer.attention.self.query.weight.numel() * 2 == reference_layer.attention.self.query.weight.numel()


def test_a_layer_policy_names_replicated_layers(ranks):
    ranks.run(check_object)


def check_heads_that_do_not_divide() -> None:
    odd = tiny_non_decoder("bert", num_attention_heads=1)
    with pytest.raises(ValueError, match="2 given; it must divide num_attention_heads=1 of BertSelfAttention"):
        engine_by_policy(odd, "bert")


def test_heads_that_tp_size_does_not_divide_raise(ranks):
    ranks.run(check_heads_that_do_not_divide)


@pytest.mark.parametrize(
    ("policy", "more", "message"),
    [
        ({BertLayer: ("output.tense",)}, {}, "no module whose name ends in 'output.tense'"),
        ({"BertLayer": ("output.dense",)}, {}, "'BertLayer' given; it must be a class"),
        ({T5Block: ("output.dense",)}, {}, r"the model has none of \['T5Block'\]"),
        ({BertLayer: "output.dense"}, {"kernel_inject": True}, "given; replace_with_kernel_inject=true"),
    ],
)
def test_invalid_policies_raise(policy, more, message):
    with pytest.raises(ValueError, match=message):
        hybrid.init_inference(tiny_non_decoder("bert"), dtype="float32", injection_policy=policy, **more)


def test_a_policy_at_one_rank_changes_nothing():
    reference = tiny_non_decoder("bert")
    engine = engine_by_policy(twin(reference), "bert", size=1)
    with torch.no_grad():
        expected = reference(IDS, attention_mask=MASK).logits
    assert torch.equal(engine(IDS, attention_mask=MASK).logits, expected)
    with pytest.raises(ValueError, match="the model has none of"):
        hybrid.init_inference(tiny_model("llama"), dtype="float32", injection_policy={BertLayer: "o_proj"})
