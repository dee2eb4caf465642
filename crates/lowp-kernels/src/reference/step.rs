//! What the optimizer's step calculates: updates, sums and the scalars of a step.

use half::bf16;

use crate::power::power;
use crate::scalars::canonical;
use crate::{GradContribution, GroupScalars, Rule, StepCounts, StepRecord, StepScalars};

/// One element of an update: the master and the states of `rule` after the step (docs/numerics.md 12). States that the rule does not have
/// come back as they are. `g` is the gradient times the factor of `grad_scale` ([`Rule::grad_factor`]).
pub fn update(rule: Rule, values: [f32; 3], g: f32, s: &GroupScalars) -> [f32; 3] {
    match rule {
        Rule::AdamW | Rule::AdamL2 => adam(rule == Rule::AdamL2, values, g, s),
        Rule::Lion => lion(values, g, s),
        Rule::Sgd | Rule::SgdMomentum | Rule::SgdNesterov => sgd(rule, values, g, s),
        // The momentum is that of a pass before.
        Rule::Muon | Rule::Moonlight => sgd(Rule::Sgd, values, g, s),
    }
}

/// AdamW and Adam with L2: `exp_avg`, `exp_avg_sq`.
fn adam(l2: bool, [p, m, v]: [f32; 3], g: f32, s: &GroupScalars) -> [f32; 3] {
    let g = if l2 { s.weight_decay.mul_add(p, g) } else { g };
    let m = s.beta1.mul_add(m, (1.0 - s.beta1) * g);
    let v = s.beta2.mul_add(v, ((1.0 - s.beta2) * g) * g);
    let (mh, vh) = (m / s.correction1, v / s.correction2);
    let u = mh / (vh.sqrt() + s.eps);
    let u = if l2 { u } else { s.weight_decay.mul_add(p, u) };
    [(-s.lr).mul_add(u, p), m, v]
}

/// Lion: `exp_avg`.
fn lion([p, m, none]: [f32; 3], g: f32, s: &GroupScalars) -> [f32; 3] {
    let u = s.beta1.mul_add(m, (1.0 - s.beta1) * g);
    let u = if u > 0.0 {
        1.0
    } else if u < 0.0 {
        -1.0
    } else {
        u
    };
    let m = s.beta2.mul_add(m, (1.0 - s.beta2) * g);
    let u = s.weight_decay.mul_add(p, u);
    [(-s.lr).mul_add(u, p), m, none]
}

/// Stochastic gradient descent: `momentum_buffer`, or nothing.
fn sgd(rule: Rule, [p, m, none]: [f32; 3], g: f32, s: &GroupScalars) -> [f32; 3] {
    let g = s.weight_decay.mul_add(p, g);
    let summed = s.beta1.mul_add(m, g);
    let (u, m) = match rule {
        Rule::SgdMomentum => (summed, summed),
        Rule::SgdNesterov => (s.beta1.mul_add(summed, g), summed),
        _ => (g, m),
    };
    [(-s.lr).mul_add(u, p), m, none]
}

/// The sum of squares of `values` in binary64, and how many are not finite, in the order that every
/// backend keeps ([`crate::SumSquaresJob`]).
pub fn sum_of_squares(values: &[f32]) -> (f64, u64) {
    let squares = values.iter().map(|&x| f64::from(x) * f64::from(x));
    let mut sums: Vec<f64> = squares.collect();
    while sums.len() > 1 {
        sums = sums.chunks(4096).map(run_sum).collect();
    }
    let non_finite = values.iter().filter(|x| !x.is_finite()).count();
    (sums.first().copied().unwrap_or(0.0), non_finite as u64)
}

/// Value `i` is added to sum `i % 256`; then the upper half of the sums is added to the lower half
/// until one is left.
fn run_sum(values: &[f64]) -> f64 {
    let mut sums = [0f64; 256];
    for (i, &x) in values.iter().enumerate() {
        sums[i % 256] += x;
    }
    for half in [128, 64, 32, 16, 8, 4, 2, 1] {
        for i in 0..half {
            sums[i] += sums[i + half];
        }
    }
    sums[0]
}

/// One element of a sum into binary32 ([`crate::SumJob`]).
pub fn sum_f32(into: f32, from: f32) -> f32 {
    into + from
}

