"""What `python -m shoal` does, in a fork of a process that has imported all: with a folder and an
environment of its own.

``python -m tests.e2e.as_command FOLDER ENVIRONMENT ARGUMENTS``, the environment as JSON. Nothing
that is read at an import may depend on either; where Python itself begins is tested by the few
commands that are started as programs.
"""

import json
import os
import runpy
import sys
import tempfile


def main():
    _, folder, environment, *arguments = sys.argv
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(json.loads(environment))
    tempfile.tempdir = None  # found anew, in this environment
    sys.argv[1:] = arguments
    runpy.run_module("shoal", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
