//! State in and out of the optimizer: an optimizer that resumes from a state goes on as one that did not stop, and a state that fits no parameter is an error.

use lowp_comm::LocalComm;
use lowp_format::{
    AnyRecipe, QuantizedTensor, RecipeOptions, STATE_BLOCK, Shape, StateCode, Usage,
};
use lowp_kernels::{Backend, Cpu, Master, Source};
use lowp_optim::{
    Group, MasterDtype, OptimError, Optimizer, OptimizerBuilder, ParamId, ParamMemory, ParamPlace,
    ParamSpec, Rule, StateDtype, StateDtypes, StepOptions,
};
use lowp_shard::{CastItem, CastPlan, ScaleBookBuilder, ShardError, ShardSpec, ShardedTensor};

const SHAPE: Shape = Shape::new(32, 32);

/// A recipe whose parameters have masters in `dtype`.
fn recipe_of(dtype: MasterDtype) -> Result<AnyRecipe, OptimError> {
    let name = match dtype {
        MasterDtype::F32 | MasterDtype::Bf16 => "mxfp8",
        MasterDtype::Bf16Plus16 => "bf16",
    };
    Ok(AnyRecipe::from_name(name, &RecipeOptions::default())?)
}

/// One parameter, with states of the dtypes of `state`, which begins with `master`.
fn one_param(
    state: StateDtypes,
    master: Vec<f32>,
) -> Result<(Optimizer<Cpu>, ParamId, ShardedTensor<Cpu>), OptimError> {
    with_param(OptimizerBuilder::new(LocalComm::solo(&Cpu)), state, master)
}

fn with_param(
    builder: OptimizerBuilder<Cpu>,
    state: StateDtypes,
    master: Vec<f32>,
) -> Result<(Optimizer<Cpu>, ParamId, ShardedTensor<Cpu>), OptimError> {
    let mut builder = builder.on(&Cpu);
    let group = builder.group(Group::default());
    let recipe = recipe_of(state.master)?;
    let shard = ShardedTensor::new(&Cpu, recipe, ShardSpec::new(&recipe, SHAPE, 1, 0)?)?;
    let spec = ParamSpec {
        state,
        ..ParamSpec::new("w", group, master)
    };
    let id = builder.param(shard.local(), spec)?;
    Ok((builder.build()?, id, shard))
}

fn values(seed: u32) -> Vec<f32> {
    let value = |i: u32| ((i * 97 + seed * 31) % 251) as f32 / 125.0 - 1.0;
    (0..SHAPE.elements() as u32).map(value).collect()
}

fn step(optimizer: &mut Optimizer<Cpu>, id: ParamId, seed: u32) -> Result<(), OptimError> {
    optimizer.set_grad(id, &values(seed))?;
    let report = optimizer.step(&StepOptions::default())?.wait()?;
    assert!(report.applied);
    Ok(())
}

fn bytes(shard: &ShardedTensor<Cpu>) -> Vec<Vec<u8>> {
    let buffers = shard.local().buffers().iter();
    let read = |buffer: &lowp_format::Buffer<_>| Cpu.download(&buffer.storage).expect("bytes");
    buffers.map(read).collect()
}

fn every_state() -> impl Iterator<Item = StateDtypes> {
    use StateDtype::{Bf16, F32, Fp8};
    let pairs = [
        [F32, F32],
        [Bf16, F32],
        [Bf16, Bf16],
        [Fp8, F32],
        [Fp8, Fp8],
    ];
    pairs.into_iter().flat_map(|[exp_avg, exp_avg_sq]| {
        MasterDtype::ALL.map(|master| StateDtypes {
            master,
            exp_avg,
            exp_avg_sq,
            ..StateDtypes::default()
        })
    })
}

#[test]
fn a_second_moment_alone_in_bf16_is_an_error() {
    let state = StateDtypes {
        exp_avg: StateDtype::F32,
        exp_avg_sq: StateDtype::Bf16,
        ..StateDtypes::default()
    };
    let error = one_param(state, values(0)).expect_err("an error");
    let text = error.to_string();
    assert!(
        text.contains("exp_avg is f32 and exp_avg_sq is bf16"),
        "{text}"
    );
}

/// On a CPU all memory is the host's, and none of it is page-locked.
#[test]
fn a_cpu_has_nothing_to_offload() -> Result<(), OptimError> {
    for state in every_state() {
        let builder = OptimizerBuilder::new(LocalComm::solo(&Cpu)).offload(true);
        let (mut optimizer, id, _) = with_param(builder, state, values(0))?;
        assert_eq!(optimizer.host_bytes(), 0);
        let (mut other, other_id, _) = one_param(state, values(0))?;
        step(&mut optimizer, id, 1)?;
        step(&mut other, other_id, 1)?;
        assert_eq!(optimizer.state(id)?, other.state(other_id)?);
    }
    Ok(())
}

