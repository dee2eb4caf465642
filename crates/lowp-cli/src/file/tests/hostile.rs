//! Thousands of damaged files through every file command, in this process: none panics, none takes memory in proportion
//! to a number that a file merely states. The damage is the same in every run.

use super::counted;
use clap::Parser;
use lowp_format::{AnyRecipe, Recipe};
use std::fs;
use std::path::{Path, PathBuf};

/// What a command may hold beyond what it held before: buffers of a megabyte, and the headers of small files.
const MEMORY: usize = 24 << 20;

/// Numbers at the edges of what types, limits and files hold.
pub(super) const NUMBERS: [&str; 16] = [
    "0",
    "1",
    "2",
    "31",
    "32",
    "33",
    "127",
    "4096",
    "65536",
    "4294967296",
    "281474976710656",
    "4611686018427387904",
    "9223372036854775808",
    "18446744073709551615",
    "-1",
    "1e30",
];
/// Words that mean something in a header, in the place of others.
const WORDS: [&str; 18] = [
    "F32",
    "BF16",
    "F16",
    "F64",
    "U8",
    "I64",
    "BOOL",
    "F8_E4M3",
    "F4",
    "both",
    "rowwise",
    "columnwise",
    "padded",
    "compact",
    "swizzled",
    "e5m2",
    "",
    "__metadata__",
];

/// The low-precision recipes, by name.
pub(super) fn recipes() -> Vec<&'static str> {
    let all = AnyRecipe::low_precision();
    all.iter().map(Recipe::name).collect()
}

fn words_of_headers() -> Vec<&'static str> {
    WORDS.into_iter().chain(recipes()).collect()
}

/// Random numbers that are the same in every run.
pub(super) struct Random(pub(super) u64);

impl Random {
    pub(super) fn below(&mut self, n: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        usize::try_from(self.0 >> 16).unwrap_or(0) % n.max(1)
    }

    pub(super) fn one_of<'a>(&mut self, of: &[&'a str]) -> &'a str {
        of[self.below(of.len())]
    }
}

/// How many damaged inputs a test tries: `normal`, or with `LOWP_EXHAUSTIVE=1` a hundred times as many.
pub(super) fn rounds(normal: usize) -> usize {
    let exhaustive = std::env::var_os("LOWP_EXHAUSTIVE").is_some_and(|value| value == "1");
    if exhaustive { 100 * normal } else { normal }
}

/// Runs a command. Whether it succeeds is another test's question.
pub(crate) fn run(words: &[&str]) -> bool {
    let cli = crate::Cli::try_parse_from([&["lowp"], words].concat()).expect("a command line");
    let crate::Command::File(command) = cli.command else {
        panic!("no file command: {words:?}");
    };
    let before = counted::start();
    let result = crate::file::main(&command);
    let used = counted::peak() - before;
    assert!(used < MEMORY, "{words:?}: {used} bytes in use");
    if let Err(error) = &result {
        // A panic of a rank, which is a thread, becomes an error.
        assert!(
            !format!("{error:#}").contains("panic"),
            "{words:?}: {error:#}"
        );
    }
    result.is_ok()
}

pub(crate) fn text(path: &Path) -> &str {
    path.to_str().expect("a UTF-8 path")
}

/// A file of the header `header` and `data` after it.
fn file(header: &[u8], data: &[u8]) -> Vec<u8> {
    [&(header.len() as u64).to_le_bytes(), header, data].concat()
}

/// The places of the runs of characters that `is` takes, in `bytes`.
pub(super) fn runs(bytes: &[u8], is: impl Fn(u8) -> bool) -> Vec<(usize, usize)> {
    let (mut found, mut start) = (Vec::new(), None);
    for (i, &byte) in bytes.iter().chain(b"\n").enumerate() {
        match (is(byte), start) {
            (true, None) => start = Some(i),
            (false, Some(from)) => {
                found.push((from, i));
                start = None;
            }
            _ => {}
        }
    }
    found
}

