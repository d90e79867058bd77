"""One number for the bits of tensors, and that it stays what it is."""

from __future__ import annotations

import torch

from lockstep import bits


def test_digests_stay_what_they_are() -> None:
    """These are what they were when all of it was written three times."""
    values = torch.arange(1000, dtype=torch.float32)
    found = [(values, 4, 3999), (values, 0, 400)]
    assert bits.on_cpu(found, 5) == 5280763100945645375
    assert bits.unsigned(bits.on_device(found, 5, values.device)) == -1885654946306771684 % 2**64
    assert (bits.hexdigest(values), bits.hexdigest(values, 100)) == ("ab408abd5a63f694", "6d83cfdee3071f49")


def test_nothing_and_parts_of_words_have_digests_too() -> None:
    assert bits.hexdigest(torch.empty(0)) == bits.hexdigest(torch.empty(0, 3, dtype=torch.int8))
    octets = torch.arange(64, dtype=torch.uint8)
    found = {int(bits.on_device([(octets, start, start + 8)], 0, octets.device)) for start in range(5)}
    assert len(found) == 5
    apart = octets[3:11].clone()
    assert int(bits.on_device([(apart, 0, 8)], 0, apart.device)) in found, "wherever in memory the bytes lie"
