//! Transpose, repack, interleave and rearrange.

use lowp_format::codec::e2m1;
use lowp_format::{Form, Orientation, ScaleLayout};
use proptest::prelude::*;

use super::*;
use lowp_kernels::reference::in_form;
use lowp_kernels::{
    InterleaveJob, PieceRows, RearrangeJob, Rearranged, RepackJob, Runs, TransposeJob, bf16,
};

fn bytes(count: usize, seed: u64) -> Vec<u8> {
    let random = Philox::new(seed, 0);
    (0..count as u64).map(|i| random.byte(i)).collect()
}

fn transpose<B: Backend>(rig: &Rig<B>, code: Code, entries: [usize; 2], from: &[u8]) -> Vec<u8> {
    let to = rig.buffer(&vec![0xA5u8; entries[1] * code.bytes(entries[0])]);
    let from = rig.buffer(from);
    rig.run(Work::Transpose(vec![TransposeJob {
        code,
        entries,
        from,
        to: to.clone(),
    }]));
    rig.content::<u8>(&to)
}

const CODES: [Code; 4] = [Code::E2M1, Code::E4M3, Code::Bf16, Code::F32];

pub fn transposing_twice_is_the_identity<B: Backend>(rig: &Rig<B>) {
    let config = cases_of(64);
    proptest!(config, |(
        code in prop::sample::select(CODES.to_vec()),
        outer in 0usize..300, inner in 0usize..150, seed: u64,
    )| {
        let row = code.bytes(inner);
        let mut from = bytes(outer * row, seed);
        if code == Code::E2M1 && inner % 2 == 1 {
            from.chunks_mut(row).for_each(|line| line[row - 1] &= 0xF);
        }
        let transposed = transpose(rig, code, [outer, inner], &from);
        prop_assert_eq!(transpose(rig, code, [inner, outer], &transposed), from.clone());
        if code == Code::E2M1 {
            let to_row = code.bytes(outer);
            for i in 0..outer {
                for j in 0..inner {
                    let found = e2m1::nibble(&transposed[j * to_row..], i);
                    prop_assert_eq!(found, e2m1::nibble(&from[i * row..], j));
                }
            }
        }
    });
}

pub fn forms_lead_back_to_compact<B: Backend>(rig: &Rig<B>) {
    let config = cases_of(128);
    proptest!(config, |(
        rows in 0usize..300, width in 1usize..40, code in prop::sample::select(vec![Code::E8M0, Code::F32]),
        side in prop::sample::select(vec![4usize, 16, 32]),
        square: bool, columnwise: bool, transposed: bool, seed: u64,
    )| {
        let shape = Shape::new(rows, width * side);
        let block = match (square, columnwise) {
            (true, _) => [side, side],
            (_, true) => [side, 1],
            _ => [1, side],
        };
        let axes = if transposed { TRANSPOSED } else { ROW_MAJOR };
        let pad = PaddedForm::TILES_128X4;
        let orientation = Orientation::ALL[usize::from(columnwise)];
        let usage = orientation.usage();
        let spec = BufferSpec::block_scale(usage, code, axes, block, pad, Origin::Quantized);
        let compact = ScaleLayout::new(&spec, shape, orientation, Form::Compact).unwrap();
        let start = bytes(compact.bytes(), seed);
        for form in Form::ALL {
            let Ok(layout) = ScaleLayout::new(&spec, shape, orientation, form) else { continue };
            let from = rig.buffer(&start);
            let there = rig.buffer(&vec![0xA5u8; layout.bytes()]);
            let back = rig.buffer(&vec![0xA5u8; compact.bytes()]);
            let job = |from_layout, to_layout, from: &B::Buffer<u8>, to: &B::Buffer<u8>| {
                let (from, to) = (from.clone(), to.clone());
                rig.run(Work::Repack(vec![RepackJob { from_layout, to_layout, from, to }]));
            };
            job(compact, layout, &from, &there);
            prop_assert_eq!(&rig.content::<u8>(&there), &in_form(&compact, &layout, &start));
            job(layout, compact, &there, &back);
            prop_assert_eq!(&rig.content::<u8>(&back), &start);
        }
    });
}

