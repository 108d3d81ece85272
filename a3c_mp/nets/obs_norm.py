"""Running mean and deviation of observations, and how nets normalise their inputs with them."""

from __future__ import annotations

from typing import NamedTuple

import cv2
import torch
from torch import Tensor, nn

CLIP = 5.0
"""largest normalised input"""
OUTLIER = 100.0
"""deviations from the mean beyond which a value of a vector enters the moments clipped to `CLIP` deviations"""


class Moments(NamedTuple):
    """What is known of a set of observations once they are gone."""

    num: Tensor  # [] float32, how many
    mean: Tensor  # [1, *obs_shape] float32
    variance: Tensor  # [1, *obs_shape] float32, about that mean

    @classmethod
    @torch.no_grad()
    def of(cls, obs: Tensor) -> Moments:
        """Moments of observations [N, *obs_shape] of any dtype."""
        obs = obs.to(torch.float32, copy=True)
        mean = obs.mean(dim=0, keepdim=True)
        variance = obs.sub_(mean).square_().mean(dim=0, keepdim=True)  # a fifth of the time of `Tensor.var`
        return cls(torch.tensor(float(len(obs)), device=obs.device), mean, variance)


class ObsNorm(nn.Module):
    """Subtract from every input its running mean, divide by its running deviation, clip to [-`CLIP`, `CLIP`].

    Burda et al. 2018 ("Exploration by random network distillation"), section 2.4. In Pong all but a few pixels are the
    same in every frame; what is left after this is the ball and the paddles.

    Args:
        shape: of one observation.
        image: the inputs are bytes; before the first update they are divided by 255.
    """

    count: Tensor
    mean: Tensor
    variance: Tensor
    shift: Tensor
    scale: Tensor

    def __init__(self, shape: tuple[int, ...], image: bool):
        super().__init__()
        self.image = image
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("mean", torch.zeros(1, *shape))
        self.register_buffer("variance", torch.ones(1, *shape))
        self.register_buffer("shift", torch.zeros(1, *shape))
        self.register_buffer("scale", torch.full((1, *shape), 1 / 255 if image else 1.0))

    def update(self, obs: Tensor) -> tuple[bool, int]:
        """Merge observations [N, *shape]; returns (whether their moments were merged, how many values were clipped)."""
        moments, clipped = self.clipped_moments(obs)
        return self.merge(moments), clipped

    @torch.no_grad()
    def clipped_moments(self, obs: Tensor) -> tuple[Moments, int]:
        """Moments of observations [N, *shape], and how many values were clipped for them.

        Once there is a running mean, values of vectors that lie more than `OUTLIER` deviations from it count as
        `CLIP` deviations, which is what the net sees of them. Otherwise a single huge value, the FLT_MAX of a sensor
        that sees nothing, would be all that the variance ever shows; and clipped to `OUTLIER` deviations, one in ten
        thousand (1 / OUTLIER^2) would be enough for the variance to grow without end.
        """
        if self.image or self.count == 0:
            return Moments.of(obs), 0
        obs = obs.to(torch.float32)
        deviation = self.variance.sqrt() + 1e-2
        outliers = (obs - self.mean).abs() > OUTLIER * deviation  # false for NaN
        clipped = int(outliers.sum())
        if clipped:
            obs = torch.where(outliers, obs.clamp(self.mean - CLIP * deviation, self.mean + CLIP * deviation), obs)
        return Moments.of(obs), clipped

    @torch.no_grad()
    def merge(self, moments: Moments) -> bool:
        """Merge the moments of 1 or more observations (Chan, Golub & LeVeque 1979).

        Returns:
            whether the result is finite; if not, everything stays as it is.
        """
        count, mean, variance = moments
        total = self.count + count
        delta = mean - self.mean
        squares = self.variance * self.count + variance * count + delta.square() * self.count * count / total
        mean, variance = self.mean + delta * count / total, squares / total
        if not (self.image or bool((mean.isfinite() & variance.isfinite()).all())):  # those of bytes always are
            return False
        self.mean.copy_(mean)
        self.variance.copy_(variance)
        self.count.copy_(total)
        # Whole grey levels are exact in bfloat16, so the actors' copies subtract exactly what the learner does. The
        # floor under the deviation, one grey level, keeps pixels that hardly ever change from drowning the rest.
        self.shift.copy_(self.mean.round() if self.image else self.mean)
        self.scale.copy_(1 / (self.variance.sqrt() + (1.0 if self.image else 1e-2)))
        return True

    def forward(self, obs: Tensor) -> Tensor:
        """Floating-point observations [N, *shape], overwritten."""
        return obs.sub_(self.shift.to(obs.dtype)).mul_(self.scale.to(obs.dtype)).clamp_(-CLIP, CLIP)

    def convert(self, obs: Tensor) -> Tensor:
        """Raw observations [N, *shape], normalised, in the dtype that the net computes in; images as channels_last."""
        if not self.image:
            return self(obs.to(self.shift.dtype, copy=True))
        device = obs.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else self.shift.dtype
        return self(channels_last(obs).to(dtype))


def channels_last(images: Tensor) -> Tensor:
    """Bytes [N, C, H, W] with the channels of a pixel side by side in memory, as convolutions are fastest."""
    if images.device.type != "cpu":
        return images.contiguous(memory_format=torch.channels_last)
    num, channels, height, width = images.shape
    planes = images.reshape(num, channels, height * width).numpy()
    merged = cv2.merge([planes[:, c] for c in range(channels)])  # a sixth of the time of `contiguous`
    return torch.from_numpy(merged).view(num, height, width, channels).permute(0, 3, 1, 2)


def note_on_inputs(net: nn.Module) -> str:
    """A line for the log where observations have axes as images have, and are treated as vectors; empty elsewhere."""
    norm = getattr(net, "norm", None)
    if not isinstance(norm, ObsNorm) or norm.image or norm.mean.dim() < 3:
        return ""
    shape = tuple(norm.mean.shape[1:])
    return f"observations {shape} are treated as vectors; images are uint8, with 3 axes, and 36 x 36 or more"
