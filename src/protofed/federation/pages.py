"""How a process that trains asks the system for memory. Results do not depend on it."""

from __future__ import annotations

import contextlib
import ctypes
import os
from pathlib import Path

HEAP = 1 << 28  # bytes of the heap that may be on huge pages; only those that are written take memory
HUGE_PAGES = 14  # MADV_HUGEPAGE


def keep_pages() -> None:
    """Tell glibc to keep freed pages, because consecutive training steps allocate tensors of the same sizes, and Linux to
    make them huge ones, because weights of some megabytes are on more small pages than a processor remembers."""
    if os.name != "posix":
        return
    try:
        libc = ctypes.CDLL(None)
        mallopt, madvise = libc.mallopt, libc.madvise
    except (AttributeError, OSError):  # another C library
        return
    for option, value in ((-3, 1 << 30), (-1, 1 << 30), (-2, 1 << 26)):  # mmap threshold, trim threshold, top pad
        mallopt(option, value)
    libc.malloc.restype = ctypes.c_void_p
    libc.free(ctypes.c_void_p(libc.malloc(ctypes.c_size_t(HEAP))))  # the heap is now so long, and takes no memory yet
    with contextlib.suppress(OSError):
        heap = next((line for line in Path("/proc/self/maps").read_text().splitlines() if line.endswith("[heap]")), "")
        begin, _, end = heap.partition(" ")[0].partition("-")
        if end:
            size = int(end, 16) - int(begin, 16)
            madvise(ctypes.c_void_p(int(begin, 16)), ctypes.c_size_t(size), HUGE_PAGES)
