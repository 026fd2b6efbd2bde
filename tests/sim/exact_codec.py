"""A codec of two ways that loses nothing: a mean still says whose contributions it is of."""

import math

from torch import Tensor

from shoal.optim.codecs.base import Shape
from shoal.optim.codecs.device_checks import Checks
from shoal.optim.codecs.floats import FLOAT32
from shoal.optim.codecs.quantized import SectionCodec
from shoal.optim.codecs.two_way import TwoWayCodec


class _Plain(SectionCodec):
    """Values as float32, in sections that can be cut anywhere."""

    name = "sign"

    def section(self, shape: Shape) -> int:
        return 4 * math.prod(shape)

    def fields(self, section: Tensor, count: int, start: int, stop: int) -> list[Tensor]:
        return [section[4 * start : 4 * stop]]

    def write(self, tensor: Tensor, section: Tensor, checks: Checks) -> None:
        section.copy_(FLOAT32.encode([tensor]))

    def read(self, section: Tensor, shape: Shape, checks: Checks) -> Tensor:
        return FLOAT32.decode(section.clone(), [shape])[0]


def exact_two_way() -> TwoWayCodec:
    return TwoWayCodec(_Plain(), 1.0, FLOAT32)
