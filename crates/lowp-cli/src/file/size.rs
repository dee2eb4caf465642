//! `--max-shard-size`: bytes, as people write them.

/// Units, the longer names first.
const UNITS: [(&str, u64); 7] = [
    ("KiB", 1 << 10),
    ("MiB", 1 << 20),
    ("GiB", 1 << 30),
    ("KB", 1_000),
    ("MB", 1_000_000),
    ("GB", 1_000_000_000),
    ("B", 1),
];

/// The number of bytes, above 0, that `text` is.
pub(super) fn bytes(text: &str) -> Result<u64, String> {
    let found = UNITS.iter().find_map(|&(unit, bytes)| {
        let number = text.strip_suffix(unit)?;
        Some((number, bytes))
    });
    let (number, unit) = found.unwrap_or((text, 1));
    let bytes = number.trim_end().parse::<u64>().ok();
    match bytes.and_then(|number| number.checked_mul(unit)) {
        Some(bytes) if bytes > 0 => Ok(bytes),
        _ => Err(
            "give a whole number above 0 and B, KB, MB, GB, KiB, MiB or GiB, such as 5GB"
                .to_owned(),
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_of_every_unit() {
        for (text, bytes) in [
            ("5GB", 5_000_000_000),
            ("1GiB", 1 << 30),
            ("7", 7),
            ("12 MB", 12_000_000),
            ("3KiB", 3 << 10),
        ] {
            assert_eq!(super::bytes(text), Ok(bytes), "{text}");
        }
        for text in [
            "",
            "GB",
            "0",
            "-1GB",
            "5gb",
            "1.5GB",
            "99999999999GB",
            "5TB",
        ] {
            assert!(bytes(text).is_err(), "{text}");
        }
    }
}
