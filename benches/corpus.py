"""Source code, headers and documents of this machine as one file to train on.

    python3 benches/corpus.py OUT --mb 264 /usr /opt

Files come in the order of a hash of their paths, each content once, so that text of one kind is spread over the file.
"""

import argparse
import hashlib
import os

ENDINGS = (".py", ".pyi", ".h", ".hpp", ".cuh", ".inl", ".c", ".cc", ".cpp", ".cu", ".rs", ".go", ".js", ".ts", ".pl", ".pm", ".sh", ".md", ".rst", ".txt")


def files(roots):
    """Paths of text, in the order of a hash of them."""
    found = []
    for root in roots:
        for folder, _, names in os.walk(root):
            found.extend(os.path.join(folder, name) for name in names if name.endswith(ENDINGS))
    return sorted(found, key=lambda path: hashlib.sha256(path.encode(errors="surrogateescape")).digest())


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out")
    parser.add_argument("roots", nargs="+")
    parser.add_argument("--mb", type=int, default=264)
    args = parser.parse_args()
    seen, written = set(), 0
    with open(args.out, "wb") as out:
        for path in files(args.roots):
            try:
                with open(path, "rb") as file:
                    content = file.read()
            except OSError:
                continue
            digest = hashlib.sha256(content).digest()
            if os.path.islink(path) or digest in seen or b"\0" in content or len(content) > 1 << 20:
                continue
            seen.add(digest)
            written += out.write(content)
            if written >= args.mb * 10**6:
                break
    print(f"{written} bytes of {len(seen)} files")


if __name__ == "__main__":
    main()
