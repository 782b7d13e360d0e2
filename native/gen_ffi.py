"""Write the cffi module of lightck from lck.h: gen_ffi.py <lck.h> <_lck_ffi.py>.

ABI mode, out of line: the same text that the C compiler reads is parsed here once, at build time, and the result is
a plain Python module that needs neither a compiler nor pycparser.
"""

from __future__ import annotations

import sys
from pathlib import Path

from cffi import FFI


def main(header: str, output: str) -> None:
    text = Path(header).read_text(encoding="ascii")
    _, begin, rest = text.partition("/* CFFI_BEGIN */")
    cdef, end, _ = rest.partition("/* CFFI_END */")
    if not begin or not end:
        raise SystemExit(f"{header}: the CFFI_BEGIN and CFFI_END markers are not both there")
    ffi = FFI()
    ffi.set_source("lightck._lck_ffi", None)
    ffi.cdef(cdef)
    ffi.emit_python_code(output)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
