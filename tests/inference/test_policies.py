"""Injection policies: which projections add up over the ranks; encoders and encoder-decoders at two ranks."""

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
from tests.tiny_models import OTHERS, prompts, tiny_model, tiny_other, twin

# DeepSpeed's own examples of policies, in its documentation and tests, with the names of transformers 5
POLICIES = {
    "bert": {BertLayer: ("output.dense",)},
    "roberta": {RobertaLayer: ("output.dense",)},
    "distilbert": {TransformerBlock: ("attention.out_lin", "ffn.lin2")},
    "t5": {T5Block: ("SelfAttention.o", "EncDecAttention.o", "DenseReluDense.wo")},
}
IDS, MASK = prompts(3, 7, padded=True)


def injected(model, name: str, size: int = 2, **settings) -> hybrid.InferenceEngine:
    more = {"tp": {"tp_size": size}, "injection_policy": POLICIES.get(name), **settings}
    return hybrid.init_inference(model, **{"dtype": torch.float32, **more})


def check_policy(name: str, folder: str) -> None:
    """Equal to the whole model, from its own weights and from a file; each rank has half of the layers' matrices."""
    reference = tiny_other(name)
    more = {"decoder_input_ids": IDS} if name == "t5" else {}
    with torch.no_grad():
        expected = reference(IDS, attention_mask=MASK, **more).logits
    for checkpoint in (None, folder):
        model = twin(reference)
        if checkpoint:
            with torch.device("meta"):
                model = type(reference)(reference.config)
        engine = injected(model, name, checkpoint=checkpoint)
        found = engine(IDS, attention_mask=MASK, **more).logits
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
        layers = next(iter(POLICIES[name]))
        held = [
            sum(p.numel() for m in one.modules() if isinstance(m, layers) for p in m.parameters() if p.dim() > 1)
            for one in (model, reference)
        ]
        assert held[0] * 2 == held[1]
        if name == "t5":
            request = {"attention_mask": MASK, "max_new_tokens": 6}
            assert torch.equal(engine.generate(IDS, **request), reference.generate(IDS, **request))
            drawn = engine.generate(IDS, do_sample=True, **request)
            both = [torch.zeros(3, 9, dtype=torch.int64) for _ in range(2)]
            dist.all_gather(both, torch.nn.functional.pad(drawn, (0, 9 - drawn.shape[1])))
            assert torch.equal(*both)
        engine.profile_model_time()
        engine(IDS, attention_mask=MASK, **more)
        assert len(engine.model_times()) == 1
        assert engine.coverage()[0]["container"] == "native"


@pytest.mark.parametrize("name", OTHERS)
def test_two_ranks_make_what_one_makes(ranks, tmp_path, name):
    tiny_other(name).save_pretrained(tmp_path)
    ranks.run(check_policy, name, str(tmp_path))


# gpt2's layers are Conv1D, whose weights are turned; its queries, keys and values are one matrix, which is kept whole.
# Ends of names may begin with a dot, as in DeepSpeed's policies; bloom's positions are biases of heads.
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
        engine = injected(model, name, injection_policy=DECODERS[name], checkpoint=checkpoint)
        found = engine(IDS, attention_mask=MASK).logits[real]
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
        assert torch.equal(engine.generate(IDS, **request), reference.generate(IDS, **request))
        assert all("spread over 2 ranks by the injection policy" in row["why"] for row in engine.coverage())
        held, whole = (sum(param.numel() for param in one.parameters()) for one in (model, reference))
        assert held < 0.85 * whole


def check_packed_decoder() -> None:
    """By names alone gpt2's queries, keys and values are each cut, though they are one matrix."""
    reference = tiny_model("gpt2").eval()
    engine = injected(twin(reference), "gpt2", injection_policy={GPT2Block: ("attn.c_proj", ".mlp.c_proj")})
    request = {"attention_mask": MASK, "max_new_tokens": 6, "do_sample": False}
    assert torch.equal(engine.generate(IDS, **request), reference.generate(IDS, **request))
    attention = engine.module.transformer.h[0].attn
    assert attention.c_attn.weight.shape == (48, 32) and attention.split_size == 16


@pytest.mark.parametrize("name", DECODERS)
def test_decoders_by_a_policy(ranks, tmp_path, name):
    tiny_model(name).save_pretrained(tmp_path)
    ranks.run(check_decoder, name, str(tmp_path))
    if name == "gpt2":
        ranks.run(check_packed_decoder)


def check_object() -> None:
    """A gate that every rank keeps whole: names alone would cut it."""
    reference = tiny_other("bert")
    policy = {BertLayer: hybrid.LayerPolicy(sums=("output.dense",), whole=("intermediate.dense",))}
    with pytest.raises(RuntimeError):  # what takes a part of its inputs would get the whole
        injected(twin(reference), "bert", injection_policy=policy)(IDS, attention_mask=MASK)
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
        injected(twin(reference), "bert", injection_policy={BertIntermediate: policy[BertIntermediate]})
    engine = injected(model, "bert", injection_policy=policy)
    torch.testing.assert_close(engine(IDS, attention_mask=MASK).logits, expected, atol=1e-4, rtol=1e-4)
    layer, whole = (one.bert.encoder.layer[0] for one in (model, reference))
    assert layer.intermediate.dense.weight.shape == whole.intermediate.dense.weight.shape
    assert layer.attention.self.query.weight.numel() * 2 == whole.attention.self.query.weight.numel()


def test_a_policy_object_says_what_stays_whole(ranks):
    ranks.run(check_object)


def check_refusals() -> None:
    odd = tiny_other("bert", num_attention_heads=1)
    with pytest.raises(ValueError, match="2 given; it must divide num_attention_heads=1 of BertSelfAttention"):
        injected(odd, "bert")


def test_heads_that_cannot_be_shared_out(ranks):
    ranks.run(check_refusals)


@pytest.mark.parametrize(
    ("policy", "more", "words"),
    [
        ({BertLayer: ("output.tense",)}, {}, "no module whose name ends in 'output.tense'"),
        ({"BertLayer": ("output.dense",)}, {}, "'BertLayer' given; it must be a class"),
        ({T5Block: ("output.dense",)}, {}, r"the model has none of \['T5Block'\]"),
        ({BertLayer: "output.dense"}, {"kernel_inject": True}, "given with replace_with_kernel_inject=true"),
    ],
)
def test_what_is_wrong_is_named(policy, more, words):
    with pytest.raises(ValueError, match=words):
        hybrid.init_inference(tiny_other("bert"), dtype="float32", injection_policy=policy, **more)


def test_at_one_rank_there_is_nothing_to_share_out():
    reference = tiny_other("bert")
    engine = injected(twin(reference), "bert", size=1)
    with torch.no_grad():
        expected = reference(IDS, attention_mask=MASK).logits
    assert torch.equal(engine(IDS, attention_mask=MASK).logits, expected)
    with pytest.raises(ValueError, match="the model has none of"):
        hybrid.init_inference(tiny_model("llama"), dtype="float32", injection_policy={BertLayer: "o_proj"})
