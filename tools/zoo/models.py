"""Which models are run, how they are built, and at which image sizes.

A model is named ``SOURCE:NAME``; the source is a library, or the part of one that has its own builder::

    torchvision:resnet18        every classification model that torchvision lists
    segmentation:fcn_resnet50   every segmentation model that torchvision lists
    video:r3d_18                torchvision's networks for video
    timm:convnext_atto          at least one of every timm family that has convolutions
    smp:Unet                    the decoders of segmentation-models-pytorch
    monai:UNet                  3-D networks of MONAI

All are untrained and unmodified; weights that start at zero are drawn, see :func:`build`.  Images are 3 x 3 x height x
width, videos 2 x 3 x frames x height x width, volumes 1 x 1 x depth x half of height x half of width.  Batch norm over
pooled pixels gives +1 and -1 for a batch of 2 whatever the values are: its gradient all but cancels, and the rounding
of the rest is amplified; hence 3 images.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

import torch
from torch import nn

PACKAGES = {
    "torchvision": "torchvision",
    "segmentation": "torchvision",
    "video": "torchvision",
    "timm": "timm",
    "smp": "segmentation_models_pytorch",
    "monai": "monai",
}
"""The package that each source is imported from."""

TORCHVISION = """
    alexnet convnext_tiny convnext_small convnext_base convnext_large densenet121 densenet161 densenet169 densenet201
    efficientnet_b0 efficientnet_b1 efficientnet_b2 efficientnet_b3 efficientnet_b4 efficientnet_b5 efficientnet_b6
    efficientnet_b7 efficientnet_v2_s efficientnet_v2_m efficientnet_v2_l googlenet inception_v3 mnasnet0_5 mnasnet0_75
    mnasnet1_0 mnasnet1_3 mobilenet_v2 mobilenet_v3_small mobilenet_v3_large regnet_x_400mf regnet_x_800mf
    regnet_x_1_6gf regnet_x_3_2gf regnet_x_8gf regnet_x_16gf regnet_x_32gf regnet_y_400mf regnet_y_800mf regnet_y_1_6gf
    regnet_y_3_2gf regnet_y_8gf regnet_y_16gf regnet_y_32gf regnet_y_128gf resnet18 resnet34 resnet50 resnet101
    resnet152 resnext50_32x4d resnext101_32x8d resnext101_64x4d shufflenet_v2_x0_5 shufflenet_v2_x1_0
    shufflenet_v2_x1_5 shufflenet_v2_x2_0 squeezenet1_0 squeezenet1_1 vgg11 vgg11_bn vgg13 vgg13_bn vgg16 vgg16_bn vgg19
    vgg19_bn wide_resnet50_2 wide_resnet101_2
""".split()
TORCHVISION_ATTENTION = """
    maxvit_t swin_t swin_s swin_b swin_v2_t swin_v2_s swin_v2_b vit_b_16 vit_b_32 vit_l_16 vit_l_32 vit_h_14
""".split()
SEGMENTATION = """
    deeplabv3_mobilenet_v3_large deeplabv3_resnet50 deeplabv3_resnet101 fcn_resnet50 fcn_resnet101
    lraspp_mobilenet_v3_large
""".split()
VIDEO = "r3d_18 mc3_18 r2plus1d_18 s3d".split()
TIMM = """
    resnet10t resnet18d resnet26t resnetaa50 resnetblur18 resnetrs50 resnext50d_32x4d seresnet50 seresnext26d_32x4d
    ecaresnet26t test_resnet resnetv2_18 resnetv2_50d_gn resnetv2_50x1_bit resnetv2_50d_evos skresnet18
    skresnext50_32x4d res2net50_14w_8s res2next50 resnest14d gernet_s gcresnext26ts seresnet33ts eca_resnext26ts
    gcresnet33ts repvgg_a0 mobileone_s0 darknet17 darknet53 darknetaa53 cspresnet50 cspresnext50 cspdarknet53
    cs3darknet_s cs3darknet_focus_s cs3sedarknet_l cs3edgenet_x cspnext_tiny dla34 dla46x_c dla60_res2net dpn48b
    dpn68 densenet121 densenetblur121d
    convnext_atto convnext_atto_ols convnextv2_atto convmixer_768_32 efficientnet_lite0 efficientnet_b0
    efficientnet_es tf_efficientnet_b0 tf_efficientnetv2_b0 efficientnet_cc_b0_4e gc_efficientnetv2_rw_t mixnet_s
    tf_mixnet_s mnasnet_small semnasnet_075 mobilenetv1_100 mobilenetv2_035 mobilenet_edgetpu_v2_xs
    mobilenetv4_conv_small_035 fbnetc_100 spnasnet_100 tinynet_e rexnet_100 rexnetr_200 mobilenetv3_small_050
    tf_mobilenetv3_small_minimal_100 fbnetv3_b lcnet_035 lcnetv2_small hardcorenas_a hardcorenas_b ghostnet_050
    ghostnetv2_100 ghostnetv3_050 repghostnet_050 repvit_m0_9 regnetx_002 regnety_002 regnetz_005 regnetv_040
    regnetz_b16 nf_regnet_b0 nf_resnet26 nf_seresnet26 nf_ecaresnet26 eca_nfnet_l0 dm_nfnet_f0 nfnet_f0 hrnet_w18_small
    hgnet_tiny hgnetv2_b0 vovnet39a ese_vovnet19b_dw ese_vovnet39b_evos eca_vovnet39b selecsls42 tresnet_m
    tresnet_v2_l inception_v3 inception_v4 inception_resnet_v2 inception_next_atto nasnetalarge pnasnet5large
    legacy_xception xception41 xception41p legacy_senet154 legacy_seresnet18 legacy_seresnext26_32x4d vgg11 vgg11_bn
    mambaout_femto poolformer_s12 poolformerv2_s12 convformer_s18 rdnet_tiny fasternet_t0 starnet_s1 focalnet_tiny_srf
    fastvit_t8