pub fn interleaving_concatenates_rows<B: Backend>(rig: &Rig<B>) {
    let config = cases_of(64);
    proptest!(config, |(
        outer in 0usize..50, widths in prop::collection::vec(0usize..40, 0..5), gap in 0usize..20, seed: u64,
    )| {
        let total: usize = widths.iter().sum();
        // Pieces lie one after another, in reverse order with bytes between their rows, or are the same rows.
        let mut pieces = PieceRows::dense(outer, widths.iter().copied());
        match seed % 3 {
            0 => {}
            1 => {
                let mut start = 0;
                for piece in pieces.iter_mut().rev() {
                    (piece.start, piece.pitch) = (start, piece.width + gap);
                    start += outer * piece.pitch;
                }
            }
            _ => pieces.iter_mut().for_each(|piece| piece.start = gap),
        }
        let len = outer * (total + widths.len() * gap) + gap;
        let from = bytes(len, seed);
        let to = rig.buffer(&vec![0u8; outer * total]);
        let mut expected: Vec<u8> = Vec::new();
        for row in 0..outer {
            for piece in &pieces {
                expected.extend(&from[piece.start + row * piece.pitch..][..piece.width]);
            }
        }
        let from = rig.buffer(&from);
        rig.run(Work::Interleave(vec![InterleaveJob { outer, pieces, from, to: to.clone() }]));
        prop_assert_eq!(rig.content::<u8>(&to), expected);
    });
}

/// Runs of three nested orders, the outermost of the source the innermost of the destination; and back.
pub fn rearranging_moves_every_run<B: Backend>(rig: &Rig<B>) {
    proptest!(cases_of(64), |(
        counts in prop::array::uniform3(0usize..9), len in prop::sample::select(vec![0usize, 1, 3, 8, 16, 40]), seed: u64,
    )| {
        let [outer, middle, inner] = counts;
        let all = outer * middle * inner * len;
        let runs = Runs {
            len,
            counts,
            from: 0,
            from_pitch: [middle * inner * len, inner * len, len],
            to: 0,
            to_pitch: [len, outer * len, middle * outer * len],
        };
        let values = bytes(4 * all, seed);
        let (floats, _) = values.as_chunks::<4>();
        let floats: Vec<f32> = floats.iter().map(|&x| f32::from(u16::from_le_bytes([x[0], x[1]]))).collect();
        let halves: Vec<bf16> = floats.iter().map(|&x| bf16::from_f32(x)).collect();
        let mut places = Vec::new();
        for at in 0..all {
            let (run, within) = (at / len, at % len);
            let [i, j, k] = [run / (middle * inner), run / inner % middle, run % inner];
            places.push(((k * middle + j) * outer + i) * len + within);
        }
        let moved = |buffers: Rearranged<B>, runs| {
            rig.run(Work::Rearrange(vec![RearrangeJob { copies: vec![runs], buffers }]));
        };
        let [from, to, back] = [&values[..all], &vec![0; all], &vec![0; all]].map(|x| rig.buffer(x));
        moved(Rearranged::Bytes([from.clone(), to.clone()]), runs);
        moved(Rearranged::Bytes([to.clone(), back.clone()]), runs.reversed());
        let found = rig.content::<u8>(&to);
        prop_assert!(places.iter().zip(&values).all(|(&place, &value)| found[place] == value));
        prop_assert_eq!(rig.content::<u8>(&back), &values[..all]);
        let [from, to] = [rig.buffer(&floats), rig.buffer(&vec![0f32; all])];
        moved(Rearranged::F32([from, to.clone()]), runs);
        let found = rig.content::<f32>(&to);
        prop_assert!(places.iter().zip(&floats).all(|(&place, &value)| found[place] == value));
        let [from, to] = [rig.buffer(&halves), rig.buffer(&vec![bf16::ZERO; all])];
        moved(Rearranged::Bf16([from, to.clone()]), runs);
        let found = rig.content::<bf16>(&to);
        prop_assert!(places.iter().zip(&halves).all(|(&place, &value)| found[place] == value));
    });
}

