"""Entry point: ``torchrun train.py --job.config_file train_configs/quickstart.toml [--section.key value]``.

Exit codes: 0 done; 1 error; 2 configuration error; 75 stopped by a signal, after a save if it could
(run the same command again to resume); 76 non-finite loss. torchrun itself reports any of the last as 1.
"""

from __future__ import annotations

import sys


def main(argv: list[str]) -> int:
    from titanforge.config import ConfigError, format_help, load_config
    from titanforge.failure import tell

    if {"-h", "--help"} & set(argv):
        print(format_help())
        return 0
    try:
        config = load_config(argv)
        from titanforge.launch import run

        return run(config)
    except ConfigError as error:
        tell(str(error), found_by_all=True)
        return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
