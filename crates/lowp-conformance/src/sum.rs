//! Sums and conversions of vectors.

use super::fence::{Fence, Fenced};
use super::*;
use lowp_kernels::{ConvertJob, SumJob, reference};

/// Whether `from` and `into` are bf16.
const PAIRS: [[bool; 2]; 4] = [[false, false], [false, true], [true, false], [true, true]];

/// Around lines of lanes, 16-byte words, and the tasks of threads.
const LENGTHS: [usize; 13] = [0, 1, 3, 7, 8, 15, 16, 17, 31, 33, 257, 8193, 150_001];

/// Bytes behind an aligned address at which `from` and `into` begin.
const SHIFTS: [[usize; 2]; 5] = [[0, 0], [0, 4], [4, 0], [6, 6], [8, 8]];

/// A vector between fences.
fn fenced<'r, B: Fenced>(
    rig: &'r Rig<B>,
    values: &[f32],
    half: bool,
    shift: usize,
) -> (Source<B>, Fence<'r>) {
    if half {
        let halves: Vec<bf16> = values.iter().map(|&x| bf16::from_f32(x)).collect();
        let (buffer, fence) = B::fenced(rig, &halves, shift);
        (Source::Bf16(buffer), fence)
    } else {
        let (buffer, fence) = B::fenced(rig, values, shift);
        (Source::F32(buffer), fence)
    }
}

/// What `into` will be when `from` was added.
pub(super) fn summed<B: Backend>(rig: &Rig<B>, from: &Source<B>, into: &Source<B>) -> Vec<f32> {
    let (from, sums) = (widened(rig, from), widened(rig, into));
    let sum = |(from, sum): (f32, f32)| match into {
        Source::F32(_) => reference::sum_f32(sum, from),
        Source::Bf16(_) => reference::sum_bf16(bf16::from_f32(sum), from).to_f32(),
    };
    from.into_iter().zip(sums).map(sum).collect()
}

pub fn every_pair_of_dtypes_equals_the_reference<B: Fenced>(rig: &Rig<B>) {
    for [from_half, into_half] in PAIRS {
        for (n, len) in LENGTHS.into_iter().enumerate() {
            let shifts = if len > 10_000 { &SHIFTS[..2] } else { &SHIFTS };
            for &[from_shift, into_shift] in shifts {
                let what =
                    format!("{rig:?} {len} {from_half} {from_shift} {into_half} {into_shift}");
                let seed = n as u64;
                let (from, around) = fenced(rig, &values(len, seed, true), from_half, from_shift);
                let (into, fence) = fenced(rig, &values(len, !seed, true), into_half, into_shift);
                let [source, expected] = [widened(rig, &from), summed(rig, &from, &into)];
                let job = SumJob {
                    from: from.clone(),
                    into: into.clone(),
                };
                rig.run(Work::Sum(vec![job]));
                assert!(bits(&widened(rig, &into)) == bits(&expected), "sum: {what}");
                let job = ConvertJob {
                    from: from.clone(),
                    into: into.clone(),
                };
                rig.run(Work::Convert(vec![job]));
                let rounded = |&x: &f32| match into {
                    Source::F32(_) => x,
                    Source::Bf16(_) => bf16::from_f32(x).to_f32(),
                };
                let expected: Vec<f32> = source.iter().map(rounded).collect();
                assert!(bits(&widened(rig, &into)) == bits(&expected), "{what}");
                assert!(bits(&widened(rig, &from)) == bits(&source), "{what}");
                around();
                fence();
            }
        }
    }
}

/// Signalling NaNs and payloads included.
pub fn conversions_keep_every_bit_they_can<B: Backend>(rig: &Rig<B>) {
    let halves: Vec<bf16> = (0..=u16::MAX).map(bf16::from_bits).collect();
    let random = Philox::new(5, 5);
    let words = (0..1u64 << 14).flat_map(|i| random.block(i));
    // Every bf16, its neighbours below and above, and the ties between two of them.
    let near = (0..=u16::MAX)
        .map(u32::from)
        .flat_map(|half| [0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF].map(|low| half << 16 | low));
    let floats: Vec<f32> = near.chain(words).map(f32::from_bits).collect();

    let wide = rig.buffer(&vec![1f32; halves.len()]);
    let narrow = rig.buffer(&vec![bf16::ONE; floats.len()]);
    let same_halves = rig.buffer(&vec![bf16::ONE; halves.len()]);
    let same_floats = rig.buffer(&vec![1f32; floats.len()]);
    let job = |from: &Source<B>, into: Source<B>| ConvertJob {
        from: from.clone(),
        into,
    };
    let (from_halves, from_floats) = (
        Source::Bf16(rig.buffer(&halves)),
        Source::F32(rig.buffer(&floats)),
    );
    rig.run(Work::Convert(vec![
        job(&from_halves, Source::F32(wide.clone())),
        job(&from_floats, Source::Bf16(narrow.clone())),
        job(&from_halves, Source::Bf16(same_halves.clone())),
        job(&from_floats, Source::F32(same_floats.clone())),
    ]));
    let exact = |x: &f32| x.to_bits();
    let half = |x: &bf16| x.to_bits();
    let found = rig.content::<f32>(&wide);
    let shifted = |x: &bf16| u32::from(x.to_bits()) << 16;
    assert!(found.iter().map(exact).eq(halves.iter().map(shifted)));
    let found = rig.content::<bf16>(&narrow);
    let rounded = |&x: &f32| bf16::from_f32(x).to_bits();
    assert!(found.iter().map(half).eq(floats.iter().map(rounded)));
    let found = rig.content::<bf16>(&same_halves);
    assert!(found.iter().map(half).eq(halves.iter().map(half)));
    let found = rig.content::<f32>(&same_floats);
    assert!(found.iter().map(exact).eq(floats.iter().map(exact)));
}

pub fn one_plan_adds_many_vectors<B: Backend>(rig: &Rig<B>) {
    let jobs: Vec<SumJob<B>> = (0..40usize)
        .map(|i| SumJob {
            from: source(rig, &values(i * 700 % 9001, i as u64, true), i % 2 == 0).0,
            into: source(rig, &values(i * 700 % 9001, !(i as u64), true), i % 3 == 0).0,
        })
        .collect();
    let expected = jobs.iter().map(|job| summed(rig, &job.from, &job.into));
    let expected: Vec<_> = expected.collect();
    rig.run(Work::Sum(jobs.clone()));
    for (job, expected) in jobs.iter().zip(expected) {
        assert_eq!(bits(&widened(rig, &job.into)), bits(&expected));
    }
    // Two sums into one vector have an order, which a plan has not.
    let into = &jobs[1].into;
    let twice = vec![jobs[1].clone(), jobs[1].clone()];
    let itself = vec![SumJob {
        from: into.clone(),
        into: into.clone(),
    }];
    for aliased in [twice, itself] {
        let error = rig.plan(Work::Sum(aliased)).unwrap_err();
        assert!(matches!(error, KernelError::Aliased { .. }), "{error}");
    }
}
