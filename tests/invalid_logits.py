"""Rows of logits that have no softmax, for tests of every sampler."""

import torch


def with_invalid_rows(logits: torch.Tensor) -> tuple[torch.Tensor, list[int]]:
    """A copy of logits [rows, vocab] in which every other row, from the second one on, has no softmax; and these rows.
    The other rows are unchanged. There are at most 7 invalid ones."""
    logits, vocabulary = logits.clone(), logits.shape[1]
    signed, payload = torch.tensor([-4194303, 0x7F800001], dtype=torch.int32).view(torch.float32)  # other NaN
    invalid = list(range(1, len(logits), 2))[:7]
    for kind, row in enumerate(invalid):
        own = logits[row]
        if kind == 0:
            own[vocabulary - 1] = torch.nan  # in the last vector, or behind it
        elif kind == 1:
            own[vocabulary // 3] = torch.inf
        elif kind == 2:
            own[:] = torch.nan
        elif kind == 3:
            own[:] = -torch.inf
        elif kind == 4:
            own[:] = -torch.inf
            own[0] = signed  # and nothing else
        elif kind == 5:
            own[vocabulary // 2] = payload
        else:
            own[::2], own[1] = torch.nan, torch.inf
    return logits, invalid
