//! Sums and conversions of vectors.

use super::fence::{Fence, Fenced};
use super::*;
use lowp_kernels::{ConvertJob, OwnPart, SumJob, SumPartsJob, reference};

/// Whether `from` and `into` are bf16.
const PAIRS: [[bool; 2]; 4] = [[false, false], [false, true], [true, false], [true, true]];

/// Around lines of lanes, 16-byte words, and the tasks of threads.
const LENGTHS: [usize; 13] = [0, 1, 3, 7, 8, 15, 16, 17, 31, 33, 257, 8193, 150_001];

/// Bytes past an aligned address at which `from` and `into` begin.
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
    let (from, sums) = (rig.widened(from), rig.widened(into));
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
                let [source, expected] = [rig.widened(&from), summed(rig, &from, &into)];
                let job = SumJob {
                    from: from.clone(),
                    into: into.clone(),
                };
                rig.run(Work::Sum(vec![job]));
                assert!(bits(&rig.widened(&into)) == bits(&expected), "sum: {what}");
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
                assert!(bits(&rig.widened(&into)) == bits(&expected), "{what}");
                assert!(bits(&rig.widened(&from)) == bits(&source), "{what}");
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
        assert_eq!(bits(&rig.widened(&job.into)), bits(&expected));
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

/// What `into` of `job` will be.
pub(super) fn summed_parts<B: Backend>(rig: &Rig<B>, job: &SumPartsJob<B>) -> Vec<f32> {
    let parts = rig.widened(&job.parts);
    let own = job.own.as_ref();
    let own = own.map(|own| (own.number, rig.widened(&own.values)));
    let before = rig.content::<f32>(&job.into);
    let len = before.len();
    let sum = |(i, before): (usize, f32)| {
        let part = |number| match &own {
            Some((elsewhere, own)) if *elsewhere == number => own[i],
            _ => parts[number * len + i],
        };
        let sum = reference::sum_parts((0..job.count).map(part));
        match job.accumulate {
            true => reference::sum_f32(before, sum),
            false => sum,
        }
    };
    before.into_iter().enumerate().map(sum).collect()
}

/// Around the unrolled parts of a thread, for vectors that begin and end anywhere.
pub fn parts_are_added_in_their_order<B: Fenced>(rig: &Rig<B>) {
    let lens = [0, 1, 7, 8, 33, 2049, 4096, 8200, 70_000];
    let counts = [1, 2, 4, 5, 6, 9, 16];
    for (n, (len, half)) in lens
        .into_iter()
        .flat_map(|len| [(len, false), (len, true)])
        .enumerate()
    {
        let long = len > 10_000;
        let count = if long { 2 } else { counts[n % counts.len()] };
        let cases = [
            (None, false, [0, 0]),
            (Some(0), true, [0, 0]),
            (Some(count - 1), false, [0, 4]),
            (None, true, [8, 0]),
        ];
        for (own, accumulate, [shift, into_shift]) in &cases[..if long { 1 } else { 4 }] {
            let (shift, into_shift) = (*shift, *into_shift);
            let what = format!("{rig:?} {count} x {len} {half} {own:?} {shift} {into_shift}");
            let seed = n as u64;
            let (parts, around) = fenced(rig, &values(count * len, seed, true), half, shift);
            let (elsewhere, _own) = fenced(rig, &values(len, seed + 100, true), half, shift);
            let (into, fence) = fenced(rig, &values(len, !seed, true), false, into_shift);
            let Source::F32(into) = into else {
                unreachable!("it was asked for in binary32")
            };
            let job = SumPartsJob {
                parts,
                count,
                own: own.map(|number| OwnPart {
                    number,
                    values: elsewhere,
                }),
                into: into.clone(),
                accumulate: *accumulate,
            };
            let expected = summed_parts(rig, &job);
            rig.run(Work::SumParts(vec![job]));
            assert!(bits(&rig.content(&into)) == bits(&expected), "{what}");
            around();
            fence();
        }
    }
}

pub fn parts_must_fit<B: Backend>(rig: &Rig<B>) {
    let floats = |len: usize| Source::F32(rig.buffer(&vec![1f32; len]));
    let halves = |len: usize| Source::Bf16(rig.buffer(&vec![bf16::ONE; len]));
    let own = |number, values| Some(OwnPart { number, values });
    let refused = |parts, count, own| {
        let into = rig.buffer(&[0f32; 3]);
        let job = SumPartsJob {
            parts,
            count,
            own,
            into,
            accumulate: false,
        };
        rig.plan(Work::SumParts(vec![job])).unwrap_err().to_string()
    };
    for (found, says) in [
        (
            refused(floats(0), 0, None),
            "a sum of 0 parts; give at least one",
        ),
        (
            refused(floats(6), usize::MAX, None),
            "a sum of 18446744073709551615 parts",
        ),
        (refused(floats(7), 2, None), "parts of job 0"),
        (
            refused(floats(6), 2, own(2, floats(3))),
            "the number of a part that lies elsewhere",
        ),
        (
            refused(floats(6), 2, own(1, floats(4))),
            "part that lies elsewhere of job 0",
        ),
        (
            refused(floats(6), 2, own(1, halves(3))),
            "has another dtype than the others",
        ),
    ] {
        assert!(found.contains(says), "{found}");
    }
}
