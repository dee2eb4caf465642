//! Transpose, repack and interleave.

use lowp_format::codec::e2m1;
use lowp_format::{Form, Orientation, ScaleLayout};
use proptest::prelude::*;

use super::*;
use lowp_kernels::reference::in_form;
use lowp_kernels::{InterleaveJob, PieceRows, RepackJob, TransposeJob};

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
