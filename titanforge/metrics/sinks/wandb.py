"""Weights & Biases: online when logged in, offline otherwise, never a prompt; a resumed run stays one run."""

from __future__ import annotations

import logging
import netrc
import os
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

logger = logging.getLogger(__name__)

RUN_ID_FILE = "wandb_run_id"


def has_credentials() -> bool:
    """Whether wandb can log in without asking: a key or token in the environment, or a netrc entry."""
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    host = urlsplit(os.environ.get("WANDB_BASE_URL") or "https://api.wandb.ai").hostname or ""
    named = os.environ.get("NETRC")
    for path in [Path(named)] if named else [Path.home() / ".netrc", Path.home() / "_netrc"]:
        try:
            if netrc.netrc(str(path)).hosts.get(host):
                return True
        except FileNotFoundError:
            continue
        except (OSError, netrc.NetrcParseError) as error:
            logger.warning("W&B: cannot read %s (%s)", path, error)
    return False


def choose_mode() -> str | None:
    """What to pass to ``wandb.init(mode=…)``: None where WANDB_MODE already decides."""
    wanted = os.environ.get("WANDB_MODE")
    if has_credentials():
        return None if wanted else "online"
    if wanted in (None, "", "online", "run", "shared"):
        if wanted:
            logger.warning(
                "W&B: WANDB_MODE=%s but no API key (WANDB_API_KEY or netrc): running offline", wanted
            )
        return "offline"
    return None


class WandbSink:
    """One W&B run.

    Args:
        project: W&B project; WANDB_PROJECT wins, and every other WANDB_* variable keeps its meaning.
        dump_folder: wandb's own folder (``wandb/``) and the file with the run's id go here.
        config: the whole configuration, nested.
        description: shown as the run's notes.
        start_step: > 0 means resumed: the saved run id is continued.
        rank: ranks after the first get their own run in the same group.
    """

    def __init__(
        self,
        project: str,
        dump_folder: str | Path,
        config: dict[str, Any],
        description: str = "",
        start_step: int = 0,
        rank: int = 0,
    ) -> None:
        import wandb
        from wandb.errors import CommError

        folder = Path(dump_folder)
        folder.mkdir(parents=True, exist_ok=True)
        id_file = folder / (RUN_ID_FILE if rank == 0 else f"{RUN_ID_FILE}_rank{rank}")
        run_id = os.environ.get("WANDB_RUN_ID")
        if run_id and rank:
            run_id = f"{run_id}-rank{rank}"
        if not run_id and start_step and id_file.exists():
            run_id = id_file.read_text().strip()
        name = os.environ.get("WANDB_NAME")
        arguments: dict[str, Any] = {
            "project": os.environ.get("WANDB_PROJECT") or project,
            "dir": os.environ.get("WANDB_DIR") or str(folder),
            "config": config,
            "notes": os.environ.get("WANDB_NOTES") or description or None,
            "id": run_id or None,
            "resume": os.environ.get("WANDB_RESUME") or "allow",
            "group": os.environ.get("WANDB_RUN_GROUP") or None,
            "name": f"{name}-rank{rank}" if name and rank else name,
            # Its closing block would bury the summary that says where everything is.
            "settings": None if "WANDB_SILENT" in os.environ else wandb.Settings(silent=True),
        }
        mode = choose_mode()
        try:
            self._run = wandb.init(mode=mode, **arguments)  # type: ignore[arg-type]
        except CommError as error:
            logger.warning(
                "W&B: cannot reach the server (%s): running offline; `wandb sync` uploads it later", error
            )
            self._run = wandb.init(mode="offline", **arguments)
        id_file.write_text(self._run.id + "\n")
        # Our own step is the x axis: W&B's counter would refuse the steps that a resumed run repeats.
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")
        self.folder = Path(self._run.dir).parent
        self.url = self._run.url

    def log(self, values: dict[str, Any], step: int) -> None:
        self._run.log({name: value for name, value in values.items() if value is not None} | {"step": step})

    def log_sample(self, prompt: str, text: str, step: int) -> None:
        import wandb

        table = wandb.Table(columns=["step", "prompt", "text"], data=[[step, prompt, text]])
        self._run.log({f"sample/{prompt[:40]}": table, "step": step})

    def close(self) -> None:
        self._run.finish()
