//! Steps over gradients in memory of other libraries, and the sets of addresses that stay planned.

use super::*;
use crate::{Group, OptimizerBuilder, ParamMemory, ParamPlace, ParamSpec, StepOptions};
use half::bf16;
use lowp_comm::LocalComm;
use lowp_format::{AnyRecipe, QuantizedTensor, Recipe, RecipeOptions, Shape, Usage};
use lowp_kernels::Cpu;

const SHAPE: Shape = Shape { rows: 32, cols: 64 };

fn tensor(recipe: AnyRecipe) -> QuantizedTensor<<Cpu as Backend>::Buffer<u8>> {
    let alloc = |_: &_, bytes| Cpu.alloc::<u8>(bytes);
    QuantizedTensor::new(recipe, SHAPE, Usage::BOTH, alloc).unwrap()
}

fn some() -> AnyRecipe {
    AnyRecipe::low_precision()[0]
}

fn zeros() -> <Cpu as Backend>::Buffer<f32> {
    Cpu.alloc(SHAPE.elements()).unwrap()
}

fn memory(values: &[f32]) -> ParamMemory<Cpu> {
    ParamMemory {
        master: Source::F32(Cpu.upload(values).unwrap()).into(),
        states: vec![Source::F32(zeros()).into(), Source::F32(zeros()).into()],
        grad: Some(Source::F32(zeros())),
        place: ParamPlace::default(),
    }
}

/// Steps over memory of the caller, at addresses that come and go, give what steps over own memory give.
#[test]
fn gradients_at_any_address_give_the_same_steps() {
    let values: Vec<f32> = (0..SHAPE.elements()).map(|i| (i as f32).sin()).collect();
    let grads = |step: usize| -> Vec<f32> { values.iter().map(|x| x * step as f32).collect() };
    let options = StepOptions {
        max_norm: Some(1.0),
        ..StepOptions::default()
    };
    for recipe in AnyRecipe::low_precision() {
        let (mine, theirs) = (tensor(recipe), tensor(recipe));
        let mut own = OptimizerBuilder::new(LocalComm::solo(&Cpu));
        let group = own.group(Group::default());
        let id = own
            .param(&mine, ParamSpec::new("w", group, values.clone()))
            .unwrap();
        let mut own = own.build().unwrap();
        let mut over = OptimizerBuilder::new(LocalComm::solo(&Cpu));
        let group = over.group(Group::default());
        let memory = memory(&values);
        let master = memory.master.clone();
        over.param_in(&theirs, "w", group, memory).unwrap();
        let mut over = over.build().unwrap();
        over.keep_sets(2);
        let places = [zeros(), zeros(), zeros()];
        for step in 1..8 {
            own.set_grad(id, &grads(step)).unwrap();
            own.step(&options).unwrap().wait().unwrap();
            let place = &places[step % 3];
            Cpu.write(place, 0, &grads(step)).unwrap();
            over.take_grads(vec![Some(Source::F32(place.clone()))])
                .unwrap();
            over.step(&options).unwrap().wait().unwrap();
        }
        assert_eq!(master.download(&Cpu).unwrap(), own.master(id).unwrap());
        for (a, b) in mine.buffers().iter().zip(theirs.buffers()) {
            let [a, b] = [a, b].map(|buffer| Cpu.download(&buffer.storage).unwrap());
            assert_eq!(a, b, "{}", recipe.name());
        }
    }
}

/// An optimizer over copies of the memory of another one goes on as that, to the bit; other parameters are an error.
#[test]
fn steps_go_on_where_parameters_lie_elsewhere() {
    let values: Vec<f32> = (0..SHAPE.elements()).map(|i| (i as f32).sin()).collect();
    let of = |tensor: &QuantizedTensor<_>, memory: ParamMemory<Cpu>| {
        let mut builder = OptimizerBuilder::new(LocalComm::solo(&Cpu));
        let group = builder.group(Group::default());
        builder.param_in(tensor, "w", group, memory).unwrap();
        builder
    };
    let steps = |optimizer: &mut Optimizer<Cpu>, numbers: Range<usize>| {
        for number in numbers {
            let grad: Vec<f32> = values.iter().map(|x| x * number as f32).collect();
            let grad = Source::F32(Cpu.upload(&grad).unwrap());
            optimizer.take_grads(vec![Some(grad)]).unwrap();
            optimizer
                .step(&StepOptions::default())
                .unwrap()
                .wait()
                .unwrap();
        }
    };
    for recipe in AnyRecipe::low_precision() {
        let (mine, theirs) = (tensor(recipe), tensor(recipe));
        let memory_of_mine = memory(&values);
        let mut own = of(&mine, memory_of_mine.clone()).build().unwrap();
        steps(&mut own, 1..4);
        for (from, to) in mine.buffers().iter().zip(theirs.buffers()) {
            let bytes: Vec<u8> = Cpu.download(&from.storage).unwrap();
            Cpu.write(&to.storage, 0, &bytes).unwrap();
        }
        let copy = |values: &[f32]| Source::F32(Cpu.upload(values).unwrap());
        let names = lowp_kernels::Rule::AdamW.states().iter();
        let states = names
            .zip(&memory_of_mine.states)
            .map(|(&name, state)| copy(&state.download(&Cpu, name).unwrap()).into());
        let moved: ParamMemory<Cpu> = ParamMemory {
            master: copy(&memory_of_mine.master.download(&Cpu).unwrap()).into(),
            states: states.collect(),
            grad: Some(Source::F32(zeros())),
            place: ParamPlace::default(),
        };
        let master = moved.master.clone();
        let mut other = of(&theirs, moved).build_moved(&own).unwrap();
        steps(&mut own, 4..7);
        steps(&mut other, 4..7);
        assert_eq!(other.counts().unwrap(), own.counts().unwrap());
        let masters = [&master, &memory_of_mine.master].map(|m| m.download(&Cpu).unwrap());
        assert_eq!(masters[0], masters[1], "{}", recipe.name());
        for (a, b) in mine.buffers().iter().zip(theirs.buffers()) {
            let [a, b] = [a, b].map(|buffer| Cpu.download(&buffer.storage).unwrap());
            assert_eq!(a, b, "{}", recipe.name());
        }
        let plain = AnyRecipe::from_name("fp32", &RecipeOptions::default()).unwrap();
        let error = of(&tensor(plain), memory(&values)).build_moved(&own);
        let error = error.unwrap_err().to_string();
        assert!(error.contains("make a new optimizer"), "{error}");
    }
}