/// One element of a sum of parts in their order ([`crate::SumPartsJob`]).
pub fn sum_parts(parts: impl IntoIterator<Item = f32>) -> f32 {
    parts.into_iter().reduce(sum_f32).unwrap_or(0.0)
}

/// One element of a sum into bfloat16 ([`crate::SumJob`]).
pub fn sum_bf16(into: bf16, from: f32) -> bf16 {
    bf16::from_f32(into.to_f32() + from)
}

/// One element of a momentum ([`crate::MomentumJob`], docs/numerics.md 22.1): the momentum, and what is orthogonalised of it.
pub fn momentum(m: f32, g: f32, mu: f32) -> (f32, bf16) {
    let m = mu.mul_add(m, g);
    (m, bf16::from_f32(mu.mul_add(m, g)))
}

/// The factor of a matrix whose squares have this sum ([`crate::NormalizeJob`], docs/numerics.md 22.3).
pub fn inverse_norm(sum: f64) -> f32 {
    let norm = sum.sqrt();
    // A NaN stays one.
    let least = match norm < LEAST_NORM {
        true => LEAST_NORM,
        false => norm,
    };
    (1.0 / least) as f32
}

/// What matrices of a smaller norm are divided by.
const LEAST_NORM: f64 = 1e-7;

/// What a step makes of the gradients of all ranks.
#[derive(Clone, Debug)]
pub struct StepOutput {
    /// The scalars of the step.
    pub scalars: StepScalars,
    /// The counts after it.
    pub counts: StepCounts,
    /// What the host reads of it.
    pub report: StepRecord,
}

/// A step's scalars, counts and report ([`crate::StepScalarsJob`], docs/numerics.md 12.8). `parts` are whole replicas of `shards` ranks, among them `replica`.
pub fn step_scalars(
    parts: &[GradContribution],
    shards: usize,
    replica: usize,
    options: &StepScalars,
    counts: StepCounts,
) -> StepOutput {
    let squares = |replica: usize| {
        let mut sum = parts[replica * shards].sum_squares;
        for shard in 1..shards {
            sum += parts[replica * shards + shard].sum_squares;
        }
        sum
    };
    let mut report = StepRecord::default();
    for (rank, part) in parts.iter().enumerate() {
        report.non_finite = report.non_finite.wrapping_add(part.non_finite);
        if part.consensus != parts[0].consensus && report.consensus.is_none() {
            report.consensus = Some(rank);
        }
        let first = rank - rank % shards;
        if part.within != parts[first].within && report.within.is_none() {
            report.within = Some(rank);
        }
    }
    for other in 1..parts.len() / shards {
        let differs = squares(other).to_bits() != squares(0).to_bits();
        if differs && report.non_finite == 0 && report.replicas.is_none() {
            report.replicas = Some(other);
        }
    }
    let norm = squares(replica).sqrt() * f64::from(options.grad_scale.abs());
    report.norm = if norm.is_nan() { f64::NAN } else { norm };
    let factor = f64::from(options.max_norm) / (norm + 1e-6);
    report.clip = if factor < 1.0 { factor as f32 } else { 1.0 };
    let clipped = norm * f64::from(report.clip);
    let defects = [
        report.non_finite != 0,
        !options.grad_scale.is_finite(),
        clipped.is_nan() || clipped > f64::from(f32::MAX),
        report.consensus.is_some(),
        report.replicas.is_some(),
        report.within.is_some(),
    ];
    let good = !defects.contains(&true);
    report.applied = good && !options.skip;
    let step = counts.applied.wrapping_add(1);
    let mut after = counts;
    match (options.skip, good) {
        (true, _) => {}
        (false, true) => after.applied = step,
        (false, false) => after.skipped = counts.skipped.wrapping_add(1),
    }
    report.steps = after.applied;
    report.skipped = after.skipped;
    let mut scalars = options.clone();
    scalars.grad_scale = canonical(options.grad_scale * report.clip);
    scalars.skip = !report.applied;
    for group in &mut scalars.groups {
        let correction = |beta: f32| match group.bias_correction {
            true => canonical((1.0 - power(beta.into(), step)) as f32),
            false => 1.0,
        };
        [group.correction1, group.correction2] = [group.beta1, group.beta2].map(correction);
    }
    StepOutput {
        scalars,
        counts: after,
        report,
    }
}
