"""Observation normalization: running statistics of observations, and what they do to the inputs of nets."""

import math
from typing import Any

import cv2
import torch
from torch import Tensor, nn

from a3c_mp.nets.obs_stats import FAR_FROM_EQUALS, ImageStats, JoinedStats, VectorStats

KNEE = 5.0  # normalized values are what they are up to here; beyond, those of vectors grow with the logarithm
SLOPE = 0.1  # and those of images, which end at 255 grey levels, with this slope
LARGE_IMAGE = 128 * 128  # pixels of an image beyond which a step takes several times as long as with 84 x 84
VALUES_AT_ONCE = 125_000  # of images, normalized together on a CPU: they stay in a core's cache between operations
MOST_MERGED = 128  # channels that OpenCV merges


class ObsNorm(nn.Module):
    """Observation normalization: subtract the running mean, divide by the standard deviation, squash what is far.

    Burda et al. 2018 ("Exploration by random network distillation"), section 2.4, without their clipping to +-5: it
    makes the values of a rare feature equal, which lie at 10 to 50 deviations where it is in one of 1,000 states.
    In Pong all but a few pixels are the same in every frame; normalization leaves the ball and the paddles. Images are
    uint8, divided by 255 at first. Buffers are what actors need; the learner saves the statistics in checkpoints.

    `image` says whether observations are images; or it is the shape of the one whose pixels flat float32 observations
    begin with.
    """

    shift: Tensor  # [1, *shape]
    scale: Tensor  # [1, *shape]
    knee: Tensor  # [], `KNEE`, or the largest number where observations enter as they are

    def __init__(self, shape: tuple[int, ...], image: bool | tuple[int, ...] | None):
        super().__init__()
        self.image_shape = shape if image is True else image or None
        self.has_images, self.image = self.image_shape is not None, self.image_shape == shape  # `image`: bytes alone
        pixels = math.prod(self.image_shape or (0,))
        self.stats: Any = ImageStats(shape) if self.image else VectorStats(shape)
        if self.has_images and not self.image:
            self.stats = JoinedStats(pixels, shape[0] - pixels)
        scale = torch.ones(1, *shape)
        scale.view(-1)[:pixels] = 1 / 255
        self.register_buffer("shift", torch.zeros(1, *shape))
        self.register_buffer("scale", scale)
        self.register_buffer("knee", torch.tensor(KNEE))

    def turn_off(self) -> None:
        """Let observations enter as they are; images divided by 255."""
        self.knee.fill_(torch.finfo(self.knee.dtype).max)  # infinity less itself is no number

    @torch.no_grad()
    def update(self, obs: Tensor) -> int:
        """Update the statistics with observations [N, *shape]; return how many values are too far to be told apart."""
        mean, deviation, far = self.stats.update(obs)
        # Whole grey levels are exact in bfloat16, so the actors' copies subtract exactly what the learner does.
        self.shift.copy_(mean.round() if self.image else mean, non_blocking=True)
        self.scale.copy_(1 / deviation, non_blocking=True)
        return far

    def forward(self, obs: Tensor) -> Tensor:
        """Normalize floating-point observations [N, *shape]; images in place."""
        shift, scale = self.shift.to(obs.dtype), self.scale.to(obs.dtype)
        if self.image:
            return _normalize(obs, shift, scale)
        obs = (obs - shift).mul_(scale)
        near = obs.clamp(-self.knee, self.knee)
        rest = obs.sub_(near)
        return near.add_(rest.abs().clamp_(max=FAR_FROM_EQUALS).log1p_().mul_(rest.sign_()))

    def convert(self, obs: Tensor) -> Tensor:
        """Normalize raw observations [N, *shape], in the dtype that the net computes in; images as channels_last."""
        if not self.image:
            return self(obs.to(self.shift.dtype))
        device = obs.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else self.shift.dtype
        is_traced = torch.compiler.is_exporting()  # numpy and OpenCV cannot be
        if device != "cpu" or is_traced or obs.shape[1] > MOST_MERGED:
            return self(obs.contiguous(memory_format=torch.channels_last).to(dtype))
        # bfloat16 is computed in float32, which is faster, and is the same to the last bit up to the knee: differences
        # of whole grey levels (see `update`) and products of two bfloat16 numbers are exact there.
        shift, scale = self.shift.to(dtype).float(), self.scale.to(dtype).float()
        inputs = torch.empty_like(obs, dtype=dtype, memory_format=torch.channels_last)
        at_once = max(1, VALUES_AT_ONCE // self.shift.numel())
        for images, part in zip(obs.split(at_once), inputs.split(at_once), strict=True):
            if dtype == torch.float32:
                _normalize(part.copy_(channels_last(images)), shift, scale)
            else:
                part.copy_(_normalize(channels_last(images).float(), shift, scale))
        return inputs


def _normalize(images: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    images.sub_(shift).mul_(scale)
    return images.lerp_(images.clamp(-KNEE, KNEE), 1 - SLOPE)


def channels_last(images: Tensor) -> Tensor:
    """Images uint8 [N, C, H, W] on the CPU in channels_last memory format, the fastest one for convolutions."""
    num, channels, height, width = images.shape
    planes = images.reshape(num, channels, height * width).numpy()
    merged = cv2.merge([planes[:, c] for c in range(channels)])  # a sixth of the time of `contiguous`
    return torch.from_numpy(merged).view(num, height, width, channels).permute(0, 3, 1, 2)


def note_on_inputs(net: nn.Module) -> str:
    """A log line if observations with 2 or more axes are treated as vectors, or images are large; else ""."""
    norm = getattr(net, "norm", None)
    if not isinstance(norm, ObsNorm):
        return ""
    if norm.image_shape is not None and math.prod(size := norm.image_shape[1:]) > LARGE_IMAGE:
        return f"images of {size[0]} x {size[1]} make a step slow: --frame-size 84 is often enough"
    if norm.image_shape is not None or norm.shift.dim() < 3:
        return ""
    shape = tuple(norm.shift.shape[1:])
    return f"observations {shape} are treated as vectors; images have the same bounds everywhere, and 36 x 36 or more"
