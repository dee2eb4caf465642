//! Updates by every rule against the reference, and fused with the encode against one after the other.

use lowp_format::codec::bf16::round_stochastic;
use lowp_format::codec::remainder;
use lowp_format::{AnyRecipe, Orientation, STATE_BLOCK, ShardTiles, StateBits, state_bytes};
use proptest::prelude::*;

use super::*;
use lowp_kernels::StateDtype::{Bf16, F32, Fp8};
use lowp_kernels::reference::{self, Reference};
use lowp_kernels::{
    GroupScalars, Master, MasterDtype, Rule, State, StateDtype, UpdateAmax, UpdateJob, UpdateRandom,
};

pub(super) fn scalars(step: u64) -> GroupScalars {
    GroupScalars::default().at_step(step)
}

/// A master of these values, rounded to nearest even in bf16.
fn master<B: Backend>(rig: &Rig<B>, dtype: MasterDtype, values: &[f32]) -> Master<B> {
    let half = || rig.buffer(&vec![0u8; 2 * values.len()]);
    match dtype {
        MasterDtype::F32 | MasterDtype::Bf16 => {
            source(rig, values, dtype == MasterDtype::Bf16).0.into()
        }
        MasterDtype::Bf16Plus16 => {
            let halves = Master::Bf16Plus16 {
                parameter: half(),
                remainder: half(),
            };
            halves.upload(&rig.backend, values).unwrap();
            halves
        }
    }
}

pub(super) fn job<B: Backend>(
    rig: &Rig<B>,
    variant: Variant,
    len: usize,
    seed: u64,
) -> UpdateJob<B> {
    let state = |&dtype: &StateDtype| match dtype {
        StateDtype::F32 => Source::F32(rig.buffer(&vec![0f32; len])).into(),
        StateDtype::Bf16 => Source::Bf16(rig.buffer(&vec![bf16::ZERO; len])).into(),
        StateDtype::Fp8 => State::Fp8(rig.buffer(&vec![0u8; state_bytes(len)])),
    };
    UpdateJob {
        rule: variant.rule,
        master: master(rig, variant.master, &values(len, seed, false)),
        states: variant.states.iter().map(state).collect(),
        random: Some(RANDOM),
        grad: source(rig, &values(len, seed ^ 1, false), variant.half_grad).0,
        group: 0,
        source_rounding: SourceRounding::F32,
        amax: None,
        encode: None,
    }
}

/// Random bits of elements in the middle of a matrix.
const RANDOM: UpdateRandom = UpdateRandom {
    seed: 0x0123_4567_89AB_CDEF,
    stream: 1 << 63 | 5,
    tiles: None,
    first: 3 << 32 | 96,
};

/// Master and states, as the reference updates them.
pub(super) struct Expected {
    rule: Rule,
    values: Vec<Vec<f32>>,
    master: MasterDtype,
    states: Vec<StateDtype>,
    /// Where each element lies in the flattened matrix.
    places: Vec<usize>,
}

impl Expected {
    pub(super) fn new<B: Backend>(rig: &Rig<B>, job: &UpdateJob<B>) -> Self {
        Self {
            rule: job.rule,
            values: [vec![rig.master(job)], rig.states(job)].concat(),
            master: job.master.dtype(),
            states: job.states.iter().map(State::dtype).collect(),
            places: {
                let random = job.random.unwrap();
                random
                    .runs(0..job.master.len(&rig.backend))
                    .flatten()
                    .collect()
            },
        }
    }

