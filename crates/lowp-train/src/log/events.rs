//! The event files of TensorBoard: records with checksums, each a message of scalars in the encoding of protocol buffers.
//!
//! The format: `tensorflow/core/lib/io/record_writer.cc` and `tensorflow/core/util/event.proto` of TensorFlow.

use std::fs::File;
use std::io::{self, Write};
use std::path::Path;
use std::process;
use std::time::{SystemTime, UNIX_EPOCH};

/// One file of events.
#[derive(Debug)]
pub(super) struct Events {
    file: File,
}

impl Events {
    /// A new file in `folder`. Where a run resumes, readers drop what other files have after step `resumed`.
    pub(super) fn create(folder: &Path, resumed: Option<usize>) -> io::Result<Self> {
        let now = now();
        let seconds = now.floor();
        let nanos = (now - seconds) * 1e9;
        let name = format!(
            "events.out.tfevents.{seconds:.0}.lowp.{}.{nanos:.0}",
            process::id()
        );
        let mut events = Self {
            file: File::create_new(folder.join(name))?,
        };
        events.add(&event(now, 0, &version()))?;
        if let Some(step) = resumed {
            events.add(&event(now, step as u64 + 1, &start()))?;
        }
        Ok(events)
    }

    /// Adds numbers of a step, each with its tag.
    pub(super) fn scalars(&mut self, step: u64, scalars: &[(String, f64)]) -> io::Result<()> {
        self.add(&event(now(), step, &summary(scalars)))
    }

    fn add(&mut self, event: &[u8]) -> io::Result<()> {
        self.file.write_all(&record(event))
    }
}

fn now() -> f64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH);
    since.map_or(0.0, |since| since.as_secs_f64())
}

/// A length, its checksum, the bytes, and their checksum.
fn record(bytes: &[u8]) -> Vec<u8> {
    let length = (bytes.len() as u64).to_le_bytes();
    let [of_length, of_bytes] = [&length[..], bytes].map(|part| masked(crc32c(part)).to_le_bytes());
    [&length[..], &of_length, bytes, &of_bytes].concat()
}

/// `Event { wall_time, step, .. }`, with the field `what`.
fn event(time: f64, step: u64, what: &[u8]) -> Vec<u8> {
    [
        &[1 << 3 | 1][..],
        &time.to_le_bytes(),
        &number(2, step),
        what,
    ]
    .concat()
}

/// `Event { .., summary: Summary { value: [Value { tag, simple_value }, ..] } }`.
fn summary(scalars: &[(String, f64)]) -> Vec<u8> {
    let mut values = Vec::new();
    for (tag, value) in scalars {
        #[expect(clippy::cast_possible_truncation, reason = "the format has f32")]
        let simple = (*value as f32).to_le_bytes();
        let value = [&field(1, tag.as_bytes())[..], &[2 << 3 | 5], &simple].concat();
        values.extend(field(1, &value));
    }
    field(5, &values)
}

/// The first event of a file.
fn version() -> Vec<u8> {
    field(3, b"brain.Event:2")
}

/// That a session starts, so that readers drop what they have of its step and later ones.
fn start() -> Vec<u8> {
    // `SessionLog { status: START }`.
    field(7, &number(1, 1))
}

/// A field of bytes.
fn field(number: u8, bytes: &[u8]) -> Vec<u8> {
    [&[number << 3 | 2][..], &varint(bytes.len() as u64), bytes].concat()
}

/// A field of a whole number.
fn number(number: u8, value: u64) -> Vec<u8> {
    [&[number << 3][..], &varint(value)].concat()
}

fn varint(mut value: u64) -> Vec<u8> {
    let mut bytes = Vec::new();
    while value >= 0x80 {
        bytes.push((value & 0x7F) as u8 | 0x80);
        value >>= 7;
    }
    bytes.push(value as u8);
    bytes
}

/// The checksum as it is stored: masked as TensorFlow does, because a CRC of data that contain CRCs is weak.
fn masked(crc: u32) -> u32 {
    crc.rotate_right(15).wrapping_add(0xA282_EAD8)
}

/// CRC-32 with the polynomial of Castagnoli.
fn crc32c(bytes: &[u8]) -> u32 {
    let mut crc = !0u32;
    for &byte in bytes {
        crc ^= u32::from(byte);
        for _ in 0..8 {
            let out = 0u32.wrapping_sub(crc & 1);
            crc = crc >> 1 ^ (out & 0x82F6_3B78);
        }
    }
    !crc
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What `RecordWriter` of the package tensorboard (2.21) writes of the same events, with times of 1.5.
    #[test]
    fn records_are_those_of_tensorboard() {
        let scalars = [("loss", 2.5), ("codes/up/zero", 0.125)];
        let scalars = scalars.map(|(tag, value)| (tag.to_owned(), value));
        for (step, what, expected) in [
            (
                300,
                summary(&scalars),
                "31000000000000009d8383e909000000000000f83f10ac022a230a0b0a046c6f737315000020400a140a0d636f6465732f75702f7a65726f150000003eb3630cc9",
            ),
            (
                7,
                version(),
                "1a00000000000000129bd82d09000000000000f83f10071a0d627261696e2e4576656e743a32da446486",
            ),
            (
                7,
                start(),
                "0f000000000000006d532b0909000000000000f83f10073a020801774771c7",
            ),
        ] {
            let bytes = record(&event(1.5, step, &what));
            let hex: String = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
            assert_eq!(hex, expected);
        }
    }

    /// RFC 3720, B.4.
    #[test]
    fn checksums_are_those_of_the_standard() {
        assert_eq!(crc32c(b"123456789"), 0xE306_9283);
        assert_eq!(crc32c(&[0; 32]), 0x8A91_36AA);
        assert_eq!(crc32c(&[0xFF; 32]), 0x62A8_AB43);
    }

    #[test]
    fn numbers_have_as_many_bytes_as_they_need() {
        assert_eq!(varint(0), [0]);
        assert_eq!(varint(300), [0xAC, 0x02]);
        assert_eq!(varint(u64::MAX).len(), 10);
    }
}