/// A block of values as it is stored.
fn nearest(code: StateCode, values: &[f32]) -> Vec<f32> {
    let (mut codes, mut stored) = (vec![0; values.len()], vec![0.0; values.len()]);
    let scale = code.encode_block(values, |_| 0x8000, &mut codes);
    code.decode_block(&codes, scale, &mut stored);
    stored
}

/// Bytes of master, gradient and states are those of the dtypes; a state of another dtype is rounded to nearest.
#[test]
fn a_state_is_rounded_to_the_dtypes_of_another() -> Result<(), OptimError> {
    let (mut from, id, _) = one_param(StateDtypes::default(), values(0))?;
    (1..=2).try_for_each(|seed| step(&mut from, id, seed))?;
    let state = from.state(id)?;
    for dtypes in every_state() {
        let (mut to, to_id, _) = one_param(dtypes, state.master.clone())?;
        let len = SHAPE.elements();
        let bytes = dtypes.master.bytes() * len + size_of::<f32>() * len;
        let bytes = bytes + dtypes.bytes(Rule::AdamW, len);
        assert_eq!(to.state_bytes(), bytes);
        to.set_states(to_id, &state.states)?;
        let found = to.state(to_id)?;
        let round = |&x: &f32| match dtypes.master {
            MasterDtype::F32 | MasterDtype::Bf16Plus16 => x,
            MasterDtype::Bf16 => half::bf16::from_f32(x).to_f32(),
        };
        let expected: Vec<f32> = state.master.iter().map(round).collect();
        assert_eq!(found.master, expected);
        for (at, (name, dtype)) in dtypes.of_rule(Rule::AdamW).enumerate() {
            let values = &state.states[at];
            let expected: Vec<f32> = match dtype {
                StateDtype::F32 => values.clone(),
                StateDtype::Bf16 => {
                    let round = |&x: &f32| half::bf16::from_f32(x).to_f32();
                    values.iter().map(round).collect()
                }
                StateDtype::Fp8 => {
                    let blocks = values.chunks(STATE_BLOCK);
                    blocks
                        .flat_map(|values| nearest(name.code(), values))
                        .collect()
                }
            };
            assert_eq!(found.states[at], expected, "{dtypes}");
        }
    }
    Ok(())
}

#[test]
fn a_state_goes_on_as_it_would_have() -> Result<(), OptimError> {
    for dtypes in every_state() {
        let (mut whole, id, shard) = one_param(dtypes, values(0))?;
        (1..=2).try_for_each(|seed| step(&mut whole, id, seed))?;
        let (state, counts) = (whole.state(id)?, whole.counts()?);
        let (mut other, other_id, other_shard) = one_param(dtypes, state.master.clone())?;
        other.set_states(other_id, &state.states)?;
        other.set_counts(counts)?;
        assert_eq!(bytes(&shard), bytes(&other_shard));
        (3..=4).try_for_each(|seed| step(&mut whole, id, seed))?;
        (3..=4).try_for_each(|seed| step(&mut other, other_id, seed))?;
        assert_eq!(whole.state(id)?, other.state(other_id)?);
        assert_eq!(whole.counts()?, other.counts()?);
        assert_eq!(bytes(&shard), bytes(&other_shard));
    }
    Ok(())
}

