"""Running mean and standard deviation of observations, which one absurd value does not spoil."""

import math
from typing import Any

import torch
from torch import Tensor

FAR = 1e6  # distance from the mean (standard deviations) beyond which a value is left out, as of a broken sensor
FAR_FROM_EQUALS = 1e15  # the same distance, in units of the feature, where all others are equal; most that nets see
SMALLEST = 2.0**-34  # values and deviations below it count as 0
RARE = 1e-4  # share of a feature's values below which a bin does not say on which scale the feature varies
COMMON = 0.05  # share of a feature's values above which several that differ are no failure of a sensor
ROUNDED = 4e-6  # share of the other values that is rounding to float32, as in sines of headings that were added up
LARGEST_EXPONENT = 128
MANY_FEATURES = 4096  # beyond these, bins are 256 times as wide as the last one, not twice: they take less memory
VALUES_AT_ONCE, ROWS_AT_ONCE = 100_000, 16  # of a batch that enter the statistics: a sample of wide observations


class ImageStats:
    """Running mean and variance of images uint8 [N, *shape]; bytes have no outliers.

    One grey level is added to the deviation, so that pixels that hardly ever change do not dominate the input.
    """

    def __init__(self, shape: tuple[int, ...]):
        self.count, self.mean, self.variance = torch.zeros(()), torch.zeros(1, *shape), torch.ones(1, *shape)

    def update(self, obs: Tensor) -> tuple[Tensor, Tensor, int]:
        """Merge images into the statistics (Chan, Golub & LeVeque 1979); return (mean, deviation, 0)."""
        self.load_state_dict({name: value.to(obs.device) for name, value in self.state_dict().items()})
        obs = obs.to(torch.float32, copy=True)
        mean = obs.mean(dim=0, keepdim=True)
        variance = obs.sub_(mean).square_().mean(dim=0, keepdim=True)  # a fifth of the time of `Tensor.var`
        total, delta = self.count + len(obs), mean - self.mean
        squares = self.variance * self.count + variance * len(obs) + delta.square() * self.count * len(obs) / total
        self.mean, self.variance, self.count = self.mean + delta * len(obs) / total, squares / total, total
        return self.mean, self.variance.sqrt() + 1.0, 0

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count, "mean": self.mean, "variance": self.variance}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count, self.mean, self.variance = state["count"], state["mean"], state["variance"]


class JoinedStats:
    """Statistics of flat observations [N, pixels + numbers] that begin with the pixels of an image."""

    def __init__(self, pixels: int, numbers: int):
        self.sizes = [pixels, numbers]
        self.image, self.vector = ImageStats((pixels,)), VectorStats((numbers,))

    def update(self, obs: Tensor) -> tuple[Tensor, Tensor, int]:
        pixels, numbers = obs.split(self.sizes, dim=1)
        mean, deviation, _ = self.image.update(pixels)
        mean_of_numbers, of_numbers, far = self.vector.update(numbers)
        deviation = torch.cat([deviation, of_numbers.to(deviation)], dim=1)
        return torch.cat([mean, mean_of_numbers.to(mean)], dim=1), deviation, far

    def state_dict(self) -> dict[str, Any]:
        return self.image.state_dict() | self.vector.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.image.load_state_dict(state)
        self.vector.load_state_dict(state)


