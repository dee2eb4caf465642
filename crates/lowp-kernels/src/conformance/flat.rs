//! Flat encodes: any split of the flattened matrix gives the bits of the whole.

use proptest::prelude::*;

use super::observed::made;
use super::*;
use crate::{AmaxJob, BlockAmax, FlatBlocks, FlatEncodeJob};

pub(super) fn any_split_equals_the_whole<B: Backend>(rig: &Rig<B>) {
    let config = cases_of(96);
    proptest!(config, |(
        index in 0..cases().len(), rows in 0usize..70, width in 1usize..3, seed: u64, half: bool,
        cuts in prop::collection::vec(0.0f64..1.0, 0..4),
    )| {
        let mut cuts = cuts;
        let case = &cases()[index];
        let shape = Shape::new(rows, case.columns() * width);
        let all = shape.elements();
        let given = values(all, seed, true);
        let (whole, widened) = source(rig, &given, half);
        let specs: Vec<BufferSpec> = case.specs.iter().copied()
            .filter(|s| s.key.part != Part::Data || s.axes == ROW_MAJOR).collect();
        let amax = crate::reference::amax(widened.iter().copied());
        let tensor = made(&case.kernel, amax, (false, 0.0));
        let job = encode_job(rig, case.kernel, &specs, shape, whole, tensor);
        let whole_targets = job.targets.clone();
        rig.run(Work::Encode(vec![job.clone()]));
        let expected = contents(rig, &whole_targets);

        cuts.sort_by(f64::total_cmp);
        let mut bounds = vec![0];
        bounds.extend(cuts.iter().map(|c| (c * all as f64) as usize));
        bounds.push(all);
        // Agree on the amaxes.
        let amaxes = rig.buffer(&vec![0f32; 2 * all + 1]);
        let mut blocks: Vec<BlockAmax> = Vec::new();
        let mut start = 1;
        for block in case.kernel.blocks.into_iter().flatten() {
            if blocks.iter().all(|b| b.block != block) {
                blocks.push(BlockAmax { block, start });
                start += rows.div_ceil(block[0]) * shape.cols.div_ceil(block[1]);
            }
        }
        let piece = |from: usize, to: usize| {
            let (source, _) = source(rig, &widened[from..to], half);
            source
        };
        let pairs = || bounds.windows(2).map(|w| (w[0], w[1]));
        rig.run(Work::Amax(pairs().map(|(from, to)| AmaxJob {
            shape, start: from, source: piece(from, to), source_rounding: SourceRounding::F32,
            out: amaxes.clone(), tensor: Some(0), blocks: blocks.clone(),
        }).collect()));
        // Each piece consumes them, and the next one still reads them.
        let slot = Slot { buffer: amaxes.clone(), index: 0 };
        let tensor = matches!(case.kernel.scale, ScaleRule::Tensor | ScaleRule::TwoLevel)
            .then_some(TensorInput::Observed { slot, pow2: false, epsilon: 0.0 });
        // Encode piece by piece, each into its own bytes, and merge nibbles.
        let mut merged: Vec<Vec<u8>> = expected.iter().map(|(_, b)| vec![0; b.len()]).collect();
        for (from, to) in pairs() {
            let bits = case.kernel.element.bits();
            let span = from * bits / 8..(to * bits).div_ceil(8);
            let targets: Vec<Target<B>> = specs.iter().zip(&merged).map(|(spec, m)| {
                let bytes = match spec.key.part {
                    Part::Data if from == to => vec![],
                    // Neighbours' nibbles are there already and must survive.
                    Part::Data => m[span.clone()].to_vec(),
                    _ => vec![0xA5; m.len()],
                };
                Target::new(*spec, rig.buffer(&bytes))
            }).collect();
            rig.run(Work::FlatEncode(vec![FlatEncodeJob {
                shape, start: from, len: to - from, kernel: case.kernel, source: piece(from, to),
                source_rounding: SourceRounding::F32, tensor: tensor.clone(),
                blocks: Some(FlatBlocks { amaxes: amaxes.clone(), blocks: blocks.clone() }),
                targets: targets.clone(),
            }]));
            for (target, merged) in targets.iter().zip(&mut merged) {
                let bytes = rig.content::<u8>(&target.bytes);
                match target.spec.key.part {
                    Part::Data if from == to => {}
                    Part::Data => merged[span.clone()].copy_from_slice(&bytes),
                    _ => merged.copy_from_slice(&bytes),
                }
            }
        }
        let found = rig.content::<f32>(&amaxes);
        let consumed = if tensor.is_some() { 0..start } else { 1..start };
        prop_assert!(found[consumed].iter().all(|x| x.is_sign_negative()));
        for ((key, expected), merged) in expected.iter().zip(&merged) {
            prop_assert_eq!(expected, merged, "{} {:?} {:?}", key, case.kernel, bounds);
        }
    });
}

/// Owned nibbles only: elements 9 to 13 change bytes 4 to 6 but for the low nibble of byte 4.
pub(super) fn only_owned_nibbles_change<B: Backend>(rig: &Rig<B>) {
    let case = case(
        Code::E2M1,
        ScaleRule::TwoLevel,
        Some([[1, 16], [16, 1]]),
        Some(TRANSPOSED),
    );
    let bytes = rig.buffer(&[0xEEu8; 3]);
    let target = Target::new(case.specs[0], bytes.clone());
    rig.run(Work::FlatEncode(vec![FlatEncodeJob {
        shape: Shape::new(1, 32),
        start: 9,
        len: 4,
        kernel: case.kernel,
        source: Source::F32(rig.buffer(&[6f32; 4])),
        source_rounding: SourceRounding::F32,
        tensor: Some(TensorInput::Known(Slot {
            buffer: rig.buffer(&[6f32]),
            index: 0,
        })),
        blocks: Some(FlatBlocks {
            amaxes: rig.buffer(&[6f32; 2]),
            blocks: [BlockAmax {
                block: [1, 16],
                start: 0,
            }]
            .into_iter()
            .collect(),
        }),
        targets: [target].into_iter().collect(),
    }]));
    assert_eq!(rig.content::<u8>(&bytes), [0x7E, 0x77, 0xE7]);
}
