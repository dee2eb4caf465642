//! The law of the optimizer: whatever recipes, shapes, dtypes and groups are mixed, and however
//! rows are cut, a step is the naive rule on the full tensors followed by a full quantize, and scales
//! follow from the amaxes of the full tensors.

use std::fmt;

use lowp_comm::run_ranks;
use lowp_format::{
    Extent, KernelKey, Orientation, Phase, Recipe, ScaleRule, Shape, SourceRounding, history,
    tensor_scale,
};
use lowp_kernels::Cpu;
use lowp_optim::{
    FloatDtype, Group, MasterDtype, OptimError, StateDtype, StateDtypes, StepOptions, StepReport,
};
use lowp_tests::golden::first_difference;
use lowp_tests::model::{Case, Rank, is_delayed, kernels, recipe_variants, tensor_slots};
use lowp_tests::naive::{Factors, Naive};
use lowp_tests::values::Family;
use lowp_tests::world::{Bytes, TIMEOUT, orientation};
use proptest::collection::vec;
use proptest::prelude::*;

/// One entry of a scale book, kept by the test.
struct Entry {
    case: usize,
    scale: f32,
    column: Vec<f32>,
}

/// The amax of the values that are quantized: NaN ignored, taken over the full tensor.
fn amax(case: &Case, master: &[f32]) -> f32 {
    let round = |x: f32| match case.recipe.source_rounding() {
        SourceRounding::F32 => x,
        SourceRounding::ViaBf16 => half::bf16::from_f32(x).to_f32(),
    };
    master.iter().fold(0.0, |a: f32, &x| a.max(round(x).abs()))
}

/// The ingredients of the orientation whose scales depend on an amax of the tensor: one of the two, or both.
fn tensor_key(case: &Case) -> Option<KernelKey> {
    let of_tensor = |key: &KernelKey| matches!(key.scale.outer(), Some((Extent::Tensor, _)));
    kernels(&case.recipe).into_iter().find(of_tensor)
}

impl Entry {
    fn new(index: usize, case: &Case) -> Option<Self> {
        let column = match tensor_key(case)?.scale {
            ScaleRule::Delayed { window, .. } => vec![0.0; window],
            _ => Vec::new(),
        };
        let (case, scale) = (index, 1.0);
        Some(Self {
            case,
            scale,
            column,
        })
    }

    fn observe(&mut self, case: &Case, master: &[f32]) {
        let KernelKey { element, scale, .. } = tensor_key(case).expect("an amax of the tensor");
        let amax = amax(case, master);
        self.scale = match scale {
            ScaleRule::Delayed {
                algorithm, margin, ..
            } => {
                self.column[0] = self.column[0].max(amax);
                let column = &mut self.column;
                history(column, self.scale, Some(amax), element, algorithm, margin)
            }
            ScaleRule::Current { pow2, epsilon, .. } => tensor_scale(amax, element, pow2, epsilon),
            _ => amax,
        };
    }
}

/// What one rank has after calibration and after each step.
struct Seen {
    report: Option<StepReport>,
    scales: Vec<f32>,
    histories: Vec<Vec<f32>>,
    /// Own rows, per parameter: master, first and second moment.
    rows: Vec<Vec<Vec<f32>>>,
    gathered: Vec<[Bytes; 2]>,
}

#[derive(Clone)]
struct Plan {
    cases: Vec<Case>,
    groups: Vec<Group>,
    world: usize,
    /// Per step: options and full gradients.
    steps: Vec<(StepOptions, Vec<Vec<f32>>)>,
    reshard: bool,
}

/// Without the gradients, which a failing test would print by the thousand.
impl fmt::Debug for Plan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let steps: Vec<StepOptions> = self.steps.iter().map(|step| step.0).collect();
        f.debug_struct("Plan")
            .field("cases", &self.cases)
            .field("groups", &self.groups)
            .field("world", &self.world)
            .field("steps", &steps)
            .field("reshard", &self.reshard)
            .finish()
    }
}

impl Plan {
    fn run(&self) -> Vec<Vec<Seen>> {
        let ranks = run_ranks(
            &Cpu,
            self.world,
            TIMEOUT,
            |_, comm| -> Result<_, OptimError> {
                let mut rank = Rank::new(&self.cases, &self.groups, &comm, &comm)?;
                let mut seen = vec![self.look(&rank, None)?];
                for (options, grads) in &self.steps {
                    let report = rank.step(grads, options)?;
                    seen.push(self.look(&rank, Some(report))?);
                }
                Ok(seen)
            },
        );
        ranks.unwrap_or_else(|e| panic!("{e}"))
    }

    fn look(&self, rank: &Rank, report: Option<StepReport>) -> Result<Seen, OptimError> {
        let scales = rank.optimizer.scales().scales()?;
        let mut rows = Vec::new();
        for &id in &rank.ids {
            let states = rank.optimizer.states(id)?;
            rows.push([vec![rank.optimizer.master(id)?], states].concat());
        }
        let mut histories = Vec::new();
        for slot in tensor_slots(rank.optimizer.scales())? {
            histories.push(rank.optimizer.scales().history(slot)?.unwrap_or_default());
        }
        Ok(Seen {
            report,
            histories,
            scales,
            rows,
            gathered: rank.gather(self.reshard)?,
        })
    }

