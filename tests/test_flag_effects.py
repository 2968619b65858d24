"""Every flag of training changes what it says, in a whole run; `TESTED` says where each flag's effect is tested."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import torch
from launching import read_lines

from data import Plan
from engine import checkpoint, flags

COUNTS = (9, 8, 7)
# flag -> the test that sees its effect
TESTED = {
    "data": "test_prepare.py test_several_patterns_and_an_unquoted_brace_pattern",
    "val_data": "test_train.py test_evaluation_is_exact_on_any_world_size",
    "task": "test_run.py test_a_mistake_is_one_line",
    "label": "test_prepare.py test_a_label_may_lie_in_json",
    "classes": "test_prepare.py test_names_come_from_the_listing_the_file_or_nowhere",
    "num_classes": "test_flag_effects.py test_the_model_gets_its_classes_and_picture_size",
    "img_size": "test_flag_effects.py test_the_model_gets_its_classes_and_picture_size",
    "scale": "test_flag_effects.py test_augmentation_can_be_set_and_left_out",
    "hflip": "test_flag_effects.py test_augmentation_can_be_set_and_left_out",
    "no_aug": "test_flag_effects.py test_augmentation_can_be_set_and_left_out",
    "decoder": "test_prepare.py test_the_decoder_is_chosen_and_said",
    "workers": "test_train.py test_global_batches_are_one_sequence_for_every_world_size",
    "cache_dir": "test_remote_training.py test_a_run_on_two_ranks_says_what_it_needs_and_keeps_no_secret",
    "cache_size": "test_remote_training.py test_a_run_on_two_ranks_says_what_it_needs_and_keeps_no_secret",
    "stream": "test_streaming.py test_a_streamed_run_says_what_it_does_not_promise",
    "epoch_samples": "test_streaming.py test_a_streamed_run_says_what_it_does_not_promise",
    "allow_pipe": "test_streaming.py test_a_streamed_run_says_what_it_does_not_promise",
    "max_bad": "test_train.py test_too_many_bad_samples_stop_every_rank_with_one_message",
    "num_frames": "test_video_training.py test_the_flags_of_clips_reach_the_task",
    "sampling_rate": "test_video_training.py test_the_flags_of_clips_reach_the_task",
    "target_fps": "test_video_training.py test_the_flags_of_clips_reach_the_task",
    "short_side": "test_video_training.py test_the_flags_of_clips_reach_the_task",
    "test_data": "test_views.py test_a_run_trains_and_then_tests",
    "test_size": "test_views.py test_each_flag_of_the_test_changes_it",
    "num_ensemble_views": "test_views.py test_each_flag_of_the_test_changes_it",
    "num_spatial_crops": "test_views.py test_each_flag_of_the_test_changes_it",
    "ensemble": "test_views.py test_each_flag_of_the_test_changes_it",
    "epochs": "test_prepare.py test_flags_win_over_the_checkpoint",
    "batch_size": "test_train.py test_a_batch_of_10_on_3_processes_and_another_world_size_at_a_resume",
    "seed": "test_flag_effects.py test_the_stream_is_the_plan_s",
    "no_shuffle": "test_flag_effects.py test_the_stream_is_the_plan_s",
    "shuffle_block": "test_flag_effects.py test_the_stream_is_the_plan_s",
    "lanes": "test_flag_effects.py test_the_stream_is_the_plan_s",
    "model": "test_launch.py test_the_bare_command_trains",
    "model_kwargs": "test_settings.py test_the_model_gets_its_keywords",
    "opt": "test_flag_effects.py test_the_optimizer_gets_its_settings",
    "lr": "test_flag_effects.py test_the_rate_follows_the_schedule",
    "momentum": "test_flag_effects.py test_the_optimizer_gets_its_settings",
    "weight_decay": "test_flag_effects.py test_the_optimizer_gets_its_settings",
    "sched": "test_flag_effects.py test_the_rate_follows_the_schedule",
    "warmup_epochs": "test_flag_effects.py test_the_rate_follows_the_schedule",
    "warmup_lr": "test_flag_effects.py test_the_rate_follows_the_schedule",
    "auto_augment": "test_training_flags.py test_what_changes_pictures_or_targets_changes_what_is_learnt",
    "color_jitter": "test_training_flags.py test_what_changes_pictures_or_targets_changes_what_is_learnt",
    "reprob": "test_training_flags.py test_what_changes_pictures_or_targets_changes_what_is_learnt",
    "mixup": "test_training_flags.py test_what_changes_pictures_or_targets_changes_what_is_learnt",
    "cutmix": "test_training_flags.py test_what_changes_pictures_or_targets_changes_what_is_learnt",
    "loss": "test_training_flags.py test_what_changes_pictures_or_targets_changes_what_is_learnt",
    "smoothing": "test_training_flags.py test_what_changes_pictures_or_targets_changes_what_is_learnt",
    "amp": "test_training_flags.py test_what_changes_pictures_or_targets_changes_what_is_learnt",
    "pretrained": "test_training_flags.py test_weights_to_start_from",
    "init_from": "test_training_flags.py test_weights_to_start_from",
    "freeze": "test_training_flags.py test_frozen_parts_stay_as_they_are",
    "lr_base": "test_training_flags.py test_rates_by_other_flags",
    "backbone_lr": "test_training_flags.py test_parts_of_the_model_have_rates_of_their_own",
    "layer_decay": "test_training_flags.py test_parts_of_the_model_have_rates_of_their_own",
    "min_lr": "test_training_flags.py test_rates_by_other_flags",
    "warmup_steps": "test_training_flags.py test_rates_by_other_flags",
    "clip_grad": "test_training_flags.py test_clipping_slows_the_weights_down",
    "grad_accum": "test_training_flags.py test_what_the_model_is_told",
    "ema": "test_training_flags.py test_the_average_is_kept_and_evaluated",
    "sync_bn": "test_training_flags.py test_synchronised_batch_norm_needs_gpus",
    "find_unused_parameters": "test_training_flags.py test_a_model_may_leave_parameters_out",
    "channels_last": "test_training_flags.py test_what_the_model_is_told",
    "compile": "test_training_flags.py test_what_the_model_is_told",
    "tf32": "test_training_flags.py test_what_the_model_is_told",
    "checkpoint_hist": "test_training_flags.py test_checkpoints_are_kept_by_number_and_written_by_time",
    "if_disk_full": "test_training_flags.py test_a_full_disk_stops_the_run_or_not",
    "val_interval": "test_training_flags.py test_evaluations_come_every_so_many_epochs",
    "precise_bn": "test_training_flags.py test_batch_norm_s_statistics_are_taken_anew",
    "save_predictions": "test_training_flags.py test_predictions_are_written_if_asked_for",
    "dry_run": "test_training_flags.py test_a_dry_run_tells_everything_and_trains_nothing",
    "output": "test_launch.py test_the_bare_command_trains",
    "name": "test_prepare.py test_resume_auto_goes_on_with_the_one_that_is_named",
    "resume": "test_train.py test_a_resumed_run_ends_with_the_same_bits",
    "checkpoint_interval": "test_flag_effects.py test_intervals",
    "log_interval": "test_flag_effects.py test_intervals",
    "profile": "test_limits.py test_a_profile_of_all_ranks",
    "audit": "test_flag_effects.py test_there_is_an_audit_only_if_asked_for",
    "evaluate": "test_train.py test_evaluation_is_exact_on_any_world_size",
    "config": "test_flag_effects.py test_a_recipe_trains",
    "device": "test_distributed.py test_processes_are_as_told_else_one_per_gpu_else_one",
    "nproc_per_node": "test_train.py test_global_batches_are_one_sequence_for_every_world_size",
    "nnodes": "test_launch.py test_two_nodes_meet",
    "node_rank": "test_launch.py test_two_nodes_meet",
    "dist_url": "test_launch.py test_two_nodes_meet",
    "dist_timeout": "test_launch.py test_a_node_that_does_not_come_is_named",
    "dist_backend": "test_run.py test_a_mistake_is_one_line",
}


def test_every_flag_has_a_test():
    assert TESTED.keys() == flags.defaults().keys()
    for flag, where in TESTED.items():
        name, test = where.split()
        text = (Path(__file__).parent / name).read_text()
        assert re.search(rf"def {test}\(", text), where
        short = {"batch_size": '"-b"', "workers": '"-j"', "config": '"-c"'}.get(flag, "-")
        assert f"--{flag.replace('_', '-')}" in text or short in text, where


def last(folder):
    return checkpoint.read(folder / "checkpoints" / "last.pt")


def weights(folder):
    return torch.cat([value.flatten().double() for value in last(folder)["model"].values()])


def rates(folder):
    return [line["lr"] for line in read_lines(folder / "metrics.jsonl") if line["event"] == "train"]


@pytest.mark.parametrize(
    ("words", "plan"),
    [
        ([], {}),
        (["--seed", 1], {"seed": 1}),
        (["--no-shuffle"], {"shuffle": False}),
        (["--shuffle-block", 4], {"shuffle_block": 4}),
        (["--lanes", 3], {"lanes": 3}),
    ],
)
def test_the_stream_is_the_plan_s(train, words, plan):
    folder = train("--audit", *words)
    ids = [tuple(i[:2]) for line in read_lines(folder / "audit" / "rank0.jsonl") for i in line["ids"]]
    plans = Plan(np.array(COUNTS), 2, **plan)
    batches = [plans.batch(start, 8, 0, 1) for start in range(0, 48, 8)]
    assert ids == [(f"{s}.tar", i) for b in batches for s, i in zip(b.shard.tolist(), b.index.tolist(), strict=True)]
    assert last(folder)["stream"] | plan == last(folder)["stream"]


def test_augmentation_can_be_set_and_left_out(train):
    small = [weights(train("--hflip", 0)), weights(train("--hflip", 1)), weights(train("--hflip", 1, "--scale", 0.1, 0.2))]
    assert not torch.equal(small[0], small[1])
    assert not torch.equal(small[1], small[2])  # left out, pictures up to 64 are padded and cropped
    large = [weights(train("--img-size", 96, "--hflip", 0, *scale)) for scale in ([], ["--scale", 0.08, 1], ["--scale", 1, 1])]
    assert torch.equal(large[0], large[1])
    assert not torch.equal(large[0], large[2])
    assert torch.equal(weights(train("--no-aug", "--hflip", 0)), weights(train("--no-aug", "--hflip", 1)))


def flat(name, num_classes, img_size):
    """A model that takes pictures of one size only, in place of create_model's."""
    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3 * img_size * img_size, num_classes))


