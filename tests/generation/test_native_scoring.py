"""Scores by a model's own forward equal those from Hugging Face's full logits, without holding full logits."""

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import hybrid
from hybrid.generation import scoring
from hybrid.generation.scoring import FORWARD_TOKENS, LOGIT_ROWS, score_natively, similar
from tests.marks import slow_but
from tests.tiny_models import ALL_FAMILIES, CROSSED, tiny_model, with_peft

TEMPERATURE = 0.7


def sequences() -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of many lengths, padded on the left, the right, both and not at all.  int64 [6, 19] each"""
    ids = torch.randint(3, 97, (6, 19), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[0, :7], mask[1, 11:], mask[2, :4], mask[2, 9:], mask[3, :17], mask[5, 1:] = 0, 0, 0, 0, 0, 0
    return ids * mask, mask


def expected(model: nn.Module, ids: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Logprobs and entropies in float64 from Hugging Face's logits of each row alone, without padding."""
    logps, entropies = torch.zeros(2, *ids[:, 1:].shape)
    for row, kept in enumerate(mask.bool()):
        at = kept.nonzero()[:, 0]
        if len(at) > 1:
            distribution = (model(ids[row, at][None]).logits[0, :-1].double() / TEMPERATURE).log_softmax(-1)
            logps[row, at[1:] - 1] = distribution.gather(1, ids[row, at[1:], None])[:, 0].float()
            entropies[row, at[1:] - 1] = -(distribution.exp() * distribution).sum(-1).float()
    return logps, entropies


def require_scores(model: nn.Module, tolerance: float = 1e-4, rows: int = 4, **options) -> None:
    """Scores equal `expected`; `tolerance` covers float32 sums over other batch shapes."""
    ids, mask = sequences()
    with torch.no_grad():
        actual = score_natively(model, ids, mask, TEMPERATURE, rows, **options)
        logps, entropies = expected(model, ids, mask)
    torch.testing.assert_close(actual.per_token_logps, logps, atol=tolerance, rtol=1e-4)
    torch.testing.assert_close(actual.entropies, entropies, atol=tolerance, rtol=1e-4)


class ForwardCounts:
    """Counts the forwards of modules."""

    def __init__(self, *modules: nn.Module):
        self.counts = [0] * len(modules)
        for index, module in enumerate(modules):
            module.register_forward_hook(lambda *args, index=index: self.count(index))

    def count(self, index: int) -> None:
        self.counts[index] += 1


@pytest.mark.parametrize("family", slow_but(CROSSED, ALL_FAMILIES))
def test_scores_of_every_family_match_hugging_face(family, monkeypatch):
    monkeypatch.setattr(scoring, "LOGIT_ROWS", 9)  # several chunks of each forward
    model = tiny_model(family).eval()
    layer = next(module for module in model.modules() if isinstance(module, nn.ModuleList))[0]
    forwards = ForwardCounts(layer, model.get_output_embeddings())
    ids, mask = sequences()
    with torch.no_grad():
        score_natively(model, ids, mask, TEMPERATURE, 4)
    # Rows of 19, 12, 11 and 5 tokens together, then 2 and 1: the decoder runs twice, the head for 9 tokens at a time.
    assert forwards.counts == [2, 10]
    require_scores(model)


def test_scores_with_an_adapter_match_peft(monkeypatch):
    monkeypatch.setattr(scoring, "LOGIT_ROWS", 9)
    require_scores(with_peft(tiny_model("llama")).eval())


def test_scores_with_temperature_and_holes_in_the_mask():
    """A hole changes positions and attention as in one padded forward."""
    model = tiny_model("qwen2").eval()
    ids, mask = sequences()
    mask[4, 6:9] = mask[0, 12] = 0
    with torch.no_grad():
        actual = score_natively(model, ids, mask, 1.3, 2)
        distribution = (hybrid.padded_forward(model)(ids, mask).logits[:, :-1] / 1.3).log_softmax(-1)
    scored_mask = mask[:, 1:] * mask[:, :-1]
    logps = distribution.gather(-1, ids[:, 1:, None])[..., 0] * scored_mask
    torch.testing.assert_close(actual.per_token_logps, logps, atol=1e-4, rtol=1e-4)


