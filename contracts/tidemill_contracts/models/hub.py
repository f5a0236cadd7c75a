"""Where a model's files are: a directory as it stands, or a Hugging Face Hub id, fetched once.

Fetching is left to huggingface_hub, its cache and its environment variables (``HF_HOME``,
``HF_ENDPOINT``, ``HF_TOKEN``, ``HF_HUB_OFFLINE``); only files that Tidemill reads are fetched.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from tidemill_contracts.models.errors import CheckpointError

FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer*.json",
    "chat_template*",
    "*.safetensors",
    "model.safetensors.index.json",
)

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)


def resolve_model_dir(model: str) -> Path:
    """The directory of `model`: a path, or an ``org/name`` of the Hub, which is downloaded.

    Blocks for as long as a download takes. Raises `CheckpointError`, in one line, where there is
    no such directory or the Hub does not have or give the model.
    """
    path = Path(model).expanduser()
    if model and path.is_dir():
        return path
    if path.is_file():
        raise CheckpointError(f"{model} is a file; give the model's directory.")
    if not _HUB_ID.fullmatch(model):
        raise CheckpointError(
            f"no such model directory: {model!r}. Give a directory with config.json and"
            " safetensors files, or a Hub id such as Qwen/Qwen3-0.6B."
        )
    return _download(model)


def _download(model: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
    )

    # Passed on because the library reads the variable only when it is imported.
    endpoint = os.environ.get("HF_ENDPOINT") or None
    hub = endpoint or "https://huggingface.co"
    try:
        return Path(snapshot_download(model, allow_patterns=list(FILES), endpoint=endpoint))
    except GatedRepoError as error:
        problem = f"{hub} gives it only to those who accepted its terms; do so, then set HF_TOKEN"
        cause: Exception = error
    except RepositoryNotFoundError as error:
        problem = f"neither a directory here nor a model on {hub} (a private one needs HF_TOKEN)"
        cause = error
    except LocalEntryNotFoundError as error:
        problem = f"not in the local cache, and {hub} cannot be asked ({_first_line(error)})"
        cause = error
    except Exception as error:  # whatever the library's HTTP client of the day raises
        problem = f"fetching it from {hub} failed ({type(error).__name__}: {_first_line(error)})"
        cause = error
    raise CheckpointError(f"no such model: {model}: {problem}.") from cause


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), "").removeprefix("Got: ").rstrip(".")
