"""What a run measured: always a line of JSON for each event (``log.py``), and on request the same for other tools' eyes.

``catalogue.py`` says what the events mean as numbers. ``sink.py`` hands them to Prometheus (``endpoint.py``), TensorBoard
(``tensorboard_file.py``) and Weights & Biases (``wandb_run.py``), those that ``opening.py`` finds in the settings.
"""

from shoal.node.metrics.log import Metrics, RoundRecord, Value
from shoal.node.metrics.sink import MetricsError

__all__ = ["Metrics", "MetricsError", "RoundRecord", "Value"]