def test_the_model_gets_its_classes_and_picture_size(train):
    folder = train("--img-size", 40, "--num-classes", 11, model=flat)
    assert last(folder)["model"]["1.weight"].shape == (11, 3 * 40 * 40)
    (start,) = (line for line in read_lines(folder / "metrics.jsonl") if line["event"] == "start")
    assert (start["img_size"], start["num_classes"]) == (40, 11)


def test_the_optimizer_gets_its_settings(train):
    groups = last(train("--momentum", 0.5, "--weight-decay", 0.25))["optimizer"]["param_groups"]
    assert [(group["momentum"], group["nesterov"], group["weight_decay"]) for group in groups] == [(0.5, True, 0.25), (0.5, True, 0.0)]
    folder = train("--opt", "adamw", "--momentum", 0.8)
    assert [group["betas"][0] for group in last(folder)["optimizer"]["param_groups"]] == [0.8, 0.8]
    resumed = train("--resume", folder, "--epochs", 3, "--weight-decay", 0.125, "--momentum", 0.7)  # a flag wins over the checkpoint
    groups = last(resumed)["optimizer"]["param_groups"]
    assert [(group["betas"][0], group["weight_decay"]) for group in groups] == [(0.7, 0.125), (0.7, 0.0)]
    assert last(resumed)["progress"]["step"] == 9


