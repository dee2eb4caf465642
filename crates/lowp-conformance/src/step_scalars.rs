//! The scalars of a step made on the device, and plans that run with them.

use super::*;
use lowp_kernels::{
    GradContribution, GroupScalars, Rule, StepCounts, StepRecord, StepScalarsJob, StochasticKey,
    SumSquaresJob, UpdateAmax, UpdateJob, reference,
};

/// What the scalars of a step are made of.
#[derive(Clone, Debug)]
pub(super) struct Input {
    pub(super) parts: Vec<GradContribution>,
    pub(super) shards: usize,
    pub(super) replica: usize,
    pub(super) options: StepScalars,
    pub(super) counts: StepCounts,
}

/// One of `of`.
fn pick<T: Clone>(word: u32, of: &[T]) -> T {
    of[word as usize % of.len()].clone()
}

impl Input {
    /// Replicas of shards that agree in most cases; scalars of every kind.
    pub(super) fn random(seed: u64) -> Self {
        let random = Philox::new(seed, 3);
        let [replicas, shards, replica, groups] = random.block(0);
        let (replicas, shards) = (1 + replicas as usize % 4, 1 + shards as usize % 5);
        let mut input = Self::of(replicas, shards, seed);
        input.replica = replica as usize % replicas;
        let [rank, defect, bits, _] = random.block(1);
        let part = &mut input.parts[rank as usize % (replicas * shards)];
        match defect % 16 {
            0 => part.non_finite = 1 + u64::from(bits % 3),
            1 => part.non_finite = u64::MAX - u64::from(bits % 3),
            2 => part.consensus ^= 1 << (bits % 64),
            3 => part.sum_squares = f64::from_bits(part.sum_squares.to_bits() ^ 1),
            4 => {
                part.sum_squares = f64::NAN;
                part.non_finite = u64::from(bits % 2);
            }
            5 => part.sum_squares = f64::INFINITY,
            6 => part.sum_squares = pick(bits, &[1e80, 1e300, -1.0, 1e-320]),
            7 => part.within ^= 1 << (bits % 64),
            _ => {}
        }
        let group = |i: u32| {
            let words = random.block(100 + u64::from(i));
            let betas = [0.0, 0.5, 0.9, 0.95, 0.99, 0.999, 0.9999];
            let strange = [1.0, 1.5, -0.75, -1.25, f32::INFINITY, f32::NAN, 1e-30];
            let beta = |word: u32| match word % 8 {
                0 => pick(word >> 3, &strange),
                _ => pick(word >> 3, &betas),
            };
            GroupScalars {
                lr: f32::from_bits(words[2]),
                beta1: beta(words[0]),
                beta2: beta(words[1]),
                correction1: f32::from_bits(words[3]),
                bias_correction: !words[3].is_multiple_of(4),
                ..GroupScalars::default()
            }
        };
        let [scale, norm, step, skip] = random.block(2);
        let (scales, norms) = (
            [
                1.0,
                0.5,
                1.0 / 3.0,
                1.0 / 65536.0,
                3e38,
                0.0,
                -2.0,
                f32::INFINITY,
                f32::NAN,
            ],
            [f32::INFINITY, 1.0, 1e-3, 1e30, 0.0, f32::NAN],
        );
        input.options = StepScalars {
            groups: (0..groups % 6).map(group).collect(),
            grad_scale: if scale % 2 == 0 {
                1.0
            } else {
                pick(scale >> 1, &scales)
            },
            random_step: u64::from(step) << 20,
            skip: skip % 8 == 0,
            max_norm: if norm % 2 == 0 {
                1.0
            } else {
                pick(norm >> 1, &norms)
            },
        };
        let [applied, skipped, kind, _] = random.block(3);
        input.counts = StepCounts {
            applied: pick(
                kind,
                &[0, 1, u64::from(applied % 100_000), applied.into(), u64::MAX],
            ),
            skipped: u64::from(skipped),
        };
        input
    }

