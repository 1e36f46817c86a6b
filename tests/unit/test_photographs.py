"""The demo's images: scikit-image's own files, wide crops, the same on every rank."""

from __future__ import annotations

import pytest
import torch

from fxshard import photographs
from fxshard.errors import FxShardError
from fxshard.photographs import NAMES, Photograph, load_photographs, make_batch

STRIPES = tuple(Photograph(f"grey {value}", torch.full((3, 20, 40), value, dtype=torch.uint8)) for value in (0, 255))


def test_the_photographs_come_in_the_wheel() -> None:
    pytest.importorskip("skimage")
    found = load_photographs()
    assert [f"{photograph.name}." for photograph in found] == [name[: name.index(".") + 1] for name in NAMES]
    assert all(p.pixels.dtype == torch.uint8 and p.pixels.shape[0] == 3 and p.pixels.shape[1] > 100 for p in found)


def test_a_version_without_them_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("skimage")
    monkeypatch.setattr(photographs, "NAMES", ("no-such-photograph.png",))
    with pytest.raises(FxShardError, match=r"scikit-image has none of no-such-photograph\.png"):
        load_photographs()


@pytest.mark.parametrize("size", [(3, 8, 64), (2, 64, 8), (1, 20, 40), (1, 1, 100)])
def test_a_batch_has_the_wanted_size_and_range(size: tuple[int, int, int]) -> None:
    images, labels = make_batch(STRIPES, 0, size)
    batch, height, width = size
    assert images.shape == (batch, 3, height, width)
    assert labels.tolist() == [0, 1, 0][:batch]
    assert images[0].unique().tolist() == [-1.0]


def test_the_next_step_goes_on_with_the_next_photograph() -> None:
    assert make_batch(STRIPES, 1, (3, 4, 8))[1].tolist() == [1, 0, 1]


def test_batches_depend_on_the_step_and_the_seed_alone() -> None:
    noise = (Photograph("noise", torch.randint(0, 256, (3, 50, 90), dtype=torch.uint8)),)
    first = make_batch(noise, 0, (2, 8, 32), seed=1)[0]
    torch.manual_seed(5)
    assert torch.equal(first, make_batch(noise, 0, (2, 8, 32), seed=1)[0])
    assert not torch.equal(first, make_batch(noise, 1, (2, 8, 32), seed=1)[0])
    assert not torch.equal(first, make_batch(noise, 0, (2, 8, 32), seed=2)[0])
