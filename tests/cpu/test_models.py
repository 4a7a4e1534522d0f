"""Model folders: one message names the missing or broken part, and the hub is never asked for a path."""

from __future__ import annotations

import dataclasses
import json
import socket
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import GenerationConfig, Phi3Config

from skyrl_train.config.model_shape import model_shape, num_positions
from skyrl_train.config.schema import BuildModelConfig, ModelConfig
from skyrl_train.errors import ConfigError, EngineError, ModelError
from skyrl_train.inference.engines.embedded.core import build_core
from skyrl_train.inference.engines.embedded.engine import EngineSettings
from skyrl_train.models.folder import build_empty, load_config, load_model, load_tokenizer, resolve_device, use_tf32
from skyrl_train.models.tiny import build_model_folder, character_tokenizer
from skyrl_train.training.batch import RowLayout

SMALL = BuildModelConfig(hidden_size=16, num_layers=1, num_heads=2, intermediate_size=32)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "model"
    build_model_folder(SMALL, path, seed=0)
    return path


def edit_json(path: Path, **changes: object) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return dict(load_model(str(folder), "float32", "cpu").named_parameters())


class TestBuilding:
    def test_the_weights_are_a_function_of_the_seed(self, folder: Path, tmp_path: Path) -> None:
        torch.manual_seed(99)
        before = torch.get_rng_state()
        build_model_folder(SMALL, tmp_path / "same", seed=0)
        build_model_folder(SMALL, tmp_path / "other", seed=1)
        assert torch.equal(before, torch.get_rng_state())
        a, same, other = weights(folder), weights(tmp_path / "same"), weights(tmp_path / "other")
        assert all(torch.equal(a[name], same[name]) for name in a)
        assert not torch.equal(a["lm_head.weight"], other["lm_head.weight"])

    def test_a_finished_folder_is_kept_and_an_interrupted_one_is_not(self, tmp_path: Path) -> None:
        unfinished = tmp_path / "model.tmp"
        unfinished.mkdir()
        (unfinished / "stale").touch()
        build_model_folder(SMALL, tmp_path / "model", seed=0)
        assert not unfinished.exists()
        assert not (tmp_path / "model" / "stale").exists()
        first = weights(tmp_path / "model")["lm_head.weight"]
        build_model_folder(SMALL, tmp_path / "model", seed=5)
        assert torch.equal(first, weights(tmp_path / "model")["lm_head.weight"])

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"num_heads": 3}, "hidden_size=16 must be a multiple of 2 \\* num_heads = 6"),
            ({"num_layers": 0}, "num_layers must be at least 1"),
            ({"alphabet": ""}, "alphabet is empty"),
        ],
    )
    def test_impossible_sizes_are_refused_by_name(
        self, tmp_path: Path, change: dict[str, object], message: str
    ) -> None:
        with pytest.raises(ConfigError, match=f"trainer.policy.model.build.{message}"):
            build_model_folder(dataclasses.replace(SMALL, **change), tmp_path / "model", seed=0)

    @pytest.mark.parametrize("model_type", ["qwen33", "t5"])
    def test_a_type_that_is_no_causal_model_is_refused(self, tmp_path: Path, model_type: str) -> None:
        with pytest.raises(ModelError, match=f"cannot make a '{model_type}' model"):
            build_model_folder(dataclasses.replace(SMALL, model_type=model_type), tmp_path / "model", seed=0)
        assert list(tmp_path.iterdir()) == []

    def test_a_place_that_cannot_be_written_is_named(self, tmp_path: Path) -> None:
        (tmp_path / "file").touch()
        with pytest.raises(ModelError, match="cannot be written"):
            build_model_folder(SMALL, tmp_path / "file" / "model", seed=0)

    def test_the_tokenizer_knows_each_character_and_gives_it_back(self) -> None:
        tokenizer = character_tokenizer("cba c\n")
        ids = tokenizer("abc c\na?").input_ids
        assert len(ids) == 8
        assert tokenizer.decode(ids[:7]) == "abc c\na"
        assert ids[7] == tokenizer.unk_token_id
        conversation = [{"role": "user", "content": "ab"}, {"role": "assistant", "content": "c"}]
        assert tokenizer.apply_chat_template(conversation, tokenize=False) == "abc"

    def test_a_word_is_one_token_wherever_it_stands(self) -> None:
        tokenizer = character_tokenizer("abc{}", ["{call", "}}"])
        ids = tokenizer("ab{callc}}a{c}").input_ids
        assert [tokenizer.decode([token]) for token in ids] == ["a", "b", "{call", "c", "}}", "a", "{", "c", "}"]
        assert tokenizer.decode(ids) == "ab{callc}}a{c}"
        model = ModelConfig(build=dataclasses.replace(SMALL, words=["{call", "}}"]))
        shape = model_shape(model)
        assert shape is not None and shape.vocab_size == len(character_tokenizer(SMALL.alphabet, model.build.words))

    def test_a_word_of_one_character_belongs_to_the_alphabet(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match=r"belong to trainer\.policy\.model\.build\.alphabet"):
            build_model_folder(dataclasses.replace(SMALL, words=["x"]), tmp_path / "model", seed=0)