""".split()
TIMM_ATTENTION = """
    bat_resnext26ts botnet26t_256 halonet26t lambda_resnet26t sebotnet33ts_256 eca_halonext26ts coatnet_nano_rw_224
    coatnext_nano_rw_224 maxvit_pico_rw_256 maxxvit_rmlp_nano_rw_256 edgenext_xx_small mobilevit_xxs mobilevitv2_050
    mobilenetv4_hybrid_medium caformer_s18 fastvit_sa12 efficientformer_l1 efficientformerv2_s0 efficientvit_b0
    efficientvit_m0 efficientvim_m1 shvit_s1 swiftformer_xs iformer_t lowformer_b0 cpubone_nano csatv2 nextvit_small
    repvit_m1_0 tiny_vit_5m_224 levit_128s levit_conv_128s coat_lite_tiny convit_tiny crossvit_tiny_240 cait_xxs24_224
    davit_tiny gcvit_xxtiny mvitv2_tiny pit_ti_224 pvt_v2_b0 twins_svt_small visformer_tiny xcit_nano_12_p16_224
    nest_tiny hiera_tiny_224 swin_tiny_patch4_window7_224 swinv2_tiny_window8_256 swinv2_cr_tiny_224
    vit_tiny_r_s16_p8_224 vit_small_r26_s32_224 vit_base_mci_224 vitamin_small_224 deit_tiny_patch16_224
    beit_base_patch16_224 volo_d1_224 sequencer2d_s mixer_s32_224 gmlp_ti16_224 vit_relpos_small_patch16_224
""".split()
SMP = "Unet UnetPlusPlus Linknet FPN PSPNet PAN DeepLabV3 DeepLabV3Plus UPerNet".split()
SMP_ATTENTION = "MAnet Segformer DPT".split()
MONAI = """
    UNet BasicUNet BasicUNetPlusPlus DynUNet SegResNet SegResNetDS AttentionUnet VNet HighResNet RegUNet DenseNet121
    resnet10 SEResNet50 FlexibleUNet MedNeXtS
""".split()
MONAI_ATTENTION = "UNETR SwinUNETR".split()

CNNS = (
    *(f"torchvision:{name}" for name in TORCHVISION),
    *(f"segmentation:{name}" for name in SEGMENTATION),
    *(f"video:{name}" for name in VIDEO),
    *(f"timm:{name}" for name in TIMM),
    *(f"smp:{name}" for name in SMP),
    *(f"monai:{name}" for name in MONAI),
)
"""Networks of convolutions: nearly all of their work must run split."""
HYBRIDS = (
    *(f"torchvision:{name}" for name in TORCHVISION_ATTENTION),
    *(f"timm:{name}" for name in TIMM_ATTENTION),
    *(f"smp:{name}" for name in SMP_ATTENTION),
    *(f"monai:{name}" for name in MONAI_ATTENTION),
)
"""Networks in which pixels far apart meet (attention, mixing of tokens, recurrence): they may gather."""
HUGE = (
    "torchvision:convnext_large",
    "torchvision:regnet_y_128gf",
    "torchvision:vit_l_16",
    "torchvision:vit_l_32",
    "torchvision:vit_h_14",
)
"""More than 150 M parameters: in float64 two ranks take 15 to 70 GB."""
MODELS = (*CNNS, *HYBRIDS)
SUBSET = """
    torchvision:squeezenet1_1 torchvision:resnet50 torchvision:densenet121 torchvision:googlenet
    torchvision:mobilenet_v3_small torchvision:shufflenet_v2_x1_0 torchvision:efficientnet_b0
    segmentation:fcn_resnet50 segmentation:deeplabv3_mobilenet_v3_large segmentation:lraspp_mobilenet_v3_large
    video:r3d_18 timm:convnext_atto timm:res2net50_14w_8s timm:resnest14d timm:hrnet_w18_small timm:dla34
    timm:nf_resnet26 timm:legacy_xception timm:inception_next_atto timm:poolformer_s12 timm:edgenext_xx_small smp:Unet
    smp:PSPNet monai:UNet