pub fn runs_outside_of_their_buffers_are_rejected<B: Backend>(rig: &Rig<B>) {
    let good = Runs {
        len: 4,
        counts: [1, 2, 3],
        from: 0,
        from_pitch: [24, 12, 4],
        to: 0,
        to_pitch: [24, 4, 8],
    };
    let rejected = |runs: Runs, len: usize| {
        let buffers = Rearranged::Bytes([0, len].map(|len| rig.buffer(&vec![0u8; len.max(24)])));
        let copies = vec![runs];
        let job = RearrangeJob { copies, buffers };
        rig.backend.plan(Work::Rearrange(vec![job])).map(drop)
    };
    rejected(good, 24).expect("runs within their buffers");
    for (runs, len) in [
        (good, 25),
        (Runs { from: 1, ..good }, 24),
        (
            Runs {
                to: usize::MAX,
                ..good
            },
            24,
        ),
        (
            Runs {
                to_pitch: [0, 4, 9],
                ..good
            },
            24,
        ),
        (
            Runs {
                from_pitch: [0, usize::MAX, 4],
                ..good
            },
            24,
        ),
        (
            Runs {
                counts: [2, 2, 3],
                ..good
            },
            24,
        ),
        (
            Runs {
                counts: [usize::MAX, 2, 3],
                ..good
            },
            24,
        ),
        // Entries that are written twice, and others never.
        (
            Runs {
                to_pitch: [0; 3],
                ..good
            },
            24,
        ),
        (
            Runs {
                to_pitch: [24, 4, 4],
                ..good
            },
            24,
        ),
    ] {
        rejected(runs, len).expect_err("runs outside of a buffer");
    }
}

/// Runs of no entries, wherever they are, and pitches of orders that have one run, whatever they are.
pub fn runs_that_are_none_or_one<B: Backend>(rig: &Rig<B>) {
    let one = Runs {
        len: 4,
        counts: [1; 3],
        from: 0,
        from_pitch: [usize::MAX; 3],
        to: 0,
        to_pitch: [usize::MAX, 0, usize::MAX],
    };
    let none = [
        Runs {
            len: 0,
            to: 1,
            ..one
        },
        Runs {
            len: 0,
            counts: [usize::MAX, 1, 1],
            ..one
        },
        Runs {
            counts: [usize::MAX, usize::MAX, 0],
            from: usize::MAX,
            ..one
        },
    ];
    let values: Vec<f32> = (0..4).map(|x| x as f32).collect();
    for (copies, len) in [(none.to_vec(), 0), ([&none[..], &[one]].concat(), 4)] {
        let [from, to] = [&values[..len], &[0.0; 4][..len]].map(|x| rig.buffer(x));
        let buffers = Rearranged::F32([from, to.clone()]);
        rig.run(Work::Rearrange(vec![RearrangeJob { copies, buffers }]));
        assert_eq!(rig.content::<f32>(&to), values[..len]);
    }
}

pub fn large_transposes_run<B: Backend>(rig: &Rig<B>) {
    let entries = [130, 515];
    for code in [Code::E2M1, Code::E4M3] {
        let from = bytes(130 * code.bytes(515), 3);
        let to = rig.buffer(&vec![0u8; 515 * code.bytes(130)]);
        let from = rig.buffer(&from);
        let job = TransposeJob {
            code,
            entries,
            from: from.clone(),
            to: to.clone(),
        };
        rig.run(Work::Transpose(vec![job]));
        let (from, to) = (rig.content::<u8>(&from), rig.content::<u8>(&to));
        for i in 0..130 {
            for j in 0..515 {
                if code == Code::E4M3 {
                    assert_eq!(to[j * 130 + i], from[i * 515 + j]);
                } else {
                    let found = e2m1::nibble(&to[j * 65..], i);
                    assert_eq!(found, e2m1::nibble(&from[i * 258..], j));
                }
            }
        }
    }
}