class VectorStats:
    """Running mean and standard deviation of each feature of vectors [N, *shape], of any scale.

    Values are counted in bins by sign and power of two, with exact moments of each bin. Mean and deviation are those of
    all bins that belong together: from one bin outwards, until the next one lies `FAR` deviations of those before it
    away. So a rare value counts as it is, whenever it comes, and an absurd one, however frequent, not at all.
    """

    def __init__(self, shape: tuple[int, ...]):
        self.shape, num_features = shape, math.prod(shape)
        self.step = 1 if num_features <= MANY_FEATURES else 8
        self.zero_bin = (LARGEST_EXPONENT - math.frexp(SMALLEST)[1]) // self.step + 1
        bins = 2 * self.zero_bin + 1
        self.moments = torch.zeros(3, bins, num_features)  # count, mean, deviation of each bin

    def update(self, obs: Tensor) -> tuple[Tensor, Tensor, int]:
        """Merge observations [N, *shape] into the statistics; NaN and infinities are left out.

        Returns (mean [1, *shape], deviation [1, *shape], 1 where all are equal; how many values are `FAR` from it).
        """
        rows = max(VALUES_AT_ONCE // self.moments.shape[2], ROWS_AT_ONCE)
        if rows < len(obs):  # of all environments: a fixed step could be their number
            seen = torch.Generator().manual_seed(int(self.moments[0].double().sum()))
            obs = obs[torch.randperm(len(obs), generator=seen)[:rows]]
        values = obs.flatten(1).cpu().double()
        bins = self._bins(values)
        finite = values.isfinite()
        used = torch.bincount(bins[finite], minlength=self.moments.shape[1]).nonzero().squeeze(1)
        place = torch.empty(self.moments.shape[1], dtype=torch.int64)
        place[used] = torch.arange(len(used))
        index = (place[bins.where(finite, used[:1])] * values.shape[1] + torch.arange(values.shape[1]))[finite]
        new = _moments(index, values[finite], len(used), values.shape[1])
        self.moments[:, used] = _merged(self.moments[:, used].double(), new).float()
        mean, deviation = self._solve()
        far = int(((values - mean).abs() > FAR * deviation).sum())
        return mean.view(1, *self.shape).float(), deviation.view(1, *self.shape).float(), far

    def _bins(self, values: Tensor) -> Tensor:
        """The bin of each value, in their order on the real line; that of `zero_bin` holds values around 0."""
        exponent = torch.frexp(values)[1].clamp(max=LARGEST_EXPONENT) - math.frexp(SMALLEST)[1]
        size = exponent.div(self.step, rounding_mode="floor") + 1
        return self.zero_bin + torch.where(values < 0, -size, size).where(values.abs() >= SMALLEST, 0).long()

    def _solve(self) -> tuple[Tensor, Tensor]:
        """Mean and deviation [n] of the bins of each feature that belong together."""
        count, mean, deviation = self.moments[:, self.moments[0].any(dim=1)].double()  # [K, n] each, by values
        core, is_noise = _core(count, mean, deviation)
        centre = mean.gather(0, core[None])
        order = (mean - centre).abs().where(count > 0, math.inf).argsort(dim=0, stable=True)  # from the core outwards
        count, mean, deviation, is_noise = (part.gather(0, order) for part in (count, mean, deviation, is_noise))
        distance, num = mean - centre, count.cumsum(0)
        means = (count * distance).cumsum(0) / num
        deviations = ((count * (deviation.square() + distance.square())).cumsum(0) / num - means.square()).clamp(min=0)
        deviations, means = deviations.sqrt(), means + centre
        found, varying = _without_noise(deviations, means), _without_noise(deviations, means, ROUNDED)
        limit = torch.where(found > 0, FAR * found, FAR_FROM_EQUALS)
        alike = (mean[1:].abs() / means[:-1].abs()).log10().abs() <= 2  # enough, where others may be rounding
        joins = ((mean[1:] - means[:-1]).abs() <= limit[:-1]) | (alike & (varying[:-1] == 0)) | is_noise[1:]
        solid = (count >= COMMON * num[-1]) & (_without_noise(deviation, mean) > 0)  # no failed sensor gives these
        joins |= (solid.int().flip(0).cummax(0).values.flip(0)[1:] > 0) & (varying[:-1] == 0)
        last = (joins & (count[1:] > 0)).cumprod(0).sum(0, keepdim=True)  # the last bin that belongs to the others
        return means.gather(0, last)[0], torch.where(found > 0, found, 1.0).gather(0, last)[0]

    def state_dict(self) -> dict[str, Any]:
        return {"moments": self.moments}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.moments.copy_(state["moments"])


def _core(count: Tensor, mean: Tensor, deviation: Tensor) -> tuple[Tensor, Tensor]:
    """The bin [n] of each feature to begin with, the largest of those on its scale; which bins are noise, bool [K, n].

    A bin's scale is its deviation or, if all of its values are equal, the distance to the next bin. Where a sensor has
    no reading in most states, the value that stands for it has a scale far above that of the readings. What stands for
    it is one value: where many values differ, others that vary far less are noise. So are those that vary as much as
    rounding to float32 makes the others vary, without the largest: that may be of no reading (two such hide some).
    """
    there, total = count > 0, count.sum(0)
    below = mean.where(there, -math.inf).cummax(0).values.roll(1, 0)
    above = mean.where(there, math.inf).flip(0).cummin(0).values.flip(0).roll(-1, 0)
    below[0], above[-1] = -math.inf, math.inf
    scale = _without_noise(deviation, mean, ROUNDED)
    order = scale.argsort(dim=0, descending=True, stable=True)
    many = count.gather(0, order).cumsum(0) >= COMMON * total
    noise = scale.gather(0, order).where(many, 0.0).amax(0) / FAR  # cos(pi / 2) is 6e-17, or 4e-8 in float32
    scale = torch.where(scale > 0, scale, torch.minimum(mean - below, above - mean))
    order = scale.argsort(dim=0, descending=True, stable=True)
    many = count.gather(0, order).cumsum(0) - count.gather(0, order[:1]) >= COMMON * total
    second = scale.gather(0, order).where(many, 0.0).amax(0)
    rounding = scale.where((count >= COMMON * total) & (scale <= ROUNDED * second), 0.0).amax(0)
    noise = torch.where(rounding >= 1e-8 * second, torch.maximum(noise, ROUNDED * second), noise)  # not below 1e-8
    scale = scale.where(there & (scale > noise), math.inf)
    smallest = scale.where(count >= RARE * total, math.inf).amin(0)
    return count.where(scale <= FAR * smallest, -1.0).argmax(0), there & scale.isinf()


def _without_noise(deviation: Tensor, mean: Tensor, share: float = 1e-7) -> Tensor:
    """Deviations, 0 for those that rounding to float32 can cause: up to a share of the mean."""
    return deviation.where(deviation > SMALLEST + share * mean.abs(), 0.0)


def _moments(index: Tensor, values: Tensor, num_bins: int, num_features: int) -> Tensor:
    """Moments [3, num_bins, num_features] of values [M] in float64, each of the bin and feature of its index."""
    size = num_bins * num_features
    count = torch.bincount(index, minlength=size).double()
    mean = torch.bincount(index, values, size) / count.clamp(min=1)
    squares = torch.bincount(index, (values - mean[index]).square(), size)
    return torch.stack([count, mean, (squares / count.clamp(min=1)).sqrt()]).view(3, num_bins, num_features)


def _merged(first: Tensor, second: Tensor) -> Tensor:
    """Moments of both (Chan, Golub & LeVeque 1979)."""
    total = (first[0] + second[0]).clamp(min=1)
    share = second[0] / total
    delta = second[1] - first[1]
    variance = (1 - share) * first[2].square() + share * second[2].square() + share * (1 - share) * delta.square()
    return torch.stack([first[0] + second[0], first[1] + share * delta, variance.sqrt()])
