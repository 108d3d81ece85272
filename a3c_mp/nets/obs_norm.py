"""Observation normalization: running mean and variance of observations, applied to the inputs of nets."""

from __future__ import annotations

from typing import NamedTuple

import cv2
import torch
from torch import Tensor, nn

CLIP = 5.0
"""largest absolute value of a normalized input"""
OUTLIER = 100.0
"""distance from the mean (standard deviations) beyond which the moments count a vector's value as `CLIP` deviations"""
VALUES_AT_ONCE = 250_000
"""values of images that are normalized together on a CPU: they stay in a core's cache from one operation to the next"""
LARGEST = 1e15
"""distance from the median beyond which the first values of a vector are always outliers: their squares overflow"""


class Moments(NamedTuple):
    """Moments of a set of observations."""

    num: Tensor  # [] float32, how many
    mean: Tensor  # [1, *obs_shape] float32
    variance: Tensor  # [1, *obs_shape] float32, about that mean

    @classmethod
    @torch.no_grad()
    def of(cls, obs: Tensor) -> Moments:
        """The moments of observations [N, *obs_shape] of any dtype."""
        obs = obs.to(torch.float32, copy=True)
        mean = obs.mean(dim=0, keepdim=True)
        variance = obs.sub_(mean).square_().mean(dim=0, keepdim=True)  # a fifth of the time of `Tensor.var`
        return cls(torch.tensor(float(len(obs)), device=obs.device), mean, variance)


class ObsNorm(nn.Module):
    """Observation normalization: subtract the running mean, divide by the standard deviation, clip to +-`CLIP`.

    Burda et al. 2018 ("Exploration by random network distillation"), section 2.4. In Pong all but a few pixels are the
    same in every frame; normalization leaves the ball and the paddles. Images are uint8, divided by 255 at first.
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
        """Update mean and variance with observations [N, *shape]; return (whether it succeeded, values clipped)."""
        moments, clipped = self.clipped_moments(obs)
        return self.merge(moments), clipped

    @torch.no_grad()
    def clipped_moments(self, obs: Tensor) -> tuple[Moments, int]:
        """Compute moments of observations [N, *shape] with outliers clipped; return (moments, values clipped).

        A single sentinel, such as FLT_MAX of a sensor without a reading, would dominate the variance for good. Outliers
        are clipped to `CLIP` deviations, as in the net's input: clipped to `OUTLIER` deviations, one in ten thousand
        (1 / OUTLIER^2) would let the variance grow without bound.

        The first observations are compared with their median. Where more than half of them are equal, which does not
        tell how far the others may lie, only values farther than `LARGEST` are outliers, and count as the median.
        """
        if self.image:
            return Moments.of(obs), 0
        obs = obs.to(torch.float32)
        if self.count:
            centre, deviation = self.mean, self.variance.sqrt() + 1e-2
            farthest = OUTLIER * deviation
        else:
            centre, deviation = _median_and_deviation(obs.clamp(-LARGEST, LARGEST))
            farthest = torch.where(deviation > 0, OUTLIER * deviation, LARGEST)
        outliers = (obs - centre).abs() > farthest  # false for NaN
        clipped = int(outliers.sum())
        if clipped:
            obs = torch.where(outliers, obs.clamp(centre - CLIP * deviation, centre + CLIP * deviation), obs)
        return Moments.of(obs), clipped

    @torch.no_grad()
    def merge(self, moments: Moments) -> bool:
        """Merge moments into the running ones (Chan, Golub & LeVeque 1979); False, and no change, if not finite."""
        count, mean, variance = moments
        total = self.count + count
        delta = mean - self.mean
        squares = self.variance * self.count + variance * count + delta.square() * self.count * count / total
        mean, variance = self.mean + delta * count / total, squares / total
        if not (self.image or bool((mean.isfinite() & variance.isfinite()).all())):  # uint8 ones always are
            return False
        self.mean.copy_(mean)
        self.variance.copy_(variance)
        self.count.copy_(total)
        # Whole grey levels are exact in bfloat16, so the actors' copies subtract exactly what the learner does. One
        # grey level is added to the deviation, so that pixels that hardly ever change do not dominate the input.
        self.shift.copy_(self.mean.round() if self.image else self.mean)
        self.scale.copy_(1 / (self.variance.sqrt() + (1.0 if self.image else 1e-2)))
        return True

    def forward(self, obs: Tensor) -> Tensor:
        """Normalize floating-point observations [N, *shape] in place."""
        return _normalize(obs, self.shift.to(obs.dtype), self.scale.to(obs.dtype))

    def convert(self, obs: Tensor) -> Tensor:
        """Normalize raw observations [N, *shape], in the dtype that the net computes in; images as channels_last."""
        if not self.image:
            return self(obs.to(self.shift.dtype, copy=True))
        device = obs.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else self.shift.dtype
        if device != "cpu" or torch.compiler.is_exporting():  # numpy and OpenCV cannot be traced
            return self(obs.contiguous(memory_format=torch.channels_last).to(dtype))
        # bfloat16 is computed in float32, which is faster, and is the same to the last bit: differences of whole grey
        # levels (see `merge`) and products of two bfloat16 numbers are exact there.
        shift, scale = self.shift.to(dtype).float(), self.scale.to(dtype).float()
        inputs = torch.empty_like(obs, dtype=dtype, memory_format=torch.channels_last)
        at_once = max(1, VALUES_AT_ONCE // self.mean.numel())
        for images, part in zip(obs.split(at_once), inputs.split(at_once), strict=True):
            if dtype == torch.float32:
                _normalize(part.copy_(channels_last(images)), shift, scale)
            else:
                part.copy_(_normalize(channels_last(images).float(), shift, scale))
        return inputs


def _normalize(obs: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    return obs.sub_(shift).mul_(scale).clamp_(-CLIP, CLIP)


def _median_and_deviation(obs: Tensor) -> tuple[Tensor, Tensor]:
    """What outliers do not move: the median of observations [N, *shape] and their deviation, [1, *shape] each.

    The deviation is that of a normal distribution with the same median distance from the median, plus 1e-2, as in the
    net's input; 0 where more than half of the values are equal.
    """
    middle = slice((len(obs) - 1) // 2, (len(obs) + 1) // 2)
    median = obs.sort(dim=0).values[middle]  # `Tensor.median` is not deterministic on a GPU
    distance = (obs - median).abs().sort(dim=0).values[middle]
    return median, torch.where(distance > 0, 1.4826 * distance + 1e-2, 0)


def channels_last(images: Tensor) -> Tensor:
    """Images uint8 [N, C, H, W] on the CPU in channels_last memory format, the fastest one for convolutions."""
    num, channels, height, width = images.shape
    planes = images.reshape(num, channels, height * width).numpy()
    merged = cv2.merge([planes[:, c] for c in range(channels)])  # a sixth of the time of `contiguous`
    return torch.from_numpy(merged).view(num, height, width, channels).permute(0, 3, 1, 2)


def note_on_inputs(net: nn.Module) -> str:
    """A log line if observations with 2 or more axes are treated as vectors, else an empty string."""
    norm = getattr(net, "norm", None)
    if not isinstance(norm, ObsNorm) or norm.image or norm.mean.dim() < 3:
        return ""
    shape = tuple(norm.mean.shape[1:])
    return f"observations {shape} are treated as vectors; images are uint8, with 3 axes, and 36 x 36 or more"
