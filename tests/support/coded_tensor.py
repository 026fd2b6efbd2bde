"""A tensor subclass as quantised optimizers keep their state in."""

import torch
from torch.utils._python_dispatch import return_and_correct_aliasing


class Coded(torch.Tensor):
    """A tensor of 8-bit codes and a scale, as optimizers of torchao keep their state."""

    @staticmethod
    def __new__(cls, codes, scale):
        return torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=torch.float32)

    def __init__(self, codes, scale):
        self.codes, self.scale = codes, scale

    @classmethod
    def of(cls, values):
        scale = values.abs().max().clamp(min=1e-12) / 127
        return cls((values / scale).round().to(torch.int8), scale)

    def values(self):
        return self.codes.float() * self.scale

    def __tensor_flatten__(self):
        return ["codes", "scale"], None

    @classmethod
    def __tensor_unflatten__(cls, inner, _context, _size=None, _stride=None):
        return cls(inner["codes"], inner["scale"])

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.detach.default:
            made = cls(args[0].codes, args[0].scale)
            return return_and_correct_aliasing(func, args, kwargs, made)
        raise NotImplementedError(f"{func} of {cls.__name__}")