    /// A step by the scalars of a group of `run`.
    fn step(&mut self, grad: &[f32], run: &StepScalars, group: usize) {
        let (grad_scale, group) = (run.grad_scale, &run.groups[group]);
        let random = RANDOM.philox(run.random_step);
        let stored = |x: f32, dtype| match dtype {
            StateDtype::F32 | StateDtype::Fp8 => x,
            StateDtype::Bf16 => bf16::from_f32(x).to_f32(),
        };
        for (i, g) in grad.iter().enumerate() {
            let mut element = [0.0; 1 + Rule::MOST_STATES];
            for (x, values) in element.iter_mut().zip(&self.values) {
                *x = values[i];
            }
            let element = reference::update(
                self.rule,
                element,
                g * self.rule.grad_factor(grad_scale),
                group,
            );
            let (master, states) = self.values.split_at_mut(1);
            let bits = StateBits::new(&random, self.places[i] as u64);
            master[0][i] = match self.master {
                MasterDtype::F32 => element[0],
                MasterDtype::Bf16 => round_stochastic(element[0], bits.master).to_f32(),
                MasterDtype::Bf16Plus16 => {
                    let (parameter, remainder) = remainder::split(element[0]);
                    remainder::join(parameter, remainder)
                }
            };
            let states = states.iter_mut().zip(&self.states);
            for ((values, &dtype), x) in states.zip(&element[1..]) {
                values[i] = stored(*x, dtype);
            }
        }
        let names = self.rule.states().iter();
        let states = names.zip(&mut self.values[1..]).zip(&self.states);
        for ((name, values), _) in states.filter(|(_, dtype)| **dtype == StateDtype::Fp8) {
            let code = name.code();
            for (number, block) in values.chunks_mut(STATE_BLOCK).enumerate() {
                let places = &self.places[number * STATE_BLOCK..];
                let bits = |place: usize| StateBits::new(&random, places[place] as u64).of(code);
                let mut codes = [0; STATE_BLOCK];
                let scale = code.encode_block(block, bits, &mut codes[..block.len()]);
                code.decode_block(&codes[..block.len()], scale, block);
            }
        }
    }

    pub(super) fn assert<B: Backend>(&self, rig: &Rig<B>, job: &UpdateJob<B>, when: u64) {
        let found = Self::new(rig, job).values;
        assert_eq!(found.len(), self.values.len());
        for (which, (found, expected)) in found.iter().zip(&self.values).enumerate() {
            let [found, expected] = [bits(found), bits(expected)];
            let at = found.iter().zip(&expected).position(|(a, b)| a != b);
            let (rule, len) = (self.rule, found.len());
            assert_eq!(
                at, None,
                "{rig:?}: {rule:?}, value {which} of {len} after {when}"
            );
        }
    }
}

/// docs/numerics.md 12.2, 12.9 and 12.10.
#[test]
fn known_answers() {
    for (rule, first, expected) in [
        (Rule::AdamW, 0.0, [0x3F7F_B7E9, 0x3C23_D70D, 0x3A03_1271]),
        (Rule::AdamL2, 0.0, [0x3F7F_BE77, 0x3CA3_D70D, 0x3B03_1271]),
        (Rule::Lion, 0.0, [0x3F7F_B7E9, 0x3BA3_D70D, 0]),
        (Rule::Lion, -0.5, [0x3F80_1D7E, 0xBEF0_A3D7, 0]),
        (Rule::Sgd, 0.0, [0x3F7F_F2E5, 0, 0]),
        (Rule::SgdMomentum, 0.5, [0x3F7F_D567, 0x3F26_6666, 0]),
        (Rule::SgdNesterov, 0.5, [0x3F7F_CC8E, 0x3F26_6666, 0]),
        (Rule::Muon, 0.5, [0x3F7F_F2E5, 0x3F00_0000, 0]),
    ] {
        let found = reference::update(rule, [1.0, first, 0.0], 0.1, &scalars(1));
        assert_eq!(found.map(f32::to_bits), expected, "{rule:?}, {first}");
    }
}

/// A sign is that of the sum, whose zeros and NaN stay.
#[test]
fn lion_moves_by_its_rate() {
    let group = GroupScalars {
        weight_decay: 0.0,
        ..scalars(1)
    };
    let moved = |m, g| reference::update(Rule::Lion, [0.5, m, 0.0], g, &group)[0] - 0.5;
    assert_eq!(moved(0.0, 1e-30), moved(0.0, 1e30));
    assert!(moved(0.0, 1.0) < 0.0 && moved(0.0, -1.0) > 0.0 && moved(1.0, -1.0) < 0.0);
    assert_eq!([moved(0.0, 0.0), moved(-0.0, -0.0)], [0.0; 2]);
    assert!(moved(0.0, f32::NAN).is_nan());
}

/// A rule, the dtypes of the master and the states, and whether the gradient is bf16.
#[derive(Clone, Copy, Debug)]
pub(super) struct Variant {
    rule: Rule,
    master: MasterDtype,
    states: &'static [StateDtype],
    half_grad: bool,
}

/// A rule of a master in f32.
const fn of(rule: Rule, states: &'static [StateDtype], half_grad: bool) -> Variant {
    Variant {
        rule,
        master: MasterDtype::F32,
        states,
        half_grad,
    }
}

/// The same of a master in bf16.
const fn of_half(rule: Rule, states: &'static [StateDtype], half_grad: bool) -> Variant {
    Variant {
        master: MasterDtype::Bf16,
        ..of(rule, states, half_grad)
    }
}

