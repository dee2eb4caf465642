//! Updates with an encode, of matrices that end inside the tiles of kernels.

use super::encode::tensor;
use super::update::{amax, states};
use super::*;
use lowp_kernels::testing::is_stochastic;
use lowp_kernels::{Rule, StochasticKey, UpdateJob};

/// Rows and columns that end inside tiles of 128 rows, of 64 and of 128 columns: at whole warps and
/// chunks, and anywhere.
const SHAPES: [[usize; 2]; 5] = [[32, 64], [17, 32], [130, 96], [96, 128], [160, 192]];

/// Dtypes of each state and of the gradient (true is bf16), and where buffers begin: first at whole chunks.
const VARIANTS: [([bool; 2], bool, usize); 7] = [
    ([false, false], false, 0),
    ([true, true], false, 0),
    ([true, false], false, 0),
    ([false, false], true, 0),
    ([true, true], true, 0),
    ([true, false], true, 0),
    ([false, false], false, 4),
];

/// Every recipe and every row of the table, whatever path its kernels take: masters, states, amaxes and
/// codes are those of the reference, and nothing past the last row or value is written.
pub fn updates_of_short_tiles<B: Fenced>(rig: &Rig<B>) {
    // Weights are not transformed.
    let weights = |case: &Case| !case.kernels().iter().any(|key| key.hadamard);
    let all = cases().into_iter().filter(weights).enumerate();
    for (first, (index, case)) in rig.some_of(all, 4).into_iter().enumerate() {
        // Other variants of each recipe.
        let variants = VARIANTS.into_iter().enumerate().cycle().skip(first);
        let variants = rig.some_of(variants.take(VARIANTS.len()), 2);
        for [rows, cols] in SHAPES {
            let shape = Shape::new(rows, cols.next_multiple_of(case.columns()));
            for &(variant, (half_states, half_grad, shift)) in &variants {
                let mut choices = Choices::new(rig, (index * VARIANTS.len() + variant) as u64);
                choices.shift = Some(shift);
                let job = update(&mut choices, &case, shape, half_states, half_grad);
                let what = format!("{rig:?}, {shape}, variant {variant}: {case:?}");
                let plan = rig.plan(job.clone().work());
                let plan = plan.unwrap_or_else(|error| panic!("{error}: {what}"));
                run_planned(&choices, &job, &plan, &what);
            }
        }
    }
}

/// An update of a master of `shape`, encoded as `case` says.
fn update<B: Fenced>(
    choices: &mut Choices<'_, B>,
    case: &Case,
    shape: Shape,
    half_states: [bool; 2],
    half_grad: bool,
) -> UpdateJob<B> {
    let len = shape.elements();
    let master = choices.floats(len, false);
    let source_rounding = choices.rounding();
    let known = |input: TensorInput<B>| TensorInput::Known(input.slot().clone());
    let specs = case.specs();
    let targets = specs.iter();
    let targets = targets.map(|spec| Target::new(*spec, choices.bytes(spec.bytes(shape))));
    let targets = targets.collect();
    let stochastic = case.kernels().iter().all(is_stochastic) && choices.coin();
    let key = StochasticKey {
        seed: choices.word(),
        stream: choices.word(),
        first: choices.pick(&[0, 7]),
    };
    let encode = EncodeJob {
        shape,
        kernels: case.kernels(),
        source: Source::F32(master.clone()),
        source_rounding,
        tensor: tensor(choices, case, shape).map(|input| input.map(known)),
        targets,
        stochastic: stochastic.then_some(key),
    };
    let grad = match half_grad {
        true => Source::Bf16(choices.halves(len, false)),
        false => Source::F32(choices.floats(len, false)),
    };
    let amax = amax(choices, shape);
    let rule = choices.pick(&Rule::ALL);
    UpdateJob {
        rule,
        master: Source::F32(master).into(),
        states: states(choices, rule, len, half_states),
        random: None,
        grad,
        group: choices.below(2),
        source_rounding,
        amax: choices.pick(&[None, Some(amax)]),
        encode: Some(Box::new(encode)),
    }
}