    fn check(&self) {
        let ranks = self.run();
        let mut entries: Vec<Entry> = (0..)
            .zip(&self.cases)
            .filter_map(|(index, case)| Entry::new(index, case))
            .collect();
        let mut naive: Vec<Naive> = self
            .cases
            .iter()
            .map(|case| {
                let rule = self.groups[case.group].rule;
                Naive::new(rule, case.values.clone(), case.state)
            })
            .collect();
        // The first cast follows the values in every recipe.
        for entry in &mut entries {
            entry.observe(&self.cases[entry.case], &naive[entry.case].master);
        }
        let used: Vec<f32> = entries.iter().map(|e| e.scale).collect();
        self.compare(0, &ranks, &naive, &entries, &used);
        for (number, (options, grads)) in (1u64..).zip(&self.steps) {
            let factors = self.factors(options, grads, &ranks[0][number as usize]);
            for ((case, naive), grad) in self.cases.iter().zip(&mut naive).zip(grads) {
                let group = &self.groups[case.group];
                naive.step(&case.stored(grad), group, number, factors);
            }
            // Delayed scales encode before they learn of the new values.
            let before: Vec<f32> = entries.iter().map(|e| e.scale).collect();
            for entry in &mut entries {
                entry.observe(&self.cases[entry.case], &naive[entry.case].master);
            }
            self.compare(number as usize, &ranks, &naive, &entries, &before);
        }
    }

    /// Checks the report of a step against the full gradients; what the update multiplied by.
    fn factors(&self, options: &StepOptions, grads: &[Vec<f32>], seen: &Seen) -> Factors {
        let report = seen.report.expect("a step");
        let stored = self.cases.iter().zip(grads);
        let squares: f64 = stored
            .flat_map(|(case, grad)| case.stored(grad))
            .map(|g| f64::from(g) * f64::from(g))
            .sum();
        let norm = squares.sqrt() * f64::from(options.grad_scale);
        let close = |a: f64, b: f64, tolerance: f64| (a - b).abs() <= tolerance * b.abs();
        assert!(report.applied && report.grad.non_finite == 0);
        assert!(
            close(report.grad.norm, norm, 1e-12),
            "{} {norm}",
            report.grad.norm
        );
        let clip = options.max_norm.map_or(1.0, |max| {
            (f64::from(max) / (report.grad.norm + 1e-6)).min(1.0) as f32
        });
        assert_eq!(report.clip, clip);
        Factors {
            grad_scale: options.grad_scale * clip,
            lr_factor: options.lr_factor,
        }
    }

    fn compare(
        &self,
        step: usize,
        ranks: &[Vec<Seen>],
        naive: &[Naive],
        entries: &[Entry],
        delayed: &[f32],
    ) {
        for (rank, seen) in ranks.iter().map(|seen| &seen[step]).enumerate() {
            let scales: Vec<f32> = entries.iter().map(|e| e.scale).collect();
            assert_eq!(
                seen.scales, scales,
                "step {step}: scales of rank {rank} in {self:?}"
            );
            for (entry, found) in entries.iter().zip(&seen.histories) {
                assert_eq!(found, &entry.column, "step {step}: history of rank {rank}");
            }
            assert_eq!(seen.report, ranks[0][step].report);
        }
        for (index, (case, naive)) in self.cases.iter().zip(naive).enumerate() {
            let what = |part: &str| format!("step {step}: {part} of param {index}, {case:?}");
            let parts = [&naive.master].into_iter().chain(&naive.states);
            assert!(
                ranks
                    .iter()
                    .all(|seen| seen[step].rows[index].len() == 1 + naive.states.len())
            );
            for (part, expected) in parts.enumerate() {
                let rows = ranks.iter().flat_map(|seen| &seen[step].rows[index][part]);
                let found: Vec<f32> = rows.copied().collect();
                assert_eq!(
                    first_difference(&found, expected),
                    None,
                    "{}",
                    what(["master", "the first state", "the second state"][part])
                );
            }
            let is_delayed = is_delayed(&case.recipe);
            let entry = entries.iter().position(|e| e.case == index);
            let scale = entry.filter(|_| is_delayed).map(|e| delayed[e]);
            for phase in Phase::ALL {
                let o: Orientation = orientation(phase);
                let expected = case.cast(&naive.master, scale, o);
                for seen in ranks {
                    let found = &seen[step].gathered[index][phase as usize];
                    assert!(found == &expected, "{}", what(phase.name()));
                }
            }
        }
    }
}

fn shapes() -> impl Strategy<Value = Shape> {
    let rows = prop_oneof![Just(0usize), Just(1), Just(17), Just(33), 2usize..70];
    (rows, 1usize..4).prop_map(|(rows, tiles)| Shape::new(rows, 32 * tiles))
}

