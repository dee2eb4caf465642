//! Steps of the optimizer over shards: clipping, skipped steps, gradient accumulation, and what a
//! step sends.

use std::sync::Arc;

use lowp_comm::{Communicator, GradWire, ReduceItem, run_ranks};
use lowp_format::{AnyRecipe, Extent, Orientation, Recipe, Role, Shape, Usage};
use lowp_kernels::{Backend, Cpu, Source};
use lowp_optim::{Group, OptimError, StepOptions, StepReport};
use lowp_tests::model::{Case, Rank, State};
use lowp_tests::spy::{Call, Spy};
use lowp_tests::values::Family;
use lowp_tests::world::TIMEOUT;
use proptest::prelude::*;

/// One matrix of every recipe; most have fewer blocks of rows than ranks.
fn cases(seed: u64) -> Vec<Case> {
    (seed..)
        .zip(AnyRecipe::all())
        .map(|(seed, recipe)| {
            let shape = Shape::new([17, 1, 40, 33][(seed % 4) as usize], 32);
            Case::new(recipe, shape, Family::Normal.values(seed, shape.elements()))
        })
        .collect()
}

/// One full gradient per case.
type Grads = Vec<Vec<f32>>;

fn grads(cases: &[Case], seed: u64, family: Family) -> Vec<Vec<f32>> {
    let grad = |case: &Case| family.values(seed, case.shape.elements());
    cases.iter().map(grad).collect()
}

/// Runs every rank of a model of `cases`.
fn ranks<T: Send>(
    cases: &[Case],
    world: usize,
    f: impl Fn(&mut Rank) -> Result<T, OptimError> + Sync,
) -> Vec<T> {
    let run = run_ranks(&Cpu, world, TIMEOUT, |_, comm| {
        f(&mut Rank::new(cases, &[Group::default()], &comm, &comm)?)
    });
    run.unwrap_or_else(|e| panic!("{e}"))
}

/// The masters of all ranks, put together.
fn masters(states: &[State], param: usize) -> Vec<u32> {
    let rows = states.iter().flat_map(|s| &s.params[param].master);
    rows.copied().collect()
}

/// Squares of multiples of 1/8 up to 4 add up without rounding in any order.
fn exact_grads(cases: &[Case], seed: u64) -> Vec<Vec<f32>> {
    let snap = |x: f32| (x.clamp(-4.0, 4.0) * 8.0).round() / 8.0;
    let mut grads = grads(cases, seed, Family::Normal);
    grads.iter_mut().flatten().for_each(|x| *x = snap(*x));
    grads
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 12, ..ProptestConfig::default() })]

    #[test]
    fn clipping_over_shards_is_clipping_of_the_whole(
        seed in 0u64..1 << 32, world in 2usize..7, max_norm in 0.01f32..50.0, grad_scale in 0.1f32..4.0,
    ) {
        let cases = cases(seed);
        let grads = exact_grads(&cases, seed);
        let options = StepOptions { max_norm: Some(max_norm), grad_scale, lr_factor: 1.0, ..StepOptions::default() };
        let run = |world| -> (Vec<StepReport>, Vec<State>) {
            let run = |rank: &mut Rank| Ok((rank.step(&grads, &options)?, rank.state()?));
            ranks(&cases, world, run).into_iter().unzip()
        };
        let ((one, whole), (many, parts)) = (run(1), run(world));
        let squares: f64 = grads.iter().flatten().map(|&g| f64::from(g).powi(2)).sum();
        prop_assert_eq!(one[0].grad.norm, squares.sqrt() * f64::from(grad_scale));
        for report in many {
            prop_assert_eq!(report, one[0]);
        }
        for param in 0..cases.len() {
            prop_assert_eq!(masters(&parts, param), masters(&whole, param));
        }
    }

    /// Any number of micro-batches gives the step of their sum; for the mean `grad_scale` divides.
    #[test]
    fn accumulated_micro_batches_are_their_sum(
        seed in 0u64..1 << 32, world in 1usize..6, count in 1u64..5, bf16_wire: bool,
    ) {
        let cases = cases(seed);
        // Small integers: exact in bf16, as are the sums of at most 4 x 5 of them.
        let integers = |seed| {
            let mut grads = grads(&cases, seed, Family::Normal);
            grads.iter_mut().flatten().for_each(|x| *x = x.clamp(-6.0, 6.0).round());
            grads
        };
        // Rank r of the world computed micro(r, m) for micro-batch m.
        let micro = |rank: usize, m: u64| integers(seed + 100 * m + rank as u64);
        let total = |m: u64| {
            let mut sum = integers(seed + 100 * m);
            for rank in 1..world {
                for (sum, grad) in sum.iter_mut().zip(micro(rank, m)) {
                    sum.iter_mut().zip(grad).for_each(|(s, g)| *s += g);
                }
            }
            sum
        };
        let mut whole = total(0);
        for m in 1..count {
            for (sum, grad) in whole.iter_mut().zip(total(m)) {
                sum.iter_mut().zip(grad).for_each(|(s, g)| *s += g);
            }
        }
        let options = StepOptions { grad_scale: 1.0 / count as f32, ..StepOptions::default() };
        let wire = if bf16_wire { GradWire::Bf16 } else { GradWire::F32 };
        // The first step leaves gradients behind, which the second must not add to.
        let expected = ranks(&cases, world, |rank| {
            rank.step(&grads(&cases, seed, Family::Outliers), &options)?;
            Ok((rank.step(&whole, &options)?, rank.state()?))
        });
        let reduced = ranks(&cases, world, |rank| {
            rank.step(&grads(&cases, seed, Family::Outliers), &options)?;
            for m in 0..count {
                reduce(rank, &micro(rank.world.rank(), m), wire, m > 0)?;
            }
            Ok((rank.finish(&options)?, rank.state()?))
        });
        prop_assert_eq!(&reduced, &expected);
    }
}

