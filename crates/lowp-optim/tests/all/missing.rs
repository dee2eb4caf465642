//! Steps in which parameters have no gradient: each parameter is what an optimizer of its own makes of it, which steps where there is a
//! gradient.

use std::time::Duration;

use lowp_comm::{LocalComm, run_ranks};
use lowp_format::{AnyRecipe, QuantizedTensor, Recipe, RecipeOptions, Shape, Usage};
use lowp_kernels::{Backend, Cpu, StepCounts};
use lowp_optim::{
    Group, OptimError, Optimizer, OptimizerBuilder, ParamId, ParamSpec, ParamState, StepOptions,
};
use lowp_shard::{DelayedState, ShardSpec, ShardedTensor};
use proptest::prelude::*;

const SHAPE: Shape = Shape::new(32, 64);

type Tensor<B> = QuantizedTensor<<B as Backend>::Buffer<u8>>;

/// Parameters of one optimizer, with numbers that their values follow from.
struct Model<B: Backend> {
    backend: B,
    optimizer: Optimizer<B>,
    params: Vec<(usize, ParamId, Tensor<B>)>,
}

/// All that a parameter is.
type Everything = (ParamState, u64, Vec<Vec<u8>>, Vec<Option<DelayedState>>);

impl Model<Cpu> {
    fn new(recipes: &[AnyRecipe], numbers: &[usize]) -> Self {
        Self::on(&Cpu, recipes, numbers)
    }
}

impl<B: Backend> Model<B> {
    /// The recipe of parameter `n` is `recipes[n]`.
    fn on(backend: &B, recipes: &[AnyRecipe], numbers: &[usize]) -> Self {
        Self::of(backend, recipes, numbers, |number| values(number, 0, 1.0))
    }

    /// Parameter `n` begins with `master(n)`.
    fn of(
        backend: &B,
        recipes: &[AnyRecipe],
        numbers: &[usize],
        master: impl Fn(usize) -> Vec<f32>,
    ) -> Self {
        let mut builder = OptimizerBuilder::new(LocalComm::solo(backend));
        let groups = [0.1, 0.0].map(|weight_decay| {
            builder.group(Group {
                weight_decay,
                ..Group::default()
            })
        });
        let mut params = Vec::new();
        for &number in numbers {
            let alloc = |_: &_, bytes| backend.alloc::<u8>(bytes);
            let tensor = QuantizedTensor::new(recipes[number], SHAPE, Usage::BOTH, alloc).unwrap();
            let spec = ParamSpec::new(format!("p{number}"), groups[number % 2], master(number));
            params.push((number, builder.param(&tensor, spec).unwrap(), tensor));
        }
        let mut optimizer = builder.build().unwrap();
        optimizer.keep_sets(4);
        let backend = backend.clone();
        Self {
            backend,
            optimizer,
            params,
        }
    }

    /// A step with gradients for those that are `present`, by number.
    fn step(
        &mut self,
        step: usize,
        present: &[bool],
        bad: Option<usize>,
        options: &StepOptions,
    ) -> lowp_optim::StepReport {
        for (number, id, _) in &self.params {
            if present[*number] {
                let mut grad = values(*number, step, 0.1);
                if bad == Some(*number) {
                    grad[5] = f32::NAN;
                }
                self.optimizer.set_grad(*id, &grad).unwrap();
            } else {
                self.optimizer.leave_out(*id);
            }
        }
        self.optimizer.step(options).unwrap().wait().unwrap()
    }

    fn everything(&self, at: usize) -> Everything {
        let (_, id, tensor) = &self.params[at];
        let buffers = tensor.buffers().iter();
        let codes = buffers.map(|buffer| self.backend.download(&buffer.storage).unwrap());
        let book = self.optimizer.scales();
        let slots = self.optimizer.slots(*id).unwrap().into_iter().flatten();
        let delayed = slots.map(|slot| book.delayed_state(slot).unwrap());
        let steps = self.optimizer.steps().unwrap()[at];
        (
            self.optimizer.state(*id).unwrap(),
            steps,
            codes.collect(),
            delayed.collect(),
        )
    }
}