/// Rows in memory of the caller, of any dtypes, are updated as those rows of the whole are: they round by the random bits of their place.
#[test]
fn rows_in_memory_of_the_caller_are_those_of_the_whole() -> Result<(), OptimError> {
    const SEED: u64 = 5;
    let alloc = |_: &_, n| Cpu.alloc::<u8>(n);
    let plain = AnyRecipe::from_name("fp32", &RecipeOptions::default())?;
    let tensor =
        |rows| QuantizedTensor::with_buffers(plain, Shape::new(rows, SHAPE.cols), [], alloc);
    for dtypes in every_state() {
        let mut builder = OptimizerBuilder::new(LocalComm::solo(&Cpu)).seed(SEED);
        let group = builder.group(Group::default());
        let spec = ParamSpec {
            state: dtypes,
            ..ParamSpec::new("w", group, values(0))
        };
        let id = match dtypes.master {
            MasterDtype::F32 | MasterDtype::Bf16 => builder.param(&tensor(SHAPE.rows)?, spec),
            MasterDtype::Bf16Plus16 => {
                let bf16 = recipe_of(dtypes.master)?;
                builder.param(
                    &QuantizedTensor::new(bf16, SHAPE, Usage::BOTH, alloc)?,
                    spec,
                )
            }
        }?;
        let mut whole = builder.build()?;
        (1..=3).try_for_each(|seed| step(&mut whole, id, seed))?;
        let expected = whole.state(id)?;
        for rows in [0..7, 7..SHAPE.rows] {
            let elements = rows.start * SHAPE.cols..rows.end * SHAPE.cols;
            let mut builder = OptimizerBuilder::new(LocalComm::solo(&Cpu)).seed(SEED);
            let group = builder.group(Group::default());
            let half = || Cpu.alloc::<u8>(2 * elements.len());
            let master = match dtypes.master {
                MasterDtype::Bf16Plus16 => Master::Bf16Plus16 {
                    parameter: half()?,
                    remainder: half()?,
                },
                dtype => Source::alloc(&Cpu, dtype.float(), elements.len())?.into(),
            };
            master.upload(&Cpu, &values(0)[elements.clone()])?;
            let memory = ParamMemory {
                master,
                states: Rule::AdamW.alloc(&Cpu, |name| dtypes.of(name), elements.len())?,
                grad: None,
                place: ParamPlace {
                    start: elements.start,
                    tiles: None,
                },
            };
            let tensor = match &memory.master {
                Master::Values(_) => tensor(rows.len())?,
                Master::Bf16Plus16 { parameter, .. } => {
                    let (shape, bf16) = (SHAPE.with_rows(rows.len()), recipe_of(dtypes.master)?);
                    let own = |_: &_, _| Ok::<_, OptimError>(parameter.clone());
                    QuantizedTensor::new(bf16, shape, Usage::BOTH, own)?
                }
            };
            let id = builder.param_in(&tensor, "w", group, memory)?;
            let mut own = builder.build()?;
            for seed in 1..=3 {
                let grad = Cpu.upload(&values(seed)[elements.clone()])?;
                own.take_grads(vec![Some(Source::F32(grad))])?;
                own.step(&StepOptions::default())?.wait()?;
            }
            let found = own.state(id)?;
            assert_eq!(found.master, expected.master[elements.clone()], "{dtypes}");
            for (found, expected) in found.states.iter().zip(&expected.states) {
                assert_eq!(*found, expected[elements.clone()], "{dtypes}");
            }
        }
    }
    Ok(())
}

/// A master in halves is that of a tensor in bf16 whose only buffer is one of them.
#[test]
fn a_parameter_that_is_no_half_of_its_master_is_an_error() -> Result<(), OptimError> {
    let half = || Cpu.alloc::<u8>(2 * SHAPE.elements());
    for name in ["bf16", "mxfp8", "fp32"] {
        let recipe = AnyRecipe::from_name(name, &RecipeOptions::default())?;
        let alloc = |_: &_, n| Cpu.alloc::<u8>(n);
        let tensor = QuantizedTensor::new(recipe, SHAPE, Usage::BOTH, alloc)?;
        let own = tensor.buffers()[0].storage.clone();
        for parameter in [half()?, own] {
            let is_half =
                name == "bf16" && Cpu.span(&parameter) == Cpu.span(&tensor.buffers()[0].storage);
            let master = Master::Bf16Plus16 {
                parameter,
                remainder: half()?,
            };
            let mut builder = OptimizerBuilder::new(LocalComm::solo(&Cpu));
            let group = builder.group(Group::of(Rule::Sgd));
            let memory = ParamMemory {
                master: master.clone(),
                states: Vec::new(),
                grad: None,
                place: ParamPlace::default(),
            };
            match builder.param_in(&tensor, "w1", group, memory) {
                Ok(_) => assert!(is_half, "{name}"),
                Err(error) => {
                    let text = error.to_string();
                    let expected = "parameter 'w1' is not a half of its master";
                    assert!(!is_half && text.starts_with(expected), "{name}: {text}");
                }
            }
            // A cast by itself.
            let mut book = ScaleBookBuilder::default();
            let items = [CastItem::rows(&tensor, master, &mut book)];
            let planned = CastPlan::new(&Cpu, &book.build(&Cpu)?, &items);
            match (planned, name) {
                (Ok(_), "bf16") => {}
                (Err(ShardError::Halves { .. }), "mxfp8" | "fp32") => {}
                (other, _) => panic!("{name}: {other:?}"),
            }
        }
    }
    Ok(())
}

