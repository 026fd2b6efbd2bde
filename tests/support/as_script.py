"""What ``python -W error::DeprecationWarning:__main__ FILE ARGUMENTS`` does, in a fork of a process
that has imported all (`tests.support.fork_server`): with a folder and an environment of its own.

``python -m tests.support.as_script FOLDER ENVIRONMENT FILE ARGUMENTS``, the environment as JSON.
"""

import json
import os
import runpy
import sys
import warnings


def main():
    _, folder, environment, *command = sys.argv
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(json.loads(environment))
    sys.argv = command
    warnings.filterwarnings("error", category=DeprecationWarning, module="__main__")
    runpy.run_path(command[0], run_name="__main__")


if __name__ == "__main__":
    main()
