"""Import a Python file that lies in no package, such as a script or the maker of golden pools."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType


def module_at(path: Path) -> ModuleType:
    """Return the module that running this file gives. It is named after the file and is not in ``sys.modules``."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