/// The same of a master in two halves.
pub(super) const fn of_halves(
    rule: Rule,
    states: &'static [StateDtype],
    half_grad: bool,
) -> Variant {
    Variant {
        master: MasterDtype::Bf16Plus16,
        ..of(rule, states, half_grad)
    }
}

/// The dtypes that so many states have.
fn state_dtypes(states: usize) -> &'static [&'static [StateDtype]] {
    match states {
        0 => &[&[]],
        1 => &[&[F32], &[Bf16], &[Fp8]],
        _ => &[
            &[F32, F32],
            &[Bf16, F32],
            &[Bf16, Bf16],
            &[Fp8, F32],
            &[Fp8, Fp8],
        ],
    }
}

/// Every rule with every dtype of the master, of its states and of the gradient.
fn variants() -> Vec<Variant> {
    let mut all = Vec::new();
    for rule in Rule::ALL {
        for &states in state_dtypes(rule.states().len()) {
            all.extend([false, true].map(|half_grad| of(rule, states, half_grad)));
            all.extend([false, true].map(|half_grad| of_half(rule, states, half_grad)));
            all.extend([false, true].map(|half_grad| of_halves(rule, states, half_grad)));
        }
    }
    all
}

/// Every rule, and every dtype of two states, once, and some of them with masters in bf16 and in two halves.
const LONG: [Variant; 16] = [
    of(Rule::AdamW, &[F32, F32], false),
    of(Rule::AdamW, &[Bf16, F32], true),
    of(Rule::AdamW, &[Fp8, Fp8], true),
    of(Rule::AdamL2, &[Bf16, Bf16], false),
    of(Rule::AdamL2, &[Fp8, F32], false),
    of(Rule::Lion, &[Bf16], true),
    of(Rule::SgdMomentum, &[F32], true),
    of(Rule::SgdNesterov, &[Bf16], false),
    of(Rule::Muon, &[F32], true),
    of_half(Rule::AdamW, &[Fp8, Fp8], false),
    of_half(Rule::AdamL2, &[Bf16, F32], true),
    of_half(Rule::Sgd, &[], false),
    of_halves(Rule::AdamW, &[F32, F32], true),
    of_halves(Rule::AdamW, &[Fp8, Fp8], true),
    of_halves(Rule::Lion, &[Bf16], false),
    of_halves(Rule::Sgd, &[], true),
];

/// One of them.
pub(super) const ADAMW: Variant = of(Rule::AdamW, &[Bf16, F32], true);

pub fn updates_equal_the_reference<B: Backend>(rig: &Rig<B>) {
    // All of them on a few elements, and some on those of several tasks.
    let short = variants()
        .into_iter()
        .flat_map(|variant| [0, 1, 7, 4097].map(|len| (variant, len)));
    let long = LONG.into_iter().map(|variant| (variant, 150_000));
    for (variant, len) in short.chain(long) {
        let job = job(rig, variant, len, 40);
        let plan = rig.plan(Work::Update(vec![job.clone()])).unwrap();
        let grad = rig.widened(&job.grad);
        let mut expected = Expected::new(rig, &job);
        for step in 1..=2 {
            let group = scalars(step);
            let run = StepScalars {
                groups: vec![group],
                grad_scale: 0.7,
                random_step: step,
                ..StepScalars::default()
            };
            rig.backend.run(&plan, &run).unwrap();
            expected.step(&grad, &run, 0);
            expected.assert(rig, &job, step);
        }
    }
}

/// NaNs, infinities, and what is subnormal among masters and gradients.
pub fn any_values_are_updated<B: Backend>(rig: &Rig<B>) {
    let len = 20_000;
    for variant in LONG {
        let job = UpdateJob {
            master: master(rig, variant.master, &values(len, 44, true)),
            grad: source(rig, &values(len, 45, true), variant.half_grad).0,
            ..job(rig, variant, len, 43)
        };
        let plan = rig.plan(Work::Update(vec![job.clone()])).unwrap();
        let mut expected = Expected::new(rig, &job);
        for step in 1..=2 {
            let run = StepScalars {
                groups: vec![scalars(step)],
                random_step: step,
                ..StepScalars::default()
            };
            rig.backend.run(&plan, &run).unwrap();
            expected.step(&rig.widened(&job.grad), &run, 0);
            expected.assert(rig, &job, step);
        }
    }
}