""".split()
"""For the other meshes: one of each kind of layer."""

SIZES = {
    "torchvision:inception_v3": (299, 299),
    "video:s3d": (224, 224),
    "smp:PAN": (128, 160),
    "timm:inception_v3": (96, 160),
    "timm:inception_v4": (96, 160),
    "timm:inception_resnet_v2": (96, 160),
    "timm:nasnetalarge": (96, 128),
    "timm:pnasnet5large": (96, 128),
}
"""The least height and width of models that are too deep for the asked ones."""
MULTIPLES = {
    "monai:SwinUNETR": 32,
    "monai:UNETR": 16,
    "smp": 32,
    "monai": 32,
    "timm:hrnet_w18_small": 32,
    "timm:dla34": 32,
}
"""Models, or whole sources, that take multiples of so many pixels only: larger sizes are rounded down."""
BATCH = 3
VOLUME_DEPTH = 32
FRAMES = {"video:s3d": 16}
CLIP_FRAMES = 8


class NotInstalledError(Exception):
    """The package of a model is not installed, or its release does not have the model."""


def source_of(name: str) -> tuple[str, str]:
    """Return a model's source and its name there.

    Example:
        >>> source_of("timm:resnet18d")
        ('timm', 'resnet18d')
    """
    source, _, model = name.partition(":")
    return source, model


def is_3d(name: str) -> bool:
    """Return whether a model takes videos or volumes."""
    return source_of(name)[0] in ("video", "monai")


def build(name: str, size: tuple[int, int]) -> tuple[nn.Module, tuple[torch.Tensor]]:
    """Return an untrained model and an input for it.

    Weights that are zero when the model is made are drawn: no gradient passes a zero weight (the last norm of a branch,
    a gain, a head), and a wrong one behind it would not show.

    Args:
        name: One of :data:`MODELS`, or another model of the same sources.
        size: Height and width in pixels, where the model takes any.

    Raises:
        NotInstalledError: The model's package is missing, or does not know the model.
    """
    source, model = source_of(name)
    package = PACKAGES.get(source, "")
    if not package or importlib.util.find_spec(package) is None:
        msg = f"{package or source} is not installed"
        raise NotInstalledError(msg)
    height, width = fitting_size(name, size)
    net = _BUILDERS[source](model, (height, width))
    _wake(net)
    return net, (torch.randn(input_shape(name, (height, width))),)


@torch.no_grad()
def _wake(net: nn.Module) -> None:
    for name, parameter in net.named_parameters():
        if not name.endswith("bias") and not parameter.any():
            parameter.normal_(std=0.1)


def input_shape(name: str, size: tuple[int, int]) -> tuple[int, ...]:
    """Return the shape of a model's input for images of ``size`` (height, width)."""
    source, _ = source_of(name)
    if source == "monai":
        return (1, 1, min(VOLUME_DEPTH, size[0]), *size)
    return (2, 3, FRAMES.get(name, CLIP_FRAMES), *size) if source == "video" else (BATCH, 3, *size)


