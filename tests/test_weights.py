"""Weights to start from: what fits is loaded, the head is made anew, anything else is one line."""

from __future__ import annotations

import urllib.error

import pytest
import torch
from torch import nn

from engine.optim import head_names, number_layers, split_groups
from engine.weights import freeze, load_exactly, load_pretrained, read_pretrained, read_weights, set_training
from models import create_model


def test_the_head_is_made_anew_where_the_classes_differ():
    for name in ("resnet18", "vit_b_32", "squeezenet1_0", "mobilenet_v3_small", "resnet20"):
        theirs, ours = create_model(name, 7, 224), create_model(name, 3, 224)
        head = head_names(ours)
        before = {key: value.clone() for key, value in ours.state_dict().items() if key in head}
        line = load_pretrained(ours, theirs.state_dict())
        assert line == f"pretrained weights loaded; the head ({', '.join(sorted(head))}) is new"
        for key, value in ours.state_dict().items():
            assert torch.equal(value, before[key] if key in head else theirs.state_dict()[key]), key
    same = create_model("tiny", 3)
    assert load_pretrained(same, create_model("tiny", 3).state_dict()) == "pretrained weights loaded, with the head"


def test_weights_of_another_model_are_refused():
    with pytest.raises(ValueError) as refused:
        load_pretrained(create_model("tiny", 3), create_model("resnet20", 3).state_dict())
    beginning = "--pretrained: the weights are of another model: 15 of 20 tensors don't fit, features.0.weight is "
    assert str(refused.value).startswith(beginning)
    with pytest.raises(ValueError) as refused:
        load_exactly(create_model("tiny", 3), create_model("tiny", 4).state_dict())
    assert str(refused.value) == (
        "--init-from: the weights are of another model: 2 tensors differ, the first is head.bias; "
        "--pretrained takes weights of a model with other classes"
    )


def test_what_is_no_file_of_weights_is_named(tmp_path):
    (tmp_path / "text.pt").write_text("hello")
    torch.save({"epoch": 3}, tmp_path / "none.pt")
    for name, reason in {
        "no.pt": "there is no such file; give a .pt or .pth file of weights",
        "text.pt": "torch can't load it with weights_only=True (",
        "none.pt": "no weights in it; it must hold a dict of tensors, or one under 'model', 'state_dict' or 'model_state'",
    }.items():
        for read, flag in ((lambda path: read_pretrained(path, "tiny"), "--pretrained"), (read_weights, "--init-from")):
            with pytest.raises(ValueError) as refused:
                read(str(tmp_path / name))
            assert str(refused.value).startswith(f"{flag} {tmp_path}/{name}: {reason}") and "\n" not in str(refused.value)


@pytest.mark.parametrize("key", ["state_dict", "model", "model_state", "model_ema"])
def test_weights_are_found_where_other_programs_keep_them(tmp_path, key):
    theirs = create_model("tiny", 3).state_dict()
    torch.save({"epoch": 3, "cfg": "TRAIN: {}", key: {f"module.{name}": value for name, value in theirs.items()}}, tmp_path / "theirs.pyth")
    assert read_pretrained(str(tmp_path / "theirs.pyth"), "tiny").keys() == theirs.keys()


def test_torchvision_s_weights_are_its_models_only_and_need_a_network(monkeypatch):
    with pytest.raises(ValueError, match="--pretrained torchvision: tiny is no model of torchvision's; give the path of a file of weights"):
        read_pretrained("torchvision", "tiny")

    def no_network(*_, **__):
        raise urllib.error.URLError("no network")

    monkeypatch.setattr("torch.hub.download_url_to_file", no_network)
    monkeypatch.setattr("torch.hub.get_dir", lambda: "/nowhere")
    monkeypatch.setattr("os.makedirs", lambda *_, **__: None)
    with pytest.raises(ValueError) as refused:
        read_pretrained("torchvision", "resnet18")
    assert str(refused.value) == (
        "--pretrained torchvision: the weights of resnet18 can't be downloaded (<urlopen error no network>): "
        "download them where there is a network, and give their path"
    )
    with pytest.raises(ValueError, match="the weights of r3d_18 can't be downloaded"):  # a model of clips
        read_pretrained("torchvision", "r3d_18")


def test_freezing():
    model = create_model("tiny", 3)
    freeze(model, ["features.0", "features.1"])
    frozen = [name for name, parameter in model.named_parameters() if not parameter.requires_grad]
    assert frozen == ["features.0.weight", "features.1.weight", "features.1.bias"]
    set_training(model)
    assert [model.get_submodule(f"features.{n}").training for n in (0, 1, 3, 4)] == [False, False, True, True]
    assert model.get_submodule("features.2").training  # nothing in it
    with pytest.raises(ValueError) as refused:
        freeze(model, ["layer1"])
    assert str(refused.value) == "--freeze layer1: no parameter's name begins so; the model's parts are features, head"
    with pytest.raises(ValueError, match="--freeze features head: nothing is left to train"):
        freeze(model, ["features", "head"])


def test_layers_are_numbered_from_the_input():
    layers = number_layers(create_model("resnet18", 10))
    some = ("conv1.weight", "bn1.bias", "layer1.0.conv2.weight", "layer1.1.bn1.weight", "fc.bias")
    assert [layers[name] for name in some] == [0, 0, 1, 2, 9]
    vit = number_layers(create_model("vit_b_32", 10, 32))
    assert vit["encoder.layers.encoder_layer_11.ln_1.weight"] - vit["encoder.layers.encoder_layer_0.ln_1.weight"] == 11
    assert max(vit.values()) == vit["heads.head.weight"]


def test_rates_fall_towards_the_input_and_the_head_has_the_whole():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2))
    groups = split_groups(model, 0.1, layer_decay=0.5, backbone_scale=0.2)
    assert [(g["lr_scale"], g["weight_decay"], len(g["params"])) for g in groups] == [
        (1.0, 0.1, 1), (1.0, 0.0, 1), (0.1, 0.1, 1), (0.1, 0.0, 1), (0.05, 0.1, 1), (0.05, 0.0, 1),
    ]  # fmt: skip
