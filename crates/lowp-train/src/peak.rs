//! What GPUs can do at most: the rates of dense bf16 products in NVIDIA's data sheets, by which MFU is measured.

/// Words that names of devices have, and operations per second; the first one that fits.
const KNOWN: [(&[&str], f64); 9] = [
    (&["B200"], 2250e12),
    (&["H200", "NVL"], 835e12),
    (&["H200"], 989.4e12),
    (&["GH200"], 989.4e12),
    (&["H100", "PCIe"], 756e12),
    (&["H100", "NVL"], 835e12),
    (&["H100"], 989.4e12),
    (&["A100"], 312e12),
    (&["L40S"], 362e12),
];

/// That of the device `name`, in operations per second, if it is known.
pub fn known(name: &str) -> Option<f64> {
    let mut known = KNOWN.into_iter();
    let has = |word: &str| name.split([' ', '-']).any(|part| part == word);
    let fits = |words: &[&str]| words.iter().all(|word| has(word));
    known.find(|(words, _)| fits(words)).map(|(_, peak)| peak)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_told_apart() {
        assert_eq!(known("NVIDIA H100 80GB HBM3"), Some(989.4e12));
        assert_eq!(known("NVIDIA H100 PCIe"), Some(756e12));
        assert_eq!(known("NVIDIA H200"), Some(989.4e12));
        assert_eq!(known("NVIDIA H200 NVL"), Some(835e12));
        assert_eq!(known("NVIDIA A100-SXM4-80GB"), Some(312e12));
        for other in ["Tesla T4", "NVIDIA RTX A1000", "NVIDIA GB200"] {
            assert_eq!(known(other), None, "{other}");
        }
    }
}
