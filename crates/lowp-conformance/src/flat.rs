//! Flat encodes: any split of the flattened matrix gives the bits of the whole.

use lowp_format::Orientation;
use proptest::prelude::*;

use super::*;
use lowp_kernels::testing::RuleKind;
use lowp_kernels::{AmaxJob, BlockAmax, FlatBlocks, FlatEncodeJob};

/// The orientations of `case` that a flat encode makes.
pub(super) fn flat_usage(case: &Case) -> Usage {
    let takes = |key: &KernelKey| !key.hadamard && RuleKind::of(key.scale) != RuleKind::FourOverSix;
    let kernels = case.kernels();
    let usage = Orientation::ALL
        .into_iter()
        .filter(|o| takes(&kernels[*o as usize]));
    usage.fold(Usage::empty(), |all, o| all | o.usage())
}

/// The blocks of the orientations of `usage`, one after another from entry 1 of a vector on, and where it ends.
pub(super) fn blocks_of(case: &Case, shape: Shape, usage: Usage) -> (Vec<BlockAmax>, usize) {
    let mut blocks: Vec<BlockAmax> = Vec::new();
    let mut start = 1;
    for orientation in usage.orientations() {
        let Some(block) = case.kernels()[orientation as usize].block else {
            continue;
        };
        if blocks.iter().all(|part| part.block != block) {
            blocks.push(BlockAmax { block, start });
            start += shape.rows.div_ceil(block[0]) * shape.cols.div_ceil(block[1]);
        }
    }
    (blocks, start)
}

/// The buffers that a flat encode fills.
pub(super) fn flat_specs(case: &Case) -> Vec<BufferSpec> {
    let mut specs = case.of_usage(flat_usage(case));
    specs.retain(|spec| spec.key.part != Part::Data || spec.axes == ROW_MAJOR);
    specs
}

