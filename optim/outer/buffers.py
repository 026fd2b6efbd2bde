"""Selection of the buffers that are averaged beside the parameters."""

from __future__ import annotations

from torch import Tensor, nn

from shoal.optim.outer.parameters import Exclude, fits


def float_buffers(model: nn.Module) -> list[Tensor]:
    """Return the model's floating-point buffers that are in its state_dict, each once; so no counters and masks."""
    return AveragedBuffers(model).now()


class AveragedBuffers:
    """The buffers of ``float_buffers`` by name: ``model.to`` and modules that assign to a buffer put another tensor in its place.

    Without a model there are none. Those whose names are in ``exclude`` are left out.
    """

    def __init__(self, model: nn.Module | None, exclude: Exclude = ()) -> None:
        self._model = nn.Module() if model is None else model
        saved = self._model.state_dict(keep_vars=True)
        own = [pattern for pattern in exclude if isinstance(pattern, str)]
        self._shapes = {
            name: buffer.shape
            for name, buffer in self._model.named_buffers()
            if name in saved and buffer.is_floating_point() and not any(fits(name, pattern) for pattern in own)
        }

    def __len__(self) -> int:
        return len(self._shapes)

    def now(self) -> list[Tensor]:
        """Return the model's present tensors. ValueError if one is gone or has another shape than at first."""
        buffers = dict(self._model.named_buffers(remove_duplicate=False)) if self._shapes else {}
        for name, shape in self._shapes.items():
            if name not in buffers or buffers[name].shape != shape:
                raise ValueError(
                    f"the averaged buffer {name!r} is not of shape {tuple(shape)} any more: keep it so, or ignore buffers"
                )
        return [buffers[name] for name in self._shapes]
