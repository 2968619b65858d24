"""torchvision's classification models by their names, without weights.

in: a name of a table, num_classes, img_size  ->  out: an nn.Module, (n, 3, img_size, img_size), or a clip of such -> (n, num_classes)
Invariant: the forward gives one tensor, in training too. torchvision is imported only when one of its models is built;
the table is written out, so that asking which models exist costs nothing.
"""

from __future__ import annotations

from typing import Any

from torch import nn

# model name -> name of the constructor in torchvision.models
TORCHVISION_MODELS: dict[str, str] = {
    "alexnet": "alexnet",
    "convnext_base": "convnext_base",
    "convnext_large": "convnext_large",
    "convnext_small": "convnext_small",
    "convnext_tiny": "convnext_tiny",
    "densenet121": "densenet121",
    "densenet161": "densenet161",
    "densenet169": "densenet169",
    "densenet201": "densenet201",
    "efficientnet_b0": "efficientnet_b0",
    "efficientnet_b1": "efficientnet_b1",
    "efficientnet_b2": "efficientnet_b2",
    "efficientnet_b3": "efficientnet_b3",
    "efficientnet_b4": "efficientnet_b4",
    "efficientnet_b5": "efficientnet_b5",
    "efficientnet_b6": "efficientnet_b6",
    "efficientnet_b7": "efficientnet_b7",
    "efficientnet_v2_l": "efficientnet_v2_l",
    "efficientnet_v2_m": "efficientnet_v2_m",
    "efficientnet_v2_s": "efficientnet_v2_s",
    "googlenet": "googlenet",
    "inception_v3": "inception_v3",
    "maxvit_t": "maxvit_t",
    "mnasnet0_5": "mnasnet0_5",
    "mnasnet0_75": "mnasnet0_75",
    "mnasnet1_0": "mnasnet1_0",
    "mnasnet1_3": "mnasnet1_3",
    "mobilenet_v2": "mobilenet_v2",
    "mobilenet_v3_large": "mobilenet_v3_large",
    "mobilenet_v3_small": "mobilenet_v3_small",
    "regnet_x_16gf": "regnet_x_16gf",
    "regnet_x_1_6gf": "regnet_x_1_6gf",
    "regnet_x_32gf": "regnet_x_32gf",
    "regnet_x_3_2gf": "regnet_x_3_2gf",
    "regnet_x_400mf": "regnet_x_400mf",
    "regnet_x_800mf": "regnet_x_800mf",
    "regnet_x_8gf": "regnet_x_8gf",
    "regnet_y_128gf": "regnet_y_128gf",
    "regnet_y_16gf": "regnet_y_16gf",
    "regnet_y_1_6gf": "regnet_y_1_6gf",
    "regnet_y_32gf": "regnet_y_32gf",
    "regnet_y_3_2gf": "regnet_y_3_2gf",
    "regnet_y_400mf": "regnet_y_400mf",
    "regnet_y_800mf": "regnet_y_800mf",
    "regnet_y_8gf": "regnet_y_8gf",
    "resnet101": "resnet101",
    "resnet152": "resnet152",
    "resnet18": "resnet18",
    "resnet34": "resnet34",
    "resnet50": "resnet50",
    "resnext101_32x8d": "resnext101_32x8d",
    "resnext101_64x4d": "resnext101_64x4d",
    "resnext50_32x4d": "resnext50_32x4d",
    "shufflenet_v2_x0_5": "shufflenet_v2_x0_5",
    "shufflenet_v2_x1_0": "shufflenet_v2_x1_0",
    "shufflenet_v2_x1_5": "shufflenet_v2_x1_5",
    "shufflenet_v2_x2_0": "shufflenet_v2_x2_0",
    "squeezenet1_0": "squeezenet1_0",
    "squeezenet1_1": "squeezenet1_1",
    "swin_b": "swin_b",
    "swin_s": "swin_s",
    "swin_t": "swin_t",
    "swin_v2_b": "swin_v2_b",
    "swin_v2_s": "swin_v2_s",
    "swin_v2_t": "swin_v2_t",
    "vgg11": "vgg11",
    "vgg11_bn": "vgg11_bn",
    "vgg13": "vgg13",
    "vgg13_bn": "vgg13_bn",
    "vgg16": "vgg16",
    "vgg16_bn": "vgg16_bn",
    "vgg19": "vgg19",
    "vgg19_bn": "vgg19_bn",
    "vit_b_16": "vit_b_16",
    "vit_b_32": "vit_b_32",
    "vit_h_14": "vit_h_14",
    "vit_l_16": "vit_l_16",
    "vit_l_32": "vit_l_32",
    "wide_resnet101_2": "wide_resnet101_2",
    "wide_resnet50_2": "wide_resnet50_2",
}

# The same for models of clips (n, 3, T, H, W), in torchvision.models.video.
TORCHVISION_VIDEO_MODELS: dict[str, str] = {
    "mc3_18": "mc3_18",
    "mvit_v1_b": "mvit_v1_b",
    "mvit_v2_s": "mvit_v2_s",
    "r2plus1d_18": "r2plus1d_18",
    "r3d_18": "r3d_18",
    "s3d": "s3d",
    "swin3d_b": "swin3d_b",
    "swin3d_s": "swin3d_s",
    "swin3d_t": "swin3d_t",
}

# Constructors whose weights depend on the picture's size, and the keyword that says it.
_SIZE_KEYWORD = {
    "maxvit_t": "input_size",
    "vit_b_16": "image_size",
    "vit_b_32": "image_size",
    "vit_h_14": "image_size",
    "vit_l_16": "image_size",
    "vit_l_32": "image_size",
}
# Constructors that would give auxiliary logits beside the logits; both warn unless init_weights is said.
_NO_AUXILIARY_HEADS = {
    "googlenet": {"aux_logits": False, "init_weights": True},
    "inception_v3": {"aux_logits": False, "init_weights": True},
}


def create_torchvision_model(name: str, num_classes: int, img_size: int | None = None, **options: Any) -> nn.Module:
    """Build the model with random weights; `img_size` matters to vit_* and maxvit_t only (their default is 224). options: other
    keywords of its constructor."""
    import torchvision.models

    keywords: dict[str, Any] = dict(_NO_AUXILIARY_HEADS.get(name, {}), **options)
    if img_size is not None and name in _SIZE_KEYWORD:
        keyword = _SIZE_KEYWORD[name]
        keywords[keyword] = (img_size, img_size) if keyword == "input_size" else img_size
    constructor = getattr(torchvision.models, TORCHVISION_MODELS[name])
    model: nn.Module = constructor(weights=None, num_classes=num_classes, **keywords)
    return model


def create_torchvision_video_model(name: str, num_classes: int, **options: Any) -> nn.Module:
    """Build the model of clips with random weights. (mvit_* and swin3d_* are made for 224 pixels, mvit_* for 16 frames.)"""
    import torchvision.models.video

    constructor = getattr(torchvision.models.video, TORCHVISION_VIDEO_MODELS[name])
    model: nn.Module = constructor(weights=None, num_classes=num_classes, **options)
    return model