class LargestTensor(TorchDispatchMode):
    """Elements of the largest tensor that any operation makes, and of the largest over the vocabulary."""

    def __init__(self, vocabulary: int):
        super().__init__()
        self.vocabulary, self.elements, self.logits = vocabulary, 0, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        output = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(output):
            if isinstance(tensor, torch.Tensor) and tensor.dtype.is_floating_point and tensor.dim() > 1:
                self.elements = max(self.elements, tensor.numel())
                if tensor.shape[-1] == self.vocabulary:
                    self.logits = max(self.logits, tensor.numel())
        return output


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_logits_of_a_whole_batch_are_never_in_memory(dtype):
    """12 rows of 700 tokens with a vocabulary of 5003 are 42 million logits: those of 256 tokens are in memory at once,
    and no other tensor is larger than attention's masks."""
    model = tiny_model("llama", vocab_size=5003, max_position_embeddings=1024, dtype=dtype).eval()
    ids = torch.randint(3, 5003, (12, 700))
    with torch.no_grad(), LargestTensor(5003) as largest:
        score_natively(model, ids, torch.ones_like(ids), 1.0, 16)
    assert largest.logits == LOGIT_ROWS * 5003
    assert largest.elements <= max(largest.logits, 5 * 700 * 700)
    assert 5 * 700 <= FORWARD_TOKENS < 6 * 700


class WithoutLogitsToKeep(nn.Module):
    """A model like old ones on the hub, which always returns all logits."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.inner = model

    def forward(self, input_ids, attention_mask=None, position_ids=None, use_cache=None):
        return self.inner(input_ids, attention_mask=attention_mask, position_ids=position_ids, use_cache=use_cache)


class DecoderElsewhere(WithoutLogitsToKeep):
    """A model with `logits_to_keep` that does not call its `base_model`."""

    def __init__(self, model: nn.Module):
        super().__init__(model)
        self.base_model = nn.Identity()

    def forward(self, input_ids, attention_mask=None, position_ids=None, use_cache=None, logits_to_keep=0):
        more = {"attention_mask": attention_mask, "position_ids": position_ids, "use_cache": use_cache}
        return self.inner(input_ids, logits_to_keep=logits_to_keep, **more)


@pytest.mark.parametrize("wrapper", [WithoutLogitsToKeep, DecoderElsewhere])
def test_models_without_logits_to_keep_are_scored(wrapper, monkeypatch):
    monkeypatch.setattr(scoring, "LOGIT_ROWS", 9)
    model = wrapper(tiny_model("llama").eval())
    require_scores(model)
    require_scores(tiny_model("llama").eval(), in_parts=False)
    forwards = ForwardCounts(model.inner.model)
    with torch.no_grad():
        score_natively(model, *sequences(), TEMPERATURE, 4)
    assert forwards.counts[0] == (4 if wrapper is DecoderElsewhere else 2), (
        "the number of forwards of the whole model is wrong"
    )


def test_forwards_batch_rows_of_similar_length():
    assert similar([3, 100, 5, 90, 4, 2000, 1], most_rows=3, most_tokens=250) == [[5], [1, 3], [2, 4, 0], [6]]
    assert similar([8], 16, 4) == [[0]]


def test_a_forward_that_counts_columns_gets_rows_padded_on_the_right():
    """BART's decoder has learned positions and no `position_ids`: logits of padded rows equal those of rows alone."""
    sizes = {"d_model": 32, "decoder_layers": 2, "decoder_attention_heads": 4, "decoder_ffn_dim": 48}
    model = tiny_model("bart", sizes={**sizes, "is_encoder_decoder": False}).eval()
    ids, mask = sequences()
    logits = hybrid.padded_forward(model)(ids, mask).logits
    for row, kept in enumerate(mask.bool()):
        torch.testing.assert_close(logits[row, kept], model(ids[row, kept][None]).logits[0], atol=1e-5, rtol=1e-4)
    logits[mask.bool()].sum().backward()
    assert model.get_input_embeddings().weight.grad.abs().sum() > 0
