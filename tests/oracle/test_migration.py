"""SkyRL's table of ``--from skyrl`` against its package: every setting has a row, and every default in it is SkyRL's."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import oracles
import pytest
import yaml
from batches import CLOSE, assert_equal, our_loss, random_batch, settings
from test_skyrl import skyrl_loss

from skyrl_train.config.compare import changes
from skyrl_train.config.migration.table import UNSET
from skyrl_train.config.migration.translate import LIBRARIES, migrate

pytestmark = pytest.mark.oracle


def leaves(section: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    for field in fields(section):
        value = getattr(section, field.name)
        if is_dataclass(value):
            yield from leaves(value, f"{prefix}{field.name}.")
        elif value != {}:
            yield prefix + field.name, value


def test_every_setting_of_skyrl_has_a_row_with_its_default(skyrl: SimpleNamespace) -> None:
    table, theirs = LIBRARIES["skyrl"], dict(leaves(skyrl.settings.SkyRLTrainConfig()))
    assert len(theirs) > 300
    assert [name for name in theirs if not table.rows(name)] == []
    stated = {row.name: row.default for row in table.settings if row.default is not UNSET}
    # SkyRL fills it in from trainer.max_prompt_length.
    assert stated.pop("generator.max_input_length") is None
    home = str(Path("~").expanduser())
    ours = {
        name: [path.replace("~", home) for path in value] if name.startswith("data.") else value
        for name, value in stated.items()
    }
    assert ours == {name: theirs[name] for name in ours}


def test_a_whole_file_of_skyrl_is_read(skyrl: SimpleNamespace, tmp_path: Path) -> None:
    file = tmp_path / "skyrl.yaml"
    file.write_text(skyrl.settings.get_config_as_yaml_str(skyrl.settings.SkyRLTrainConfig()))
    given, kept = (migrate("skyrl", [text]).config for text in (str(file), "trainer.epochs=1"))
    # The first three of SkyRL's defaults are not kept: the run's name, its folder and its tracker. The others say the same.
    assert {change.key.rpartition(".")[0] for change in changes(kept, given)} == {
        "trainer",
        "trainer.eval.sampling_params",
        "generator.inference_engine.engine_args",
    }
    assert (given.trainer.run_name, given.trainer.trackers) == ("test_run", ["wandb"])


def test_every_setting_of_trls_grpo_has_a_row(trl: SimpleNamespace) -> None:
    table, names = LIBRARIES["trl"], [field.name for field in fields(trl.GRPOConfig)]
    assert len(names) > 150
    assert [
        name for name in names if not table.rows(table.renamed.get(name, name)) and not table.rows(f"{name}.x")
    ] == []


@pytest.mark.parametrize(
    "file",
    [
        "trainer/config/_generated_ppo_trainer.yaml",
        "experimental/fully_async_policy/config/fully_async_ppo_trainer.yaml",
    ],
)
def test_every_setting_of_verls_trainer_has_a_row(verl: SimpleNamespace, file: str) -> None:
    table, settings_of_verl = LIBRARIES["verl"], yaml.safe_load((oracles.FOLDER / "verl" / file).read_text())

    def names(section: dict[str, Any], prefix: str = "") -> Iterator[str]:
        for name, value in section.items():
            if isinstance(value, dict):
                yield from names(value, f"{prefix}{name}.")
            elif name != "_target_":
                yield prefix + name

    for hydras in ("defaults", "hydra"):
        settings_of_verl.pop(hydras, None)
    assert [name for name in names(settings_of_verl) if not table.rows(name)] == []


@pytest.mark.parametrize("seed", range(3))
def test_rollout_is_has_the_gradient_of_importance_sampling_with_icepop(skyrl: SimpleNamespace, seed: int) -> None:
    batch = random_batch(seed).first_pass()
    algorithm = migrate("skyrl", ["trainer.algorithm.policy_loss_type=rollout_is"]).config.trainer.algorithm
    correction = algorithm.off_policy_correction
    ours = our_loss(
        batch,
        settings(
            policy_loss_type=algorithm.policy_loss_type,
            off_policy_correction__tis_ratio_type=correction.tis_ratio_type,
            off_policy_correction__icepop_ratio_low=correction.icepop_ratio_low,
            off_policy_correction__icepop_ratio_high=correction.icepop_ratio_high,
        ),
    )
    theirs = skyrl_loss(skyrl, batch, policy_loss_type="rollout_is")
    assert (ours.gradient == 0)[batch.mask].any() and (ours.gradient != 0)[batch.mask].any()
    assert_equal(ours.gradient, theirs.gradient, CLOSE)
