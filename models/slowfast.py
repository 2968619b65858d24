"""SlowFast networks: a pathway that sees few frames in many channels, and one that sees all frames in few.

in: num_classes, options  ->  out: an nn.Module, float (n, 3, T, H, W), T a multiple of alpha -> logits (n, num_classes)
Invariant: parameters have PySlowFast's names and shapes; the two pathways' inputs are made here, on the device.
Source: Feichtenhofer et al., SlowFast networks for video recognition, 2019 (arXiv 1812.03982).
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from models.resnet3d import Head, Options, Stage, Stems, initialize, pool_size

STEM_KERNELS = (1, 5)  # temporal, of the slow and the fast pathway
STAGE_KERNELS = ((1, 3), (1, 3), (3, 3), (3, 3))


class FuseFastToSlow(nn.Module):
    """The fast pathway's features, every alpha-th frame of them, join the slow pathway's channels."""

    def __init__(self, fast_width: int, ratio: int, kernel: int, alpha: int, options: Options) -> None:
        super().__init__()
        width = fast_width * ratio
        self.conv_f2s = nn.Conv3d(fast_width, width, (kernel, 1, 1), stride=(alpha, 1, 1), padding=(kernel // 2, 0, 0), bias=False)
        self.bn = options.norm(width)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, xs: list[Tensor]) -> list[Tensor]:
        slow, fast = xs
        return [torch.cat([slow, self.relu(self.bn(self.conv_f2s(fast)))], 1), fast]


class SlowFast(nn.Module):
    """alpha: frames of the fast pathway to one of the slow; beta_inv: channels of the slow to one of the fast; fusion_ratio,
    fusion_kernel: channels of a fusion to one of the fast pathway, and its temporal kernel."""

    def __init__(
        self,
        num_classes: int,
        img_size: int | None,
        options: Options,
        *,
        alpha: int,
        beta_inv: int,
        fusion_ratio: int,
        fusion_kernel: int,
    ) -> None:
        super().__init__()
        slow = options.width_per_group
        if min(alpha, beta_inv, fusion_ratio, fusion_kernel) < 1 or slow % beta_inv or fusion_kernel % 2 == 0:
            raise ValueError(
                f"alpha={alpha}, beta_inv={beta_inv}, fusion_ratio={fusion_ratio}, fusion_kernel={fusion_kernel}: all are at least 1, "
                f"fusion_kernel is odd, and beta_inv divides width_per_group={slow}"
            )
        self.alpha = alpha
        fast = slow // beta_inv
        self.s1 = Stems([slow, fast], STEM_KERNELS, options)
        widths = [slow, fast]
        for number in range(2, 6):
            self.add_module(f"s{number - 1}_fuse", FuseFastToSlow(widths[1], fusion_ratio, fusion_kernel, alpha, options))
            factor = 2 ** (number - 2)
            inner = slow * options.num_groups * factor
            in_widths = [widths[0] + widths[1] * fusion_ratio, widths[1]]
            widths = [4 * slow * factor, 4 * fast * factor]
            kernels = [[kernel] for kernel in STAGE_KERNELS[number - 2]]
            self.add_module(f"s{number}", Stage(number, in_widths, [inner, inner // beta_inv], widths, kernels, options))
        self.head = Head(widths, num_classes, pool_size(img_size), options.dropout)
        initialize(self, options.zero_init_final_bn)

    def forward(self, clips: Tensor) -> Tensor:
        x = self.s1([self._slow_frames(clips), clips])
        for number in range(2, 6):
            x = self.get_submodule(f"s{number - 1}_fuse")(x)
            x = self.get_submodule(f"s{number}")(x)
        return self.head(x)

    def _slow_frames(self, clips: Tensor) -> Tensor:
        """T / alpha of the T frames, spread evenly from the first to the last."""
        num_frames = clips.shape[2]
        if num_frames % self.alpha:
            raise ValueError(f"clips of {num_frames} frames: this model takes multiples of alpha={self.alpha}")
        num_slow = num_frames // self.alpha
        places = torch.arange(num_slow, device=clips.device) * (num_frames - 1) // max(num_slow - 1, 1)
        return clips.index_select(2, places)


def _build(
    num_classes: int,
    img_size: int | None = None,
    *,
    alpha: int = 8,
    beta_inv: int = 8,
    fusion_ratio: int = 2,
    fusion_kernel: int = 5,
    **options: Any,
) -> nn.Module:
    return SlowFast(
        num_classes, img_size, Options(**options), alpha=alpha, beta_inv=beta_inv, fusion_ratio=fusion_ratio, fusion_kernel=fusion_kernel
    )


# num_classes, img_size, options -> the model. The names are wds_example's, whose 8x8 has the shapes that PySlowFast calls 4x16;
# PySlowFast's own 8x8 has the last name.
slowfast_8x8_r50 = partial(_build)
slowfast_4x16_r50 = partial(_build)
slowfast_8x8_r50_alpha4 = partial(_build, alpha=4, fusion_kernel=7)
