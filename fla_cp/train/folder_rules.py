"""Rules for --model, and for the flags that may be given together with --model hf:DIR."""

from __future__ import annotations

import dataclasses
from importlib.util import find_spec

from fla_cp.integrations.stock_folder import has_weights, read_config_json
from fla_cp.train.config import RECIPES, TrainConfig, UserError

BESIDE_FOLDER = ("size", "init", "impl", "remat", "compile")
"""Fields of ModelConfig that may be set beside hf:DIR; `compile` may be auto or off."""

_PACKAGES = ("transformers", "safetensors")


def check_model_name(config: TrainConfig) -> None:
    """Raises UserError for a size that is not known, and for a folder that cannot be trained or
    whose model does not take one of the flags."""
    model = config.model
    if model.folder is not None:
        _check_folder(config, model.folder)
        return
    if model.size not in RECIPES:
        names = ", ".join(map(repr, RECIPES))
        raise UserError(f"--model must be one of {names}, or hf:DIR, got {model.size!r}")
    if model.init != "weights":
        raise UserError(f"--model.init must be left out without --model hf:DIR, got {model.init}")


def _check_folder(config: TrainConfig, folder: str) -> None:
    model, flag = config.model, f"--model hf:{folder}"
    missing = [name for name in _PACKAGES if find_spec(name) is None]
    if missing:
        raise UserError(f"--model hf:DIR needs {', '.join(missing)}: pip install 'fla_cp[hf]'")
    for field in dataclasses.fields(model):
        value = getattr(model, field.name)
        if field.name not in BESIDE_FOLDER and value != field.default:
            name = field.name.replace("_", "-")
            raise UserError(
                f"--model.{name} must be left out with {flag}, whose config.json has the model's "
                f"dimensions, got {value}"
            )
    if model.compile == "on":
        raise UserError(
            f"--compile must be auto or off with {flag}: its blocks look up operators at the call, "
            "which torch.compile cannot trace; they run uncompiled"
        )
    if config.parallel.cuda_graphs == "on":
        raise UserError(f"--cuda-graphs must be left out with {flag}, whose code makes hosts wait")
    if config.run.init_from is not None:
        raise UserError(
            f"--init-from must be left out with {flag}, whose weights a run starts from, got "
            f"{config.run.init_from}"
        )
    try:
        read_config_json(folder)
    except ValueError as error:
        raise UserError(f"{flag}: {error}") from None
    resumes = config.run.resume != "none"
    if not has_weights(folder) and model.init == "weights" and not resumes:
        raise UserError(
            f"{flag}: {folder} must have weights (*.safetensors); for random ones, add "
            "--model.init random"
        )