fn dtypes() -> impl Strategy<Value = FloatDtype> {
    prop_oneof![Just(FloatDtype::F32), Just(FloatDtype::Bf16)]
}

/// Every dtype of states.
const STATES: [StateDtypes; 3] = [
    states(StateDtype::F32, StateDtype::F32),
    states(StateDtype::Bf16, StateDtype::F32),
    states(StateDtype::Bf16, StateDtype::Bf16),
];

const fn states(exp_avg: StateDtype, exp_avg_sq: StateDtype) -> StateDtypes {
    StateDtypes {
        master: MasterDtype::F32,
        exp_avg,
        exp_avg_sq,
        momentum_buffer: exp_avg_sq,
    }
}

fn groups() -> impl Strategy<Value = Group> {
    let betas = (0.0f32..0.99, 0.5f32..0.999);
    let decay = prop_oneof![Just(0.0f32), 0.0f32..0.5];
    let rule = proptest::sample::select(&Naive::RULES[..]);
    (
        0.0f32..0.1,
        betas,
        1e-9f32..1e-4,
        decay,
        rule,
        any::<bool>(),
    )
        .prop_map(
            |(lr, betas, eps, weight_decay, rule, bias_correction)| Group {
                lr,
                betas,
                eps,
                weight_decay,
                rule,
                bias_correction,
            },
        )
}

fn case() -> impl Strategy<Value = Case> {
    let recipes = recipe_variants();
    let families = [
        Family::Normal,
        Family::Outliers,
        Family::Wide,
        Family::Zeros,
    ];
    let recipe = (0..recipes.len()).prop_map(move |i| recipes[i]);
    let family = (0..families.len()).prop_map(move |i| families[i]);
    (
        recipe,
        shapes(),
        0usize..3,
        dtypes(),
        proptest::sample::select(&STATES[..]),
        family,
        any::<u64>(),
    )
        .prop_map(|(recipe, shape, group, grad, state, family, seed)| Case {
            recipe,
            shape,
            group,
            grad,
            state,
            values: family.values(seed, shape.elements()),
        })
}

fn options() -> impl Strategy<Value = StepOptions> {
    let max_norm = prop_oneof![Just(None), (0.1f32..10.0).prop_map(Some)];
    let scale = prop_oneof![Just(1.0f32), 0.01f32..2.0];
    (0.0f32..1.0, scale, max_norm).prop_map(|(lr_factor, grad_scale, max_norm)| StepOptions {
        lr_factor,
        grad_scale,
        max_norm,
        ..StepOptions::default()
    })
}

fn plan() -> impl Strategy<Value = Plan> {
    let fixed = (
        vec(case(), 1..8),
        vec(groups(), 3),
        1usize..6,
        any::<bool>(),
    );
    let steps = vec((options(), any::<u64>()), 1..4);
    (fixed, steps).prop_map(|((cases, groups, world, reshard), steps)| {
        let grads = |seed: u64| {
            let family = [Family::Normal, Family::Outliers, Family::Zeros][(seed % 3) as usize];
            let grad = |(index, case): (u64, &Case)| {
                family.values(seed.wrapping_add(index), case.shape.elements())
            };
            (0u64..).zip(&cases).map(grad).collect::<Vec<_>>()
        };
        let steps = steps
            .into_iter()
            .map(|(options, seed)| (options, grads(seed)))
            .collect();
        Plan {
            cases,
            groups,
            world,
            steps,
            reshard,
        }
    })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 96, ..ProptestConfig::default() })]

    #[test]
    fn a_step_is_the_naive_rule_then_a_full_quantize(plan in plan()) {
        plan.check();
    }
}

/// Every variant of every recipe in one optimizer, more ranks than most have blocks.
#[test]
fn every_variant_in_one_optimizer() {
    let dtypes = [FloatDtype::F32, FloatDtype::Bf16];
    let cases: Vec<Case> = recipe_variants()
        .into_iter()
        .enumerate()
        .map(|(i, recipe)| {
            let shape = Shape::new([17, 1, 48, 33][i % 4], 64);
            Case {
                group: i % Naive::RULES.len(),
                grad: dtypes[i / 2 % 2],
                state: STATES[i / 4 % 3],
                ..Case::new(
                    recipe,
                    shape,
                    Family::Normal.values(i as u64, shape.elements()),
                )
            }
        })
        .collect();
    assert!(cases.len() > 15, "only {} variants", cases.len());
    let grads = |seed: u64| {
        let grad = |case: &Case| Family::Normal.values(seed, case.shape.elements());
        cases.iter().map(grad).collect::<Vec<_>>()
    };
    let options = StepOptions {
        max_norm: Some(1.0),
        ..StepOptions::default()
    };
    let groups = Naive::RULES.map(|rule| Group {
        lr: 0.02,
        ..Group::of(rule)
    });
    Plan {
        groups: groups.to_vec(),
        world: 5,
        steps: (100..104).map(|seed| (options, grads(seed))).collect(),
        reshard: true,
        cases: cases.clone(),
    }
    .check();
}
