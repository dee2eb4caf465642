//! Where the results of two programs differ: JSON that they print, and the bytes of files. A difference in JSON or in a safetensors file
//! is named by its place, as `FILE: PLACE = OLD -> NEW`.

use std::collections::BTreeSet;
use std::fs;
use std::path::PathBuf;

use serde_json::Value;

/// Shown where only one side has a value.
const NOTHING: &str = "nothing";

/// What differs in JSON that was `printed`, and in `files` of `folders`, without values whose places end as one of `varying`.
pub(super) fn differences(
    printed: [&[u8]; 2],
    files: &BTreeSet<PathBuf>,
    folders: &[PathBuf; 2],
    varying: &[String],
) -> Vec<String> {
    let mut found = Vec::new();
    let [a, b] = printed.map(json);
    between("printed:", [a.as_ref(), b.as_ref()], &mut found);
    for file in files {
        let name = file.display().to_string();
        let bytes = folders.each_ref().map(|folder| fs::read(folder.join(file)));
        match bytes {
            [Ok(a), Ok(b)] => between_files(&name, [&a, &b], &mut found),
            [Ok(_), _] => found.push(format!("{name}: only of the old program")),
            _ => found.push(format!("{name}: only of the new program")),
        }
    }
    found.retain(|what| {
        let place = what.split(" = ").next().unwrap_or(what);
        what.contains(NOTHING) || !varying.iter().any(|end| place.ends_with(end))
    });
    found
}

fn between_files(name: &str, [old, new]: [&[u8]; 2], found: &mut Vec<String>) {
    let before = found.len();
    match [parts(old), parts(new)] {
        _ if old == new => return,
        [Some((a, tensors)), Some((b, others))] => {
            between(&format!("{name}:"), [Some(&a), Some(&b)], found);
            let equal = tensors.iter().zip(others).take_while(|(a, b)| a == b);
            if tensors != others {
                found.push(format!("{name}: other tensors from byte {}", equal.count()));
            }
        }
        _ => {}
    }
    if found.len() == before {
        found.push(format!("{name}: other bytes"));
    }
}

fn json(bytes: &[u8]) -> Option<Value> {
    serde_json::from_slice(bytes).ok()
}

/// The JSON of a file, and of a safetensors file the bytes of the tensors.
fn parts(bytes: &[u8]) -> Option<(Value, &[u8])> {
    let whole = || Some((json(bytes)?, &[][..]));
    let safetensors = || {
        let (length, rest) = bytes.split_first_chunk()?;
        let length = usize::try_from(u64::from_le_bytes(*length)).ok()?;
        let (header, tensors) = rest.split_at_checked(length)?;
        Some((json(header)?, tensors))
    };
    safetensors().or_else(whole)
}

fn between(place: &str, values: [Option<&Value>; 2], found: &mut Vec<String>) {
    match values {
        [Some(Value::Object(a)), Some(Value::Object(b))] => {
            for key in a.keys().chain(b.keys()).collect::<BTreeSet<_>>() {
                between(&format!("{place} {key}"), [a.get(key), b.get(key)], found);
            }
        }
        [Some(Value::Array(a)), Some(Value::Array(b))] => {
            for index in 0..a.len().max(b.len()) {
                let place = format!("{place} {index}");
                between(&place, [a.get(index), b.get(index)], found);
            }
        }
        // As text: -0 equals 0.
        _ => {
            let shown = |value: Option<&Value>| value.map_or(NOTHING.to_owned(), Value::to_string);
            let [a, b] = values.map(shown);
            if a != b {
                found.push(format!("{place} = {a} -> {b}"));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file(header: &str, byte: u8) -> Vec<u8> {
        let length = (header.len() as u64).to_le_bytes();
        [&length[..], header.as_bytes(), &[7, byte]].concat()
    }

    #[test]
    fn every_changed_byte_is_found() {
        let check = |old: &[u8], new: &[u8], expected: &str| {
            let mut found = Vec::new();
            between_files("q", [old, new], &mut found);
            assert_eq!(found.join(", "), expected);
        };
        let old = file("[1]", 1);
        check(&old, &old, "");
        check(&old, &file("[1]", 2), "q: other tensors from byte 1");
        check(&old, &file("[2]", 1), "q: 0 = 1 -> 2");
        check(&old, &file("[1 ]", 1), "q: other bytes");
        check(b"abc", b"abd", "q: other bytes");
        check(b"[0.0]", b"[-0.0]", "q: 0 = 0.0 -> -0.0");
    }

    #[test]
    fn printed_json_is_compared_without_what_varies() {
        let check = |old: &str, new: &str, expected: &str| {
            let (files, folders) = (BTreeSet::new(), [PathBuf::new(), PathBuf::new()]);
            let printed = [old.as_bytes(), new.as_bytes()];
            let found = differences(printed, &files, &folders, &["seconds".to_owned()]);
            assert_eq!(found.join(", "), expected);
        };
        let old = r#"{"loss":1.5,"seconds":2}"#;
        check(old, r#"{"loss":1.5,"seconds":3}"#, "");
        check(
            old,
            r#"{"loss":2.5,"seconds":3}"#,
            "printed: loss = 1.5 -> 2.5",
        );
        check(old, r#"{"loss":1.5}"#, "printed: seconds = 2 -> nothing");
        check("text for people", "may change", "");
    }
}