/// One micro-batch: this rank's full gradients, reduce-scattered into the optimizer.
fn reduce(
    rank: &mut Rank,
    grads: &[Vec<f32>],
    wire: GradWire,
    accumulate: bool,
) -> Result<(), OptimError> {
    let mut parts = Vec::new();
    for (index, grad) in grads.iter().enumerate() {
        let ranges = rank.tensors[index].spec().all_elements();
        parts.push((rank.ids[index], Source::F32(Cpu.upload(grad)?), ranges));
    }
    let mut items = Vec::new();
    for (id, grad, ranges) in &parts {
        let Source::F32(out) = rank.optimizer.grad(*id) else {
            panic!("an f32 gradient");
        };
        items.push(ReduceItem {
            grad,
            memory: items.len(),
            ranges,
            out,
            accumulate,
        });
    }
    rank.shards.reduce_scatter(&items, wire)?;
    for &id in &rank.ids {
        rank.optimizer.mark_ready(id);
    }
    Ok(())
}

#[test]
fn a_gradient_replaces_the_one_before() {
    let cases = cases(2);
    let run = |f: fn(&mut Rank, &[Grads; 3]) -> Result<(), OptimError>| {
        let three = [7, 8, 9].map(|seed| exact_grads(&cases, seed));
        ranks(&cases, 1, |rank| {
            f(rank, &three)?;
            rank.finish(&StepOptions::default())?;
            rank.state()
        })
    };
    let last = run(|rank, [_, _, c]| rank.set_grads(c));
    let replaced = run(|rank, [a, b, c]| {
        rank.set_grads(a)?;
        rank.set_grads(b)?;
        rank.set_grads(c)
    });
    assert!(replaced == last, "set_grad added");
}