/// What docs/numerics.md 12.3 says of a second moment in bf16: the gradient becomes zero, and with a beta2 of 0.999 the moment stays where
/// it is, as every step takes less than half of the distance to the next value from it.
#[test]
fn a_second_moment_in_bf16_does_not_fall_with_a_beta2_of_0_999() -> Result<(), OptimError> {
    for (beta2, dtype, falls) in [
        (0.999, StateDtype::F32, true),
        (0.999, StateDtype::Bf16, false),
        (0.99, StateDtype::Bf16, true),
        (0.95, StateDtype::Bf16, true),
    ] {
        let mut builder = OptimizerBuilder::new(LocalComm::solo(&Cpu)).on(&Cpu);
        let group = builder.group(Group {
            betas: (0.9, beta2),
            ..Group::default()
        });
        let recipe = AnyRecipe::from_name("mxfp8", &RecipeOptions::default())?;
        let shard = ShardedTensor::new(&Cpu, recipe, ShardSpec::new(&recipe, SHAPE, 1, 0)?)?;
        let spec = ParamSpec {
            state: StateDtypes {
                exp_avg: dtype,
                exp_avg_sq: dtype,
                ..StateDtypes::default()
            },
            ..ParamSpec::new("w", group, values(0))
        };
        let id = builder.param(shard.local(), spec)?;
        let mut optimizer = builder.build()?;
        // A value in each part of a binade.
        let first: Vec<f32> = (0..SHAPE.elements())
            .map(|i| 1.0 + i as f32 / 1024.0)
            .collect();
        optimizer.set_states(id, &[vec![0.0; first.len()], first])?;
        let before = optimizer.states(id)?.remove(1);
        for _ in 0..1000 {
            optimizer.set_grad(id, &vec![0.0; SHAPE.elements()])?;
            optimizer.step(&StepOptions::default())?.wait()?;
        }
        let after = optimizer.states(id)?.remove(1);
        let ratio = |(after, before): (&f32, &f32)| after / before;
        let ratios = after.iter().zip(&before).map(ratio);
        let most = ratios.fold(0.0, f32::max);
        match falls {
            true => assert!(most < 0.4, "{beta2} {dtype:?}: {most}"),
            false => assert_eq!(after, before, "{beta2} {dtype:?}"),
        }
    }
    Ok(())
}

/// A step that is far below the distance of neighbours in bf16 moves the mean of the masters as it moves those in f32.
#[test]
fn masters_in_bf16_follow_small_steps_in_the_mean() -> Result<(), OptimError> {
    let mut means = Vec::new();
    for master in MasterDtype::ALL {
        let state = StateDtypes {
            master,
            ..StateDtypes::default()
        };
        let len = SHAPE.elements();
        let (mut optimizer, id, _) = one_param(state, vec![1.5; len])?;
        let options = StepOptions {
            lr_factor: 0.1,
            ..StepOptions::default()
        };
        for _ in 0..20 {
            optimizer.set_grad(id, &vec![1.0; len])?;
            optimizer.step(&options)?.wait()?;
        }
        let sum: f64 = optimizer.master(id)?.into_iter().map(f64::from).sum();
        means.push(sum / len as f64);
    }
    // About 20 steps of 1e-4, where values are 2^-7 apart; the deviation of the mean is 2^-7 * sqrt(0.25 / 1024) at most.
    assert!((0.0015..0.0025).contains(&(1.5 - means[0])), "{means:?}");
    assert!((means[1] - means[0]).abs() < 5.0 * 0.000_125, "{means:?}");
    assert_eq!(means[2], means[0]);
    Ok(())
}

#[test]
fn states_that_do_not_fit_are_errors_and_replace_nothing() -> Result<(), OptimError> {
    let (mut optimizer, id, _) = one_param(StateDtypes::default(), values(0))?;
    step(&mut optimizer, id, 1)?;
    let state = optimizer.state(id)?;
    let mut wrong = vec![state.states.clone(); 6];
    wrong[0][0].push(0.0);
    wrong[1][1].clear();
    wrong[2].pop();
    for (wrong, value) in wrong[3..].iter_mut().zip([-1e-9, f32::NAN, f32::INFINITY]) {
        wrong[1][7] = value;
    }
    let texts = [
        "exp_avg has 1025 values",
        "exp_avg_sq has 0 values",
        "is updated by adamw, which keeps 2 states of each element, but 1 were given",
        "second moment 7 is -0.000000001",
        "second moment 7 is NaN",
        "second moment 7 is inf",
    ];
    for (wrong, text) in wrong.iter().zip(texts) {
        let error = optimizer.set_states(id, wrong).expect_err(text).to_string();
        assert!(
            error.contains("parameter 'w'") && error.contains(text),
            "{error}"
        );
        assert_eq!(optimizer.state(id)?, state);
    }
    let (other, foreign, _) = one_param(StateDtypes::default(), values(0))?;
    assert!(other.state(id).is_err() && optimizer.set_states(foreign, &state.states).is_err());
    Ok(())
}
