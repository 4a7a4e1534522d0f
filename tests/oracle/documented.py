"""Settings as the documentation gives them."""

from __future__ import annotations

import re
from pathlib import Path

import yaml
from batches import settings

from skyrl_train.config.schema import AlgorithmConfig, RejectionConfig

PAGE = Path(__file__).parents[2] / "docs" / "tutorials" / "off_policy_correction.md"


def documented_dppo() -> AlgorithmConfig:
    """The settings of DPPO, word for word; everything else is the default."""
    blocks = re.findall(r"^ *```yaml\n(.*?)^ *```", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    (text,) = [block for block in blocks if "probability_difference" in block]
    algorithm = yaml.safe_load(text)["trainer"]["algorithm"]
    correction = algorithm["off_policy_correction"]
    config = settings(
        policy_loss_type=algorithm["policy_loss_type"],
        off_policy_correction__tis_ratio_type=AlgorithmConfig().off_policy_correction.tis_ratio_type,
        off_policy_correction__rejections=[RejectionConfig(**rule) for rule in correction.pop("rejections")],
        **{f"off_policy_correction__{key}": value for key, value in correction.items()},
    )
    assert set(algorithm) == {"policy_loss_type", "off_policy_correction"}
    return config
