"""Sink for TensorBoard: an event file in a folder named like the node, so that nodes of one DIR can be compared."""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path
from typing import Any

from shoal.node.extras import require
from shoal.node.metrics.catalogue import Fields
from shoal.node.metrics.curves import Curves
from shoal.node.metrics.sink import About, MetricsError


class TensorBoardFile:
    """Writer to ``folder``/``node``. MetricsError: the package is missing, or the folder cannot be written.

    It does not use the package's own writer, whose thread prints a traceback when a disk is full.
    """

    name = "TensorBoard"

    def __init__(self, folder: Path, node: str) -> None:
        require(MetricsError, "--tensorboard", "tensorboard", extra="tensorboard")
        self._folder, self._curves = folder.absolute() / node, Curves()
        self._records: Any = None
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise self._unwritable(error) from error

    def _unwritable(self, error: OSError) -> MetricsError:
        return MetricsError(
            f"Cannot write for TensorBoard into {str(self._folder)!r} ({error.strerror}): choose another folder with --tensorboard."
        )

    def begin(self, about: About) -> str:
        """Open the file, which has the name by which TensorBoard finds it."""
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.summary.writer.record_writer import RecordWriter

        now = time.time()
        path = self._folder / f"events.out.tfevents.{now:.6f}.{socket.gethostname().replace('/', '-')}.{os.getpid()}"
        try:
            self._records = RecordWriter(path.open("xb"))
            self._write(Event(wall_time=now, file_version="brain.Event:2"))
        except OSError as error:
            raise self._unwritable(error) from error
        return f"curves for TensorBoard: tensorboard --logdir {self._folder.parent}"

    def event(self, name: str, time: float, fields: Fields) -> None:
        """Append the points of an event, and flush them at once."""
        step, points = self._curves.points(name, time, fields)
        if points:
            from tensorboard.compat.proto.event_pb2 import Event
            from tensorboard.compat.proto.summary_pb2 import Summary

            values = [Summary.Value(tag=tag, simple_value=value) for tag, value in points.items()]
            self._write(Event(wall_time=time, step=step, summary=Summary(value=values)))

    def _write(self, event: Any) -> None:
        self._records.write(event.SerializeToString())
        self._records.flush()

    def close(self) -> None:
        """Close the file."""
        if self._records is not None:
            self._records.close()