/// Without clipping and skipping, finite gradients give the same step; others are applied.
#[test]
fn steps_without_a_norm() {
    let values: Vec<f32> = (0..SHAPE.elements()).map(|i| (i as f32).sin()).collect();
    let step = |grad: &[f32], options: &StepOptions| {
        let mut builder = OptimizerBuilder::new(LocalComm::solo(&Cpu));
        let group = builder.group(Group::default());
        let memory = memory(&values);
        let master = memory.master.clone();
        builder
            .param_in(&tensor(some()), "w", group, memory)
            .unwrap();
        let mut optimizer = builder.build().unwrap();
        optimizer
            .take_grads(vec![Some(Source::F32(Cpu.upload(grad).unwrap()))])
            .unwrap();
        let report = optimizer.step(options).unwrap().wait().unwrap();
        (report, master.download(&Cpu).unwrap())
    };
    let with = StepOptions::default();
    let without = StepOptions {
        skip_nonfinite: false,
        ..with
    };
    let (measured, expected) = step(&values, &with);
    let (report, found) = step(&values, &without);
    assert_eq!(found, expected);
    assert!(measured.grad.norm > 0.0 && report.grad.norm == 0.0 && report.applied);
    let mut bad = values.clone();
    bad[3] = f32::NAN;
    assert!(!step(&bad, &with).0.applied);
    let (report, found) = step(&bad, &without);
    assert!(report.applied && found[3].is_nan() && found[4] == expected[4]);
    let clipped = StepOptions {
        max_norm: Some(1.0),
        ..without
    };
    assert!(!step(&bad, &clipped).0.applied);
}

#[test]
fn what_is_pinned_stays_planned() {
    let mut builder = OptimizerBuilder::new(LocalComm::solo(&Cpu));
    let group = builder.group(Group::default());
    let memory = memory(&[0.0; SHAPE.rows * SHAPE.cols]);
    builder
        .param_in(&tensor(some()), "w", group, memory)
        .unwrap();
    let mut optimizer = builder.build().unwrap();
    optimizer.keep_sets(3);
    let places: Vec<_> = (0..8).map(|_| Some(Source::F32(zeros()))).collect();
    let known = |optimizer: &mut Optimizer<Cpu>, at: usize| {
        let spans = spans(&Cpu, &places[at..=at]);
        optimizer.take_grads_at(&spans)
    };
    for (at, place) in places.iter().enumerate() {
        optimizer.take_grads(vec![place.clone()]).unwrap();
        if at == 1 {
            optimizer.pin_grads();
        }
    }
    let kept: Vec<bool> = (0..5).map(|at| known(&mut optimizer, at)).collect();
    assert_eq!(kept, [false, true, false, false, false]);
    // Beside the present set, which is the pinned one, two more.
    assert!(known(&mut optimizer, 7) && known(&mut optimizer, 6) && !known(&mut optimizer, 5));
    optimizer.keep_sets(1);
    assert!(known(&mut optimizer, 1) && !known(&mut optimizer, 7));
}

type Grads = Vec<Option<Source<Cpu>>>;

/// Two parameters, and the gradients of both, of either one, and of none.
fn two() -> (Optimizer<Cpu>, [Grads; 4]) {
    let mut builder = OptimizerBuilder::new(LocalComm::solo(&Cpu));
    let group = builder.group(Group::default());
    for name in ["a", "b"] {
        let memory = memory(&[1.0; SHAPE.rows * SHAPE.cols]);
        builder
            .param_in(&tensor(some()), name, group, memory)
            .unwrap();
    }
    let mut optimizer = builder.build().unwrap();
    optimizer.keep_sets(4);
    let [a, b] = [(); 2].map(|()| Some(Source::F32(zeros())));
    let sets = [
        vec![a.clone(), b.clone()],
        vec![a, None],
        vec![None, b],
        vec![None, None],
    ];
    (optimizer, sets)
}

