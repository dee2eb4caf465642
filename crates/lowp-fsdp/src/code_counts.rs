//! [`CodeCounts`]: how many codes of a weight are at the ends of what their format can say.

use lowp_format::{Code, Part, QuantizedTensor, Recipe};
use lowp_kernels::{Backend, KernelError};

/// Counts of codes below 16 bits.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CodeCounts {
    /// Codes that were counted.
    pub codes: u64,
    /// Those of the largest magnitude, of values that reach or pass it.
    pub saturated: u64,
    /// Those of zero, of values that are zero or too small.
    pub zero: u64,
}

/// Those of the stored codes of `tensor`.
pub(crate) fn count<B: Backend, R: Recipe>(
    backend: &B,
    tensor: &QuantizedTensor<B::Buffer<u8>, R>,
) -> Result<CodeCounts, KernelError> {
    let mut counts = CodeCounts::default();
    for buffer in tensor.buffers() {
        let code = buffer.spec.code;
        let Some(largest) = largest(code).filter(|_| buffer.spec.key.part == Part::Data) else {
            continue;
        };
        let bytes = backend.download(&buffer.storage)?;
        count_bytes(&mut counts, &bytes, code, largest);
    }
    Ok(counts)
}

/// The bits of the largest finite value.
fn largest(code: Code) -> Option<u8> {
    match code {
        Code::E4M3 => Some(0x7E),
        Code::E5M2 => Some(0x7B),
        Code::E2M1 => Some(0x7),
        Code::E8M0 | Code::Bf16 | Code::F32 => None,
    }
}

fn count_bytes(counts: &mut CodeCounts, bytes: &[u8], code: Code, largest: u8) {
    // How often each byte is there: what it says is asked once.
    let mut bins = [0u64; 256];
    for &byte in bytes {
        bins[usize::from(byte)] += 1;
    }
    let sign = 1 << (code.bits() - 1);
    for (byte, count) in (0..=u8::MAX).zip(bins) {
        let entries = match code.entries_per_byte() {
            2 => [Some(byte & 0xF), Some(byte >> 4)],
            _ => [Some(byte), None],
        };
        for entry in entries.into_iter().flatten() {
            let magnitude = entry & !sign;
            counts.codes += count;
            counts.saturated += count * u64::from(magnitude == largest);
            counts.zero += count * u64::from(magnitude == 0);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use lowp_format::codec::{e2m1, e4m3, e5m2};

    /// Every byte once, against what it decodes to.
    #[test]
    fn counts_are_those_of_values() {
        let bytes: Vec<u8> = (0..=u8::MAX).collect();
        let decoded = |code: Code| -> Vec<f32> {
            let values = bytes.iter().flat_map(|&byte| match code {
                Code::E4M3 => vec![e4m3::decode(byte)],
                Code::E5M2 => vec![e5m2::decode(byte)],
                _ => vec![e2m1::decode(byte & 0xF), e2m1::decode(byte >> 4)],
            });
            values.collect()
        };
        for code in [Code::E4M3, Code::E5M2, Code::E2M1] {
            let mut counts = CodeCounts::default();
            count_bytes(&mut counts, &bytes, code, largest(code).expect("a code"));
            let values = decoded(code);
            let count =
                |of: &dyn Fn(f32) -> bool| values.iter().filter(|value| of(**value)).count() as u64;
            let expected = CodeCounts {
                codes: values.len() as u64,
                saturated: count(&|value| value.abs() == code.max_finite()),
                zero: count(&|value| value == 0.0),
            };
            assert_eq!(counts, expected, "{code}");
            assert!(expected.saturated > 0 && expected.zero > 0);
        }
    }
}