def fitting_size(name: str, size: tuple[int, int]) -> tuple[int, int]:
    """Return the height and width that a model takes, next to ``size``."""
    fixed = _own_size(name)
    if fixed is not None:
        return fixed
    if source_of(name)[0] == "monai":  # convolutions of volumes in float64 are slow and unfold their input
        size = (size[0] // 2, size[1] // 2)
    least = SIZES.get(name, (0, 0))
    multiple = MULTIPLES.get(name, MULTIPLES.get(source_of(name)[0], 1))
    height, width = (max(a, b) // multiple * multiple for a, b in zip(size, least, strict=True))
    return height, width


def _own_size(name: str) -> tuple[int, int] | None:
    """Return the only size that a model takes, None where it takes many."""
    source, model = source_of(name)
    if source == "torchvision" and model.startswith(("vit_", "maxvit_")):
        return (224, 224)
    if source == "timm" and name in HYBRIDS:
        config = importlib.import_module("timm").get_pretrained_cfg(model)
        return None if config is None else (config.input_size[1], config.input_size[2])
    return None


def _torchvision(model: str, _: tuple[int, int]) -> nn.Module:
    models = importlib.import_module("torchvision.models")
    extra = {"init_weights": True} if model in ("googlenet", "inception_v3") else {}
    return _made(_known(models, model)(weights=None, **extra))


def _segmentation(model: str, _: tuple[int, int]) -> nn.Module:
    models = importlib.import_module("torchvision.models.segmentation")
    extra = {} if model.startswith("lraspp") else {"aux_loss": True}
    return _made(_known(models, model)(weights=None, weights_backbone=None, **extra))


def _video(model: str, _: tuple[int, int]) -> nn.Module:
    return _made(_known(importlib.import_module("torchvision.models.video"), model)(weights=None))


def _timm(model: str, _: tuple[int, int]) -> nn.Module:
    timm = importlib.import_module("timm")
    if not timm.is_model(model):
        msg = f"timm {timm.__version__} has no {model}"
        raise NotInstalledError(msg)
    return _made(timm.create_model(model))


def _smp(model: str, _: tuple[int, int]) -> nn.Module:
    library = importlib.import_module(PACKAGES["smp"])
    settings: dict[str, Any] = {"encoder_name": "resnet18", "encoder_weights": None, "classes": 5}
    if model == "Segformer":
        settings["encoder_name"] = "mit_b0"
    if model == "DPT":
        settings |= {"encoder_name": "tu-vit_tiny_patch16_224", "dynamic_img_size": True}
    return _made(_known(library, model)(**settings))


def _monai(model: str, size: tuple[int, int]) -> nn.Module:
    nets = importlib.import_module("monai.networks.nets")
    volume = (min(VOLUME_DEPTH, size[0]), *size)
    return _made(_known(nets, model)(**_MONAI_SETTINGS[model](volume)))


def _known(module: Any, model: str) -> Any:
    if not hasattr(module, model):
        msg = f"{module.__name__} has no {model}"
        raise NotInstalledError(msg)
    return getattr(module, model)


def _made(net: Any) -> nn.Module:
    assert isinstance(net, nn.Module)
    return net


_IN_OUT = {"spatial_dims": 3, "in_channels": 1, "out_channels": 2}
_STAGES = {"channels": (8, 16, 32, 64), "strides": (2, 2, 2)}
_MONAI_SETTINGS: dict[str, Any] = {
    "UNet": lambda _: _IN_OUT | _STAGES | {"num_res_units": 2},
    "BasicUNet": lambda _: _IN_OUT | {"features": (8, 8, 16, 32, 64, 8)},
    "BasicUNetPlusPlus": lambda _: _IN_OUT | {"features": (8, 8, 16, 32, 64, 8)},
    "DynUNet": lambda _: (
        _IN_OUT
        | {
            "kernel_size": [3] * 4,
            "strides": [1, 2, 2, 2],
            "upsample_kernel_size": [2] * 3,
            "filters": [8, 16, 32, 64],
            "deep_supervision": True,
        }
    ),
    "SegResNet": lambda _: _IN_OUT | {"init_filters": 8},
    "SegResNetDS": lambda _: _IN_OUT | {"init_filters": 8, "dsdepth": 2},
    "AttentionUnet": lambda _: _IN_OUT | _STAGES,
    "VNet": lambda _: _IN_OUT,
    "HighResNet": lambda _: _IN_OUT,
    "RegUNet": lambda _: _IN_OUT | {"num_channel_initial": 8, "depth": 3},
    "DenseNet121": lambda _: _IN_OUT,
    "resnet10": lambda _: {"spatial_dims": 3, "n_input_channels": 1, "num_classes": 4},
    "SEResNet50": lambda _: {"spatial_dims": 3, "in_channels": 1, "num_classes": 4},
    "FlexibleUNet": lambda _: {"in_channels": 1, "out_channels": 2, "backbone": "resnet18", "spatial_dims": 3},
    "MedNeXtS": lambda _: {"spatial_dims": 3, "in_channels": 1, "out_channels": 2},
    "UNETR": lambda volume: {
        "in_channels": 1,
        "out_channels": 2,
        "img_size": volume,
        "hidden_size": 96,
        "mlp_dim": 192,
        "num_heads": 4,
    },
    "SwinUNETR": lambda _: {"in_channels": 1, "out_channels": 2, "feature_size": 12},
}
"""Keyword arguments of MONAI's networks, which have no defaults for them, by the volume's size."""
_BUILDERS = {
    "torchvision": _torchvision,
    "segmentation": _segmentation,
    "video": _video,
    "timm": _timm,
    "smp": _smp,
    "monai": _monai,
}