    /// Replicas that agree on a finite gradient, at the first step.
    fn of(replicas: usize, shards: usize, seed: u64) -> Self {
        let random = Philox::new(seed, 4);
        let part = |rank: usize| GradContribution {
            sum_squares: f64::from(random.normal((rank % shards) as u64)).powi(2) * 8.0,
            non_finite: 0,
            consensus: seed,
            // Replicas need not have it in common.
            within: (rank / shards) as u64,
        };
        Self {
            parts: (0..replicas * shards).map(part).collect(),
            shards,
            replica: 0,
            options: StepScalars::default(),
            counts: StepCounts::default(),
        }
    }

    fn part_bytes(&self) -> Vec<u8> {
        self.parts
            .iter()
            .flat_map(GradContribution::to_bytes)
            .collect()
    }
}

/// The parts that lie in `bytes`.
pub(super) fn parts(bytes: &[u8]) -> Vec<GradContribution> {
    let parts = bytes.as_chunks().0;
    parts.iter().map(GradContribution::from_bytes).collect()
}

/// The job of `input`, with buffers that `buffer` makes.
pub(super) fn job<B: Backend>(
    input: &Input,
    mut buffer: impl FnMut(&[u8]) -> B::Buffer<u8>,
) -> StepScalarsJob<B> {
    let options = input.options.to_bytes();
    StepScalarsJob {
        parts: buffer(&input.part_bytes()),
        shards: input.shards,
        replica: input.replica,
        counts: buffer(&input.counts.to_bytes()),
        out: buffer(&vec![0xA5; options.len()]),
        options: buffer(&options),
        report: buffer(&[0xA5; StepRecord::BYTES]),
    }
}

/// The scalars, counts and report that the reference makes of `input`.
pub(super) fn outputs(input: &Input) -> [Vec<u8>; 3] {
    let Input {
        parts,
        shards,
        replica,
        options,
        counts,
    } = input;
    let made = reference::step_scalars(parts, *shards, *replica, options, *counts);
    [
        made.scalars.to_bytes(),
        made.counts.to_bytes().to_vec(),
        made.report.to_bytes().to_vec(),
    ]
}

fn found<B: Backend>(rig: &Rig<B>, job: &StepScalarsJob<B>) -> [Vec<u8>; 3] {
    [&job.out, &job.counts, &job.report].map(|buffer| rig.content::<u8>(buffer))
}

fn report<B: Backend>(rig: &Rig<B>, job: &StepScalarsJob<B>) -> StepRecord {
    let bytes = rig.content::<u8>(&job.report);
    StepRecord::from_bytes(bytes.first_chunk().unwrap())
}

pub fn any_gradient_equals_the_reference<B: Backend>(rig: &Rig<B>) {
    let inputs: Vec<Input> = (0..600).map(Input::random).collect();
    let jobs: Vec<_> = inputs.iter().map(|i| job(i, |b| rig.buffer(b))).collect();
    // It makes scalars also where those of its own run say that nothing changes.
    let skip = StepScalars {
        skip: true,
        ..StepScalars::default()
    };
    let (first, rest) = jobs.split_at(300);
    rig.run(Work::StepScalars(first.to_vec()));
    rig.run_with(Work::StepScalars(rest.to_vec()), &skip);
    let mut reports = Vec::new();
    for (input, job) in inputs.iter().zip(&jobs) {
        let names = ["scalars", "counts", "report"];
        for ((name, found), expected) in names.into_iter().zip(found(rig, job)).zip(outputs(input))
        {
            assert_eq!(found, expected, "{name} of {input:?} on {rig:?}");
        }
        reports.push(report(rig, job));
    }
    // Else the test would not see what it is about.
    let kinds: [fn(&StepRecord) -> bool; 7] = [
        |r| r.applied,
        |r| !r.applied && r.non_finite == 0,
        |r| r.applied && r.clip < 1.0,
        |r| r.consensus.is_some(),
        |r| r.within.is_some(),
        |r| r.replicas.is_some(),
        |r| r.norm.is_nan(),
    ];
    for (kind, is) in kinds.into_iter().enumerate() {
        let count = reports.iter().filter(|r| is(r)).count();
        assert!(count >= 10, "{count} reports of kind {kind}");
    }
}

