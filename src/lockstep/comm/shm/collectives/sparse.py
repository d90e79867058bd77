"""All-reduce of sparse tensors: the sum of all ranks', by gathering every rank's indices and values.

Ranks may hold different numbers of entries. Every rank adds the same entries in the same order, so all end with the
same bits.
"""

from __future__ import annotations

import torch

from lockstep.comm.shm.collectives.gather import all_gather_lengths, all_gather_uneven
from lockstep.comm.shm.rounds import Rounds


def all_reduce_sparse(rounds: Rounds, tensor: torch.Tensor) -> torch.Tensor:
    """The sum over ranks of a coalesced COO tensor, as a new coalesced tensor."""
    indices, values = tensor.indices(), tensor.values()
    counts = [numbers[0] for numbers in all_gather_lengths(rounds, [values.shape[0]])]
    all_indices = [indices.new_empty(indices.shape[0], count) for count in counts]
    all_values = [values.new_empty(count, *values.shape[1:]) for count in counts]
    all_gather_uneven(rounds, [each.view(-1) for each in all_indices], indices.contiguous().view(-1))
    all_gather_uneven(rounds, [each.view(-1) for each in all_values], values.contiguous().view(-1))
    total = torch.sparse_coo_tensor(
        torch.cat(all_indices, dim=1), torch.cat(all_values), tensor.shape, is_coalesced=False, check_invariants=False
    )
    return total.coalesce()
