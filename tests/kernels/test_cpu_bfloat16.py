"""Products of bfloat16 in pairs and in tiles, on machines that have no such instructions: they are emulated, so what is
tested is the code around them. What the instructions themselves do is Intel's word."""

import pytest
import torch

from hybrid.architectures.reading import read_decoder
from hybrid.containers.batch import PackedBatch
from hybrid.containers.cpu_decoder import CpuDecoder
from hybrid.kernels.cpu_library import FLAGS, built, cpu_library, opened
from tests.models import VOCABULARY, tiny_model

pytestmark = pytest.mark.skipif(cpu_library() is None, reason="no C++ compiler here")

# Rows of products that are no multiple of a tile, and depths with a rest behind the last whole block.
SHAPE = {"hidden_size": 72, "intermediate_size": 100, "head_dim": 24}


@torch.no_grad()
def logits_of(library, model, sequences: list[torch.Tensor]) -> torch.Tensor:
    """Logits of every token.  float32 [tokens, vocab]"""
    decoder = CpuDecoder(
        read_decoder(model), lambda place: place.module._parameters.get(place.parameter), torch.bfloat16, library
    )
    decoder.bind()
    decoder.reserve(128)
    sizes = torch.tensor([len(ids) for ids in sequences])
    batch = PackedBatch(
        ids=torch.cat(sequences),
        positions=torch.cat([torch.arange(size) for size in sizes]).int(),
        starts=torch.cat([torch.zeros(1), sizes.cumsum(0)]).int(),
        lengths=sizes.int(),
        tables=(1 + torch.arange(len(sequences) * 3).view(-1, 3)).int(),
    )
    return decoder.logits(decoder.forward(batch, decoder.kv(1 + len(sequences) * 3)))


@pytest.mark.parametrize("level", [1, 2], ids=["pairs", "tiles"])
@pytest.mark.parametrize("family", ["llama", "gpt2", "mixtral"])
def test_emulated_products_equal_vectors_own(family, level):
    library = opened(built((*FLAGS, f"-DEMULATE_BF16={level}", "-DLANES=16")))
    model = tiny_model(family, dtype=torch.bfloat16, **(SHAPE if family == "llama" else {})).eval()
    generator = torch.Generator().manual_seed(0)
    # More rows than tiles are made for at once, and fewer than one tile.
    sequences = [torch.randint(3, VOCABULARY, (length,), generator=generator) for length in (70, 9, 1)]
    found, expected = (logits_of(one, model, sequences) for one in (library, cpu_library()))
    # The same products, summed in another order and rounded to bfloat16 at every operation; a mixture may send a token
    # to another expert where two are nearly as likely.
    different = ((found - expected).abs() > 0.02 * expected.abs().max()).any(dim=1)
    assert different.sum() <= (2 if family == "mixtral" else 0)
    alone = logits_of(library, model, sequences[1:2])
    assert torch.equal(alone, found[70:79]), "a row depends on the batch around it"