pub fn thousands_of_ranks_equal_the_reference<B: Backend>(rig: &Rig<B>) {
    for (replicas, shards) in [(1, 4096), (4096, 1), (16, 256), (300, 7)] {
        let mut input = Input::of(replicas, shards, 1);
        let last = input.parts.len() - 1;
        for defect in 0..5 {
            input.replica = [0, replicas - 1, replicas / 2, 0, 0][defect];
            match defect {
                1 => input.parts[last].consensus ^= 1 << 40,
                2 => input.parts[last].sum_squares += 1.0,
                3 => input.parts[last].non_finite = u64::MAX,
                4 => input.parts[last].within ^= 1 << 63,
                _ => {}
            }
            let job = job(&input, |bytes| rig.buffer(bytes));
            rig.run(Work::StepScalars(vec![job.clone()]));
            assert_eq!(
                found(rig, &job),
                outputs(&input),
                "{replicas} x {shards}, {defect}"
            );
            let report = report(rig, &job);
            assert_eq!(report.consensus, (defect > 0).then_some(last));
            let differs = defect == 2 && replicas > 1;
            assert_eq!(report.replicas, differs.then_some(replicas - 1));
            // The only rank of a replica has nobody to differ from.
            let differs = defect == 4 && shards > 1;
            assert_eq!(report.within, differs.then_some(last));
        }
    }
}

pub fn counts_go_on_from_step_to_step<B: Backend>(rig: &Rig<B>) {
    let mut input = Input::of(2, 3, 5);
    input.options.groups = vec![GroupScalars::default(); 300];
    for (i, group) in input.options.groups.iter_mut().enumerate() {
        group.beta1 = 1.0 - 1.0 / (2.0 + i as f32);
        group.bias_correction = i % 7 != 0;
    }
    let job = job(&input, |bytes| rig.buffer(bytes));
    let plan = rig.plan(Work::StepScalars(vec![job.clone()])).unwrap();
    for step in 0..200u32 {
        let non_finite = u64::from(step % 10 == 3);
        input.parts[4].non_finite = non_finite;
        input.options.skip = step % 11 == 5;
        let (backend, options) = (&rig.backend, input.options.to_bytes());
        backend.write(&job.parts, 0, &input.part_bytes()).unwrap();
        backend.write(&job.options, 0, &options).unwrap();
        backend.run(&plan, &StepScalars::default()).unwrap();
        let expected = outputs(&input);
        assert_eq!(found(rig, &job), expected, "step {step}");
        input.counts = StepCounts::from_bytes(expected[1].first_chunk().unwrap());
    }
    let StepCounts { applied, skipped } = input.counts;
    // The host skips 18 steps, one of them among the 20 whose gradient is not finite.
    assert_eq!([applied, skipped], [163, 19]);
}

/// The buffers of a step over two parameters, and its plans in order: update, then encode.
struct Step<B: Backend> {
    grads: [Source<B>; 2],
    masters: [B::Buffer<f32>; 2],
    moments: [B::Buffer<f32>; 4],
    observed: B::Buffer<f32>,
    targets: Vec<Target<B>>,
    plans: [B::Plan; 2],
}

const SHAPE: Shape = Shape {
    rows: 48,
    cols: 160,
};
const OTHER: usize = 777;

impl<B: Backend> Step<B> {
    fn new(rig: &Rig<B>) -> Self {
        let lens = [SHAPE.elements(), OTHER];
        let masters = lens.map(|len| rig.buffer(&values(len, 1, false)));
        let moments = [lens[0], lens[0], lens[1], lens[1]];
        let moments = moments.map(|len| rig.buffer(&vec![0f32; len]));
        let observed = rig.buffer(&[0f32]);
        let slot = || Slot {
            buffer: observed.clone(),
            index: 0,
        };
        let grads = [
            source(rig, &vec![0.0; lens[0]], false).0,
            source(rig, &vec![0.0; lens[1]], true).0,
        ];
        let update = |group: usize| UpdateJob {
            master: Source::F32(masters[group].clone()).into(),
            states: vec![
                Source::F32(moments[2 * group].clone()).into(),
                Source::F32(moments[2 * group + 1].clone()).into(),
            ],
            random: None,
            grad: grads[group].clone(),
            group,
            rule: Rule::AdamW,
            source_rounding: SourceRounding::F32,
            amax: (group == 0).then(|| UpdateAmax::of_tensor(slot())),
            encode: None,
        };
        let blocks = Some([[1, 16], [16, 1]]);
        let case = case(Code::E2M1, ScaleRule::TWO_LEVEL, blocks, Some(TRANSPOSED));
        let master = Source::F32(masters[0].clone());
        let encode = EncodeJob {
            tensor: [(); 2].map(|()| Some(TensorInput::Observed(slot()))),
            stochastic: Some(StochasticKey {
                seed: 1,
                stream: 2,
                first: 3,
            }),
            ..encode_job(
                rig,
                &case,
                &case.specs(),
                SHAPE,
                master,
                &case.outer(SHAPE, 1.0),
            )
        };
        let targets = encode.targets.clone();
        let works = [
            Work::Update(vec![update(0), update(1)]),
            Work::Encode(vec![encode]),
        ];
        let plans = works.map(|work| rig.plan(work).unwrap());
        Self {
            grads,
            masters,
            moments,
            observed,
            targets,
            plans,
        }
    }

