"""Requests: processors of rows that are padded differently."""

from functools import partial

import torch
from transformers import LogitsProcessorList, RepetitionPenaltyLogitsProcessor

from hybrid.generation.request import RowRepetitionPenalty, process_rows

LENGTHS, WIDTH, VOCABULARY = (3, 7, 5), 7, 23


def test_a_rows_repetition_penalty_is_that_of_its_own_tokens():
    """As Hugging Face's on each row without its padding, to the bit; also of some rows, in another order."""
    ids, scores = torch.randint(1, VOCABULARY, (len(LENGTHS), WIDTH)), torch.randn(len(LENGTHS), VOCABULARY)
    for row, length in enumerate(LENGTHS):
        ids[row, : WIDTH - length] = 0
    theirs = RepetitionPenaltyLogitsProcessor(1.4)
    own_tokens = [ids[row : row + 1, WIDTH - length :] for row, length in enumerate(LENGTHS)]
    expected = torch.cat([theirs(own, scores[row : row + 1].clone()) for row, own in enumerate(own_tokens)])
    assert not torch.equal(
        expected, torch.cat([theirs(ids[row : row + 1], scores[row : row + 1].clone()) for row in range(3)])
    )
    penalty = RowRepetitionPenalty(1.4, WIDTH - torch.tensor(LENGTHS))
    assert torch.equal(penalty(ids, scores), expected)
    process, rows = partial(process_rows, LogitsProcessorList([penalty])), torch.tensor([2, 0])
    assert torch.equal(process(ids[rows], scores[rows], rows), expected[rows])