/// A gradient that is not finite on one rank leaves every rank where it was.
#[test]
fn one_bad_value_skips_the_step_everywhere() {
    for (bad, world) in [(f32::NAN, 4), (f32::INFINITY, 3), (f32::NEG_INFINITY, 1)] {
        let cases = cases(3);
        let good: Vec<_> = (0..3).map(|s| grads(&cases, s, Family::Normal)).collect();
        let mut poisoned = good[1].clone();
        // The last element of the last matrix: one rank holds it.
        *poisoned
            .last_mut()
            .expect("a matrix")
            .last_mut()
            .expect("an element") = bad;
        let options = StepOptions {
            max_norm: Some(1.0),
            ..StepOptions::default()
        };
        let skipping = ranks(&cases, world, |rank| {
            rank.step(&good[0], &options)?;
            let before = rank.state()?;
            let report = rank.step(&poisoned, &options)?;
            assert!(!report.applied && report.grad.non_finite == 1, "{report:?}");
            assert_eq!((report.steps, report.skipped), (1, 1));
            assert!(rank.state()? == before, "a skipped step changed something");
            let report = rank.step(&good[2], &options)?;
            assert!(report.applied);
            assert_eq!((report.steps, report.skipped), (2, 1));
            rank.state()
        });
        // Bias corrections count applied steps only, so the skipped step leaves no trace.
        let plain = ranks(&cases, world, |rank| {
            rank.step(&good[0], &options)?;
            rank.step(&good[2], &options)?;
            rank.state()
        });
        assert!(skipping == plain, "a skipped step left a trace");
    }
}

#[test]
fn scaled_gradients_out_of_range_skip_the_step() {
    let cases = cases(5);
    let large: Vec<Vec<f32>> = cases
        .iter()
        .map(|case| vec![1e30; case.shape.elements()])
        .collect();
    for (grad_scale, max_norm, applied) in [
        (1e-30, None, true),
        (f32::INFINITY, None, false),
        (f32::NAN, Some(1.0), false),
        (1e10, None, false),
        (1e10, Some(1.0), true),
    ] {
        let options = StepOptions {
            grad_scale,
            max_norm,
            ..StepOptions::default()
        };
        let finite = |rank: &mut Rank| {
            let before = rank.state()?;
            let report = rank.step(&large, &options)?;
            assert_eq!(report.applied, applied, "{options:?} {report:?}");
            assert_eq!(rank.state()? == before, !applied);
            for &id in &rank.ids {
                assert!(rank.optimizer.master(id)?.iter().all(|x| x.is_finite()));
            }
            Ok(())
        };
        ranks(&cases, 2, finite);
    }
}

/// Amaxes that ranks agree on: of the tensor, or of its columns; those of rows are a rank's own.
fn agreed_amaxes(case: &Case) -> usize {
    let quantizers = case.recipe.quantizers(Role::Weight);
    let entries = |usage: Usage| {
        let orientation = usage.orientations().next()?;
        let (extent, _) = quantizers.of(orientation).kernel.scale.outer()?;
        let own = extent == Extent::Line && orientation == Orientation::Rowwise;
        (!own).then(|| extent.entries(orientation, case.shape))
    };
    quantizers
        .outer_usages(Usage::BOTH)
        .filter_map(entries)
        .sum()
}

/// Whatever the number of parameters: one gather for the norm and one maximum over one vector, on
/// ranks without rows too.
#[test]
fn a_step_is_two_collectives() {
    let many: Vec<Case> = (0..5).flat_map(cases).collect();
    let observed = |cases: &[Case]| cases.iter().map(agreed_amaxes).sum::<usize>();
    assert!(many.iter().filter(|case| agreed_amaxes(case) > 0).count() > 10);
    let run = run_ranks(&Cpu, 50, TIMEOUT, |_, comm| -> Result<bool, OptimError> {
        let spy = Spy::new(comm.clone());
        let world: Arc<dyn Communicator<Cpu>> = spy.clone();
        let mut rank = Rank::new(&many, &[Group::default()], &world, &world)?;
        spy.take();
        for step in 0..3 {
            let report = rank.step(&grads(&many, step, Family::Normal), &StepOptions::default())?;
            assert!(report.applied);
            match &spy.take()[..] {
                [Call::AllGather(parts), Call::AllReduceMax(amaxes)] => {
                    assert_eq!(parts.iter().map(Vec::len).collect::<Vec<_>>(), [32]);
                    assert_eq!(*amaxes, observed(&many));
                }
                calls => panic!("{calls:?}"),
            }
        }
        Ok(rank.tensors.iter().all(|t| t.spec().rows().is_empty()))
    });
    let without_rows = run.unwrap_or_else(|e| panic!("{e}"));
    assert!(without_rows[49] && !without_rows[0]);
}