/// Of shard tiles, and of a rank that begins within a row.
pub fn random_bits_are_those_of_the_matrix<B: Backend>(rig: &Rig<B>) {
    let full = Shape::new(256, 192);
    let of_width = |cols| {
        let recipes = AnyRecipe::low_precision().into_iter();
        let mut tiles = recipes.map(|recipe| ShardTiles::new(&recipe, full, Usage::BOTH, cols));
        tiles.find_map(|tiles| tiles.ok().filter(|tiles| !tiles.are_in_order()))
    };
    for (tiles, first) in [(None, 5), (of_width(64), 64 * 160), (of_width(48), 48 * 7)] {
        for variant in LONG {
            if variant.states.contains(&Fp8) && first % STATE_BLOCK != 0 {
                continue;
            }
            let random = UpdateRandom {
                tiles,
                first,
                ..RANDOM
            };
            let job = UpdateJob {
                random: Some(random),
                ..job(rig, variant, full.elements() - first, 42)
            };
            let mut expected = Expected::new(rig, &job);
            let run = StepScalars {
                groups: vec![scalars(1)],
                random_step: 1 << 20,
                ..StepScalars::default()
            };
            rig.run_with(Work::Update(vec![job.clone()]), &run);
            expected.step(&rig.widened(&job.grad), &run, 0);
            expected.assert(rig, &job, 1);
        }
    }
}

/// Groups of one optimizer have other rules.
pub fn rules_mix_in_one_plan<B: Backend>(rig: &Rig<B>) {
    let jobs: Vec<UpdateJob<B>> = (0..)
        .zip(variants())
        .map(|(index, variant)| UpdateJob {
            group: index % 3,
            ..job(rig, variant, 700 + 64 * index, 50 + index as u64)
        })
        .collect();
    let run = StepScalars {
        groups: (1..4).map(scalars).collect(),
        ..StepScalars::default()
    };
    let mut expected: Vec<Expected> = jobs.iter().map(|job| Expected::new(rig, job)).collect();
    rig.run_with(Work::Update(jobs.clone()), &run);
    for (job, expected) in jobs.iter().zip(&mut expected) {
        expected.step(&rig.widened(&job.grad), &run, job.group);
        expected.assert(rig, job, 1);
    }
}

pub fn many_steps_equal_the_reference<B: Backend>(rig: &Rig<B>) {
    let len = 1031;
    let steps = if rig.sampled { 250 } else { 1000 };
    for variant in LONG {
        let job = job(rig, variant, len, 41);
        let plan = rig.plan(Work::Update(vec![job.clone()])).unwrap();
        let mut expected = Expected::new(rig, &job);
        let grads: Vec<Vec<f32>> = (0..16).map(|seed| values(len, seed, false)).collect();
        for step in 1..=steps {
            let grad = &grads[step as usize % grads.len()];
            let halves: Vec<bf16> = grad.iter().map(|&x| bf16::from_f32(x)).collect();
            let grad = match &job.grad {
                Source::F32(b) => {
                    rig.backend.write(b, 0, grad).unwrap();
                    grad.clone()
                }
                Source::Bf16(b) => {
                    rig.backend.write(b, 0, &halves).unwrap();
                    rig.widened(&job.grad)
                }
            };
            let group = scalars(step);
            let run = StepScalars {
                groups: vec![group],
                random_step: step,
                ..StepScalars::default()
            };
            rig.backend.run(&plan, &run).unwrap();
            expected.step(&grad, &run, 0);
            if [1, 10, 100].contains(&step) || step == steps {
                expected.assert(rig, &job, step);
            }
        }
    }
}

