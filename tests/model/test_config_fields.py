"""What a model's config says reaches the computation: nothing is a constant of the layers."""

import numpy as np

from dymerge_jax.config import RopeConfig
from dymerge_jax.library import Model, pad_batch
from dymerge_jax.model import params_of
from tests.support import numpy_llama
from tests.support.tiny_models import tiny_model

PROMPT = [5, 9, 2, 40, 7, 33]


def test_every_field_of_a_config_counts() -> None:
    """One query head for each KV head, heads wider than hidden / heads, a large epsilon, scaled rotary frequencies."""
    rope = RopeConfig(theta=100.0, factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position=32)
    split = tiny_model(num_layers=1, num_kv_heads=4, head_dim=24, ffn=48, rms_norm_eps=0.2, rope=rope)
    model = Model(split, None, adapter_slots=1)
    logits = np.asarray(model.logits(pad_batch([PROMPT]), model.mix([{}])))[0]
    expected = numpy_llama.logits(split.config, params_of(split), PROMPT)
    np.testing.assert_allclose(logits, expected, atol=1e-4)