pub fn any_split_equals_the_whole<B: Backend>(rig: &Rig<B>) {
    let config = cases_of(160);
    let cases: Vec<Case> = cases()
        .into_iter()
        .filter(|c| !flat_usage(c).is_empty())
        .collect();
    proptest!(config, |(
        index in 0..cases.len(), rows in 0usize..70, width in 1usize..3, seed: u64, half: bool,
        cuts in prop::collection::vec(0.0f64..1.0, 0..4),
    )| {
        let mut cuts = cuts;
        let case = &cases[index];
        let shape = Shape::new(rows, case.columns() * width);
        let all = shape.elements();
        let given = values(all, seed, true);
        let (whole, widened) = source(rig, &given, half);
        let specs = flat_specs(case);
        let oracle = Oracle::new(case, shape, &widened, Outer::default());
        let amaxes = oracle.amaxes();
        let oracle = oracle.under(&amaxes);
        let job = encode_job(rig, case, &specs, shape, whole, &oracle.outer);
        let whole_targets = job.targets.clone();
        rig.run(Work::Encode(vec![job.clone()]));
        let expected = contents(rig, &whole_targets);

        cuts.sort_by(f64::total_cmp);
        let mut bounds = vec![0];
        bounds.extend(cuts.iter().map(|c| (c * all as f64) as usize));
        bounds.push(all);
        let pairs = || bounds.windows(2).map(|w| (w[0], w[1]));
        // Agree on the amaxes of the tensor or its lines, and of blocks.
        let kernels = case.kernels();
        let begin = Orientation::ALL.map(|o| match kernels[o as usize].scale.is_delayed() {
            true => amaxes[o as usize].clone(),
            false => vec![0.0; amaxes[o as usize].len()],
        });
        let tensor = inputs(rig, case, &begin, observed);
        let (blocks, entries) = blocks_of(case, shape, flat_usage(case));
        let agreed = rig.buffer(&vec![0f32; entries]);
        let flat_job = |from: usize, to: usize, targets| FlatEncodeJob {
            shape, start: from, len: to - from, kernels,
            source: source(rig, &widened[from..to], half).0,
            source_rounding: SourceRounding::F32, tensor: tensor.clone(),
            blocks: Some(FlatBlocks { amaxes: agreed.clone(), blocks: blocks.clone() }),
            targets,
        };
        let observe = |(from, to)| {
            let mut jobs = AmaxJob::before_flat(&rig.backend, &flat_job(from, to, Vec::new()));
            // No flat encode reads transformed values.
            jobs.retain(|job| !job.hadamard);
            jobs
        };
        rig.run(Work::Amax(pairs().flat_map(observe).collect()));
        // Each piece consumes them, and the next one still reads them. Encode piece by piece, each into its own
        // bytes, and merge nibbles.
        let mut merged: Vec<Vec<u8>> = expected.iter().map(|(_, b)| vec![0; b.len()]).collect();
        for (from, to) in pairs() {
            let span = |spec: &BufferSpec| {
                let bits = spec.code.bits();
                from * bits / 8..(to * bits).div_ceil(8)
            };
            let targets: Vec<Target<B>> = specs.iter().zip(&merged).map(|(spec, m)| {
                let bytes = match spec.key.part {
                    Part::Data if from == to => vec![],
                    // Neighbours' nibbles are there already and must survive.
                    Part::Data => m[span(spec)].to_vec(),
                    _ => vec![0xA5; m.len()],
                };
                Target::new(*spec, rig.buffer(&bytes))
            }).collect();
            rig.run(Work::FlatEncode(vec![flat_job(from, to, targets.clone())]));
            for (target, merged) in targets.iter().zip(&mut merged) {
                let bytes = rig.content::<u8>(&target.bytes);
                match target.spec.key.part {
                    Part::Data if from == to => {}
                    Part::Data => merged[span(&target.spec)].copy_from_slice(&bytes),
                    _ => merged.copy_from_slice(&bytes),
                }
            }
        }
        let consumed = |entries: &[f32]| entries.iter().all(|x| x.is_sign_negative());
        prop_assert!(consumed(&rig.content::<f32>(&agreed)[1..]));
        for (orientation, input) in tensor.iter().enumerate() {
            let Some(TensorInput::Observed(slot)) = input else { continue };
            let entries = rig.content::<f32>(&slot.buffer);
            let entries = &entries[slot.index..][..amaxes[orientation].len()];
            prop_assert!(consumed(entries));
        }
        for ((key, expected), merged) in expected.iter().zip(&merged) {
            prop_assert_eq!(expected, merged, "{} {:?} {:?}", key, kernels, bounds);
        }
    });
}

/// Owned nibbles only: elements 9 to 13 change bytes 4 to 6 but for the low nibble of byte 4.
pub fn only_owned_nibbles_change<B: Backend>(rig: &Rig<B>) {
    let case = case(
        Code::E2M1,
        ScaleRule::TWO_LEVEL,
        Some([[1, 16], [16, 1]]),
        Some(TRANSPOSED),
    );
    let bytes = rig.buffer(&[0xEEu8; 3]);
    let target = Target::new(case.specs()[0], bytes.clone());
    rig.run(Work::FlatEncode(vec![FlatEncodeJob {
        shape: Shape::new(1, 32),
        start: 9,
        len: 4,
        kernels: case.kernels(),
        source: Source::F32(rig.buffer(&[6f32; 4])),
        source_rounding: SourceRounding::F32,
        tensor: inputs(rig, &case, &[vec![6.0], vec![]], |_, slot| {
            TensorInput::Known(slot)
        }),
        blocks: Some(FlatBlocks {
            amaxes: rig.buffer(&[6f32; 2]),
            blocks: vec![BlockAmax {
                block: [1, 16],
                start: 0,
            }],
        }),
        targets: vec![target],
    }]));
    assert_eq!(rig.content::<u8>(&bytes), [0x7E, 0x77, 0xE7]);
}
