"""Models by name."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fxshard.models import UnknownModelError, build_named


def classifier(num_classes: int) -> nn.Module:
    return nn.Linear(2, num_classes)


def with_default(num_classes: int = 7) -> nn.Module:
    return nn.Linear(2, num_classes)


made = nn.Linear(2, 6)


def fixed() -> nn.Module:
    return nn.Linear(2, 9)


def number() -> int:
    return 3


@pytest.mark.parametrize(("name", "logits"), [("classifier", 4), ("with_default", 7), ("fixed", 9), ("made", 6)])
def test_a_factory_gets_the_arguments_that_it_names_and_has_no_default_for(name: str, logits: int) -> None:
    assert build_named(f"{__name__}:{name}", num_classes=4)(torch.ones(1, 2)).shape == (1, logits)


def test_who_insists_gets_as_many_logits_as_asked_for() -> None:
    assert build_named(f"{__name__}:with_default", num_classes=4, insist=True)(torch.ones(1, 2)).shape == (1, 4)


@pytest.mark.parametrize("name", ["convnext_atto", "timm:convnext_atto", "timm:resnet10t", "torchvision:resnet18"])
def test_libraries_models_have_as_many_logits_as_asked_for(name: str) -> None:
    pytest.importorskip("torchvision" if name.startswith("torchvision") else "timm")
    model = build_named(name, num_classes=4, drop_path_rate=0.1).eval()
    assert model(torch.randn(1, 3, 32, 32)).shape == (1, 4)


def test_timm_s_models_have_the_drop_path() -> None:
    pytest.importorskip("timm")
    model = build_named("convnext_atto", num_classes=4, drop_path_rate=0.1)
    assert any(type(m).__name__ == "DropPath" for m in model.modules())


def test_a_model_without_drop_path_is_built_without() -> None:
    pytest.importorskip("timm")
    assert isinstance(build_named("timm:vgg11", num_classes=4, drop_path_rate=0.1), nn.Module)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("timm:convnext_gigantic", "timm has no model 'convnext_gigantic'"),
        ("unet.UNet", "a model of your own has a colon, unet:UNet$"),
        ("torchvision:resnet17", "torchvision has no classification model 'resnet17'"),
        ("no.such.module:net", "there is no model no.such.module:net"),
        (f"{__name__}:nothing", "has no attribute 'nothing'"),
        (f"{__name__}:number", "returned int, not a torch.nn.Module"),
    ],
)
def test_an_unknown_name_is_refused(name: str, said: str) -> None:
    with pytest.raises(UnknownModelError, match=said):
        build_named(name, num_classes=4)
