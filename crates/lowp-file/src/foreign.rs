//! Files that are often given in the place of a safetensors file, known by how they begin.

/// What `bytes`, the start of a file, are if they are one of those, and what to do about it.
pub(crate) fn explain(bytes: &[u8]) -> Option<&'static str> {
    let trimmed = bytes
        .strip_prefix(b"\xef\xbb\xbf")
        .unwrap_or(bytes)
        .trim_ascii_start();
    let is = |start: &str| {
        let found = trimmed.get(..start.len());
        found.is_some_and(|found| found.eq_ignore_ascii_case(start.as_bytes()))
    };
    let markup = ["<!doctype html", "<html", "<?xml", "<head", "<!--"];
    if bytes.starts_with(b"version https://git-lfs.github.com/spec/") {
        Some("a Git LFS pointer, which names the file and is not it; fetch the file (git lfs pull)")
    } else if markup.into_iter().any(is) {
        Some(
            "a web page and no safetensors file, most likely what a server answered in its place: to log in, or that it \
             is not there; download the file again and look at its address",
        )
    } else if bytes.starts_with(b"PK\x03\x04") || bytes.starts_with(b"\x80\x02}") {
        Some("a PyTorch checkpoint or another archive; convert it to safetensors first")
    } else if bytes.starts_with(b"GGUF") {
        Some("a GGUF file; give the safetensors file that it was made from")
    } else if bytes.starts_with(b"\x1f\x8b") || bytes.starts_with(b"\x28\xb5\x2f\xfd") {
        Some("a compressed file; decompress it first")
    } else {
        None
    }
}

#[cfg(test)]
mod tests {
    use super::explain;

    #[test]
    fn each_is_known_by_its_start() {
        for (bytes, expected) in [
            (
                &b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n"[..],
                "Git LFS",
            ),
            (b"<!DOCTYPE html><html>", "web page"),
            (b"\xef\xbb\xbf \r\n<HTML lang=en>", "web page"),
            (b"PK\x03\x04\0\0", "PyTorch"),
            (b"GGUF\x03\0\0\0", "GGUF"),
            (b"\x1f\x8b\x08", "compressed"),
        ] {
            assert!(
                explain(bytes).is_some_and(|text| text.contains(expected)),
                "{expected}"
            );
        }
        for bytes in [&b""[..], b"<", b"\x02\0\0\0\0\0\0\0{}", b"{}", b"version 2"] {
            assert_eq!(explain(bytes), None);
        }
    }
}