    fn set_grads(&self, rig: &Rig<B>, values: &[Vec<f32>; 2]) {
        for (grad, values) in self.grads.iter().zip(values) {
            match grad {
                Source::F32(buffer) => rig.backend.write(buffer, 0, values),
                Source::Bf16(buffer) => {
                    let halves: Vec<_> = values.iter().map(|&x| bf16::from_f32(x)).collect();
                    rig.backend.write(buffer, 0, &halves)
                }
            }
            .unwrap();
        }
    }

    fn state(&self, rig: &Rig<B>) -> (Vec<Vec<u32>>, Vec<Vec<u8>>) {
        let floats = self.masters.iter().chain(&self.moments);
        let floats = floats.chain([&self.observed]);
        let floats = floats.map(|buffer| bits(&rig.content::<f32>(buffer)));
        let encoded = contents(rig, &self.targets).into_iter();
        (floats.collect(), encoded.map(|(_, bytes)| bytes).collect())
    }
}

/// The scalars as an optimizer on the host makes them of its gradient.
fn of_the_host(options: &StepScalars, squares: f64, non_finite: u64, applied: u64) -> StepScalars {
    let norm = squares.sqrt() * f64::from(options.grad_scale.abs());
    let clip = (f64::from(options.max_norm) / (norm + 1e-6)).min(1.0) as f32;
    StepScalars {
        groups: options
            .groups
            .iter()
            .map(|g| g.at_step(applied + 1))
            .collect(),
        grad_scale: options.grad_scale * clip,
        skip: non_finite > 0,
        ..*options
    }
}