fn values(number: usize, step: usize, scale: f32) -> Vec<f32> {
    let value = |i: usize| ((i * 97 + number * 31 + step * 57) % 251) as f32 / 125.0 - 1.0;
    (0..SHAPE.elements()).map(|i| scale * value(i)).collect()
}

fn recipe(name: &str) -> AnyRecipe {
    AnyRecipe::from_name(name, &RecipeOptions::default()).unwrap()
}

/// Steps of three parameters, and of three optimizers of one each.
fn law(recipes: &[AnyRecipe; 3], steps: &[([bool; 3], Option<usize>)], max_norm: Option<f32>) {
    let mut whole = Model::new(recipes, &[0, 1, 2]);
    let mut alone: Vec<Model<Cpu>> = (0..3).map(|n| Model::new(recipes, &[n])).collect();
    for (step, (present, bad)) in steps.iter().enumerate() {
        let options = StepOptions {
            max_norm,
            ..StepOptions::default()
        };
        let report = whole.step(step, present, *bad, &options);
        let numbers: Vec<usize> = (0..3).filter(|n| present[*n]).collect();
        let bad = bad.filter(|bad| present[*bad]);
        assert_eq!(report.applied, bad.is_none());
        // The norm of those that are there, as an optimizer of them alone takes it.
        let of = Model::new(recipes, &numbers).step(step, present, bad, &options);
        assert_eq!(of.grad.norm.to_bits(), report.grad.norm.to_bits());
        assert_eq!(of.clip, report.clip);
        if report.applied {
            for n in numbers {
                let clipped = StepOptions {
                    grad_scale: report.clip,
                    ..StepOptions::default()
                };
                alone[n].step(step, present, None, &clipped);
            }
        }
        for (n, alone) in alone.iter().enumerate() {
            let name = recipes[n].name();
            assert_eq!(
                whole.everything(n),
                alone.everything(0),
                "{name} in step {step}"
            );
        }
    }
    let applied = steps
        .iter()
        .filter(|(present, bad)| bad.is_none_or(|bad| !present[bad]));
    assert_eq!(
        whole.optimizer.counts().unwrap().applied,
        applied.count() as u64
    );
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(12))]

    #[test]
    fn a_parameter_is_what_its_own_optimizer_makes_of_it(
        recipes in prop::array::uniform3(prop::sample::select(AnyRecipe::all().to_vec())),
        steps in prop::collection::vec((any::<[bool; 3]>(), prop::option::weighted(0.2, 0usize..3)), 1..8),
        max_norm in prop::option::of(0.01f32..10.0),
    ) {
        law(&recipes, &steps, max_norm);
    }
}

#[test]
fn every_recipe_stays_where_it_has_no_gradient() {
    let sets = [
        [true; 3],
        [true, false, true],
        [false; 3],
        [false, true, false],
        [true; 3],
    ];
    for recipe in AnyRecipe::all() {
        law(&[recipe; 3], &sets.map(|set| (set, None)), Some(0.5));
    }
}

/// Parameters of 700 different step counts, beside an optimizer of each.
fn many_step_counts<B: Backend>(backend: &B) {
    const PARAMS: usize = 700;
    let shape = Shape::new(1, 3);
    let counts = StepCounts {
        applied: PARAMS as u64,
        skipped: 0,
    };
    let plain = recipe("fp32");
    let none = || QuantizedTensor::new(plain, shape, Usage::BOTH, |_, n| backend.alloc::<u8>(n));
    let stepped = |numbers: &[usize]| {
        let mut builder = OptimizerBuilder::new(LocalComm::solo(backend));
        let group = builder.group(Group::default());
        let ids: Vec<ParamId> = numbers
            .iter()
            .map(|n| {
                let spec = ParamSpec::new(format!("p{n}"), group, vec![1.0; 3]);
                builder.param(&none().unwrap(), spec).unwrap()
            })
            .collect();
        let mut optimizer = builder.build().unwrap();
        let steps: Vec<u64> = numbers.iter().map(|&n| n as u64).collect();
        optimizer.set_steps(counts, &steps).unwrap();
        for (n, &id) in numbers.iter().zip(&ids) {
            if n % 3 == 0 {
                optimizer.leave_out(id);
            } else {
                optimizer.set_grad(id, &[0.5; 3]).unwrap();
            }
        }
        optimizer
            .step(&StepOptions::default())
            .unwrap()
            .wait()
            .unwrap();
        let masters: Vec<_> = ids
            .iter()
            .map(|&id| optimizer.master(id).unwrap())
            .collect();
        (masters, optimizer.steps().unwrap())
    };
    let all: Vec<usize> = (0..PARAMS).collect();
    let (masters, steps) = stepped(&all);
    for n in (0..PARAMS).step_by(23) {
        let (alone, own) = stepped(&[n]);
        assert_eq!((&masters[n], steps[n]), (&alone[0], own[0]));
        assert_eq!(own[0], n as u64 + u64::from(n % 3 != 0));
    }
}

