"""Frameworks whose training loop is not the user's, and programs that read what lightck counts and logs.

Each framework has one file that a user imports, such as ``lightning.py``, and files that this one imports. Only these
import the framework, so lightck needs none of them. They use public names of lightck, ``saving/`` (``dcp.py``),
``Session._expect_end_step`` (``lightning_fit.py``), ``session/fetch_before_attach.py`` (``newest.py``), and a few flags
that lightck looks for on a framework's objects (such as ``joins_restored_state``).
"""
