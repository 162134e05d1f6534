"""Rows as a group's rollouts are: prompts shared by several completions, of unequal lengths."""

import torch

from tests.tiny_models import VOCABULARY


def grouped_rows(seed: int, groups: int = 3, size: int = 3) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return ids and mask, int64 [rows, 32], and the completion mask, int64 [rows, 14].

    Prompts of 18, 13 and 6 tokens, left padded, each with `size` completions of 0, 1, 4, 7, ... up to 14 tokens, of
    which two begin with the same ten; and one row whose prompt nobody shares.
    """
    generator = torch.Generator().manual_seed(seed)
    lengths = [18, 13, 6, 9][:groups]
    prompts = torch.randint(3, VOCABULARY, (groups, 18), generator=generator)
    prompt_mask = (torch.arange(18) >= 18 - torch.tensor(lengths)[:, None]).long()
    rows = torch.arange(groups).repeat_interleave(size)
    rows = torch.cat([rows, torch.tensor([0])])
    completions = torch.randint(3, VOCABULARY, (len(rows), 14), generator=generator)
    completions[1, :10] = completions[0, :10]
    completion_lengths = [14, 12, 0, 1, 14, 4, 7, 10, 13, 5, 14, 3, 2][: len(rows)]
    completion_mask = (torch.arange(14) < torch.tensor(completion_lengths)[:, None]).long()
    ids, mask = torch.cat([prompts[rows], completions], dim=1), torch.cat([prompt_mask[rows], completion_mask], dim=1)
    alone = torch.randint(3, VOCABULARY, (18,), generator=generator)
    ids[-1, :18], mask[-1, :18] = alone, 1
    return ids * mask, mask, completion_mask