#[test]
fn there_may_be_many_step_counts() {
    many_step_counts(&Cpu);
}

/// The same bits as on the CPU, and records beyond the groups that scalars of the host may have.
#[cfg(feature = "cuda")]
#[test]
fn cuda_leaves_out_what_has_no_gradient() {
    use lowp_kernels::Cuda;
    let cuda = match Cuda::new(0) {
        Ok(cuda) => cuda,
        Err(error) if std::env::var_os("LOWP_REQUIRE_GPU").is_some() => {
            panic!("LOWP_REQUIRE_GPU is set, but {error}")
        }
        Err(error) => return eprintln!("skipped: {error}"),
    };
    many_step_counts(&cuda);
    let sets = [
        [true; 3],
        [true, false, true],
        [false; 3],
        [false, true, false],
        [true, true, false],
        [true, false, true],
    ];
    let options = StepOptions {
        max_norm: Some(0.5),
        ..StepOptions::default()
    };
    for recipe in AnyRecipe::all() {
        let recipes = [recipe; 3];
        let mut host = Model::new(&recipes, &[0, 1, 2]);
        let mut device = Model::on(&cuda, &recipes, &[0, 1, 2]);
        for (step, set) in sets.iter().enumerate() {
            let bad = (step == 4).then_some(1);
            let reports = (
                host.step(step, set, bad, &options),
                device.step(step, set, bad, &options),
            );
            assert_eq!(reports.0.applied, reports.1.applied);
            assert_eq!(reports.0.steps, reports.1.steps);
            for at in 0..3 {
                assert_eq!(
                    host.everything(at),
                    device.everything(at),
                    "{} in step {step}",
                    recipe.name()
                );
            }
        }
    }
}

#[test]
fn step_counts_go_out_and_in() {
    let recipes = ["mxfp8", "fp8-current", "fp32"].map(recipe);
    let options = StepOptions::default();
    let mut model = Model::new(&recipes, &[0, 1, 2]);
    for (step, set) in [
        [true, false, true],
        [true, true, true],
        [false, false, true],
    ]
    .iter()
    .enumerate()
    {
        model.step(step, set, None, &options);
    }
    assert_eq!(model.optimizer.steps().unwrap(), [2, 1, 3]);
    let states = [0, 1, 2].map(|at| model.everything(at).0);
    let master = |number: usize| states[number].master.clone();
    let mut other = Model::of(&Cpu, &recipes, &[0, 1, 2], master);
    for ((_, id, _), state) in other.params.iter().zip(&states) {
        other.optimizer.set_states(*id, &state.states).unwrap();
    }
    let counts = model.optimizer.counts().unwrap();
    assert!(other.optimizer.set_steps(counts, &[1, 2]).is_err());
    other.optimizer.set_steps(counts, &[2, 1, 3]).unwrap();
    for step in 3..6 {
        let set = [step != 4, true, step == 4];
        model.step(step, &set, None, &options);
        other.step(step, &set, None, &options);
        for at in 0..3 {
            assert_eq!(model.everything(at), other.everything(at));
        }
    }
    let counts = StepCounts {
        applied: 7,
        skipped: 1,
    };
    model.optimizer.set_counts(counts).unwrap();
    assert_eq!(model.optimizer.steps().unwrap(), [7; 3]);
    assert_eq!(model.optimizer.counts().unwrap(), counts);
}