/// With the amaxes of the tensor and of lines.
pub fn fused_equals_update_then_encode<B: Backend>(rig: &Rig<B>) {
    let config = cases_of(96);
    // Weights are not transformed.
    let weights = |case: &Case| !case.kernels().iter().any(|key| key.hadamard);
    let cases: Vec<Case> = cases().into_iter().filter(weights).collect();
    // Masters in two halves are cast already.
    let cast: Vec<Variant> = variants()
        .into_iter()
        .filter(|variant| variant.master != MasterDtype::Bf16Plus16)
        .collect();
    proptest!(config, |(
        index in 0..cases.len(), rows in prop_oneof![3 => 0usize..140, 1 => Just(256)],
        width in 1usize..4, unit in proptest::sample::select(vec![1, 1, 32, 128]), seed: u64,
        variant in proptest::sample::select(cast.clone()), via: bool, lines: [bool; 2],
    )| {
        let case = &cases[index];
        let cols = lowp_format::lcm(case.columns(), unit) * width;
        let shape = Shape::new(rows, cols);
        let source_rounding = if via { SourceRounding::ViaBf16 } else { SourceRounding::F32 };
        let make = || {
            let job = job(rig, variant, shape.elements(), seed);
            UpdateJob { source_rounding, ..job }
        };
        let encode = |master: &Master<B>| {
            let source = master.values().unwrap().clone();
            let outer = case.outer(shape, 3.0);
            let job = encode_job(rig, case, &case.specs(), shape, source, &outer);
            EncodeJob { source_rounding, ..job }
        };
        let step = StepScalars { groups: vec![scalars(3)], ..StepScalars::default() };

        let apart = make();
        rig.run_with(Work::Update(vec![apart.clone()]), &step);
        let apart_encode = encode(&apart.master);
        rig.run(Work::Encode(vec![apart_encode.clone()]));

        let starts = [2, 2 + rows];
        let out = rig.buffer(&vec![0.25f32; 2 + rows + shape.cols]);
        let amax = UpdateAmax {
            shape, out: out.clone(), tensor: Some(1),
            lines: [0, 1].map(|side| lines[side].then_some(starts[side])),
        };
        let fused = make();
        let fused_encode = encode(&fused.master);
        let fused = UpdateJob {
            amax: Some(amax.clone()), encode: Some(Box::new(fused_encode.clone())), ..fused
        };
        rig.run_with(Work::Update(vec![fused.clone()]), &step);

        let [fused_master, master] = [&fused, &apart].map(|job| rig.master(job));
        prop_assert_eq!(bits(&fused_master), bits(&master));
        let [fused_states, states] = [&fused, &apart]
            .map(|job| rig.states(job).iter().map(|state| bits(state)).collect::<Vec<_>>());
        prop_assert_eq!(fused_states, states);
        let [fused_bytes, bytes] =
            [&fused_encode, &apart_encode].map(|job| contents(rig, &job.targets));
        prop_assert_eq!(fused_bytes, bytes);

        let expected = |lines: [bool; 2]| {
            let of = |orientation: Orientation| {
                let kernel = KernelKey::new(Code::E4M3, LINES);
                let (values, tensor) = (&master[..], &[][..]);
                Reference { shape, orientation, kernel, values, source_rounding, tensor, random: None }
            };
            let mut entries = vec![0.25f32, of(Orientation::Rowwise).tensor_amax().max(0.25)];
            for (side, orientation) in Orientation::ALL.into_iter().enumerate() {
                let amaxes = of(orientation).outer_amaxes();
                let raised = amaxes.into_iter().map(|amax| if lines[side] { amax.max(0.25) } else { 0.25 });
                entries.extend(raised);
            }
            entries
        };
        prop_assert_eq!(rig.content::<f32>(&out), expected(lines));

        // Alone, without an encode, the same.
        let alone = UpdateJob { amax: Some(UpdateAmax { out: rig.buffer(&vec![0.25f32; 2 + rows + shape.cols]), ..amax }), ..make() };
        rig.run_with(Work::Update(vec![alone.clone()]), &step);
        prop_assert_eq!(rig.content::<f32>(&alone.amax.unwrap().out), expected(lines));
    });
}

/// Consumed amaxes of lines are replaced, of several tasks each.
pub fn updates_of_many_tasks_raise_lines<B: Backend>(rig: &Rig<B>) {
    // Rows of the second begin within blocks of states.
    let variants = [ADAMW, of_half(Rule::AdamW, &[Fp8, Fp8], false)];
    for variant in variants {
        let shape = Shape::new(1501, 1400);
        let len = shape.elements();
        let before = vec![-9f32; shape.rows + shape.cols];
        let amax = UpdateAmax {
            shape,
            out: rig.buffer(&before),
            tensor: None,
            lines: [Some(0), Some(shape.rows)],
        };
        let job = UpdateJob {
            amax: Some(amax.clone()),
            ..job(rig, variant, len, 77)
        };
        let step = StepScalars {
            groups: vec![scalars(1)],
            ..StepScalars::default()
        };
        rig.run_with(Work::Update(vec![job.clone()]), &step);
        let master = rig.master(&job);
        let rows = master.chunks(shape.cols);
        let rows = rows.map(|row| reference::amax(row.iter().copied()));
        let cols = (0..shape.cols)
            .map(|col| reference::amax(master[col..].iter().step_by(shape.cols).copied()));
        let expected: Vec<f32> = rows.chain(cols).collect();
        assert_eq!(rig.content::<f32>(&amax.out), expected);
    }
}