def test_the_rate_follows_the_schedule(train):
    told = ["--log-interval", 1, "--lr", 0.3]
    assert rates(train(*told, "--sched", "constant", "--warmup-epochs", 0)) == [0.3] * 6
    warm = rates(train(*told, "--sched", "constant", "--warmup-epochs", 1, "--warmup-lr", 0.06))
    assert warm == pytest.approx([0.06, 0.14, 0.22] + [0.3] * 3)
    assert rates(train(*told, "--sched", "step", "--warmup-epochs", 0)) == pytest.approx([0.3] * 2 + [0.03] * 2 + [0.003] * 2)
    cosine = [0.15 * (1 + np.cos(np.pi * step / 6)) for step in range(6)]
    assert rates(train(*told, "--warmup-epochs", 0)) == pytest.approx(cosine)


def test_intervals(train):
    folder = train("--log-interval", 4, "--checkpoint-interval", 5, "--epochs", 3)
    steps = [line["step"] for line in read_lines(folder / "metrics.jsonl") if line["event"] == "train"]
    assert steps == [4, 8, 9]  # the last step is told too
    assert checkpoint.read(folder / "checkpoints" / "previous.pt")["progress"]["step"] == 6
    assert checkpoint.read(train("--checkpoint-interval", 5) / "checkpoints" / "previous.pt")["progress"]["step"] == 5


def test_there_is_an_audit_only_if_asked_for(train):
    assert not (train() / "audit").exists()
    assert len(read_lines(train("--audit") / "audit" / "rank0.jsonl")) == 6


def test_a_recipe_trains(train, tmp_path):
    (tmp_path / "r.yaml").write_text("log-interval: 1\nlr: 0.3\nsched: constant\nwarmup-epochs: 0\nno-shuffle: true\n")
    folder = train("-c", tmp_path / "r.yaml", "--lr", 0.2)
    assert rates(folder) == [0.2] * 6
    assert last(folder)["stream"]["shuffle"] is False


def test_a_step_may_hold_several_epochs(train, tmp_path):
    folder = train("-b", 60, "--epochs", 5, "--val-data", tmp_path / "train", "--log-interval", 1)
    lines = read_lines(folder / "metrics.jsonl")
    epochs = [(line["epoch"], line["step"], line["samples"]) for line in lines if line["event"] == "epoch"]
    assert epochs == [(0, 1, 24), (1, 1, 24), (2, 2, 24), (3, 2, 24), (4, 2, 24)]
    assert [(line["epoch"], line["step"], line["num_samples"]) for line in lines if line["event"] == "eval"] == [(1, 1, 24), (4, 2, 24)]
    times = [(line["data_time"], line["step_time"]) for line in lines if line["event"] == "train"]
    assert all(0 < waited <= took < 100 for waited, took in times)  # seconds of a step