class TestOpening:
    @pytest.mark.parametrize(
        "path", ["./nowhere", "../nowhere", "/nowhere/model", "a/b/c", "~/model", "model/", "a\\b"]
    )
    def test_a_path_that_is_not_there_is_said_without_asking_the_hub(
        self, path: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        asked: list[object] = []
        monkeypatch.setattr(socket, "getaddrinfo", lambda *address, **_: asked.append(address) or [])
        for open_it in (load_config, load_tokenizer, lambda p: load_model(p, "float32", "cpu")):
            with pytest.raises(ModelError, match=r"is not there\. Point trainer\.policy\.model\.path"):
                open_it(path)
        assert asked == []

    def test_so_is_a_missing_folder_inside_one_that_is_there(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (tmp_path / "runs").mkdir()
        monkeypatch.chdir(tmp_path)
        with pytest.raises(ModelError, match="'runs/model' is not there"):
            load_config("runs/model")

    def test_a_file_is_no_model_folder(self, tmp_path: Path) -> None:
        (tmp_path / "model.safetensors").touch()
        with pytest.raises(ModelError, match="a file, not a model folder"):
            load_config(str(tmp_path / "model.safetensors"))

    def test_a_hub_name_that_cannot_be_reached_says_so(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
        with pytest.raises(ModelError, match=r"no folder here, and the hub did not give it either .*Point trainer"):
            load_config("an-organisation/a-model-that-is-not-cached")

    def test_an_empty_folder_has_no_config(self, tmp_path: Path) -> None:
        with pytest.raises(ModelError, match=r"is not a model: .*Point trainer.policy.model.path at a folder"):
            load_config(str(tmp_path))

    def test_the_folder_of_a_run_is_no_model(self, tmp_path: Path) -> None:
        (tmp_path / "config.yaml").touch()
        with pytest.raises(ModelError, match=rf"the folder of a run, not a model. Point \S+ at {tmp_path / 'policy'}"):
            load_config(str(tmp_path))

    @pytest.mark.parametrize("text", ["{", "{}", '{"model_type": "no-such-type"}'])
    def test_a_broken_or_unknown_config_is_no_model(self, folder: Path, text: str) -> None:
        (folder / "config.json").write_text(text)
        with pytest.raises(ModelError, match="is not a model"):
            load_config(str(folder))

    def test_loading_is_silent(self, folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
        load_model(str(folder), "float32", "cpu")
        load_tokenizer(str(folder))
        build_empty(str(folder), "bfloat16", "cpu")
        build_model_folder(SMALL, tmp_path / "another", seed=0)
        assert capfd.readouterr() == ("", "")

    def test_an_empty_build_has_the_names_and_shapes_of_the_loaded_one(self, folder: Path) -> None:
        built = build_empty(str(folder), "bfloat16", "cpu")
        shapes = {name: p.shape for name, p in built.named_parameters()}
        assert shapes == {name: p.shape for name, p in weights(folder).items()}
        assert {p.dtype for p in built.parameters()} == {torch.bfloat16}
        assert not built.training

    def test_an_empty_build_has_the_generation_settings_of_the_loaded_one(self, folder: Path) -> None:
        GenerationConfig(eos_token_id=[2, 5]).save_pretrained(folder)
        built, loaded = build_empty(str(folder), "float32", "cpu"), load_model(str(folder), "float32", "cpu")
        assert built.generation_config.eos_token_id == loaded.generation_config.eos_token_id == [2, 5]
        (folder / "generation_config.json").unlink()
        built, loaded = build_empty(str(folder), "float32", "cpu"), load_model(str(folder), "float32", "cpu")
        assert built.generation_config.eos_token_id == loaded.generation_config.eos_token_id != [2, 5]

    @pytest.mark.parametrize(("device", "allowed"), [("cpu", True), ("cuda", False)])
    def test_a_process_that_computes_on_a_gpu_does_not_leave_attention_to_cudnn(
        self, device: str, allowed: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
        torch.backends.cuda.enable_cudnn_sdp(True)
        try:
            resolve_device(device)
            assert torch.backends.cuda.cudnn_sdp_enabled() == allowed
        finally:
            torch.backends.cuda.enable_cudnn_sdp(True)

    @pytest.mark.parametrize(("device", "precision"), [("cpu", "highest"), ("cuda", "high")])
    def test_tf32_is_for_products_on_a_gpu(self, device: str, precision: str) -> None:
        before = torch.get_float32_matmul_precision()
        try:
            use_tf32(torch.device(device))
            assert torch.get_float32_matmul_precision() == precision
        finally:
            torch.set_float32_matmul_precision(before)

    @pytest.mark.parametrize(
        ("dtype", "device", "message"),
        [
            ("float16", "cpu", "dtype 'float16' is unknown; known: float32, bfloat16"),
            ("float32", "gpu", "device=gpu is unknown"),
            ("float32", "cuda:99", "device 'cuda:99' is not there"),
        ],
    )
    def test_an_unknown_dtype_or_device_is_a_setting_at_fault(
        self, folder: Path, dtype: str, device: str, message: str
    ) -> None:
        with pytest.raises(ConfigError, match=message):
            load_model(str(folder), dtype, device)
        with pytest.raises(ConfigError, match=message):
            build_empty(str(folder), dtype, device)


class TestBrokenWeights:
    def test_none(self, folder: Path) -> None:
        (folder / "model.safetensors").unlink()
        with pytest.raises(ModelError, match=r"has no usable weights: .*save_pretrained"):
            load_model(str(folder), "float32", "cpu")

    @pytest.mark.parametrize("size", [0, 5, 100, 4000])
    def test_truncated(self, folder: Path, size: int) -> None:
        file = folder / "model.safetensors"
        file.write_bytes(file.read_bytes()[:size])
        with pytest.raises(ModelError, match="has no usable weights"):
            load_model(str(folder), "float32", "cpu")

    def test_one_tensor_missing(self, folder: Path) -> None:
        tensors = load_file(folder / "model.safetensors")
        del tensors["model.norm.weight"]
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        with pytest.raises(ModelError, match=r"miss 1 tensors, the first is 'model.norm.weight'"):
            load_model(str(folder), "float32", "cpu")

    def test_of_other_shapes(self, folder: Path) -> None:
        edit_json(folder / "config.json", intermediate_size=48)
        with pytest.raises(
            ModelError, match=r"3 weights .*'model.layers.0.mlp.down_proj.weight': \(16, 32\), not \(16, 48\)"
        ):
            load_model(str(folder), "float32", "cpu")


class TestTokenizer:
    def test_none(self, folder: Path) -> None:
        for file in folder.glob("*token*"):
            file.unlink()
        with pytest.raises(ModelError, match=r"has no tokenizer. Save one there with tokenizer.save_pretrained"):
            load_tokenizer(str(folder))

    def test_without_an_end_of_sequence_token(self, folder: Path) -> None:
        tokenizer = load_tokenizer(str(folder))
        tokenizer.eos_token = None
        tokenizer.save_pretrained(folder)
        with pytest.raises(ModelError, match="no eos_token; a response could never end"):
            load_tokenizer(str(folder))

    def test_that_knows_more_tokens_than_the_model(self, folder: Path) -> None:
        tokenizer = load_tokenizer(str(folder))
        tokenizer.add_tokens(["x", "y"])
        tokenizer.save_pretrained(folder)
        with pytest.raises(ModelError, match="knows 15 tokens but the model only 13"):
            load_tokenizer(str(folder))


FACTORS = {"short_factor": [1.0] * 4, "long_factor": [4.0] * 4}


@pytest.mark.parametrize(
    ("fields", "positions"),
    [
        ({}, None),
        ({"max_position_embeddings": 64}, 64),
        ({"max_position_embeddings": 64, "rope_scaling": None}, 64),
        ({"max_position_embeddings": 64, "rope_scaling": {"type": "linear", "factor": 4.0}}, 64),
        (
            {
                "max_position_embeddings": 64,
                "original_max_position_embeddings": 16,
                "rope_scaling": {"type": "longrope", **FACTORS},
            },
            16,
        ),
        (
            {
                "max_position_embeddings": 64,
                "rope_parameters": {"rope_type": "longrope", "original_max_position_embeddings": 16, **FACTORS},
            },
            16,
        ),
        (
            {
                "max_position_embeddings": 64,
                "original_max_position_embeddings": 16,
                "rope_scaling": {"type": "longrope", **FACTORS, "long_factor": FACTORS["short_factor"]},
            },
            64,
        ),
    ],
)
def test_positions_beyond_which_the_frequencies_change_do_not_count(
    fields: dict[str, object], positions: int | None
) -> None:
    assert num_positions(SimpleNamespace(**fields)) == positions


def test_runs_trainers_and_the_embedded_engine_stay_within_the_original_positions(tmp_path: Path) -> None:
    """Beyond them, the log-probs of a sequence depend on the other sequences of its batch."""
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    rope = {"rope_type": "longrope", "rope_theta": 10_000.0, "original_max_position_embeddings": 16, **FACTORS}
    more = {"max_position_embeddings": 64, "original_max_position_embeddings": 16, "pad_token_id": 0}
    Phi3Config(vocab_size=9, **sizes, **more, rope_parameters=rope).save_pretrained(tmp_path)
    path = str(tmp_path)
    shape = model_shape(ModelConfig(path=path))
    assert shape is not None and shape.max_position_embeddings == 16
    model = build_empty(path, "float32", "cpu")
    assert RowLayout.of(model, packed=False, micro_batch_tokens=64).positions == 16
    settings = EngineSettings(path, "cpu", "float32", max_num_seqs=2, max_model_len=17, batch_invariant=False, seed=0)
    with pytest.raises(EngineError, match="exceeds the model's 16 positions"):
        build_core(settings)
    build_core(dataclasses.replace(settings, max_model_len=16)).close()