pub fn a_step_of_the_device_equals_that_of_the_host<B: Backend>(rig: &Rig<B>) {
    let (device, host) = (Step::new(rig), Step::new(rig));
    let group = |lr| GroupScalars {
        lr,
        ..GroupScalars::default()
    };
    let mut options = StepScalars {
        groups: vec![group(1e-2), group(3e-3)],
        grad_scale: 0.125,
        max_norm: 2.5,
        ..StepScalars::default()
    };
    let part = rig.buffer(&[0u8; GradContribution::BYTES]);
    let sums = device.grads.clone().map(|source| SumSquaresJob {
        source,
        out: part.clone(),
    });
    let job = StepScalarsJob {
        parts: part.clone(),
        shards: 1,
        replica: 0,
        options: rig.buffer(&options.to_bytes()),
        counts: rig.buffer(&[0u8; StepCounts::BYTES]),
        out: rig.buffer(&vec![0u8; StepScalars::bytes(2)]),
        report: rig.buffer(&[0u8; StepRecord::BYTES]),
    };
    let sums = rig.plan(Work::SumSquares(sums.to_vec())).unwrap();
    let scalars = rig.plan(Work::StepScalars(vec![job.clone()])).unwrap();
    let (mut applied, mut clipped) = (0, 0);
    for step in 0..24u64 {
        // Some gradients are larger than the norm allows, some smaller, some not finite.
        let size = 2f32.powi((step % 8) as i32 - 4);
        let mut grads = [SHAPE.elements(), OTHER].map(|len| values(len, step, false));
        for x in grads.iter_mut().flatten() {
            *x = x.clamp(-8.0, 8.0) * size;
        }
        if step % 7 == 5 {
            grads[step as usize % 2][33] = f32::NAN;
        }
        options.random_step = step;
        let backend = &rig.backend;
        device.set_grads(rig, &grads);
        backend.write(&job.options, 0, &options.to_bytes()).unwrap();
        let zero = GradContribution {
            consensus: step,
            ..GradContribution::default()
        };
        backend.write(&part, 0, &zero.to_bytes()).unwrap();
        backend.run(&sums, &StepScalars::default()).unwrap();
        backend.run(&scalars, &StepScalars::default()).unwrap();
        for plan in &device.plans {
            backend.run_with(plan, &job.out).unwrap();
        }

        host.set_grads(rig, &grads);
        let sums = host
            .grads
            .each_ref()
            .map(|grad| reference::sum_of_squares(&rig.widened(grad)));
        let (squares, non_finite) = (sums[0].0 + sums[1].0, sums[0].1 + sums[1].1);
        let made = of_the_host(&options, squares, non_finite, applied);
        if !made.skip {
            for plan in &host.plans {
                backend.run(plan, &made).unwrap();
            }
            applied += 1;
        }
        assert_eq!(device.state(rig), host.state(rig), "step {step} on {rig:?}");
        assert_eq!(rig.content::<u8>(&job.out), made.to_bytes());
        let report = report(rig, &job);
        clipped += usize::from(report.applied && report.clip < 1.0);
        let expected = [applied, step + 1 - applied, non_finite];
        assert_eq!([report.steps, report.skipped, report.non_finite], expected);
        assert_eq!(report.applied, non_finite == 0);
    }
    // Some steps of every kind.
    assert_eq!(applied, 21);
    assert!((3..20).contains(&clipped), "{clipped}");
}

pub fn scalars_in_a_buffer_must_fit<B: Backend>(rig: &Rig<B>) {
    let step = Step::new(rig);
    let [update, encode] = &step.plans;
    step.set_grads(
        rig,
        &[values(SHAPE.elements(), 2, false), values(OTHER, 3, false)],
    );
    let before = step.state(rig);
    let groups = |count| StepScalars {
        groups: vec![GroupScalars::default(); count],
        skip: true,
        ..StepScalars::default()
    };
    let run = |plan, bytes: &[u8]| rig.backend.run_with(plan, &rig.buffer(bytes));
    let error = |groups: usize| KernelError::Scalars {
        needed: 2,
        given: groups,
    };
    for count in 0..2 {
        assert_eq!(run(update, &groups(count).to_bytes()), Err(error(count)));
    }
    for len in [0, 16, 33, 95, 97] {
        let error = run(update, &vec![0; len]);
        let found = matches!(error, Err(KernelError::Length { found, .. }) if found == len);
        assert!(found, "{error:?}");
    }
    // More than the plan uses is no error; `skip` changes nothing.
    assert_eq!(run(update, &groups(3).to_bytes()), Ok(()));
    assert_eq!(run(encode, &groups(0).to_bytes()), Ok(()));
    assert_eq!(step.state(rig), before);
    let scalars = StepScalars {
        skip: false,
        ..groups(2)
    };
    assert_eq!(run(update, &scalars.to_bytes()), Ok(()));
    assert_ne!(step.state(rig), before);
}

/// Kernels read words of eight bytes.
#[cfg(feature = "cuda")]
#[test]
fn scalars_begin_at_multiples_of_eight_bytes_on_a_device() {
    use super::fence::Fenced;
    super::rig::device::once(|rig| {
        let [update, _] = &Step::new(rig).plans;
        let scalars = StepScalars {
            groups: vec![GroupScalars::default(); 2],
            ..StepScalars::default()
        };
        for shift in [0, 1, 4, 8] {
            let (buffer, fence) = lowp_kernels::Cuda::fenced(rig, &scalars.to_bytes(), shift);
            let run = rig.backend.run_with(update, &buffer);
            let (pointer, size) = (buffer.pointer(), 8);
            match shift % 8 {
                0 => assert_eq!(run, Ok(())),
                _ => assert_eq!(run, Err(KernelError::Misaligned { pointer, size })),
            }
            fence();
        }
    });
}