/// A damaged copy of `good`, most often one that is still JSON and fits its data.
pub(super) fn damaged(good: &[u8], random: &mut Random) -> Vec<u8> {
    let length = usize::try_from(u64::from_le_bytes(*good.first_chunk().expect("a length")))
        .expect("a length");
    let (mut header, mut data) = (good[8..8 + length].to_vec(), good[8 + length..].to_vec());
    for _ in 0..=random.below(8) / 6 {
        match random.below(12) {
            0..=2 => {
                let numbers = runs(&header, |byte| byte.is_ascii_digit());
                if let Some(&(from, to)) = numbers.get(random.below(numbers.len())) {
                    header.splice(from..to, random.one_of(&NUMBERS).bytes());
                }
            }
            3 | 4 => {
                let words = runs(&header, |byte| {
                    byte.is_ascii_alphanumeric() || b"_-.".contains(&byte)
                });
                if let Some(&(from, to)) = words.get(random.below(words.len())) {
                    header.splice(from..to, random.one_of(&words_of_headers()).bytes());
                }
            }
            5 => {
                let at = random.below(header.len());
                header.splice(at..at, header[at..header.len().min(at + 40)].to_vec());
            }
            6 => {
                let at = random.below(header.len());
                header[at] ^= 1 << random.below(8);
            }
            7..=10 => {
                // A tensor of no bytes and as many rows as one likes, first in the file.
                let [rows, columns] = if random.below(2) == 0 { [1, 0] } else { [0, 1] }
                    .map(|n| if n == 0 { "0" } else { random.one_of(&NUMBERS) });
                let dtype = random.one_of(&WORDS[..5]);
                let entry = format!(
                    "{{\"{}\":{{\"dtype\":\"{dtype}\",\"shape\":[{rows},{columns}],\"data_offsets\":[0,0]}},",
                    "z".repeat(random.below(300))
                );
                header.splice(0..1, entry.into_bytes());
            }
            _ => data.truncate(random.below(data.len() + 1)),
        }
    }
    let mut bytes = file(&header, &data);
    if random.below(40) == 0 {
        let at = random.below(8);
        bytes[at] = bytes[at].wrapping_add(1);
    }
    bytes
}

/// Undamaged files: a model, what the commands make of it, and the rank files.
pub(super) fn good(dir: &Path) -> Vec<PathBuf> {
    let model = dir.join("model.safetensors");
    let header = br#"{"__metadata__":{"format":"pt"},"a.weight":{"dtype":"F32","shape":[33,32],"data_offsets":[0,4224]},"b":{"dtype":"BF16","shape":[2,4,64],"data_offsets":[4224,5248]},"e":{"dtype":"F16","shape":[4,0],"data_offsets":[5248,5248]},"n":{"dtype":"F32","shape":[8],"data_offsets":[5248,5280]}}"#;
    let data: Vec<u8> = (0..5280u32).map(|i| (i * 37 % 120) as u8).collect();
    fs::write(&model, file(header, &data)).expect("a file");
    let mut all = vec![model.clone()];
    for recipe in recipes() {
        let (q, ranks) = (dir.join(format!("{recipe}.safetensors")), dir.join(recipe));
        assert!(run(&[
            "quantize",
            text(&model),
            "-o",
            text(&q),
            "--recipe",
            recipe
        ]));
        let shard = [
            "shard",
            text(&model),
            "-o",
            text(&ranks),
            "--recipe",
            recipe,
            "--world-size",
            "2",
        ];
        assert!(run(&shard));
        all.extend([q, ranks.join("rank-00001-of-00002.safetensors")]);
    }
    all
}

#[test]
fn damaged_files_are_rejected_or_taken_and_nothing_else() {
    let dir = tempfile::tempdir().expect("a folder");
    let dir = dir.path();
    let good = good(dir);
    let rank_0 = dir
        .join(recipes()[0])
        .join("rank-00000-of-00002.safetensors");
    let (bad, out, ranks) = (
        dir.join("bad.safetensors"),
        dir.join("out.safetensors"),
        dir.join("ranks"),
    );
    fs::create_dir(&ranks).expect("a folder");
    let (mut random, mut taken) = (Random(0x9e37_79b9_7f4a_7c15), 0);
    let rounds = rounds(800);
    for round in 0..rounds {
        let source = &good[round % good.len()];
        let bytes = damaged(&fs::read(source).expect("a file"), &mut random);
        fs::write(&bad, &bytes).expect("a file");
        taken += usize::from(run(&["inspect", text(&bad)]));
        let recipe = random.one_of(&recipes());
        let (bad, out) = (text(&bad), text(&out));
        run(&[
            "quantize",
            bad,
            "-o",
            out,
            "--recipe",
            recipe,
            "--skip-unsupported",
        ]);
        run(&["dequantize", bad, "-o", out]);
        run(&["verify", bad, text(source)]);
        run(&["verify", bad, "--source", text(&good[0])]);
        run(&["verify", text(&good[1 + round % 2]), "--source", bad]);
        if round % 4 == 0 {
            let folder = dir.join("new");
            let shard = [
                "shard",
                bad,
                "-o",
                text(&folder),
                "--recipe",
                recipe,
                "--world-size",
                "3",
                "--skip-unsupported",
            ];
            if run(&shard) {
                run(&["unshard", text(&folder), "-o", out]);
                fs::remove_dir_all(&folder).expect("a folder");
            }
        }
        if source.parent() == rank_0.parent() {
            fs::copy(&rank_0, ranks.join("rank-00000-of-00002.safetensors")).expect("a file");
            fs::write(ranks.join("rank-00001-of-00002.safetensors"), &bytes).expect("a file");
            run(&["unshard", text(&ranks), "-o", out]);
            run(&["inspect", text(&ranks)]);
        }
    }
    // Damage that is always rejected at the first look would test the first look only.
    assert!(
        (rounds / 10..rounds * 9 / 10).contains(&taken),
        "{taken} of {rounds} were taken"
    );
}
