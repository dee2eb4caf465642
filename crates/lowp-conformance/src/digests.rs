//! Digests of what every kernel writes for all bf16 inputs and for a million bit patterns of f32:
//! digests.txt has those of the reference, and every backend must give them.
//!
//! The digests are printed too, so that two machines can be compared (`--nocapture`).

use std::fmt::Write;

use super::*;

/// What the reference gives: `the_snapshot_is_that_of_the_reference`. `LOWP_UPDATE_DIGESTS=1`
/// rewrites the file there.
const SNAPSHOT: &str = include_str!("digests.txt");

/// The input of one line.
struct Input {
    name: &'static str,
    shape: Shape,
    half: bool,
    values: Vec<f32>,
}

/// Every bf16, and a million f32 bit patterns.
fn inputs() -> [Input; 2] {
    let halves = (0..=u16::MAX).map(|bits| bf16::from_bits(bits).to_f32());
    let random = Philox::new(2026, 11);
    let words = (0..1u64 << 18).flat_map(|i| random.block(i));
    [
        Input {
            name: "bf16",
            shape: Shape::new(256, 256),
            half: true,
            values: halves.collect(),
        },
        Input {
            name: "f32",
            shape: Shape::new(1024, 1024),
            half: false,
            values: words.map(f32::from_bits).collect(),
        },
    ]
}

/// What a case is called.
fn name(case: &Case) -> String {
    let of = |key: &KernelKey| {
        let KernelKey {
            element,
            scale,
            block,
            hadamard,
        } = key;
        let block = block.map_or("no blocks".to_owned(), |[rows, cols]| {
            format!("{rows}x{cols}")
        });
        let transform = if *hadamard { " transformed" } else { "" };
        format!("{element} {scale:?} {block}{transform}")
    };
    let [row, col] = case.kernels().each_ref().map(of);
    let specs = case.specs();
    let columnwise = specs.iter().find(|s| s.key.usage == Usage::COLUMNWISE);
    let order = match columnwise.map(|spec| spec.axes) {
        None => "one copy",
        Some(TRANSPOSED) => "transposed",
        Some(_) => "row-major",
    };
    match row == col {
        true => format!("{row}, {order}"),
        false => format!("{row} and {col}, {order}"),
    }
}

/// FNV-1a in 64 bits.
fn digest(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0xCBF2_9CE4_8422_2325, |hash, &byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01B3)
    })
}

/// The tensor scale or amax of every line: small enough that codes saturate, large enough that
/// others vanish.
const TENSOR: f32 = 3.75;

/// One line per input, case, rounding of the source and buffer.
fn lines(
    inputs: &[Input],
    mut encode: impl FnMut(&Input, &Case, SourceRounding) -> Vec<Vec<u8>>,
) -> String {
    let mut table = String::new();
    for input in inputs {
        for case in cases() {
            for rounding in [SourceRounding::F32, SourceRounding::ViaBf16] {
                // bf16 values stay what they are; of brief cases they are enough.
                if input.half && rounding == SourceRounding::ViaBf16 || !input.half && case.brief {
                    continue;
                }
                let buffers = encode(input, &case, rounding);
                for (spec, bytes) in case.specs().iter().zip(buffers) {
                    let key = spec.key;
                    let via = match rounding {
                        SourceRounding::ViaBf16 => " via bf16",
                        SourceRounding::F32 => "",
                    };
                    let digest = digest(&bytes);
                    let case = name(&case);
                    writeln!(table, "{digest:016x} {}{via} | {case} | {key}", input.name).unwrap();
                }
            }
        }
    }
    table
}

/// Fails with the lines that differ from those of `expected`.
fn compare(who: &str, found: &str, expected: &str) {
    let differ: Vec<_> = found
        .lines()
        .zip(expected.lines())
        .filter(|(found, expected)| found != expected)
        .map(|(found, expected)| format!("found    {found}\nexpected {expected}"))
        .collect();
    assert!(
        differ.is_empty() && found.lines().count() == expected.lines().count(),
        "{who}: {} lines differ; {} found, {} expected\n{}",
        differ.len(),
        found.lines().count(),
        expected.lines().count(),
        differ.join("\n")
    );
}

pub fn outputs_are_those_of_the_snapshot<B: Backend>(rig: &Rig<B>) {
    let found = lines(&inputs(), |input, case, source_rounding| {
        let (source, _) = source(rig, &input.values, input.half);
        let outer = case.outer(input.shape, TENSOR);
        let specs = case.specs();
        let job = encode_job(rig, case, &specs, input.shape, source, &outer);
        let job = EncodeJob {
            source_rounding,
            ..job
        };
        rig.run(Work::Encode(vec![job.clone()]));
        let buffers = contents(rig, &job.targets);
        buffers.into_iter().map(|(_, bytes)| bytes).collect()
    });
    println!("{rig:?}\n{found}");
    compare(&format!("{rig:?}"), &found, SNAPSHOT);
}

/// The reference is slow: the lines of f32 inputs are checked in the exhaustive tests, those of every
/// bf16 always.
#[test]
fn the_snapshot_is_that_of_the_reference() {
    let update = std::env::var_os("LOWP_UPDATE_DIGESTS").is_some();
    let whole = update || std::env::var_os("LOWP_EXHAUSTIVE").is_some();
    let inputs = inputs();
    let some = if whole { &inputs[..] } else { &inputs[..1] };
    let found = lines(some, |input, case, source_rounding| {
        let outer = case.outer(input.shape, TENSOR);
        let oracle = Oracle {
            source_rounding,
            ..Oracle::new(case, input.shape, &input.values, outer)
        };
        case.specs()
            .iter()
            .map(|spec| oracle.encode(spec))
            .collect()
    });
    if update {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/src/digests.txt");
        std::fs::write(path, &found).unwrap();
        return;
    }
    let of_inputs = |line: &&str| {
        let input = line.split_whitespace().nth(1);
        some.iter().any(|given| input == Some(given.name))
    };
    let expected: Vec<&str> = SNAPSHOT.lines().filter(of_inputs).collect();
    compare("the reference", &found, &expected.join("\n"));
}
