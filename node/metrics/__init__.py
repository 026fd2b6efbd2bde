"""Metrics of a run: a line of JSON for each event (`log`), and on request the same for other tools.

`catalogue` defines the events as numbers, `sink` passes them to Prometheus (`endpoint`), TensorBoard (`tensorboard_file`) and
Weights & Biases (`wandb_run`), and `factory` opens those that the settings ask for.
"""