#[test]
fn sets_of_gradients_that_repeat_stay_planned() {
    let (mut optimizer, sets) = two();
    let step = |optimizer: &mut Optimizer<Cpu>| {
        optimizer
            .step(&StepOptions::default())
            .unwrap()
            .wait()
            .unwrap();
    };
    // Each of the first ones may part step counts, which plans of before shared.
    for set in sets.iter().chain(&sets) {
        optimizer.take_grads(set.clone()).unwrap();
        step(&mut optimizer);
    }
    for set in sets.iter().chain(sets.iter().rev()) {
        assert!(optimizer.take_grads_at(&spans(&Cpu, set)));
        step(&mut optimizer);
    }
    assert_eq!(optimizer.steps().unwrap(), [8, 8]);
    assert_eq!(optimizer.counts().unwrap().applied, 16);
}

#[test]
fn step_counts_of_a_captured_set_do_not_part() {
    let (mut optimizer, [both, first, ..]) = two();
    optimizer.take_grads(both.clone()).unwrap();
    optimizer
        .step(&StepOptions::default())
        .unwrap()
        .wait()
        .unwrap();
    optimizer.pin_grads();
    let counts = optimizer.counts().unwrap();
    for error in [
        optimizer.take_grads(first.clone()).unwrap_err(),
        optimizer.set_steps(counts, &[1, 0]).unwrap_err(),
    ] {
        let error = error.to_string();
        assert!(
            error.contains("parameter 'b' would have another step count"),
            "{error}"
        );
    }
    optimizer.set_steps(counts, &[1, 1]).unwrap();
    assert!(optimizer.take_grads_at(&spans(&Cpu, &both)));
    optimizer
        .step(&StepOptions::default())
        .unwrap()
        .wait()
        .unwrap();
    assert_eq!(optimizer.steps().unwrap(), [2, 2]);
    // Those that were apart before a capture stay so.
    let (mut optimizer, [both, first, ..]) = two();
    for (set, pinned) in [(&first, false), (&both, true), (&first, false)] {
        optimizer.take_grads(set.clone()).unwrap();
        optimizer
            .step(&StepOptions::default())
            .unwrap()
            .wait()
            .unwrap();
        if pinned {
            optimizer.pin_grads();
        }
    }
    assert_eq!(optimizer.steps().unwrap(), [3, 1]);
}

#[test]
fn what_does_not_fit_is_named() {
    let mut builder = OptimizerBuilder::new(LocalComm::solo(&Cpu));
    let group = builder.group(Group::default());
    let short = ParamMemory {
        grad: Some(Source::Bf16(Cpu.alloc::<bf16>(3).unwrap())),
        ..memory(&[0.0; SHAPE.rows * SHAPE.cols])
    };
    let error = builder.param_in(&tensor(some()), "w", group, short);
    assert!(error.unwrap_err().to_string().contains("the gradient"));
    let whole = memory(&[0.0; SHAPE.rows * SHAPE.cols]);
    builder
        .param_in(&tensor(some()), "w", group, whole)
        .unwrap();
    let mut optimizer = builder.build().unwrap();
    let error = optimizer.take_grads(Vec::new()).unwrap_err().to_string();
    assert!(error.contains('1') && error.contains('0'), "{error}");
    assert!(optimizer.set_group(1, Group::default()).is_err());
    let rule = lowp_kernels::Rule::AdamL2;
    let other = Group {
        rule,
        ..Group::default()
    };
    assert!(optimizer.set_group(0, other).is_err());
}

/// A tensor without buffers: the master is the parameter.
#[test]
fn a_parameter_may_live_in_its_master_alone() {
    let recipe = AnyRecipe::from_name("fp32", &RecipeOptions::default()).unwrap();
    let none = QuantizedTensor::with_buffers(recipe, SHAPE, [], |_, n| Cpu.alloc::<u8>(n));
    let mut builder = OptimizerBuilder::new(LocalComm::solo(&Cpu));
    let group = builder.group(Group::default());
    let memory = memory(&[1.0; SHAPE.rows * SHAPE.cols]);
    let master = memory.master.clone();
    builder
        .param_in(&none.unwrap(), "w", group, memory)
        .unwrap();
    let mut optimizer = builder.build().unwrap();
    let grad = Cpu.upload(&[1.0; SHAPE.rows * SHAPE.cols]).unwrap();
    optimizer.take_grads(vec![Some(Source::F32(grad))]).unwrap();
    optimizer
        .step(&StepOptions::default())
        .unwrap()
        .wait()
        .unwrap();
    assert!(master.download(&Cpu).unwrap().iter().all(|&x| x < 1.0));
}
