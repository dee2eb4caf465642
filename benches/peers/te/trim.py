#!/usr/bin/env python3
"""Cuts a CUDA shared library to the code of one architecture: trim.py SRC DST [ARCH, default 90]

Of every fatbin container the cubins of other architectures are zeroed in place, so that the layout of
the file, and every address in it, stays as it was; the zeros compress to nothing. The DT_NEEDED
entries of cuDNN's sub-libraries go, too: libcudnn.so.9 loads those that are wanted.
"""

import struct
import sys


class Elf:
    """The sections of a 64-bit little-endian ELF file."""

    def __init__(self, data):
        self.data = data
        offset, = struct.unpack_from("<Q", data, 0x28)
        size, count, names = struct.unpack_from("<HHH", data, 0x3A)
        sections = [struct.unpack_from("<IIQQQQIIQQ", data, offset + i * size) for i in range(count)]
        self.sections = {self.text(sections[names][4] + section[0]): section for section in sections}

    def text(self, offset):
        return bytes(self.data[offset:self.data.index(b"\0", offset)]).decode()

    def place(self, name):
        """Address, offset and size of a section."""
        return self.sections[name][3:6]


def cut_container(data, start, arch):
    """Keeps the code of `arch` in the fatbin container at `start`; returns its end."""
    header, size = struct.unpack_from("<HQ", data, start + 6)
    at, end, kept = start + header, start + header + size, b""
    while at < end:
        entry, payload = struct.unpack_from("<IQ", data, at + 4)
        if struct.unpack_from("<I", data, at + 28)[0] == arch:
            kept += data[at:at + entry + payload]
        at += entry + payload
    if at != end or not kept:
        sys.exit(f"the fatbin container at {start:#x} has no code of sm_{arch}, or another layout than is known")
    data[start + header:end] = kept + bytes(size - len(kept))
    struct.pack_into("<Q", data, start + 8, len(kept))
    return end, len(kept)


def cut(data, arch):
    elf = Elf(data)
    address, offset, size = elf.place(".nv_fatbin")
    at, starts, kept = offset, set(), 0
    while at < offset + size:
        if struct.unpack_from("<I", data, at)[0] != 0xBA55ED50:
            if any(data[at:at + 8]):
                sys.exit(f"no fatbin container at {at:#x}")
            at += 8
            continue
        starts.add(at)
        at, length = cut_container(data, at, arch)
        kept += length
    # What registers the containers must point to their starts.
    _, segment, length = elf.place(".nvFatBinSegment")
    for i in range(length // 24):
        magic, _, pointer, _ = struct.unpack_from("<IIQQ", data, segment + 24 * i)
        if magic != 0x466243B1 or pointer - address + offset not in starts:
            sys.exit(f"entry {i} of .nvFatBinSegment points to no fatbin container")
    print(f"{len(starts)} containers, {kept / 1e6:.1f} MB of code for sm_{arch} of {size / 1e6:.1f} MB")
    _, dynamic, length = elf.place(".dynamic")
    names = elf.place(".dynstr")[1]
    entries = [struct.unpack_from("<QQ", data, dynamic + 16 * i) for i in range(length // 16)]
    keep = [(tag, value) for tag, value in entries if not (tag == 1 and elf.text(names + value).startswith("libcudnn_"))]
    keep += [(0, 0)] * (len(entries) - len(keep))
    for i, entry in enumerate(keep):
        struct.pack_into("<QQ", data, dynamic + 16 * i, *entry)


def main():
    if len(sys.argv) not in (3, 4):
        sys.exit(__doc__)
    with open(sys.argv[1], "rb") as file:
        data = bytearray(file.read())
    cut(data, int(sys.argv[3]) if len(sys.argv) == 4 else 90)
    with open(sys.argv[2], "wb") as file:
        file.write(data)


if __name__ == "__main__":
    main()
