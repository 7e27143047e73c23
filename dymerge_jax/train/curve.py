"""The loss curve as a picture."""

import logging
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from dymerge_jax.train.work_folder import StepRecord

_log = logging.getLogger(__name__)

_SMOOTHING = 20
"""Steps that the thick line averages over."""


def draw_curve(records: Sequence[StepRecord], file: Path, *, title: str) -> bool:
    """Draws loss by step into a PNG file.

    Returns:
      Whether it was drawn: False without matplotlib, which comes with the extra "bench".
    """
    try:
        from matplotlib.figure import Figure  # an object of its own: no display and no state of pyplot's
    except ImportError:
        _log.info("no picture of the losses: matplotlib is not installed (pip install matplotlib)")
        return False
    steps, losses = [r.step for r in records], np.asarray([r.loss for r in records])
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.add_subplot(title=title, xlabel="step", ylabel="loss (nats a token)")
    axes.plot(steps, losses, linewidth=0.7, alpha=0.5, label="of each step")
    width = min(_SMOOTHING, len(losses))
    mean = np.convolve(losses, np.full(width, 1 / width), mode="valid")
    axes.plot(steps[width - 1 :], mean, linewidth=1.8, label=f"mean of {width}")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(file, dpi=120)
    return True