#[test]
fn a_parameter_that_nobody_left_out_is_named() {
    let mut model = Model::new(&["mxfp8"; 3].map(recipe), &[0, 1, 2]);
    model.optimizer.leave_out(model.params[0].1);
    model
        .optimizer
        .set_grad(model.params[2].1, &values(2, 0, 1.0))
        .unwrap();
    let error = model.optimizer.step(&StepOptions::default()).unwrap_err();
    let error = error.to_string();
    assert!(
        error.contains("'p1'") && error.contains("1 of 3"),
        "{error}"
    );
    // A gradient that comes after all is one.
    for at in 0..2 {
        let id = model.params[at].1;
        model.optimizer.set_grad(id, &values(at, 0, 1.0)).unwrap();
    }
    model
        .optimizer
        .step(&StepOptions::default())
        .unwrap()
        .wait()
        .unwrap();
    assert_eq!(model.optimizer.steps().unwrap(), [1; 3]);
}

#[test]
fn parameters_that_share_a_scale_are_left_out_together() {
    for (name, shares) in [
        ("fp8-current", true),
        ("fp8-delayed", true),
        ("mxfp8", false),
    ] {
        let mut builder = OptimizerBuilder::new(LocalComm::solo(&Cpu));
        let group = builder.group(Group::default());
        builder.scales().group(Some(0));
        let ids = [0, 1].map(|n| {
            let alloc = |_: &_, bytes| Cpu.alloc::<u8>(bytes);
            let tensor = QuantizedTensor::new(recipe(name), SHAPE, Usage::BOTH, alloc).unwrap();
            let spec = ParamSpec::new(format!("p{n}"), group, values(n, 0, 1.0));
            builder.param(&tensor, spec).unwrap()
        });
        let mut optimizer = builder.build().unwrap();
        optimizer.set_grad(ids[0], &values(0, 1, 1.0)).unwrap();
        optimizer.leave_out(ids[1]);
        let done = optimizer.step(&StepOptions::default());
        assert_eq!(done.is_err(), shares, "{name}");
        if let Err(error) = done {
            let error = error.to_string();
            assert!(
                error.contains("'p1' has no gradient") && error.contains("'p0'"),
                "{error}"
            );
        }
        for id in ids {
            optimizer.leave_out(id);
        }
        optimizer
            .step(&StepOptions::default())
            .unwrap()
            .wait()
            .unwrap();
    }
}

/// Ranks that leave out the same parameters step; others raise on every rank and change nothing.
#[test]
fn ranks_agree_on_what_has_a_gradient() {
    let ranks = run_ranks(&Cpu, 2, Duration::from_secs(60), |rank, comm| {
        let mut builder = OptimizerBuilder::new(comm);
        let group = builder.group(Group::default());
        let mut params = Vec::new();
        for number in 0..3 {
            let recipe = recipe("fp8-current");
            let spec = ShardSpec::new(&recipe, SHAPE, 2, rank)?;
            let shard = ShardedTensor::new(&Cpu, recipe, spec)?;
            let elements = shard.spec().elements();
            let master = values(number, 0, 1.0)[elements.clone()].to_vec();
            let spec = ParamSpec::new(format!("p{number}"), group, master);
            params.push((builder.param(shard.local(), spec)?, elements.len()));
        }
        let mut optimizer = builder.build()?;
        let mut step = |left_out: &[usize]| -> Result<Vec<u64>, OptimError> {
            for (number, &(id, len)) in params.iter().enumerate() {
                match left_out.contains(&number) {
                    true => optimizer.leave_out(id),
                    false => optimizer.set_grad(id, &vec![0.5; len])?,
                }
            }
            optimizer.step(&StepOptions::default())?.wait()?;
            optimizer.steps()
        };
        let first = step(&[1])?;
        let second = step(if rank == 0 { &[1] } else { &[0, 1, 2] });
        Ok::<_, OptimError>((first, second.map_err(|error| error.to_string())))
    });
    for (first, second) in ranks.unwrap() {
        assert_eq!(first, [1, 0, 1]);
        let error = second.expect_err("ranks left out different parameters");
        assert!(
            error.contains(
                "parameter 'p0' has a gradient on ranks [0] and none on ranks [1] (and 1 more)"
            ),
            "{error}"
        );
    }
}
